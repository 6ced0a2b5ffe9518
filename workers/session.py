"""One learner's books over all its fragments: what to contribute, what to apply, what to discard. Pure.

    facts in (handle)                                orders out
    StepTaken, Boundary                              TakeAccount: copy U, encode it, offer it under this id
    Cued, PaceTold, VersionArrived                   ApplyVersion, Reset: change the live parameters
    PayloadEncoded, PayloadFailed                    AskVersion, ForgetPayload
    Accepted, Expired, Merged, Rejected, Fenced      Await: deterministic runs wait here
    Welcomed, DrainRequested                         Log, Stop

Parameters change only in answer to StepTaken and Boundary, between two inner steps: first every newly received version
is applied, then what is due is contributed. A fragment has at most one open contribution, whose fate is not known yet.
Its tokens, steps and seconds obey the same rules as its parameters (`isles.workers.account`): they are subtracted when
a version that contains it is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from isles.proto.agreement import SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import Expired, Fenced, Merged, Rejected, Row
from isles.workers.books import (
    FragmentBooks,
    OpenContribution,
    PendingFacts,
    compare_at_restart,
    first_clock,
    is_merged,
    is_pending,
    is_rejected,
)
from isles.workers.orders import (
    Answer,
    ApplyVersion,
    AskVersion,
    Await,
    Boundary,
    Cued,
    DrainRequested,
    Event,
    ForgetPayload,
    FragmentSpoiled,
    Instruction,
    Log,
    PaceTold,
    PayloadEncoded,
    PayloadFailed,
    Reset,
    StepTaken,
    Stop,
    TakeAccount,
    VersionArrived,
    Welcomed,
    log_applied,
    log_merged,
    log_reset,
    stop_before_older_store,
)
from isles.workers.pace import paced_interval

__all__ = [
    "NOT_FINITE", "ApplyVersion", "AskVersion", "Await", "Boundary", "Cued", "DrainRequested", "Event", "ForgetPayload",
    "FragmentBooks", "FragmentSpoiled", "Instruction", "Log", "OpenContribution", "PaceTold", "PayloadEncoded",
    "PayloadFailed", "Reset", "Session", "StepTaken", "Stop", "TakeAccount", "VersionArrived", "Welcomed",
]  # fmt: skip

NOT_FINITE: Final = "not finite"
"""A reason with these words says that NaN or infinity was found: the inner optimizer's state is then suspect too."""


