"""A learner of the simulated world: the real session, account and client core around values of exact integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from isles.ops.simulation.values import UP_QUANTUM, ZERO, Lane, Pair, lane_of, once, ref_of
from isles.proto.agreement import SyncSettings
from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Instruction, Refused, Send, Welcomed
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    Accepted,
    AskVersion,
    BlobRef,
    Contribution,
    Error,
    Expired,
    Fenced,
    Hello,
    Hint,
    Leave,
    Merged,
    Message,
    Offer,
    Progress,
    Rejected,
    VersionReply,
)
from isles.workers import orders
from isles.workers.account import Account
from isles.workers.books import FragmentBooks
from isles.workers.session import Session

BYTES_MAX = 1 << 20
"""Far above what a simulated value takes."""


@dataclass
class Checkpoint:
    """One consistent cut of a learner at a step boundary."""

    books: tuple[FragmentBooks, ...]
    cursor: dict[int, int]
    num_steps: int
    accounts: dict[int, Account[Pair]]
    theta: dict[int, Pair]
    payloads: dict[ContributionId, bytes]
    worked: dict[int, int]
    """Fragment -> lanes of the items worked on since the last reset; what must be in the model at the end."""


@dataclass
class LearnerActor:
    """One incarnation of one learner. The world calls `receive`, `tick` and `step`, and carries what is in `outbox`."""

    learner: str
    index: int
    incarnation: str
    sync: SyncSettings
    increment: Callable[[Lane, int], int]
    """(lane, fragment) -> what an inner step on this item adds to the parameter."""
    checkpoint: Checkpoint | None = None
    outbox: list[Send] = field(default_factory=list)
    is_stopped: bool = False
    has_left: bool = False
    num_resets: int = 0
    taken: dict[ContributionId, int] = field(default_factory=dict)
    """Everything this incarnation offered, by id: lanes of what an accepted contribution must bring into the model."""

    def __post_init__(self) -> None:
        kept = self.checkpoint
        self.session = Session(
            self.sync,
            self.learner,
            self.incarnation,
            restored=None if kept is None else kept.books,
            cursor=None if kept is None else kept.cursor,
            num_steps=0 if kept is None else kept.num_steps,
        )
        self.accounts = {} if kept is None else {f: replace(account) for f, account in kept.accounts.items()}
        self.theta = {} if kept is None else dict(kept.theta)
        self.payloads = {} if kept is None else dict(kept.payloads)
        self.worked = dict(kept.worked) if kept else dict.fromkeys(range(self.sync.num_fragments), 0)
        self._values: dict[tuple[int, int], Pair] = {}
        """(fragment, version) -> values, of versions that arrived or are held."""
        for books in self.session.books:
            if books.base is not None:
                self._values[books.fragment, books.base] = self.accounts[books.fragment].anchor
        self._blobs: dict[str, bytes] = {}
        self._replies: list[tuple[AskVersion, VersionReply]] = []
        self._offers: dict[ContributionId, Offer] = {}
        self._asking: set[int] = set()
        self._avoiding: set[int] = set()
        """Fragments whose last way began with the version held, and failed: the next one begins with a checkpoint."""
        self._hinted: set[int] = set()
        """Fragments to ask for at the next look: several hints, one question."""
        self.client = Client(Hello(role="worker", id=self.learner, incarnation=self.incarnation))

    # --------------------------------------------------------------------------------------------- what the world calls

    def start(self, now: float) -> None:
        self._carry_out(self.client.start(now), now)

    def receive(self, message: Message, payload: bytes | None, now: float) -> None:
        self._carry_out(self.client.handle(message, now, payload), now)

    def tick(self, now: float) -> None:
        """Time passes."""
        self._carry_out(self.client.tick(now), now)

    def look(self, now: float) -> None:
        """Asks for what it was hinted at."""
        for fragment in sorted(self._hinted - self._asking):
            self._hinted.discard(fragment)
            self._ask_version(fragment, now)

    def ask_versions(self, now: float) -> None:
        """What a learner does now and then whatever it was told."""
        for books in self.session.books:
            self._ask_version(books.fragment, now)

    def beat(self, now: float) -> None:
        """Tells the broker that this learner lives, and how far it is."""
        if not self.client.is_asking(Progress):
            steps, is_draining = self.session.num_steps, self.session.is_draining
            self._carry_out(self.client.ask(Progress(steps=steps, tokens=steps, is_draining=is_draining), now), now)

    def step(self, now: float) -> None:
        """One inner step on the next item, if this learner holds parameters."""
        if not self.session.is_ready or self.is_stopped:
            self.boundary(now)
            return
        item = self.session.cursor.get(self.index, 0)
        lane = lane_of(self.index, item)
        for fragment in self.theta:
            self.theta[fragment] += Pair(self.increment(lane, fragment), once(lane))
            self.worked[fragment] |= once(lane)
        self._order(orders.StepTaken(tokens=1, seconds=1.0, cursor={self.index: item + 1}), now)

    def boundary(self, now: float) -> None:
        """Lets the session act between two steps without taking one; a drained learner leaves."""
        self._order(orders.Boundary(), now)
        if self.session.is_draining and self.session.is_drained and not self.has_left:
            self.has_left = True
            self._carry_out(self.client.ask(Leave(), now), now)

    def drain(self, now: float) -> None:
        """From now on hands in everything, quantisation errors included."""
        self._carry_out(self.client.ask(Progress(is_draining=True), now), now)
        self._order(orders.DrainRequested(is_exact=True), now)

    def cut_checkpoint(self) -> Checkpoint:
        """What this learner writes to restart itself."""
        return Checkpoint(
            self.session.checkpoint_books(),
            dict(self.session.cursor),
            self.session.num_steps,
            {fragment: replace(account) for fragment, account in self.accounts.items()},
            dict(self.theta),
            dict(self.payloads),
            dict(self.worked),
        )

    def account(self, fragment: int) -> Pair:
        """U: the unmerged work of a fragment."""
        if fragment not in self.accounts:
            return ZERO
        return self.accounts[fragment].contribution(self.theta[fragment])

    # ----------------------------------------------------------------------------------------------- orders of the core

    def _order(self, event: orders.Event, now: float) -> None:
        for instruction in self.session.handle(event, now):
            self._perform(instruction, now)

    def _perform(self, instruction: orders.Instruction, now: float) -> None:
        match instruction:
            case orders.TakeAccount():
                self._offer(instruction, now)
            case orders.ApplyVersion(fragment, version, subtract):
                decoded = None if subtract is None else Pair.decode(self.payloads[subtract])
                account = self.accounts[fragment]
                change = account.apply(self._values[fragment, version], decoded, lambda: self.theta[fragment])
                self.theta[fragment] = change.of(self.theta[fragment])
                self._forget_values_before(fragment, version)
            case orders.Reset(fragment, version):
                self._reset(fragment, version)
            case orders.AskVersion(fragment):
                self._ask_version(fragment, now)
            case orders.ForgetPayload(named):
                self.payloads.pop(named, None)
                offer = self._offers.pop(named, None)
                self.client.forget(lambda message: message is offer)
            case orders.Stop():
                self.is_stopped = True

    def _reset(self, fragment: int, version: int | None) -> None:
        newest = None if version is None else self._values[fragment, version]
        account = self.accounts.get(fragment)
        if account is None:
            assert newest is not None
            self.accounts[fragment] = Account.under(self.sync, newest)
            self.theta[fragment] = newest
        else:
            self.num_resets += 1
            self.theta[fragment] = account.reset(newest).of(self.theta[fragment])
        self.worked[fragment] = 0
        if version is not None:
            self._forget_values_before(fragment, version)

    def _offer(self, order: orders.TakeAccount, now: float) -> None:
        quantised = self.account(order.fragment).quantised(UP_QUANTUM)
        payload = quantised.encode()
        self._order(orders.PayloadEncoded(order.id, is_zero=quantised.is_zero), now)
        if quantised.is_zero:
            return
        self.payloads[order.id] = payload
        self.taken[order.id] = -quantised.lanes
        contribution = Contribution(
            id=order.id,
            base_version=order.base_version,
            blob=ref_of(quantised),
            codec="fp32",
            tokens=order.tokens,
            steps=order.steps,
            seconds=order.seconds,
            norms=(1.0,),
            cursor=dict(order.cursor),
        )
        self._offers[order.id] = Offer(contribution=contribution)
        self._carry_out(self.client.ask(self._offers[order.id], now, payload), now)

    def _ask_version(self, fragment: int, now: float) -> None:
        if fragment not in self._asking:
            self._asking.add(fragment)
            base = None if fragment in self._avoiding else self.session.books[fragment].base
            self._carry_out(self.client.ask(AskVersion(fragment=fragment, base_version=base), now), now)

    # ------------------------------------------------------------------------------------------------- news of the core

    def _carry_out(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self.outbox.append(instruction)
                case Welcomed(welcome):
                    self._order(orders.Welcomed(welcome.heads, welcome.rows), now)
                case Answered(ask, reply):
                    self._take_answer(ask, reply, now)
                case Fetched(blob, data):
                    self._blobs[blob.digest] = bytes(data)
                    self._take_complete_replies(now)
                case FetchFailed(blob):
                    self._give_up_ways(blob.digest)
                case Hinted(hint):
                    self._take_hint(hint, now)
                case Refused(code="fenced"):
                    self._order(Fenced(), now)

    def _take_answer(self, ask: Message, reply: Message, now: float) -> None:
        match reply:
            case Accepted() | Expired() | Merged() | Rejected():
                self._order(reply, now)
            case VersionReply() if isinstance(ask, AskVersion):
                self._asking.discard(ask.fragment)
                if reply.row is not None or reply.head.version != ask.base_version:
                    self._replies.append((ask, reply))
                    for blob in self._missing(reply):
                        self._carry_out(self.client.fetch(blob, now, bytes_max=BYTES_MAX), now)
                    self._take_complete_replies(now)
            case Error() if isinstance(ask, AskVersion):
                self._asking.discard(ask.fragment)

    def _missing(self, reply: VersionReply) -> list[BlobRef]:
        begin = [] if reply.snapshot is None else [reply.snapshot.parameters]
        wanted = [*begin, *reply.updates]
        return [blob for blob in wanted if blob is not None and blob.digest not in self._blobs]

    def _give_up_ways(self, digest: str) -> None:
        """No way leads over a blob that cannot be had: the next ask is for another one, as that of a worker is."""
        for ask, reply in list(self._replies):
            if any(blob.digest == digest for blob in self._missing(reply)):
                self._replies.remove((ask, reply))
                self._avoiding ^= {ask.fragment}

    def _take_complete_replies(self, now: float) -> None:
        waiting, self._replies = self._replies, []
        for ask, reply in waiting:
            if self._missing(reply):
                self._replies.append((ask, reply))
            else:
                self._take_version(ask, reply, now)

    def _take_version(self, ask: AskVersion, reply: VersionReply, now: float) -> None:
        fragment, version = reply.head.fragment, reply.head.version
        if reply.snapshot is not None:
            assert reply.snapshot.parameters is not None
            values = Pair.decode(self._blobs[reply.snapshot.parameters.digest])
        else:
            assert ask.base_version is not None
            base = self._values.get((fragment, ask.base_version))
            if base is None:
                return  # a later version has been applied meanwhile
            values = base
        for update in reply.updates:
            values += Pair.decode(self._blobs[update.digest])
        digest = ref_of(values).digest
        assert digest == reply.head.parameters_sha256, f"{self.learner} rebuilt version {version} wrongly"
        self._values[fragment, version] = values
        self._avoiding.discard(fragment)
        self._order(orders.VersionArrived(fragment, version, reply.row, reply.head.tokens_total), now)

    def _take_hint(self, hint: Hint, now: float) -> None:
        match hint.kind:
            case "contribution" if self.sync.has_cues and hint.learner != self.learner:
                self._order(orders.Cued(hint.fragment, hint.version), now)
            case "version" | "settled":
                self._hinted.add(hint.fragment)

    def _forget_values_before(self, fragment: int, version: int) -> None:
        for key in [key for key in self._values if key[0] == fragment and key[1] < version]:
            del self._values[key]
