"""Rounds of one fragment, many at a time: the fast path of what K, H, cues and the grace window do.

The simulated time is cut into segments that are gone through side by side, a round of each in one step; every array has
a row for each segment and, where it says [S, M], a column for each learner. The rules are those that
`isles.ops.goodput.world` goes through event by event with the outer's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from isles.ops.goodput.outcome import Rounds
from isles.ops.goodput.pauses import Clock, Pauses
from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.trace import Flags, Floats, Trace, phases, step_seconds
from isles.outer.grace import AVERAGE_SHARE, OUTLIER_FACTOR

SEGMENTS: Final = 256
ROUNDS_WARM_UP: Final = 6
"""Rounds of a segment that are not counted: the moving averages and the learners' clocks settle in them."""
ROUNDS_COUNTED: Final = 24
"""Of a segment: some 6,000 rounds in all, which give a participation to half a point."""
BOUNDARY_SHARE: Final = 1e-6
"""Of a step, by which a boundary may seem to be missed because sums of seconds are rounded."""


@dataclass
class _Learners:
    """The clocks of all learners, column by column."""

    clocks: list[Clock]
    absences: list[Clock]
    """Stretches in which a learner's lease is over."""
    steps: Floats
    """[M] seconds of an inner step."""

    def boundary_after(self, times: Floats) -> Floats:
        """[S, M] -> the number of the first step boundary at or after each of these times."""
        trained = np.stack([clock.trained(times[:, m]) for m, clock in enumerate(self.clocks)], axis=1)
        return np.ceil(trained / self.steps - BOUNDARY_SHARE)

    def time_of(self, boundaries: Floats) -> Floats:
        """[S, M] -> when each learner crosses these step boundaries."""
        return np.stack(
            [clock.time_at(boundaries[:, m] * self.steps[m]) for m, clock in enumerate(self.clocks)], axis=1
        )

    def gone_after(self, times: Floats) -> Floats:
        """[S] -> [S, M] the first moment from these times on at which a learner is not counted on."""
        columns = []
        for absence in self.absences:
            is_gone = np.isfinite(absence.still_since(times))
            columns.append(np.where(is_gone, times, absence.next_pause(times)))
        return np.stack(columns, axis=1)


@dataclass
class _Tally:
    """Sums over the rounds that count."""

    num_rounds: int = 0
    participants: float = 0.0
    ages: float = 0.0
    gaps: float = 0.0
    contributions: float = 0.0
    began: Floats = field(default_factory=lambda: np.empty(0))
    ended: Floats = field(default_factory=lambda: np.empty(0))