class Session:
    """The state machine; `restored`, `cursor` and `num_steps` come from a checkpoint, if there is one.

    With `has_buffers` there is one fragment more, the last; it may never change and has no part in any mean.
    """

    def __init__(
        self,
        sync: SyncSettings,
        learner: str,
        incarnation: str,
        *,
        has_buffers: bool = False,
        restored: Sequence[FragmentBooks] | None = None,
        cursor: Mapping[int, int] | None = None,
        num_steps: int = 0,
    ) -> None:
        self.sync = sync
        self.learner = learner
        self.incarnation = incarnation
        self.num_steps = num_steps
        self.interval_steps = sync.interval_steps
        """H of this learner: it moves with its speed if the run has dynamic intervals."""
        self.cursor: dict[int, int] = dict(cursor or {})
        self.is_draining = False
        self.is_stopped = False
        self.is_holding_back = False
        """Contribute nothing for now: a checkpoint is about to be cut."""
        self._is_joined = False
        self._is_exact_drain = False
        self._num_drawn = 0
        count = sync.num_fragments + has_buffers
        if restored is None:
            clocks = [first_clock(fragment, count, sync.interval_steps) for fragment in range(count)]
            restored = [FragmentBooks(fragment, clock=clock) for fragment, clock in enumerate(clocks)]
        assert [one.fragment for one in restored] == list(range(count)), "one entry per fragment, in order"
        self.books: tuple[FragmentBooks, ...] = tuple(replace(one) for one in restored)
        self._pending = tuple(PendingFacts() for _ in self.books)

    # ------------------------------------------------------------------------------------------------------- questions

    @property
    def is_ready(self) -> bool:
        """Whether every fragment holds a version."""
        return all(books.base is not None for books in self.books)

    @property
    def versions(self) -> dict[int, int]:
        """Fragment -> the version held, for fragments that hold one."""
        return {books.fragment: books.base for books in self.books if books.base is not None}

    @property
    def tokens_merged(self) -> float:
        """Tokens of all learners in the versions held: mean over fragments, since each fragment counts each token."""
        return sum(books.tokens_total for books in self._trained) / len(self._trained)

    @property
    def tokens_unmerged(self) -> float:
        """Tokens of this learner that are in no version held, its open contributions included: mean over fragments."""
        return sum(books.tokens for books in self._trained) / len(self._trained)

    @property
    def rounds_committed(self) -> int:
        """Outer steps in the versions held."""
        return sum(books.base or 0 for books in self._trained)

    @property
    def _trained(self) -> Sequence[FragmentBooks]:
        return self.books[: self.sync.num_fragments]

    @property
    def is_drained(self) -> bool:
        """Whether nothing of this learner's work is outside the versions it holds."""
        return not any(books.open or self._has_work(books) for books in self.books)

    def checkpoint_books(self) -> tuple[FragmentBooks, ...]:
        """A copy of the books, for a checkpoint cut at this boundary."""
        return tuple(replace(books) for books in self.books)

    # ---------------------------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes one fact; returns what to do about it, in order. `now` is in seconds of the shell's clock."""
        if self.is_stopped:
            return []
        match event:
            case StepTaken():
                self._count(event)
                return self._cross_boundary()
            case Boundary():
                return self._cross_boundary()
            case Welcomed():
                return self._take_welcome(event)
            case DrainRequested():
                self.is_draining, self._is_exact_drain = True, event.is_exact
                return []
            case PayloadEncoded():
                return self._take_encoded(event)
            case Cued() | PaceTold() | VersionArrived() | PayloadFailed() | FragmentSpoiled():
                self._note(event)
                return []
        return self._take_answer(event)

    def _note(self, event: Cued | PaceTold | VersionArrived | PayloadFailed | FragmentSpoiled) -> None:
        """Keeps a fact for the next boundary. Versions may be skipped, but the row is that of the newest reply."""
        match event:
            case Cued():
                base = self.books[event.fragment].base
                if base is None or event.version >= base:
                    self._pending[event.fragment].cue = event.version
            case PaceTold(typical_seconds=typical, own_seconds=own) if self.sync.has_dynamic_interval:
                self.interval_steps = paced_interval(self.sync.interval_steps, typical_seconds=typical, own_seconds=own)
            case VersionArrived():
                pending = self._pending[event.fragment]
                if pending.arrived is None or event.version >= pending.arrived.version:
                    pending.arrived = event
            case PayloadFailed() if self._opened(event.id):
                self._pending[event.id.fragment].failure = event
            case FragmentSpoiled():
                self._pending[event.fragment].spoiled = event.reason

    def _take_answer(self, answer: Answer) -> list[Instruction]:
        """The contribution stays open when ACCEPTED, and also when MERGED: until a version that has it is applied."""
        if isinstance(answer, Fenced):
            return self._take_fenced()
        books = self._opened(answer.id)
        if books is None:
            return []
        match answer:
            case Expired():
                return self._take_expired(books, answer.head)
            case Rejected():
                self._pending[books.fragment].rejection = answer.reason
            case Merged():
                return [AskVersion(books.fragment, books.base)]
        return []

    def _count(self, step: StepTaken) -> None:
        self.num_steps += 1
        self.cursor.update(step.cursor)
        for books, pending in zip(self.books, self._pending, strict=True):
            books.tokens += step.tokens
            books.seconds += step.seconds
            books.steps += 1
            books.clock += 1
            pending.is_zero = False

    def _take_encoded(self, event: PayloadEncoded) -> list[Instruction]:
        books = self._opened(event.id)
        if books is None or not event.is_zero:
            return []
        self._pending[books.fragment].is_zero = True
        return self._close(books)

    def _take_expired(self, books: FragmentBooks, head: int) -> list[Instruction]:
        """The work stays in the account and is offered again from a newer base."""
        books.hold = head
        books.clock = max(books.clock, self.interval_steps)
        return [*self._close(books), AskVersion(books.fragment, books.base)]

    def _take_fenced(self) -> list[Instruction]:
        self.is_stopped = True
        return [Stop(is_fenced=True, text=f"a newer incarnation of learner {self.learner} exists: this one must end")]

    def _take_welcome(self, welcome: Welcomed) -> list[Instruction]:
        """The comparison at restart; a later welcome, of a broker that was away, changes nothing."""
        if self._is_joined:
            return []
        self._is_joined = True
        rows = {row.id.fragment: row for row in welcome.rows}
        heads = {head.fragment: head.version for head in welcome.heads}
        instructions: list[Instruction] = []
        for books in self.books:
            head = heads.get(books.fragment, 0)
            if books.base is not None and books.base > head:
                self.is_stopped = True
                return [stop_before_older_store(self.learner, books.fragment, books.base, head)]
            instructions += self._restart(books, rows.get(books.fragment))
        for row in welcome.rows:
            for shard, position in row.cursor.items():
                self.cursor[shard] = max(position, self.cursor.get(shard, 0))
        return instructions

    def _restart(self, books: FragmentBooks, row: Row | None) -> list[Instruction]:
        instructions: list[Instruction] = []
        match compare_at_restart(books, row):
            case "drop open":
                instructions += self._close(books)
            case "start over":
                instructions += self._close(books)
                if books.base is not None:
                    reason = "the store is ahead of the checkpoint"
                    instructions.append(log_reset(self.learner, books.fragment, books.tokens, reason))
                books.base = None
                books.tokens, books.steps, books.seconds, books.hold = 0, 0, 0.0, 0
        return [*instructions, AskVersion(books.fragment, books.base)]

    # -------------------------------------------------------------------------------------------------------- boundary

    def _cross_boundary(self) -> list[Instruction]:
        instructions: list[Instruction] = []
        for books in self.books:
            instructions += self._settle(books)
        if not any(isinstance(one, Await) for one in instructions):
            # What is open at the first WELCOME and not in a row is an earlier incarnation's, and never accepted.
            instructions += self._contribute() if self._is_joined else []
            if self.sync.overlap_steps == 0:
                instructions += [Await(books.fragment) for books in self.books if self._must_wait(books)]
        return instructions

    def _settle(self, books: FragmentBooks) -> list[Instruction]:
        """Does what the facts about one fragment ask for, now that the live parameters may be changed."""
        pending = self._pending[books.fragment]
        failure, pending.failure = pending.failure, None
        if failure is not None:
            return self._fail(books, books.last, failure.reason, failure.is_not_finite)
        if pending.rejection is not None and books.open is not None:
            return self._fail(books, books.open.id, pending.rejection, NOT_FINITE in pending.rejection)
        if pending.spoiled is not None:
            return self._reset(books, pending.spoiled, is_not_finite=True)
        arrival = pending.arrived
        if self._must_wait(books):
            return [Await(books.fragment)]
        if arrival is None or self._is_early(books):
            return []
        if books.base is None:
            return self._take_head(books, arrival)
        instructions: list[Instruction] = []
        if is_rejected(arrival.row, books.open):
            assert books.open is not None
            assert arrival.row is not None
            reason = arrival.row.reason
            instructions += self._fail(books, books.open.id, reason, NOT_FINITE in reason)
        if arrival.version > books.base:
            instructions += self._apply(books, arrival)
        elif books.open and not books.open.has_payload and is_merged(arrival.row, books.open, books.base):
            books.last = books.open.id  # the version held contains it, and there was nothing to subtract
            instructions += self._close(books)
        pending.arrived = None
        return instructions

    def _apply(self, books: FragmentBooks, arrival: VersionArrived) -> list[Instruction]:
        """Applying version w: subtracts the own contribution if the row says that w contains it."""
        closed = books.open if is_merged(arrival.row, books.open, arrival.version) else None
        subtract = closed.id if closed is not None and closed.has_payload else None
        base = books.base
        instructions: list[Instruction] = [ApplyVersion(books.fragment, arrival.version, subtract)]
        if closed is not None:
            books.tokens -= closed.tokens
            books.steps -= closed.steps
            books.seconds = max(0.0, books.seconds - closed.seconds)
            books.last = closed.id
            instructions += self._close(books)
            instructions.append(log_merged(closed.id, arrival.version))
        if self.sync.apply_rule == "overwrite" and self.sync.books == "published":
            books.tokens, books.steps, books.seconds = 0, 0, 0.0  # the unmerged work is gone, as in the papers
        self._hold(books, arrival)
        return [*instructions, log_applied(self.learner, books.fragment, arrival.version, base)]

    def _take_head(self, books: FragmentBooks, arrival: VersionArrived) -> list[Instruction]:
        """Begins with the head. A pending contribution of an earlier incarnation is open, with nothing to subtract."""
        row = arrival.row
        if row is not None and is_pending(row, arrival.version):
            books.open = OpenContribution(row.id, has_payload=False, taken_at=self.num_steps)
        else:
            books.last = None if row is None else row.id
        self._pending[books.fragment].arrived = None
        self._hold(books, arrival)
        return [Reset(books.fragment, arrival.version)]

    def _fail(
        self, books: FragmentBooks, last: ContributionId | None, reason: str, is_not_finite: bool
    ) -> list[Instruction]:
        """The open contribution is in no version and never will be: discards the work, unless that was done already."""
        assert books.open is not None
        has_payload = books.open.has_payload
        instructions = self._close(books)
        books.last = last
        return [*self._reset(books, reason, is_not_finite), *instructions] if has_payload else instructions

    def _reset(self, books: FragmentBooks, reason: str, is_not_finite: bool) -> list[Instruction]:
        """Discards the unmerged work: parameters and anchor become the newest version that is here.

        A contribution that is still open may yet be merged; then there is nothing to subtract from the account.
        """
        pending = self._pending[books.fragment]
        pending.spoiled = None
        log = log_reset(self.learner, books.fragment, books.tokens, reason)
        if books.open is not None:
            books.open = replace(books.open, tokens=0, steps=0, seconds=0.0, has_payload=False)
        books.tokens, books.steps, books.seconds = 0, 0, 0.0
        arrival, version = pending.arrived, None
        if arrival is not None and (books.base is None or arrival.version > books.base):
            version = arrival.version
            self._hold(books, arrival)
        return [Reset(books.fragment, version, is_not_finite), log]

    def _hold(self, books: FragmentBooks, arrival: VersionArrived) -> None:
        """This version is the base from now on."""
        books.base, books.tokens_total = arrival.version, arrival.tokens_total
        pending = self._pending[books.fragment]
        pending.is_zero = False
        if pending.cue is not None and pending.cue < arrival.version:
            pending.cue = None  # that round is over

    # ---------------------------------------------------------------------------------------------------- contributing

    def _contribute(self) -> list[Instruction]:
        """Cued and drained fragments all at once; by the own clock as few at a time as keeps up with it."""
        if self.is_holding_back and not self.is_draining:
            return []
        able = [books for books in self.books if self._is_able(books)]
        urgent = [books for books in able if self._is_urgent(books)]
        due = [books for books in able if books not in urgent and books.clock >= self.interval_steps]
        due.sort(key=lambda books: (-books.clock, books.fragment))
        num_at_once = ceil(len(self.books) / self.interval_steps)
        return [self._take_account(books) for books in (*urgent, *due[:num_at_once])]

    def _is_able(self, books: FragmentBooks) -> bool:
        return books.base is not None and books.open is None and books.base >= books.hold and self._has_work(books)

    def _has_work(self, books: FragmentBooks) -> bool:
        if self._pending[books.fragment].is_zero:
            return False
        return books.tokens > 0 or (self.is_draining and self._is_exact_drain)

    def _is_urgent(self, books: FragmentBooks) -> bool:
        if self.is_draining:
            return True
        cue = self._pending[books.fragment].cue
        return cue is not None and self.sync.has_cues and not self.sync.is_deterministic

    def _take_account(self, books: FragmentBooks) -> TakeAccount:
        self._num_drawn += 1
        drawn = ContributionId(self.learner, books.fragment, self.incarnation, self._num_drawn)
        books.open = OpenContribution(drawn, books.tokens, books.steps, books.seconds, taken_at=self.num_steps)
        books.clock = 0
        self._pending[books.fragment].cue = None
        assert books.base is not None
        cursor = dict(self.cursor)
        return TakeAccount(books.fragment, drawn, books.base, books.tokens, books.steps, books.seconds, cursor)

    def _opened(self, named: ContributionId) -> FragmentBooks | None:
        """The books in which this contribution is open; anything about another one is old news."""
        if not 0 <= named.fragment < len(self.books):
            return None
        books = self.books[named.fragment]
        return books if books.open is not None and books.open.id == named else None

    def _close(self, books: FragmentBooks) -> list[Instruction]:
        closed, books.open = books.open, None
        self._pending[books.fragment].rejection = None
        return [] if closed is None else [ForgetPayload(closed.id)]

    # -------------------------------------------------------------------------------------------------- deterministic

    def _waits(self, books: FragmentBooks) -> bool:
        return self.sync.is_deterministic and not self.is_draining and books.open is not None

    def _due_step(self, books: FragmentBooks) -> int:
        assert books.open is not None
        return books.open.taken_at + ceil(self.sync.overlap_steps)

    def _is_early(self, books: FragmentBooks) -> bool:
        """Whether a version that arrived must lie until tau steps after the contribution."""
        return self._waits(books) and self.num_steps < self._due_step(books)

    def _must_wait(self, books: FragmentBooks) -> bool:
        """Whether tau steps have passed and nothing has settled the contribution yet."""
        if not self._waits(books) or self.num_steps < self._due_step(books):
            return False
        arrival = self._pending[books.fragment].arrived
        if arrival is None:
            return True
        row = arrival.row
        return not (is_merged(row, books.open, arrival.version) or is_rejected(row, books.open))
