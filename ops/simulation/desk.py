"""One fragment of a simulated outer: the real round machine and the real recovery around states of exact integers.

Its merge is a plain sum and its outer step has rate 1 and no momentum, so that every unit that goes in comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol

from isles.ops.simulation.values import DOWN_QUANTUM, ZERO, Pair, ref_of
from isles.outer import orders
from isles.outer import recovery as recoveries
from isles.outer.recovery import Recovery, StatePoint
from isles.outer.rounds import RETRY_SECONDS, Rounds, State
from isles.outer.services import Unavailable
from isles.proto.agreement import RunRecord
from isles.proto.messages import (
    AskHistory,
    BlobRef,
    Checkpoint,
    Committed,
    Contribution,
    Error,
    Fenced,
    History,
    List,
    Listing,
    Message,
    Rejection,
    Settle,
    Settled,
    Stale,
    VersionInfo,
)

POISON: Final = "poison"
"""The reason of whatever fails the screen for what is in it."""
LIST_SECONDS: Final = 4.0
"""Longest time between two looks at the store: those that nobody hinted at find little."""
FAILURES_MAX: Final = 10
"""Merges and recoveries that fail one after the other before an outer gives up, as in `isles.outer.desk`."""


@dataclass(frozen=True, slots=True)
class NotHad:
    """A blob that could not be brought."""

    digest: str
    why: Unavailable


Found = Mapping[str, bytes] | NotHad
"""What was brought, by digest, or what stands in the way."""


@dataclass(frozen=True, slots=True)
class Values:
    """What an outer step starts from."""

    parameters: Pair = ZERO
    remainder: Pair = ZERO

    def point(self, version: int) -> StatePoint:
        """What these values are known by, if they are those of a version."""
        return StatePoint(version, ref_of(self.parameters).digest, ref_of(self.remainder).digest)


class Services(Protocol):
    """What a desk is lent; everything is answered later, or never if the process dies before."""

    def now(self) -> float: ...
    def draw_token(self) -> str: ...
    def ask(self, message: Message, then: Callable[[Message], None]) -> None: ...
    def bring(self, blobs: Sequence[BlobRef], then: Callable[[Found], None]) -> None:
        """`then` gets the bytes by digest, or the first that cannot be had."""

    def store(self, values: Sequence[Pair], then: Callable[[str], None]) -> None:
        """`then` gets why a value cannot be stored, "" if all are."""

    def give_up(self, reason: str) -> None:
        """This outer cannot go on, and ends."""


class Desk:
    """Where one fragment is merged. All it holds is lost with its process."""

    def __init__(
        self,
        fragment: int,
        record: RunRecord,
        services: Services,
        is_poisoned: Callable[[Pair], bool],
        remade: list[int],
    ) -> None:
        """`is_poisoned` says whether a delta fails the screen; `remade` takes note of each recomputed version."""
        self.rounds = Rounds(fragment, record.sync, record.budget, list_seconds=LIST_SECONDS)
        self.timer_at: float | None = None
        self._fragment = fragment
        self._record = record
        self._services = services
        self._is_poisoned = is_poisoned
        self._remade = remade
        self._held: tuple[StatePoint, Values] | None = None
        self._made: tuple[StatePoint, Values] | None = None
        """A version that was made and is not known to be committed."""
        self._listing: Listing | None = None
        self._plan: orders.Plan | None = None
        """What shall be merged as soon as the state of its head is at hand."""
        self._recovery: Recovery | None = None
        self._values = Values()
        """Of the recovery."""
        self._recover_at = 0.0
        """No recovery begins before this moment, unless a merge waits for it."""
        self._num_failures = 0
        self._num_asked = 0
        """Listings that were asked for."""
        self._listing_number = self._recovery_number = 0
        """Which of them is the newest one, and which the newest recovery goes by."""
        self._lost: tuple[str, int] = "", 0
        """What a recovery found to be gone, and how many listings had been asked for then."""

    def handle(self, event: orders.Event) -> None:
        """Tells the rounds what happened and performs what they order."""
        is_new_lease = isinstance(event, orders.LeaseGranted) and event.epoch != self.rounds.epoch
        if is_new_lease or isinstance(event, orders.LeaseLost | Fenced):
            self._plan = self._made = self._recovery = self._listing = None
        for instruction in self.rounds.handle(event, self._services.now()):
            self._perform(instruction)

    def tick(self) -> None:
        """Fires the timer when it is time."""
        if self.timer_at is not None and self._services.now() >= self.timer_at:
            self.timer_at = None
            self.handle(orders.TimerFired())

    def _perform(self, instruction: orders.Instruction) -> None:
        services, fragment = self._services, self._fragment
        match instruction:
            case orders.List():
                self._num_asked += 1
                services.ask(List(fragment=fragment), partial(self._take_listing, self._num_asked))
            case orders.FetchPayloads(contributions):
                for contribution in contributions:
                    services.bring([contribution.blob], partial(self._screen, contribution))
            case orders.Settle(epoch, rejections):
                message = Settle(fragment=fragment, epoch=epoch, rejections=rejections)
                services.ask(message, partial(self._take_answer, "settle"))
            case orders.Merge(plan):
                self._plan = plan
                self._go_on()
            case orders.Commit(plan, blobs):
                services.ask(
                    orders.commit_message(plan, blobs, services.draw_token()), partial(self._take_answer, "commit")
                )
            case orders.SetTimer(at):
                self.timer_at = at

    # ------------------------------------------------------------------------------------------------- broker's answers

    def _take_listing(self, number: int, reply: Message) -> None:
        if isinstance(reply, Listing):
            if not self.rounds.is_standing_by:
                self._listing, self._listing_number = reply, number
                self._prepare(reply.head)
            self.handle(orders.Listed(reply))
        else:
            self._take_answer("list", reply)

    def _take_answer(self, ask: Literal["list", "settle", "commit"], reply: Message) -> None:
        match reply:
            case Committed(version=version):
                self._num_failures = 0
                if self._made is not None and self._made[0].version == version:
                    self._held, self._made = self._made, None
                self.handle(reply)
            case Settled() | Stale() | Fenced():
                self.handle(reply)
            case Error(text=text):
                self.handle(orders.AskFailed(ask, text))

    def _screen(self, contribution: Contribution, found: Found) -> None:
        """What is gone is rejected; what was only put off is asked for again when the rows are looked at next."""
        if not isinstance(found, NotHad):
            reason = POISON if self._is_poisoned(Pair.decode(found[contribution.blob.digest])) else ""
        elif found.why.is_lost:
            reason = f"its payload cannot be had: {found.why.text}"
        else:
            self.handle(orders.ScreenPutOff(contribution.id))
            return
        self.handle(orders.PayloadScreened(contribution.id, reason))

    # ---------------------------------------------------------------------------------------------------------- merging

    def _go_on(self, reason: str = "") -> None:
        plan = self._plan
        if plan is None or self._recovery is not None:
            return
        if self._held is not None and self._held[0].is_of(plan.head):
            self._plan = None
            blobs = [contribution.blob for contribution in plan.contributions]
            self._services.bring(blobs, partial(self._merge, plan, self._held[1]))
        elif reason:
            self._plan = None
            self.handle(orders.MergeFailed(plan, reason))
        else:
            self._recover(plan.head)

    def _merge(self, plan: orders.Plan, start: Values, found: Found) -> None:
        if isinstance(found, NotHad):
            self._fail(plan, found)
            return
        deltas = [Pair.decode(found[contribution.blob.digest]) for contribution in plan.contributions]
        update, values = make_version(start, deltas)
        point = values.point(plan.head.version + 1)
        blobs = orders.NewBlobs(point.parameters_sha256, point.optimizer_sha256, ref_of(update))
        self._made = point, values
        self._services.store([update], partial(self._take_stored, plan, blobs))

    def _fail(self, plan: orders.Plan, found: NotHad) -> None:
        """Without a payload that is gone the others are merged the next time."""
        text = found.why.text
        rejections: tuple[Rejection, ...] = ()
        if found.why.is_lost:
            lost = [one for one in plan.contributions if one.blob.digest == found.digest]
            rejections = tuple(Rejection(id=one.id, reason=f"its payload cannot be had: {text}") for one in lost)
        else:
            self._count_failure(text)
        self.handle(orders.MergeFailed(plan, text, rejections))

    def _count_failure(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures >= FAILURES_MAX:
            self._services.give_up(reason)

    def _take_stored(self, plan: orders.Plan, blobs: orders.NewBlobs, reason: str) -> None:
        self.handle(orders.MergeFailed(plan, reason) if reason else orders.Merged(plan, blobs))

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint(self) -> None:
        """Puts the state that is held into the store, in the background; rounds go on, and may come to an end first."""
        if self._held is None or not self.rounds.epoch:
            return
        point, values = self._held
        message = Checkpoint(
            fragment=self._fragment,
            epoch=self.rounds.epoch,
            version=point.version,
            parameters=ref_of(values.parameters),
            remainder=None if values.remainder.is_zero else ref_of(values.remainder),
        )
        parts = [values.parameters] if values.remainder.is_zero else [values.parameters, values.remainder]
        self._services.store(parts, partial(self._confirm, message))

    def _confirm(self, message: Checkpoint, reason: str) -> None:
        if not reason:
            self._services.ask(message, lambda _: None)

    # --------------------------------------------------------------------------------------------------------- recovery

    def _prepare(self, head: VersionInfo) -> None:
        """Brings the state of the head before it is needed; not for a listing that was overtaken by a commit."""
        held = self._held
        is_at_hand = held is not None and (head.version < held[0].version or held[0].is_of(head))
        is_ours = self.rounds.state in (State.MERGING, State.COMMITTING)
        if not (is_at_hand or is_ours or self._recovery is not None) and self._services.now() >= self._recover_at:
            self._recover(head)

    def _recover(self, head: VersionInfo) -> None:
        assert self._listing is not None
        assert self._listing.checkpoint is not None
        held = self._held
        self._recovery_number = self._listing_number
        recovery = Recovery(head, self._listing.checkpoint, held[0] if held else None, self._record.sync_of)
        self._recovery, self._values = recovery, held[1] if held else Values()
        self._carry_on(recovery, recovery.start())

    def _carry_on(self, recovery: Recovery, instructions: list[recoveries.Instruction]) -> None:
        [instruction] = instructions
        match instruction:
            case recoveries.ReadCheckpoint(info):
                blobs = [blob for blob in (info.parameters, info.remainder) if blob is not None]
                self._services.bring(blobs, partial(self._take_state, recovery, info))
            case recoveries.AskTape(first, num_max):
                ask = AskHistory(fragment=self._fragment, first=first, num_max=num_max)
                self._services.ask(ask, partial(self._take_tape, recovery))
            case recoveries.Remake(info):
                assert info.recipe is not None
                ingredients = info.recipe.ingredients
                blobs = [BlobRef(digest=one.digest, size_bytes=one.size_bytes) for one in ingredients]
                self._services.bring(blobs, partial(self._remake, recovery, info.version, blobs))
            case recoveries.Recovered():
                self._end_recovery("")
            case recoveries.GiveUp(reason):
                self._end_recovery(reason)

    def _tell(self, recovery: Recovery, event: recoveries.Event) -> None:
        if recovery is self._recovery:
            self._carry_on(recovery, recovery.handle(event))

    def _take_state(self, recovery: Recovery, info: VersionInfo, found: Found) -> None:
        if isinstance(found, NotHad):
            self._prevent(recovery, found.why)
            return
        assert info.parameters is not None
        remainder = ZERO if info.remainder is None else Pair.decode(found[info.remainder.digest])
        self._take_values(recovery, Values(Pair.decode(found[info.parameters.digest]), remainder))

    def _prevent(self, recovery: Recovery, why: Unavailable) -> None:
        """What is still gone by a listing that was asked for after it had been missed is gone for good."""
        if recovery is not self._recovery:
            return
        lost, num_asked = self._lost
        if why.is_lost and lost == why.text and num_asked < self._recovery_number:
            self._services.give_up(why.text)
        if why.is_lost and lost != why.text:
            self._lost = why.text, self._num_asked
        self._tell(recovery, recoveries.Prevented(why.text))

    def _take_tape(self, recovery: Recovery, reply: Message) -> None:
        if isinstance(reply, History):
            self._tell(recovery, recoveries.TapeRead(reply.versions))
        else:
            self._tell(recovery, recoveries.Prevented(f"the answer is {type(reply).__name__}"))

    def _remake(self, recovery: Recovery, version: int, blobs: Sequence[BlobRef], found: Found) -> None:
        if recovery is not self._recovery:
            return
        if isinstance(found, NotHad):
            self._prevent(recovery, found.why)
            return
        deltas = [Pair.decode(found[blob.digest]) for blob in blobs]
        self._remade.append(version)
        self._take_values(recovery, make_version(self._values, deltas)[1])

    def _take_values(self, recovery: Recovery, values: Values) -> None:
        if recovery is self._recovery:
            self._values = values
            point = values.point(0)
            self._tell(recovery, recoveries.StateMade(point.parameters_sha256, point.optimizer_sha256))

    def _end_recovery(self, reason: str) -> None:
        """What had to be made again is checkpointed at once, for those who cannot follow the tape."""
        recovery, self._recovery = self._recovery, None
        assert recovery is not None
        if recovery.point is not None:
            self._held = recovery.point, self._values
        if reason:
            self._recover_at = self._services.now() + RETRY_SECONDS
            self._count_failure(reason)
        else:
            self._lost = "", 0
        self._go_on(reason)
        if not reason and recovery.num_remade:
            self.checkpoint()


def make_version(start: Values, deltas: Sequence[Pair]) -> tuple[Pair, Values]:
    """The update and the next state: sum merge, rate 1, no momentum, a quantised downlink with its remainder kept."""
    exact = start.parameters + start.remainder
    for delta in deltas:
        exact = exact - delta
    update = (exact - start.parameters).quantised(DOWN_QUANTUM)
    published = start.parameters + update
    return update, Values(published, exact - published)
