"""The courier thread: owns a learner's connection, so that the training thread never waits for it.

    training thread                         courier thread                                    broker
    submit(Encode)            ->            U -> norms -> payload -> OFFER, repeated     ->
    mailbox.take()            <-            answers, cues, built versions                <-   hints, VERSION, chunks
    submit(Forget, Want, ...) ->            PROGRESS each heartbeat, heads every few seconds ->

A broker that is away, a slow link or a dead outer keep this thread busy and nobody else. What takes long, encoding and
decoding, is done by a third thread while this one keeps the line: a heartbeat waits for no model, however large.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Final, TypeVar

import torch

from isles.proto.agreement import SyncSettings
from isles.proto.client import Answered, Hinted, Refused, Welcomed
from isles.proto.clock import Clock
from isles.proto.codec.torch_codec import decode
from isles.proto.connection import Connection, News
from isles.proto.errors import IslesError, NonFiniteError, RangeError, RefusedError, refusal_error
from isles.proto.ids import ContributionId
from isles.proto.logs import Logger
from isles.proto.messages import (
    Accepted,
    Alive,
    AskHeads,
    Contribution,
    Done,
    Error,
    Expired,
    Head,
    Heads,
    Hint,
    Leave,
    Merged,
    Message,
    Offer,
    Progress,
    Rejected,
    Row,
    Shards,
    ShardsLeased,
    Welcome,
)
from isles.workers.account import Account
from isles.workers.encoding import Encode, encode_account
from isles.workers.flat import FlatModel
from isles.workers.increment import prepare
from isles.workers.mailbox import Arrival, Mailbox
from isles.workers.orders import Cued, PaceTold, PayloadEncoded, PayloadFailed, VersionArrived
from isles.workers.session import NOT_FINITE
from isles.workers.versions import Built, Held, VersionBuilder

_Result = TypeVar("_Result")

REFRESH_SECONDS: Final = 5.0
"""Between two looks at all heads: a lost hint costs at most so much latency."""
LOST_SECONDS: Final = 5.0
"""Silence after which the broker is said to be away: several heartbeats, and more than one large chunk takes."""
OFFER_AGAIN_SECONDS: Final = 5.0
"""Wait before a contribution is offered anew that the broker could not take through its own fault."""
OFFERS_MAX: Final = 24
"""How often in a row a contribution may fail so: after two minutes somebody has to look at the broker."""
STOP_SECONDS: Final = 10.0
"""Longest wait for the thread's end: encoding the largest fragment is shorter."""

OFFER_AGAIN_CODES: Final = frozenset({"damaged", "internal", "not-initialised", "not-found", "unknown-session"})
"""Errors about an offer that the offer did not cause."""


@dataclass(frozen=True, slots=True)
class Forget:
    """This contribution is closed."""

    id: ContributionId


@dataclass(frozen=True, slots=True)
class Want:
    """Bring the newest version of this fragment, and the own row."""

    fragment: int


@dataclass(frozen=True, slots=True)
class RequestShards:
    """Lease so many data shards, give these back."""

    num_wanted: int
    returned: dict[int, int]


@dataclass(frozen=True, slots=True)
class SayGoodbye:
    """Send the last counters, LEAVE, and end."""


Order = Encode | Forget | Want | RequestShards | SayGoodbye