class Rows:
    """The state of one fragment in every segment."""

    def __init__(self, scenario: Scenario, trace: Trace, pauses: Sequence[Pauses], num_segments: int) -> None:
        lease = scenario.learner_lease_seconds
        absences = [
            Pauses.of(one.seconds, one.starts + lease, np.maximum(one.ends, one.starts + lease)) for one in pauses
        ]
        steps = step_seconds(scenario, scenario.learners)
        self.scenario = scenario
        self.learners = _Learners([Clock(one) for one in pauses], [Clock(_solid(one)) for one in absences], steps)
        self.broker = Clock(_outages(trace.seconds, trace.broker_outages))
        self.closed = Clock(_outages(trace.seconds, np.concatenate((trace.broker_outages, trace.outer_outages))))
        self.step = float(np.median(steps))
        length = (ROUNDS_WARM_UP + ROUNDS_COUNTED) * scenario.interval_steps * self.step
        self.free = np.linspace(0.0, max(0.0, trace.seconds - length), num_segments)
        """[S] since when the fragment has its head."""
        shape = (num_segments, scenario.learners)
        self.last = self.learners.boundary_after(np.broadcast_to(self.free[:, None], shape))
        """[S, M] the step boundary of each learner's last contribution."""
        self.ready = self.last + 1
        """[S, M] from which boundary on it may contribute again."""
        if not scenario.has_cues:  # nothing brings their clocks together, so that in the long run they are anywhere
            self.last -= np.floor(scenario.interval_steps * phases(scenario, shape))
        self.pending = np.full(shape, np.inf)
        """[S, M] when a contribution arrived that was late for its round."""
        self.quorum_average = np.zeros(num_segments)
        self.sync_average = np.zeros(num_segments)
        self.tally = _Tally()

    def advance(self, *, is_counted: bool) -> None:
        """One round of each segment."""
        taken, arrivals = self._contributions()
        opened = self.closed.end_of(np.maximum(self.free, arrivals.min(axis=1)))
        taken, arrivals = self._cued(taken, arrivals)
        everyone, quorum = self._moments(arrivals, opened)
        closes = self._close(opened, quorum, everyone)
        hits = self.closed.next_pause(opened)
        is_hit = hits < closes + self.scenario.sync_seconds
        if is_hit.any():  # whoever comes after the outage begins the round anew
            again = np.where(is_hit, self.closed.end_of(np.where(is_hit, hits, 0.0)), opened)
            opened, quorum, everyone = again, np.maximum(quorum, again), np.maximum(everyone, again)
            closes = self._close(opened, quorum, everyone)
        self._quorum_settles(quorum - opened)
        self._commit(taken, arrivals, closes, is_counted=is_counted)

    def _contributions(self) -> tuple[Floats, Floats]:
        """By the learners' own clocks: boundaries and arrivals, [S, M] each."""
        due = np.maximum(self.last + self.scenario.interval_steps, self.ready)
        is_pending = np.isfinite(self.pending)
        taken = np.where(is_pending, self.last, due)
        return taken, np.where(is_pending, self.pending, self._arrival(due))

    def _arrival(self, boundaries: Floats) -> Floats:
        return self.broker.end_of(self.learners.time_of(boundaries) + self.scenario.transfer_seconds)

    def _cued(self, taken: Floats, arrivals: Floats) -> tuple[Floats, Floats]:
        """The first contribution that arrives at this head makes the others hand in at their next boundary."""
        if not self.scenario.has_cues:
            return taken, arrivals
        first = np.where(arrivals >= self.free[:, None], arrivals, np.inf).min(axis=1)
        first = np.where(np.isfinite(first), first, self.free)
        heard = np.broadcast_to((first + self.scenario.message_seconds)[:, None], taken.shape)
        cued = np.maximum(self.learners.boundary_after(heard), self.ready)
        is_sooner = ~np.isfinite(self.pending) & (cued < taken)
        taken = np.where(is_sooner, cued, taken)
        return taken, np.where(is_sooner, self._arrival(taken), arrivals)

    def _moments(self, arrivals: Floats, opened: Floats) -> tuple[Floats, Floats]:
        """When every live learner is in, and when there is a quorum: [S] each."""
        first = arrivals.min(axis=1)
        awaited = np.minimum(arrivals, self.learners.gone_after(opened))
        everyone = np.maximum(np.maximum(awaited.max(axis=1), first), opened)
        rank = min(self.scenario.quorum, self.scenario.learners) - 1
        enough = np.partition(arrivals, rank, axis=1)[:, rank]
        return everyone, np.maximum(np.minimum(enough, everyone), opened)

    def _close(self, opened: Floats, quorum: Floats, everyone: Floats) -> Floats:
        """The end of the grace window, or sooner if nobody is left to wait for."""
        scenario = self.scenario
        quorum_average = moved(self.quorum_average, quorum - opened)
        slack = scenario.overlap_steps * self.step - (quorum_average + self.sync_average)
        grace = np.clip(scenario.grace_share * slack, scenario.grace_min_seconds, scenario.grace_max_seconds)
        return np.maximum(np.minimum(everyone, quorum + grace), quorum)

    def _quorum_settles(self, seconds: Floats) -> None:
        self.quorum_average = moved(self.quorum_average, seconds)

    def _commit(self, taken: Floats, arrivals: Floats, closes: Floats, *, is_counted: bool) -> None:
        scenario = self.scenario
        committed = closes + scenario.sync_seconds
        seen = self.broker.end_of(committed + scenario.message_seconds + scenario.transfer_seconds)
        handed_in = self.learners.time_of(taken)
        is_in = arrivals <= closes[:, None]
        is_late = ~is_in & (handed_in < seen[:, None])
        if is_counted:
            gaps = ((taken - self.last) * self.learners.steps)[is_in | is_late]
            self._count(committed, is_in, committed[:, None] - handed_in, gaps)
        applied = self.learners.boundary_after(np.broadcast_to(seen[:, None], taken.shape))
        self.ready = np.where(is_in, np.maximum(applied, taken + 1), self.ready)
        self.last = np.where(is_in | is_late, taken, self.last)
        self.pending = np.where(is_late, arrivals, np.inf)
        self.free = committed
        self.sync_average = moved(self.sync_average, np.full_like(committed, scenario.sync_seconds))

    def _count(self, committed: Floats, is_in: Flags, ages: Floats, gaps: Floats) -> None:
        tally = self.tally
        if not tally.num_rounds:
            tally.began = self.free
        tally.ended = committed
        tally.num_rounds += committed.size
        tally.participants += float(is_in.sum())
        tally.ages += float(np.sum(ages[is_in]))
        tally.gaps += float(np.sum(gaps))
        tally.contributions += float(np.count_nonzero(gaps))


def synchronise(scenario: Scenario, trace: Trace, pauses: Sequence[Pauses], *, num_segments: int = SEGMENTS) -> Rounds:
    """What the rounds of such a run are like; `pauses` are those of each learner."""
    rows = Rows(scenario, trace, pauses, num_segments)
    for number in range(ROUNDS_WARM_UP + ROUNDS_COUNTED):
        rows.advance(is_counted=number >= ROUNDS_WARM_UP)
    tally = rows.tally
    seconds = float(np.sum(tally.ended - tally.began))
    return Rounds(
        participation=tally.participants / (tally.num_rounds * scenario.learners),
        per_hour=3600 * scenario.num_fragments * tally.num_rounds / seconds,
        merge_seconds=tally.ages / max(tally.participants, 1.0),
        gap_seconds=tally.gaps / max(tally.contributions, 1.0),
    )


def moved(average: Floats, value: Floats) -> Floats:
    """The moving averages of `isles.outer.grace` with one more value, for many at a time."""
    bounded = np.minimum(value, OUTLIER_FACTOR * average)
    return np.where(average == 0, value, average + AVERAGE_SHARE * (bounded - average))


def _outages(seconds: float, outages: Floats) -> Pauses:
    return Pauses.of(seconds, outages[:, 0], outages[:, 1])


def _solid(pauses: Pauses) -> Pauses:
    """Without stretches of no length."""
    is_solid = pauses.ends > pauses.starts
    return Pauses(pauses.seconds, pauses.starts[is_solid], pauses.ends[is_solid])
