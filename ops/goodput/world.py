"""The discrete-event goodput world: every failure, pause, contribution and round of a small fleet, one after another.

It is what the fast path (`isles.ops.goodput.fast`) is checked against, and what predicts a run whose faults are given
one by one. What it costs grows with the rounds: a month of many fragments is for the fast path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isles.ops.goodput.learner import Learner, Uptime
from isles.ops.goodput.outcome import Outcome, Rounds
from isles.ops.goodput.outer import Merged, Outer
from isles.ops.goodput.scenario import Scenario, System
from isles.ops.goodput.trace import Stop, Trace, lock_step_share, step_seconds
from isles.ops.simulation.timeline import Timeline


@dataclass
class World:
    """One system under one trace; `run` ends at the trace's end."""

    scenario: Scenario
    trace: Trace
    system: System
    timeline: Timeline = field(default_factory=Timeline)
    merged: list[Merged] = field(default_factory=list)
    """Every round that was committed."""

    def __post_init__(self) -> None:
        is_decoupled = self.system == "decoupled"
        count = self.scenario.learners if is_decoupled else 1
        steps = [float(one) for one in step_seconds(self.scenario, count)]
        self.learners = [
            Learner(
                number,
                self.scenario,
                self.timeline,
                step_seconds=steps[number],
                is_elastic=self.system != "data-parallel",
                hand_in=self._hand_in,
                lease_ends=self._lease_ends,
                tell=self._count_uptime,
            )
            for number in range(count)
        ]
        self._uptime = Uptime(count)
        self._outer = Outer(self.scenario, self.timeline, self.learners, steps, self.merged.append)
        self._plan_chips(count)
        if is_decoupled:
            self._plan_the_rest()

    def run(self) -> Outcome:
        """Everything happens; what it came to."""
        end = self.trace.seconds
        self.timeline.plan(end, self._finish)
        while self.timeline.now < end:
            self.timeline.advance()
        return self._outcome()

    # ------------------------------------------------------------------------------------------------------ beginning

    def _plan_chips(self, count: int) -> None:
        num_chips = self.scenario.chips
        events = zip(self.trace.times.tolist(), self.trace.chips.tolist(), self.trace.returns.tolist(), strict=True)
        for time, chip, back in events:
            learner = self.learners[chip * count // num_chips]
            self.timeline.plan(time, learner.fail_chip)
            self.timeline.plan(back, learner.take_back_chip)

    def _plan_the_rest(self) -> None:
        for stop in self.trace.stops:
            self.timeline.plan(stop.start, self._stop, stop)
        for outages, is_broker in ((self.trace.broker_outages, True), (self.trace.outer_outages, False)):
            for start, end in outages.tolist():
                self.timeline.plan(start, self._go_away, is_broker)
                self.timeline.plan(end, self._come_back, is_broker)
        if self.trace.stops:
            self.timeline.plan(self.scenario.checkpoint_seconds, self._take_checkpoints)
        for learner in self.learners:
            learner.begin()

    # --------------------------------------------------------------------------------------------------------- events

    def _hand_in(self, learner: Learner, fragment: int, incarnation: int) -> None:
        self._outer.expect(learner, fragment, incarnation)

    def _lease_ends(self, learner: Learner) -> None:
        self._outer.look_again(learner)

    def _stop(self, stop: Stop) -> None:
        learner = self.learners[stop.learner]
        if stop.loses_memory:
            learner.die()
        else:
            learner.stand_still("frozen")
        reason = "dead" if stop.loses_memory else "frozen"
        self.timeline.plan(self.timeline.now + stop.seconds, learner.go_on, reason)

    def _go_away(self, is_broker: bool) -> None:
        self._outer.go_away(is_broker=is_broker)

    def _come_back(self, is_broker: bool) -> None:
        self._outer.come_back(is_broker=is_broker)

    def _take_checkpoints(self) -> None:
        for learner in self.learners:
            learner.take_checkpoint()
        self.timeline.plan(self.timeline.now + self.scenario.checkpoint_seconds, self._take_checkpoints)

    def _count_uptime(self) -> None:
        self._uptime.count(self.timeline.now, sum(learner.is_still for learner in self.learners))

    # --------------------------------------------------------------------------------------------------------- ending

    def _finish(self) -> None:
        self._count_uptime()
        for learner in self.learners:
            learner.settle()

    def _outcome(self) -> Outcome:
        seconds, count = self.trace.seconds, len(self.learners)
        own_chips = self.scenario.chips / count
        useful = lost = 0.0
        for learner in self.learners:
            sums = learner.sums
            useful += max(0.0, sums.trained - self.scenario.slice_chips * sums.missing / own_chips) - sums.lost
            lost += sums.lost
        share = 1.0 if self.system == "decoupled" else lock_step_share(self.scenario)
        return Outcome(
            system=self.system,
            learners=count,
            chips=self.scenario.chips,
            goodput=share * max(0.0, useful) / (seconds * count),
            uptime=1 - self._uptime.still_seconds / seconds,
            num_failures=self.trace.times.size,
            lost=lost / (seconds * count),
            rounds=self._rounds() if self.merged else None,
        )

    def _rounds(self) -> Rounds:
        count = len(self.merged)
        num_contributions = sum(one.num_participants for one in self.merged)
        span = self.scenario.num_fragments * sum(learner.sums.trained for learner in self.learners)
        return Rounds(
            participation=num_contributions / (count * len(self.learners)),
            per_hour=3600 * count / self.trace.seconds,
            merge_seconds=sum(one.merge_seconds * one.num_participants for one in self.merged) / num_contributions,
            gap_seconds=span / num_contributions,
        )