class Courier:
    """One learner's courier. `start` begins the thread; `submit`, `mailbox` and `shards` are for other threads."""

    def __init__(
        self,
        connection: Connection,
        sync: SyncSettings,
        flat: FlatModel,
        *,
        learner: str,
        address: str,
        held: Mapping[int, Held],
        payloads: Mapping[ContributionId, bytes],
        shards: Mapping[int, int],
        progress: Callable[[], Progress],
        clock: Clock,
        log: Logger,
        accounts: Mapping[int, Account[torch.Tensor]] = MappingProxyType({}),
        worker: Executor | None = None,
    ) -> None:
        """`held`, `payloads` and `shards` are what is there at the beginning: from a checkpoint, and from WELCOME.

        `accounts`, which the training thread changes, say what a version will add to the live parameters.
        `worker` does all heavy work; without it there is one thread for it.
        """
        self.mailbox = Mailbox()
        self.shards: Mapping[int, int] = dict(shards)
        """The leased data shards with their cursors; replaced as a whole."""
        self.payloads: dict[ContributionId, bytes] = dict(payloads)
        """Payloads of open contributions; other threads only read."""
        self._connection = connection
        self._sync = sync
        self._flat = flat
        self._accounts = accounts
        self._learner = learner
        self._address = address
        self._progress = progress
        self._clock = clock
        self._log = log
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._arrived: deque[News] = deque()
        """News that wait for their turn."""
        self._worker = worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"courier-{learner}-work")
        self._versions = VersionBuilder(connection, flat.num_values, log, held, work=self._work)
        self._num_shards_wanted = 0
        self._returning: dict[int, int] = {}
        """Data shards that the broker has not taken back yet, with their cursors."""
        self._settled: dict[int, ContributionId] = {}
        self._offer_again: dict[ContributionId, tuple[float, Offer]] = {}
        self._num_failed: dict[ContributionId, int] = {}
        """Offers in a row that the broker spoiled."""
        self._next_beat = self._next_refresh = clock.now()
        self._last_seq: int | None = None
        self._lost_at: float | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"courier-{learner}", daemon=True)

    # ---------------------------------------------------------------------------------------------- for other threads

    def start(self) -> None:
        """Starts the thread, to which the connection belongs from now on."""
        self._thread.start()

    def submit(self, order: Order, *, is_urgent: bool = True) -> None:
        """Hands over an order; never waits. One that is not urgent is done with the next, or the next heartbeat."""
        self._orders.put(order)
        if is_urgent:
            self._connection.wake()

    def stop(self, *, goodbye_seconds: float = 0.0) -> None:
        """Ends the thread; before that tries for at most `goodbye_seconds` to tell the broker that we leave."""
        if not self._thread.is_alive():
            return
        if goodbye_seconds > 0:
            self.submit(SayGoodbye())
            self._thread.join(goodbye_seconds)
        self._is_stopping = True
        self._connection.wake()
        self._thread.join(STOP_SECONDS)

    def decode_own(self, named: ContributionId) -> torch.Tensor:
        """What is merged of an open contribution: its payload decoded, [num_values] float32. It takes time."""
        return decode(self.payloads[named], num_values=self._flat.num_values[named.fragment])

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._do_orders()
                self._keep_time()
                self._arrived += self._connection.poll(self._seconds_until_due())
                self._watch_broker(self._clock.now())
                for _ in range(len(self._arrived)):
                    self._handle(self._arrived.popleft())
        except IslesError as error:
            self.mailbox.fail(error)
        except BaseException:
            self.mailbox.fail(IslesError("the courier thread of this worker died, its traceback stands above"))
            raise
        finally:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._connection.close()

    def _work(self, call: Callable[[], _Result]) -> _Result:
        """Has something heavy done beside this thread, which beats and hears meanwhile, and returns what came of it.

        News wait until then, so all is still handled in order. They stay few: no more bytes come than were ordered.
        """
        done = self._worker.submit(call)
        done.add_done_callback(lambda _: self._connection.wake())
        while not done.done():
            self._beat()
            self._arrived += self._connection.poll(max(0.0, self._next_beat - self._clock.now()))
        return done.result()

    def _do_orders(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            match order:
                case Encode():
                    self._encode(order)
                case Forget():
                    self._forget(order.id)
                case Want():
                    self._versions.want(order.fragment)
                case RequestShards():
                    self._num_shards_wanted = order.num_wanted
                    self._returning.update(order.returned)
                    self._ask_shards()
                case SayGoodbye():
                    self._report()
                    self._connection.ask(Leave())

    # ---------------------------------------------------------------------------------------------------- contributing

    def _encode(self, order: Encode) -> None:
        named = order.take.id
        try:
            encoded = self._work(lambda: encode_account(order, self._flat, self._sync))
        except NonFiniteError as error:
            self.mailbox.post(PayloadFailed(named, f"{NOT_FINITE}: {error}", is_not_finite=True))
            return
        except RangeError as error:
            self.mailbox.post(PayloadFailed(named, str(error), is_not_finite=False))
            return
        if encoded is not None:
            self.payloads[named] = encoded.payload
        self.mailbox.post(PayloadEncoded(named, is_zero=encoded is None))
        if encoded is not None:
            self._offer(encoded.contribution, encoded.payload)

    def _offer(self, contribution: Contribution, payload: bytes) -> None:
        self._report()  # before the offer, so that no broker merges tokens that it never heard of
        self._connection.ask(Offer(contribution=contribution), payload)
        self._log.debug(
            "contribution.sent",
            learner=self._learner,
            fragment=contribution.id.fragment,
            number=contribution.id.number,
            base_version=contribution.base_version,
            tokens=contribution.tokens,
            bytes=len(payload),
        )

    def _forget(self, closed: ContributionId) -> None:
        self.payloads.pop(closed, None)
        self._offer_again.pop(closed, None)
        self._num_failed.pop(closed, None)
        self._connection.client.forget(lambda ask: isinstance(ask, Offer) and ask.contribution.id == closed)

    # ------------------------------------------------------------------------------------------------------------ news

    def _handle(self, news: News) -> None:
        for built in self._versions.handle(news):
            self._deliver(built)
        match news:
            case Hinted(hint=hint):
                self._take_hint(hint)
            case Welcomed(welcome=welcome):
                self._take_welcome(welcome)
            case Answered(ask=ask, reply=reply):
                self._take_reply(ask, reply)
            case Refused(code=code, text=text):
                raise refusal_error(code)(f"the broker at {self._address} refused this worker ({code}): {text}")

    def _deliver(self, built: Built) -> None:
        """Hands a version over, with the own contribution, decoded, if the row says that it is in it."""
        self._do_orders()  # what was closed while this version was built is not to be decoded again
        fragment, values, row, own = built.fragment, built.held.values, built.row, None
        if row is not None and row.state != "pending":
            self._settled[fragment] = row.id
            own = partial(self.decode_own, row.id) if row.state == "merged" and row.id in self.payloads else None
        account = self._accounts.get(fragment)
        prepared = self._work(lambda: prepare(self._flat, fragment, account, values, own))
        event = VersionArrived(fragment, built.held.version, row, built.tokens_total)
        self.mailbox.arrive(Arrival(event, values, *prepared))

    def _take_hint(self, hint: Hint) -> None:
        has_gap = self._last_seq is not None and hint.seq > self._last_seq + 1
        self._last_seq = hint.seq
        if has_gap:
            self._next_refresh = min(self._next_refresh, self._clock.now())
        if hint.fragment >= len(self._flat.num_values):
            return
        if hint.kind == "contribution" and hint.learner != self._learner:
            self.mailbox.cue(Cued(hint.fragment, hint.version))
        is_newer = hint.kind in ("contribution", "version") and hint.version > self._versions.version(hint.fragment)
        if is_newer or hint.kind == "settled":
            self._versions.want(hint.fragment)

    def _take_reply(self, ask: Message, reply: Message) -> None:
        match ask, reply:
            case Offer(), Accepted() | Expired() | Merged() | Rejected():
                self.mailbox.post(reply)
                if not isinstance(reply, Accepted):
                    self._versions.want(reply.id.fragment)
            case Offer(), Error():
                self._take_offer_error(ask, reply)
            case AskHeads(), Heads():
                self._compare(reply.heads, reply.rows)
            case Shards(), ShardsLeased():
                self._returning = {
                    shard: cursor for shard, cursor in self._returning.items() if ask.returned.get(shard) != cursor
                }
                self._take_shards(reply.shards)
            case Progress(), Alive():
                self._take_alive(ask, reply)
            case Leave(), Done():
                self._is_stopping = True
            case _, Error():
                self._log.warning("message.refused", code=reply.code, text=reply.text)

    def _take_alive(self, said: Progress, alive: Alive) -> None:
        if self._sync.has_dynamic_interval:
            self.mailbox.tell_pace(PaceTold(alive.typical_step_seconds, said.step_seconds))
        if alive.has_lost_shards and self._num_shards_wanted and not self._connection.client.is_asking(Shards):
            self._ask_shards()

    def _take_offer_error(self, offer: Offer, error: Error) -> None:
        named = offer.contribution.id
        num_failed = self._num_failed[named] = self._num_failed.get(named, 0) + 1
        if error.code not in OFFER_AGAIN_CODES or num_failed >= OFFERS_MAX:
            times = f", {num_failed} times in a row" if num_failed > 1 else ""
            raise RefusedError(
                f"the broker at {self._address} cannot take contribution {named} ({error.code}{times}): {error.text}"
            )
        self._log.warning("message.refused", code=error.code, text=error.text)
        self._offer_again[named] = (self._clock.now() + OFFER_AGAIN_SECONDS, offer)

    def _take_welcome(self, welcome: Welcome) -> None:
        """A broker that was away is back; what is unanswered repeats itself."""
        if welcome.run_record is None:
            raise RefusedError(
                f"the broker at {self._address} came back without this run: its store was emptied; give it the old "
                "store, or start all workers anew with empty checkpoint folders"
            )
        if welcome.run_record.sync != self._sync:
            raise RefusedError(
                f"the settings of the run were changed while the broker at {self._address} stood still: start this "
                "worker again, it resumes from its checkpoint"
            )
        self._last_seq = welcome.seq
        self._take_shards(welcome.shards)
        self._compare(welcome.heads, welcome.rows)

    def _ask_shards(self) -> None:
        """One question at a time, with everything that is to be returned: they must not pile up without a broker."""
        self._connection.client.forget(lambda ask: isinstance(ask, Shards))
        self._connection.ask(Shards(num_wanted=self._num_shards_wanted, returned=dict(self._returning)))

    def _take_shards(self, shards: Mapping[int, int]) -> None:
        self.shards = dict(shards)
        self.mailbox.ring()

    def _compare(self, heads: tuple[Head, ...], rows: tuple[Row, ...]) -> None:
        """Asks for what is newer than what was built, and for verdicts that were not delivered yet."""
        for head in heads:
            if head.fragment < len(self._flat.num_values) and head.version > self._versions.version(head.fragment):
                self._versions.want(head.fragment)
        for row in (row for row in rows if row.state != "pending"):
            fragment = row.id.fragment
            if fragment < len(self._flat.num_values) and self._settled.get(fragment) != row.id:
                self._versions.want(fragment)

    # ------------------------------------------------------------------------------------------------------------ time

    def _seconds_until_due(self) -> float:
        if self._arrived or not self._orders.empty():
            return 0.0
        due = min([self._next_beat, self._next_refresh, *(at for at, _ in self._offer_again.values())])
        return max(0.0, due - self._clock.now())

    def _report(self) -> None:
        """Says the newest counters, in place of older ones that are still unsaid."""
        self._connection.client.forget(lambda ask: isinstance(ask, Progress))
        self._connection.ask(self._progress())

    def _beat(self) -> None:
        now = self._clock.now()
        if now >= self._next_beat:
            self._next_beat = now + self._connection.client.limits.heartbeat_seconds
            self._report()

    def _keep_time(self) -> None:
        self._beat()
        now = self._clock.now()
        if now >= self._next_refresh:
            self._next_refresh = now + REFRESH_SECONDS
            self._tell_dropped()
            if not self._connection.client.is_asking(AskHeads):
                self._connection.ask(AskHeads())
            if len(self.shards) < self._num_shards_wanted and not self._connection.client.is_asking(Shards):
                self._ask_shards()
        for named, (at, offer) in list(self._offer_again.items()):
            if now >= at:
                del self._offer_again[named]
                self._connection.ask(offer, self.payloads[named])

    def _tell_dropped(self) -> None:
        if self._lost_at is None and (dropped := self._connection.take_dropped()):  # not while it is away
            self._log.info("messages.dropped", **dropped)

    def _watch_broker(self, now: float) -> None:
        """Says once that the broker is away, and once that it is back.

        To be asked right after listening: a thread that built a large version meanwhile has heard nobody.
        """
        heard_at = self._connection.client.heard_at
        silent = now - (now if heard_at is None else heard_at)
        if self._lost_at is None and silent > LOST_SECONDS:
            self._lost_at = now
            self._log.warning("broker.lost", address=self._address, silent_seconds=round(silent, 1))
        elif self._lost_at is not None and silent <= LOST_SECONDS:
            self._lost_at = None
            self._log.info("broker.joined", address=self._address, run=self._connection.client.hello.run)
