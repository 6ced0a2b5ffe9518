"""Broker and outer of the discrete-event goodput world: what is in the store, and which rounds are merged when. Pure.

Quorum, grace window and moving averages are decided by the functions that the real outer uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from isles.ops.goodput.learner import Learner
from isles.ops.goodput.scenario import Scenario
from isles.ops.simulation.timeline import Timeline
from isles.outer.grace import grace_seconds, updated
from isles.outer.quorum import has_everyone, has_quorum
from isles.proto.messages import Averages


@dataclass(frozen=True, slots=True)
class Merged:
    """One committed round."""

    fragment: int
    committed_at: float
    num_participants: int
    merge_seconds: float
    """Mean over the participants of the time since they handed in."""


@dataclass
class Fragment:
    """The round of one fragment."""

    fragment: int
    version: int = 0
    pending: dict[int, float] = field(default_factory=dict)
    """Learner -> when it handed in."""
    averages: Averages = field(default_factory=Averages)
    opened_at: float | None = None
    quorum_at: float | None = None
    grace: float = 0.0
    is_merging: bool = False
    is_cued: bool = False
    sync_seconds: float | None = None
    num_begun: int = 0
    """Tells the timers of an earlier round apart."""

    def begin(self) -> None:
        """Nothing of a round is left; the next one begins with what is pending."""
        self.opened_at = self.quorum_at = None
        self.is_merging = False
        self.num_begun += 1


class Outer:
    """All rounds of all fragments, and the store that they take from."""

    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        learners: Sequence[Learner],
        steps: Sequence[float],
        note: Callable[[Merged], None],
    ) -> None:
        self._scenario = scenario
        self._sync = scenario.sync
        self._timeline = timeline
        self._learners = learners
        self._steps = steps
        self._note = note
        self._num_away = 0
        """How many of broker and outer are away."""
        self._is_broker_away = False
        self._held: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        """What waits for the broker to come back."""
        self._fragments = [Fragment(n) for n in range(scenario.num_fragments)]

    # -------------------------------------------------------------------------------------------------- what arrives

    def expect(self, learner: Learner, fragment: int, incarnation: int) -> None:
        """A learner hands in: it arrives when it is transferred."""
        now = self._timeline.now
        self._timeline.plan(now + self._scenario.transfer_seconds, self._arrive, learner, fragment, incarnation, now)

    def _arrive(self, learner: Learner, fragment: int, incarnation: int, handed_in_at: float) -> None:
        if self._is_broker_away:
            self._held.append((self._arrive, (learner, fragment, incarnation, handed_in_at)))
            return
        if incarnation != learner.incarnation:
            return
        round_ = self._fragments[fragment]
        round_.pending[learner.number] = handed_in_at
        learner.take_answer(fragment)
        if self._scenario.has_cues and not round_.is_cued:
            round_.is_cued = True
            heard_at = self._timeline.now + self._scenario.message_seconds
            for other in self._learners:
                if other is not learner:
                    self._timeline.plan(heard_at, other.take_cue, fragment, round_.version)
        self._advance(round_)

    def look_again(self, _: object = None) -> None:
        """Somebody is no longer live, or an outage is over."""
        for fragment in self._fragments:
            self._advance(fragment)

    # ------------------------------------------------------------------------------------------------------- outages

    def go_away(self, *, is_broker: bool) -> None:
        """The broker, or the outer that merges, dies; what a round was doing is forgotten."""
        self._num_away += 1
        self._is_broker_away = self._is_broker_away or is_broker
        for fragment in self._fragments:
            fragment.begin()

    def come_back(self, *, is_broker: bool) -> None:
        """It is back: with the broker everything that waited for it arrives."""
        self._num_away -= 1
        if is_broker:
            self._is_broker_away = False
            held, self._held = self._held, []
            for call, arguments in held:
                call(*arguments)
        self.look_again()

    # -------------------------------------------------------------------------------------------------------- rounds

    def _advance(self, fragment: Fragment) -> None:
        """As far as rows and time allow; the order of decisions is that of `isles.outer.rounds`."""
        now = self._timeline.now
        if self._num_away or fragment.is_merging or not fragment.pending:
            return
        live = frozenset(str(one.number) for one in self._learners if one.is_live)
        contributors = {str(number) for number in fragment.pending}
        if fragment.opened_at is None:
            fragment.opened_at = now
        if fragment.quorum_at is None and has_quorum(contributors, live, self._sync.quorum):
            self._start_grace(fragment, now)
        if fragment.quorum_at is None:
            return
        if has_everyone(contributors, live) or now >= fragment.quorum_at + fragment.grace:
            fragment.is_merging = True
            done_at = now + self._scenario.sync_seconds
            self._timeline.plan(done_at, self._commit, fragment, fragment.num_begun, dict(fragment.pending))

    def _start_grace(self, fragment: Fragment, now: float) -> None:
        assert fragment.opened_at is not None
        fragment.quorum_at = now
        fragment.averages = updated(
            fragment.averages,
            step_seconds=median(self._steps),
            quorum_seconds=now - fragment.opened_at,
            sync_seconds=fragment.sync_seconds,
        )
        fragment.grace = grace_seconds(fragment.averages, self._sync)
        self._timeline.plan(now + fragment.grace, self._end_grace, fragment, fragment.num_begun)

    def _end_grace(self, fragment: Fragment, num_begun: int) -> None:
        if num_begun == fragment.num_begun:
            self._advance(fragment)

    def _commit(self, fragment: Fragment, num_begun: int, merged: dict[int, float]) -> None:
        if num_begun != fragment.num_begun:
            return
        now = self._timeline.now
        fragment.version += 1
        fragment.is_cued = False
        fragment.sync_seconds = self._scenario.sync_seconds
        for number in merged:
            del fragment.pending[number]
        ages = [now - handed_in_at for handed_in_at in merged.values()]
        self._note(Merged(fragment.fragment, now, len(merged), sum(ages) / len(ages)))
        seen_at = now + self._scenario.message_seconds + self._scenario.transfer_seconds
        self._timeline.plan(seen_at, self._publish, fragment.fragment, fragment.version, frozenset(merged))
        fragment.begin()
        self._advance(fragment)

    def _publish(self, fragment: int, version: int, merged: frozenset[int]) -> None:
        if self._is_broker_away:
            self._held.append((self._publish, (fragment, version, merged)))
            return
        for learner in self._learners:
            learner.take_version(fragment, version, has_own=learner.number in merged)
