"""The outer process: one thread with the connection, one that computes, and a desk for every fragment.

Nothing is kept here that is not in the store, so this process may end at any moment and another one go on. While a
merge is computed the first thread renews the leases and answers hints.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from isles.outer import orders
from isles.outer.payload_cache import Payload, PayloadCache
from isles.outer.services import Stock, Unavailable
from isles.outer.settings import OuterSettings
from isles.proto.client import Answered, Fetched, FetchFailed, Hinted, Welcomed, as_error
from isles.proto.clock import Clock, SystemClock
from isles.proto.connection import Connection, News, raise_if_refused
from isles.proto.errors import RefusedError, unanswered
from isles.proto.logs import Logger
from isles.proto.manifest import Manifest
from isles.proto.messages import BlobRef, Hello, Lease, Leased, Leave, Message, Welcome
from isles.proto.timeouts import check_times, cue_doubt, times_of, times_told

if TYPE_CHECKING:
    from isles.outer.desk import Desk
    from isles.proto.agreement import RunRecord

_Result = TypeVar("_Result")

TOKEN_BYTES: Final = 16
"""Of an incarnation and of a commit id: two never meet."""

POLL_SECONDS: Final = 0.25
"""Longest wait before a request to stop is heard."""

DROPPED_SECONDS: Final = 10.0
"""Shortest time between two lines about messages that were dropped."""

FETCHES_MAX: Final = 16
"""Blobs that are fetched at the same time; well below what a broker permits one client."""

RECORD_SECONDS_MIN: Final = 1.0
"""First wait for the run's start before asking; doubles up to the setting. Just after joining a hint is most likely to
be lost, since the events' socket may still be on its way."""

LEASE_SHARE: Final = 1 / 3
"""A lease is renewed after this share of it, so that one lost message does not end it."""

LEAVE_SECONDS: Final = 2.0
"""How long to wait for the answer to LEAVE; without it the leases run out by themselves."""


