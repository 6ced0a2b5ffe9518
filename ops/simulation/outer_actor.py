"""An outer of the simulated world: the real round machines and client core around values of exact integers.

Its merge is a plain sum and its outer step has rate 1 and no momentum, so that every unit that goes in comes out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from isles.ops.simulation.values import DOWN_QUANTUM, ZERO, Lane, Pair
from isles.outer import orders
from isles.outer.rounds import Rounds
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Instruction, Send, Welcomed
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    BlobRef,
    Commit,
    Committed,
    Contribution,
    Error,
    Fenced,
    Hello,
    Lease,
    Leased,
    List,
    Listing,
    Message,
    Settle,
    Settled,
    Stale,
    Stored,
    Upload,
    VersionInfo,
)

BYTES_MAX = 1 << 20


@dataclass
class _Merging:
    """A plan on its way to a version: first its blobs are fetched, then those of the new version uploaded."""

    plan: orders.Plan
    wanted: dict[str, BlobRef]
    new_blobs: orders.NewBlobs | None = None
    unstored: set[str] = field(default_factory=set)


@dataclass
class OuterActor:
    """One incarnation of one outer. The world calls `receive` and `tick`, and carries what is in `outbox`."""

    name: str
    incarnation: str
    sync: SyncSettings
    is_poisoned: Callable[[Lane, str], bool]
    """(lane, outer) -> whether this outer rejects a contribution with this item: opinions differ."""
    draw_token: Callable[[], str]
    outbox: list[Send] = field(default_factory=list)
    timers: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = Client(Hello(role="outer", id=self.name, incarnation=self.incarnation))
        self.rounds = {
            fragment: Rounds(fragment, self.sync, Budget(rounds=1)) for fragment in range(self.sync.num_fragments)
        }
        self._blobs: dict[str, bytes] = {}
        self._screening: dict[str, list[Contribution]] = {}
        self._merging: dict[int, _Merging] = {}

    def start(self, now: float) -> None:
        self._carry_out(self.client.start(now), now)

    def receive(self, message: Message, payload: bytes | None, now: float) -> None:
        self._carry_out(self.client.handle(message, now, payload), now)

    def tick(self, now: float) -> None:
        self._carry_out(self.client.tick(now), now)
        for fragment, at in list(self.timers.items()):
            if now >= at:
                del self.timers[fragment]
                self._order(fragment, orders.TimerFired(), now)

    def renew(self, now: float) -> None:
        """Asks for the leases, and looks at every fragment whatever was hinted."""
        if not self.client.is_asking(Lease):
            self._ask(Lease(fragments=tuple(self.rounds)), now)
        for fragment in self.rounds:
            self._order(fragment, orders.Hinted(), now)

    # ----------------------------------------------------------------------------------------- orders of the rounds

    def _order(self, fragment: int, event: orders.Event, now: float) -> None:
        for instruction in self.rounds[fragment].handle(event, now):
            self._perform(fragment, instruction, now)

    def _perform(self, fragment: int, instruction: orders.Instruction, now: float) -> None:
        match instruction:
            case orders.List():
                self._ask(List(fragment=fragment), now)
            case orders.FetchPayloads(contributions):
                for contribution in contributions:
                    self._screening.setdefault(contribution.blob.digest, []).append(contribution)
                    self._fetch(contribution.blob, now)
            case orders.ForgetPayloads(ids):
                self._forget(set(ids))
            case orders.Settle(epoch, rejections):
                self._ask(Settle(fragment=fragment, epoch=epoch, rejections=rejections), now)
            case orders.Merge(plan):
                self._begin_merge(fragment, plan, now)
            case orders.Commit(plan, blobs):
                self._ask(self._commit(plan, blobs), now)
            case orders.SetTimer(at):
                self.timers[fragment] = at

    def _commit(self, plan: orders.Plan, blobs: orders.NewBlobs) -> Commit:
        return Commit(
            commit_id=self.draw_token(),
            fragment=plan.fragment,
            epoch=plan.epoch,
            base_version=plan.head.version,
            parameters_sha256=blobs.parameters_sha256,
            update=blobs.update,
            parameters=blobs.parameters,
            remainder=blobs.remainder,
            recipe=plan.recipe,
        )

    def _forget(self, ids: set[ContributionId]) -> None:
        for digest, contributions in list(self._screening.items()):
            self._screening[digest] = [kept for kept in contributions if kept.id not in ids]
            if not self._screening[digest]:
                del self._screening[digest]

    # ------------------------------------------------------------------------------------------------------ merging

    def _begin_merge(self, fragment: int, plan: orders.Plan, now: float) -> None:
        blobs = [*state_blobs(plan.head), *(contribution.blob for contribution in plan.contributions)]
        merging = _Merging(plan, {blob.digest: blob for blob in blobs if blob.digest not in self._blobs})
        self._merging[fragment] = merging
        for blob in merging.wanted.values():
            self._fetch(blob, now)
        self._compute_if_ready(fragment, now)

    def _compute_if_ready(self, fragment: int, now: float) -> None:
        merging = self._merging.get(fragment)
        if merging is None or merging.wanted or merging.new_blobs is not None:
            return
        plan = merging.plan
        parameters, remainder = (self._value(blob) for blob in (plan.head.parameters, plan.head.remainder))
        deltas = [self._value(contribution.blob) for contribution in plan.contributions]
        made = make_version(parameters, remainder, deltas)
        payloads = {ref_of(value): value.encode() for value in made.values()}
        merging.new_blobs = orders.NewBlobs(
            parameters_sha256=ref_of(made["parameters"]).digest,
            update=ref_of(made["update"]),
            parameters=ref_of(made["parameters"]),
            remainder=ref_of(made["remainder"]),
        )
        merging.unstored = {blob.digest for blob in payloads}
        for blob, payload in payloads.items():
            self._carry_out(self.client.ask(Upload(blob=blob), now, payload), now)

    def _value(self, blob: BlobRef | None) -> Pair:
        return ZERO if blob is None else Pair.decode(self._blobs[blob.digest])

    # --------------------------------------------------------------------------------------------- news of the core

    def _ask(self, message: Message, now: float) -> None:
        self._carry_out(self.client.ask(message, now), now)

    def _fetch(self, blob: BlobRef, now: float) -> None:
        if blob.digest in self._blobs:
            self._take_blob(blob.digest, now)
        else:
            self._carry_out(self.client.fetch(blob, now, bytes_max=BYTES_MAX), now)

    def _carry_out(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case Send():
                    self.outbox.append(instruction)
                case Welcomed():
                    for fragment in self.rounds:
                        self._order(fragment, orders.Rejoined(), now)
                    self._ask(Lease(fragments=tuple(self.rounds)), now)
                case Answered(ask, reply):
                    self._take_answer(ask, reply, now)
                case Fetched(blob, data):
                    self._blobs[blob.digest] = bytes(data)
                    self._take_blob(blob.digest, now)
                case FetchFailed(blob, text):
                    self._take_missing(blob.digest, text, now)
                case Hinted(hint) if hint.kind in ("contribution", "version"):
                    self._order(hint.fragment, orders.Hinted(), now)

    def _take_answer(self, ask: Message, reply: Message, now: float) -> None:
        match ask, reply:
            case Lease(), Leased(epochs=epochs):
                for fragment in self.rounds:
                    event = orders.LeaseGranted(epochs[fragment]) if fragment in epochs else orders.LeaseLost()
                    self._order(fragment, event, now)
            case List(fragment=fragment), Listing():
                self._order(fragment, orders.Listed(reply), now)
            case (Settle(fragment=fragment), Settled() | Fenced()) | (
                Commit(fragment=fragment),
                Committed() | Stale() | Fenced(),
            ):
                assert isinstance(reply, Settled | Committed | Stale | Fenced)
                self._order(fragment, reply, now)
            case List(fragment=fragment), Error(text=text):
                self._order(fragment, orders.AskFailed("list", text), now)
            case Settle(fragment=fragment), Error(text=text):
                self._order(fragment, orders.AskFailed("settle", text), now)
            case Commit(fragment=fragment), Error(text=text):
                self._order(fragment, orders.AskFailed("commit", text), now)
            case Upload(), Stored(digest=digest):
                self._take_stored(digest, now)
            case Upload(blob=blob), Error(text=text):
                self._take_missing(blob.digest, text, now)

    def _take_blob(self, digest: str, now: float) -> None:
        for contribution in self._screening.pop(digest, []):
            lanes = Pair.decode(self._blobs[digest]).lanes
            reason = "poison" if any(self.is_poisoned(lane, self.name) for lane in lanes) else ""
            self._order(contribution.id.fragment, orders.PayloadScreened(contribution.id, reason), now)
        for fragment, merging in list(self._merging.items()):
            if merging.wanted.pop(digest, None):
                self._compute_if_ready(fragment, now)

    def _take_missing(self, digest: str, text: str, now: float) -> None:
        for contribution in self._screening.pop(digest, []):
            self._order(contribution.id.fragment, orders.PayloadScreened(contribution.id, text), now)
        for fragment, merging in list(self._merging.items()):
            if digest in merging.wanted or digest in merging.unstored:
                del self._merging[fragment]
                self._order(fragment, orders.MergeFailed(merging.plan, text), now)

    def _take_stored(self, digest: str, now: float) -> None:
        for fragment, merging in list(self._merging.items()):
            if digest in merging.unstored:
                merging.unstored.discard(digest)
                if not merging.unstored and merging.new_blobs is not None:
                    del self._merging[fragment]
                    self._order(fragment, orders.Merged(merging.plan, merging.new_blobs), now)


def state_blobs(head: VersionInfo) -> list[BlobRef]:
    """What an outer step starts from."""
    return [blob for blob in (head.parameters, head.remainder) if blob is not None]


def ref_of(value: Pair) -> BlobRef:
    """The blob of a value's bytes."""
    payload = value.encode()
    return BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))


def make_version(parameters: Pair, remainder: Pair, deltas: list[Pair]) -> dict[str, Pair]:
    """Sum merge, rate 1, no momentum, quantised downlink with its remainder carried on."""
    exact = parameters + remainder
    for delta in deltas:
        exact = exact - delta
    update = (exact - parameters).quantised(DOWN_QUANTUM)
    published = parameters + update
    return {"update": update, "parameters": published, "remainder": exact - published}
