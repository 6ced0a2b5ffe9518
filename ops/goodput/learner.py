"""A learner of the discrete-event goodput world: it trains, stands still, hands in and takes versions. Pure.

Only the moments are simulated at which something happens between two inner steps; what a step computes is not. The
rules of when to hand in are those of `isles.workers.session`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from isles.ops.goodput.group import Group
from isles.ops.goodput.scenario import Scenario
from isles.ops.simulation.timeline import Timeline
from isles.workers.books import first_clock

BOUNDARY_SHARE: Final = 1e-6
"""Of a step, by which a boundary may seem to be missed because sums of seconds are rounded."""


@dataclass
class Books:
    """One fragment, counted in the learner's own step boundaries."""

    fragment: int
    last: int
    """Boundary of the last contribution."""
    ready: int = 0
    """From which boundary on the next one is possible."""
    version: int = 0
    cue: int | None = None
    """Version of the round that is open, if the learner was cued for it."""
    cue_boundary: int = 0
    is_open: bool = False
    """Whether the fate of a contribution is not known yet."""
    is_accepted: bool = False
    """Whether that contribution is in the store, so that a death does not take it."""
    taken: float = 0.0
    """Trained seconds at the last contribution."""
    accepted: float = 0.0
    """Trained seconds that the store has."""
    num_planned: int = 0


@dataclass
class Sums:
    """What a learner's time was spent on, in seconds."""

    trained: float = 0.0
    missing: float = 0.0
    """Of the trained ones, times the chips it did without."""
    lost: float = 0.0
    settled_at: float = 0.0


class Learner:
    """One learner; `hand_in` is given each contribution: learner, fragment, and the incarnation that made it."""

    def __init__(
        self,
        number: int,
        scenario: Scenario,
        timeline: Timeline,
        *,
        step_seconds: float,
        is_elastic: bool,
        hand_in: Callable[[Learner, int, int], None],
        lease_ends: Callable[[Learner], None],
        tell: Callable[[], None],
    ) -> None:
        self.number = number
        self.sums = Sums()
        self.group = Group(
            scenario,
            timeline,
            is_elastic=is_elastic,
            stand_still=lambda: self.stand_still("forms"),
            go_on=lambda: self.go_on("forms"),
        )
        self.is_live = True
        """Whether rounds count on it."""
        self.incarnation = 0
        self._scenario = scenario
        self._timeline = timeline
        self._step = step_seconds
        self._is_elastic = is_elastic
        self._hand_in = hand_in
        self._lease_ends = lease_ends
        self._tell = tell
        self._reasons: list[str] = []
        self._num_still = 0
        self._checkpoint = 0.0
        self._is_synchronised = False
        interval, count = scenario.interval_steps, scenario.num_fragments
        self.books = [Books(n, last=-first_clock(n, count, interval)) for n in range(count)]

    # -------------------------------------------------------------------------------------------------------- time

    @property
    def is_still(self) -> bool:
        """Whether it stands still, for whatever reason."""
        return bool(self._reasons)

    def settle(self) -> None:
        """Counts the time up to now."""
        seconds = self._timeline.now - self.sums.settled_at
        self.sums.settled_at = self._timeline.now
        if not self._reasons:
            self.sums.trained += seconds
            if self._is_elastic:
                self.sums.missing += seconds * self.group.num_away

    def fail_chip(self) -> None:
        """One of its chips fails."""
        self.settle()
        self.group.fail()

    def take_back_chip(self) -> None:
        """One of its chips is back."""
        self.settle()
        self.group.take_back()

    def stand_still(self, reason: str) -> None:
        """It trains no more until this reason, and any other, is over."""
        self.settle()
        self._reasons.append(reason)
        if len(self._reasons) == 1:
            self._num_still += 1
            lease = self._scenario.learner_lease_seconds
            self._timeline.plan(self._timeline.now + lease, self._expire, self._num_still)
            self._tell()

    def go_on(self, reason: str) -> None:
        """This reason is over."""
        self.settle()
        self._reasons.remove(reason)
        if self._reasons:
            return
        self.is_live = True
        self._tell()
        for books in self.books:
            self._plan(books)

    def _expire(self, num_still: int) -> None:
        if self._reasons and num_still == self._num_still:
            self.is_live = False
            self._lease_ends(self)

    # ---------------------------------------------------------------------------------------------- death and memory

    def die(self) -> None:
        """Its memory is gone: what neither the store nor a checkpoint has is lost, in the mean over fragments."""
        self.stand_still("dead")
        self.incarnation += 1
        trained = self.sums.trained
        held = [max(books.accepted, self._checkpoint) for books in self.books]
        self.sums.lost += sum(trained - one for one in held) / len(held)
        for books in self.books:
            books.is_open = books.is_open and books.is_accepted

    def take_checkpoint(self) -> None:
        """What it would come back with."""
        self.settle()
        self._checkpoint = self.sums.trained

    # ----------------------------------------------------------------------------------------------------- handing in

    def begin(self) -> None:
        """The first contributions are planned; a group that has nobody to synchronise with never begins."""
        self._is_synchronised = True
        for books in self.books:
            self._plan(books)

    def take_cue(self, fragment: int, version: int) -> None:
        """A round is open: the next boundary hands in, if there is anything new."""
        books = self.books[fragment]
        if version < books.version:
            return
        books.cue, books.cue_boundary = version, self._next_boundary()
        self._plan(books)

    def take_answer(self, fragment: int) -> None:
        """The store has the contribution."""
        books = self.books[fragment]
        books.is_accepted, books.accepted = True, books.taken

    def take_version(self, fragment: int, version: int, *, has_own: bool) -> None:
        """A version is here, and is applied at the next boundary; it settles the open contribution if it has it."""
        books = self.books[fragment]
        books.version = version
        if books.cue is not None and books.cue < version:
            books.cue = None
        if has_own:
            books.is_open = books.is_accepted = False
            books.ready = max(self._next_boundary(), books.last + 1)
        self._plan(books)

    def _next_boundary(self) -> int:
        self.settle()
        return math.ceil(self.sums.trained / self._step - BOUNDARY_SHARE)

    def _plan(self, books: Books) -> None:
        """The moment of the next contribution, as things are; whatever was planned before is off."""
        books.num_planned += 1
        if self._reasons or books.is_open or not self._is_synchronised:
            return
        boundary = books.last + self._scenario.interval_steps
        if books.cue is not None:
            boundary = min(boundary, books.cue_boundary)
        boundary = max(boundary, books.ready, books.last + 1)
        self.settle()
        wait = max(0.0, boundary * self._step - self.sums.trained)
        self._timeline.plan(self._timeline.now + wait, self._contribute, books, boundary, books.num_planned)

    def _contribute(self, books: Books, boundary: int, num_planned: int) -> None:
        if num_planned != books.num_planned or self._reasons:
            return
        self.settle()
        books.last, books.taken = boundary, self.sums.trained
        books.is_open, books.is_accepted, books.cue = True, False, None
        self._hand_in(self, books.fragment, self.incarnation)


@dataclass
class Uptime:
    """For how long at least one learner trains."""

    num_learners: int
    num_still: int = 0
    still_seconds: float = 0.0
    since: float = field(default=0.0)

    def count(self, now: float, num_still: int) -> None:
        """From now on so many stand still."""
        if self.num_still == self.num_learners:
            self.still_seconds += now - self.since
        self.num_still, self.since = num_still, now