class Outer:
    """One outer; `run` is its whole life."""

    def __init__(
        self,
        settings: OuterSettings,
        connection: Connection,
        logger: Logger,
        clock: Clock | None = None,
        worker: Executor | None = None,
    ) -> None:
        """Starts nothing. The connection stays its maker's to close.

        `worker` does all heavy work; without it there is one thread for rounds and one for checkpoints.
        """
        self._settings = settings
        self._connection = connection
        self._logger = logger
        self._clock = clock or SystemClock()
        self._record: RunRecord | None = None
        self._desks: list[Desk] = []
        self._asked: dict[int, tuple[Message, Callable[[Message], None]]] = {}
        self._stock: Stock | None = None
        self._fetching: dict[str, list[Callable[[Payload | Unavailable], None]]] = {}
        self._fetch_queue: deque[tuple[BlobRef, int]] = deque()
        self._worker = worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-worker")
        self._aside = worker or ThreadPoolExecutor(max_workers=1, thread_name_prefix="outer-aside")
        self._results: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._started_at = 0.0
        self._hello_at = 0.0
        self._hello_seconds = RECORD_SECONDS_MIN
        self._lease_at = 0.0
        self._lease_seconds = 0.0
        self._is_lost = False
        self._dropped_at = 0.0
        self._joined = ("", "")
        """The run and the broker's incarnation that were logged last."""
        self._is_standing_by = False
        self._is_stopping = False

    # --------------------------------------------------------------------------------------------------- the whole life

    def run(self, should_stop: threading.Event) -> None:
        """Merges until told to stop, then finishes what is under way and frees its leases.

        Raises UnreachableError if no broker answers at the beginning, RefusedError or FencedError if it refuses this
        process, or if the run cannot be merged.
        """
        self.start()
        try:
            while not should_stop.is_set():
                self.turn()
            self._finish()
        finally:
            for executor in (self._worker, self._aside):
                executor.shutdown(wait=True, cancel_futures=True)
            if self._stock is not None:
                self._stock.states.close()

    def start(self) -> None:
        """Knocks at the broker's door; `run` does it by itself."""
        self._started_at = self._clock.now()
        self._say_hello()

    def turn(self, timeout_seconds: float = POLL_SECONDS) -> None:
        """One turn: waits for news, not longer than until something is due, takes it, and does what is due."""
        for news in self._connection.poll(self._wait_seconds(timeout_seconds)):
            self._take(news)
        while not self._results.empty():
            future, then = self._results.get()
            then(future.result())
        for desk in self._desks:
            desk.tick()
        self._keep_leases()
        self._watch_broker()

    def _finish(self) -> None:
        self._is_stopping = True
        deadline = self._clock.now() + self._settings.stop_seconds
        for desk in self._desks:
            desk.stop()
        while any(desk.is_busy for desk in self._desks) and self._clock.now() < deadline:
            self.turn()
        if self._connection.client.heard_at is None:
            return
        is_done: list[Message] = []
        self.ask(Leave(), is_done.append)
        deadline = self._clock.now() + LEAVE_SECONDS
        while not is_done and self._clock.now() < deadline:
            for news in self._connection.poll(POLL_SECONDS):
                self._take(news)

    def _wait_seconds(self, longest: float) -> float:
        now = self._clock.now()
        moments = [now + longest, *(desk.timer_at for desk in self._desks if desk.timer_at is not None)]
        if self._desks and not self._connection.client.is_asking(Lease):
            moments.append(self._lease_at)
        return max(0.0, min(moments) - now) if self._results.empty() else 0.0

    # ------------------------------------------------------------------------------------------------------------- news

    def _take(self, news: News) -> None:
        raise_if_refused(news, self._settings.broker)
        match news:
            case Welcomed():
                self._take_welcome(news.welcome)
            case Answered():
                _, then = self._asked.pop(id(news.ask))
                then(news.reply)
            case Fetched():
                self._end_fetch(news.blob, news.data)
            case FetchFailed():
                self._end_fetch(news.blob, Unavailable(news.code, news.text))
            case Hinted():
                self._take_hint(news)

    def _take_hint(self, news: Hinted) -> None:
        hint = news.hint
        if hint.kind == "initialised" and not self._desks:
            self._say_hello()
        if hint.kind in ("contribution", "version", "settled") and hint.fragment < len(self._desks):
            self._desks[hint.fragment].handle(orders.Hinted(hint.version if hint.kind == "version" else None))

    def _take_welcome(self, welcome: Welcome) -> None:
        record = welcome.run_record
        self._say_joined(record.run if record is not None else "", welcome.broker_incarnation)
        self._lease_seconds = welcome.limits.outer_lease_seconds
        if record is None:
            return
        if self._record is not None and (record.run, record.manifest) != (self._record.run, self._record.manifest):
            raise RefusedError(
                f"the broker at {self._settings.broker} now serves another run ({record.run}) than the one this outer "
                f"merged ({self._record.run}): start it again if that is meant"
            )
        if record != self._record:
            settings = times_of("outer", self._settings) | times_of("sync", record.sync)
            check_times(settings | times_told(welcome.limits), self._logger)
            if doubt := cue_doubt(record.sync):
                self._logger.warning("timeouts.doubtful", text=doubt)
            self._open_desks(record)
        self._lease_at = self._clock.now()
        for desk in self._desks:
            desk.handle(orders.Rejoined())

    def _open_desks(self, record: RunRecord) -> None:
        """Begins to merge a run, or goes on with one that was given other settings while its broker stood still."""
        from isles.outer.desk import Desk  # loads numpy, which nobody needs before there is a run
        from isles.outer.state_cache import StateCache

        manifest = Manifest.from_text(record.manifest)
        if manifest.digest != record.manifest_digest or manifest.num_parameter_fragments != record.sync.num_fragments:
            raise RefusedError(
                "the run's record contradicts its own manifest: the store was not written by this system"
            )
        for desk in self._desks:
            desk.close()
        self._record = record
        settings = self._settings
        states = StateCache(settings.state_cache_bytes, settings.scratch_dir)
        self._stock = Stock(states, PayloadCache(settings.payload_cache_bytes))
        self._desks = [
            Desk(fragment, record, manifest, settings, self, self._stock, self._logger)
            for fragment in range(len(manifest.fragments))
        ]

    def _say_hello(self) -> None:
        self._hello_at = self._clock.now()
        self._connection.start()

    def _watch_broker(self) -> None:
        client, now, settings = self._connection.client, self._clock.now(), self._settings
        if client.heard_at is None:
            if now - self._started_at > settings.join_timeout_seconds:
                raise unanswered(settings.broker, settings.join_timeout_seconds)
            return
        silent = now - client.heard_at
        if silent > settings.lost_seconds and not self._is_lost:
            self._is_lost = True
            self._logger.warning("broker.lost", address=settings.broker, silent_seconds=round(silent, 1))
        elif self._is_lost and silent <= settings.lost_seconds:
            self._say_joined(*self._joined)
        if not self._is_lost and now - self._dropped_at >= DROPPED_SECONDS:
            self._dropped_at = now
            if dropped := self._connection.take_dropped():
                self._logger.info("messages.dropped", **dropped)
        if not self._desks and client.session and now - self._hello_at >= self._hello_seconds:
            self._hello_seconds = min(2 * self._hello_seconds, settings.record_seconds)
            self._say_hello()

    def _say_joined(self, run: str, broker_incarnation: str) -> None:
        if self._is_lost or self._joined != (run, broker_incarnation):
            self._is_lost, self._joined = False, (run, broker_incarnation)
            self._logger.info("broker.joined", address=self._settings.broker, run=run or "not started yet")

    # ----------------------------------------------------------------------------------------------------------- leases

    def _keep_leases(self) -> None:
        if not self._desks or self._clock.now() < self._lease_at or self._connection.client.is_asking(Lease):
            return
        self._lease_at = self._clock.now() + LEASE_SHARE * self._lease_seconds
        fragments, num_required = tuple(range(len(self._desks))), self._settings.require_learners
        self.ask(Lease(fragments=fragments, num_required=num_required), self._take_lease)

    def _take_lease(self, reply: Message) -> None:
        if not isinstance(reply, Leased):
            error = as_error(reply)
            self._logger.warning("message.refused", code=error.code, text=error.text, ask="lease")
            return
        self._lease_seconds = reply.lease_seconds
        lost, won = [], []
        for fragment, desk in enumerate(self._desks):
            epoch = reply.epochs.get(fragment)
            if epoch is None:
                lost.append(fragment)
                desk.handle(orders.LeaseLost())
            elif not desk.is_retired:
                won += [fragment] if desk.rounds.is_standing_by else []
                desk.handle(orders.LeaseGranted(epoch))
        if won:
            epoch = max(reply.epochs[fragment] for fragment in won)
            self._logger.info("outer.leased", outer=self._connection.client.hello.id, fragments=won, epoch=epoch)
        if lost and not self._is_standing_by:
            self._logger.info("outer.standing_by", fragments=lost)
        self._is_standing_by = bool(lost)

    # ------------------------------------------------------------------------------------------ what the desks are lent

    def now(self) -> float:
        """Seconds, monotonic."""
        return self._clock.now()

    def draw_token(self) -> str:
        """A random name that nobody else draws."""
        return secrets.token_hex(TOKEN_BYTES)

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        """Asks the broker until answered, then calls `then` with the reply."""
        self._asked[id(message)] = (message, then)  # the message is kept, so that its id stays its own
        self._connection.ask(message, payload)

    def fetch(self, blob: BlobRef, then: Callable[[Payload | Unavailable], None], *, bytes_max: int) -> None:
        """Brings a blob of at most `bytes_max` bytes, then calls `then` with it, or with why it cannot be had."""
        waiting = self._fetching.setdefault(blob.digest, [])
        waiting.append(then)
        if len(waiting) == 1:
            self._fetch_queue.append((blob, bytes_max))
            self._start_fetches()

    def work(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Does what rounds wait for on the worker thread, then calls `then` with its result on this one."""
        self._submit(self._worker, call, then)

    def work_aside(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Does what no round waits for on another thread, then calls `then` with its result on this one."""
        self._submit(self._aside, call, then)

    def _submit(self, executor: Executor, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        future = executor.submit(call)
        future.add_done_callback(lambda done: self._return(done, then))

    def _return(self, done: Future[Any], then: Callable[[Any], None]) -> None:
        if not done.cancelled():
            self._results.put((done, then))
            self._connection.wake()

    def _start_fetches(self) -> None:
        num_active = len(self._fetching) - len(self._fetch_queue)
        while self._fetch_queue and num_active < FETCHES_MAX:
            blob, bytes_max = self._fetch_queue.popleft()
            num_active += 1
            self._connection.fetch(blob, bytes_max=bytes_max)

    def _end_fetch(self, blob: BlobRef, payload: Payload | Unavailable) -> None:
        waiting = self._fetching.pop(blob.digest, [])
        self._start_fetches()
        for then in waiting:
            then(payload)


def serve(settings: OuterSettings, *, logger: Logger, should_stop: threading.Event) -> int:
    """Runs an outer until `should_stop`; the exit code.

    Raises UnreachableError if no broker answers at the beginning, RefusedError or FencedError if it refuses this one.
    """
    from isles.proto.transport.dial import dial

    transport = dial(settings.broker, settings.key)
    try:
        connection = Connection(make_hello(settings), transport, SystemClock())
        Outer(settings, connection, logger).run(should_stop)
    finally:
        transport.close()
    return 0


def make_hello(settings: OuterSettings) -> Hello:
    """Who this outer is; without a name in the settings, a new one that tells the machine."""
    incarnation = secrets.token_hex(TOKEN_BYTES)
    name = settings.named(socket.gethostname(), incarnation).id
    return Hello(role="outer", id=name, incarnation=incarnation, region=settings.region, run=settings.run)
