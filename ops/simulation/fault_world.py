"""A run of eight learners in three regions, two outers and a broker, to which everything happens that may happen.

One seed is one run. Its events lie in a heap in the order of their time; there is no other clock, no thread and no
socket. Router, index, blob store, rounds, recovery, sessions and the client's protocol are the real ones; the tensors
are exact integers (`isles.ops.simulation.values`), so that every unit of work can be accounted for.

    faults      until enough has happened; the laws are checked at every step
    calm        all is healed: every learner must get something merged, and enough versions come to be, soon
    drain       nothing may be left open, pending or unmerged, soon; then the books must balance
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from isles.ops.simulation import strikes
from isles.ops.simulation.broker_machine import BrokerMachine
from isles.ops.simulation.circumstances import Circumstances
from isles.ops.simulation.credit import CreditBook
from isles.ops.simulation.delivery import Delivery
from isles.ops.simulation.faults import GAP_SECONDS, POISON_CHANCE, Weather
from isles.ops.simulation.learner_actor import LearnerActor
from isles.ops.simulation.network import REGIONS, Network
from isles.ops.simulation.outer_actor import OuterActor
from isles.ops.simulation.processes import Clock, Place, Process, Rhythm
from isles.ops.simulation.timeline import Timeline
from isles.ops.simulation.values import LEARNERS_MAX, UP_QUANTUM, Lane

VERSIONS_MIN: Final = 100
DELIVERIES_MIN: Final = 5_000
FAULTY_SHARE: Final = 0.8
"""Of these there have to be before the faults end; the others come to be while all is healed, as they do anyway."""

SECONDS_MAX: Final = 900.0
"""Most simulated time until there are enough versions: a run that needs more is as good as stuck."""
CALM_SECONDS_MAX: Final = 120.0
"""Longest time from the end of all faults until every learner got something merged, and there are enough versions: some
leases, some retries, and the longest stall of a transfer."""
DRAIN_SECONDS_MAX: Final = 240.0
"""Longest time from there until nothing is left: a contribution may have to be made, and to expire, a few times."""

LOOK_SECONDS: Final = 0.1
"""Between two looks whether a part of the run is over."""
OUTER_TICK_SECONDS: Final = 0.4
LEASE_SECONDS: Final = 1.0
REFRESH_SECONDS: Final = 20.0
"""Between two times that a learner asks for all versions, whatever it was told."""
HEARTBEAT_SECONDS: Final = 4.0
STEP_SECONDS: Final = (1.0, 2.0)
"""Of a learner, at least and at most."""
STRIKE_TICK_SECONDS: Final = 0.4
"""Between two looks whether it is time for a fault."""
RESTART_SECONDS: Final = 1.0
"""That a supervisor waits before it starts a process again which has ended of itself."""
CHECKPOINTS_KEPT: Final = 5
CHECKPOINT_CHANCE: Final = 0.1
"""That a learner writes a checkpoint after a step, and an outer one of a fragment each second."""
BARE_RESTART_CHANCE: Final = 0.2
"""That a learner starts again without a checkpoint though there is one."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one seed's run came to."""

    seed: int
    digest: str
    """Of its history: equal for every run of the seed by the same code."""
    fault: str
    """What must not have happened, "" if all is well."""
    num_versions: int
    num_faults: int
    num_deliveries: int
    num_events: int
    simulated_seconds: float


class FaultWorld:
    """The world of one seed."""

    def __init__(self, seed: int, *, note: Callable[[str], None] | None = None) -> None:
        """`note` is told the history, one line per event."""
        self.chance = chance = random.Random(seed)
        self.drawn = Circumstances.draw(seed, chance)
        self.timeline = timeline = Timeline(note)
        self.network = Network(chance)
        self.num_faults = self.num_losses = self.num_restored = 0
        self._is_calm = False
        self._increments: dict[tuple[Lane, int], int] = {}
        self._poisoned: dict[tuple[Lane, str], bool] = {}
        self.machine = BrokerMachine(
            self.drawn,
            timeline,
            chance,
            self._draw_clock,
            self._draw_token,
            self._increment,
            lambda: self.delivery.flush_broker(),  # noqa: PLW0108 - it is made below
        )
        self.laws = self.machine.laws
        credit = CreditBook(self.drawn.routing.chunk_bytes, self.drawn.routing.credit_chunks)
        self.delivery = Delivery(timeline, self.network, self.machine, credit)
        self.processes = self.delivery.processes
        self.places = [self._draw_place(index) for index in range(LEARNERS_MAX)]
        for place in self.places:
            timeline.plan(chance.random(), self._start_learner, place, False)
        for name, region in (("outer-a", REGIONS[0]), ("outer-b", REGIONS[1])):
            timeline.plan(chance.random(), self._start_outer, name, region)
        self._plan_strike()
        timeline.plan(STRIKE_TICK_SECONDS, self._consider_strike)

    # ---------------------------------------------------------------------------------------------------------- chance

    def _draw_place(self, index: int) -> Place:
        step_seconds = self.chance.uniform(*STEP_SECONDS)
        look_seconds = step_seconds * (self.drawn.look_steps - 0.5)
        return Place(f"l{index}", index, REGIONS[index % len(REGIONS)], step_seconds, look_seconds)

    def _draw_token(self) -> str:
        return f"{self.chance.getrandbits(64):016x}"

    def _draw_clock(self) -> Clock:
        return Clock.draw(self.chance, is_skewed="clocks" in self.drawn.faults.kinds)

    def _increment(self, lane: Lane, fragment: int) -> int:
        key = lane, fragment
        if key not in self._increments:
            self._increments[key] = self.chance.randint(-9, 9)
        return self._increments[key]

    def _is_poisoned(self, lane: Lane, outer: str) -> bool:
        if "poison" not in self.drawn.faults.kinds:
            return False
        key = lane, outer
        if key not in self._poisoned:
            self._poisoned[key] = not self._is_calm and self.chance.random() < POISON_CHANCE
        return self._poisoned[key]

    # ------------------------------------------------------------------------------------------------------------ time

    def run(self) -> Report:
        """The whole run; a fault is in its report, not raised."""
        fault = ""
        try:
            self._run_until(self._has_enough, SECONDS_MAX, f"fewer than {VERSIONS_MIN} versions")
            self._heal()
            self.laws.merged_by.clear()
            self._run_until(self._has_everyone, CALM_SECONDS_MAX, "not every learner gets something merged")
            self._drain()
            self._run_until(self._is_drained, DRAIN_SECONDS_MAX, "the drain does not end")
            self.laws.check_store()
            self.laws.check_end([one.actor for one in self.learners()], self._num_losses())
        except Exception as error:  # noqa: BLE001 - whatever a process raises is found here, and has a seed
            fault = _fault_words(error)
            self.timeline.say(f"LAW BROKEN: {fault}")
        return Report(
            self.drawn.seed,
            self.timeline.digest,
            fault,
            self.laws.num_versions_all,
            self.num_faults,
            self.delivery.num_deliveries,
            self.timeline.num_events,
            self.timeline.now,
        )

    def _run_until(self, is_done: Callable[[], bool], seconds_max: float, complaint: str) -> None:
        ends_at = self.timeline.now + seconds_max
        while not is_done():
            self.timeline.advance_to(self.timeline.now + LOOK_SECONDS)
            assert self.timeline.now <= ends_at, f"after {seconds_max:g} s {complaint}"

    def advance(self) -> None:
        """The next event happens. Raises AssertionError if a law is broken by it."""
        self.timeline.advance()

    def _has_enough(self) -> bool:
        return (
            self.laws.num_versions_all >= FAULTY_SHARE * VERSIONS_MIN
            and self.num_faults >= self.drawn.faults.num_faults
            and self.delivery.num_deliveries >= FAULTY_SHARE * DELIVERIES_MIN
        )

    def _has_everyone(self) -> bool:
        return (
            len(self.laws.merged_by) == len(self.places)
            and self.laws.num_versions_all >= VERSIONS_MIN
            and self.delivery.num_deliveries >= DELIVERIES_MIN
        )

    # ------------------------------------------------------------------------------------------------------- learners

    def learners(self) -> list[Process[LearnerActor]]:
        """Those that nobody has replaced."""
        return [one for one in self.processes.values() if isinstance(one.actor, LearnerActor) and not one.is_zombie]

    def _start_learner(self, place: Place, is_restart: bool) -> None:
        self.num_losses += is_restart
        checkpoint = self.chance.choice(place.checkpoints) if is_restart and place.checkpoints else None
        if self.chance.random() < BARE_RESTART_CHANCE:
            checkpoint = None
        actor = LearnerActor(
            place.name,
            place.index,
            self._draw_token(),
            self.drawn.record.sync,
            self._increment,
            checkpoint,
            taken=self.laws.taken,
        )
        process = self._admit(place.name, place.region, actor)
        self.timeline.say(f"{place.name} starts {'with' if checkpoint else 'without'} a checkpoint")
        self.timeline.plan(self.timeline.now + place.step_seconds, self._step, process, place, Rhythm())

    def _admit(self, name: str, region: str, actor: LearnerActor | OuterActor) -> Process[Any]:
        process: Process[Any] = Process(name, region, self.delivery.draw_connection(), self._draw_clock(), actor)
        self.processes[process.connection] = process
        actor.start(process.clock.at(self.timeline.now))
        self.delivery.flush(process)
        return process

    def _step(self, process: Process[LearnerActor], place: Place, rhythm: Rhythm) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.timeline.now:
            self.timeline.plan(process.frozen_until, self._step, process, place, rhythm)
            return
        actor, now = process.actor, process.clock.at(self.timeline.now)
        actor.tick(now)
        if self.timeline.now >= rhythm.look_at:
            rhythm.look_at = self.timeline.now + place.look_seconds
            actor.look(now)
        if self.timeline.now >= rhythm.refresh_at:
            rhythm.refresh_at = self.timeline.now + REFRESH_SECONDS
            actor.ask_versions(now)
        if self.timeline.now >= rhythm.beat_at:
            rhythm.beat_at = self.timeline.now + HEARTBEAT_SECONDS
            actor.beat(now)
        bases = [books.base for books in actor.session.books]
        if actor.session.is_draining:
            actor.boundary(now)
        else:
            actor.step(now)
        for books, base in zip(actor.session.books, bases, strict=True):
            assert base is None or (books.base is not None and books.base >= base), "a learner goes to an older version"
        if actor.session.is_ready and self.chance.random() < CHECKPOINT_CHANCE and not process.is_zombie:
            place.checkpoints.append(actor.cut_checkpoint())
            del place.checkpoints[:-CHECKPOINTS_KEPT]
        self.delivery.flush(process)
        if actor.is_stopped:
            self._end_fenced(process)
            return
        self.timeline.plan(self.timeline.now + place.step_seconds, self._step, process, place, rhythm)

    def _end_fenced(self, process: Process[Any]) -> None:
        """A process was told that another incarnation of it was heard for the first time after this one had been.

        Which of the two was started first nobody can know. That which has a supervisor is started again, and so it
        has the last word: the other one has said its first HELLO, and never becomes current again.
        """
        role = "outer" if isinstance(process.actor, OuterActor) else "worker"
        self.laws.check_fenced(role, process.name, process.actor.incarnation)
        if not process.is_zombie:
            self.replace(process, self.timeline.now + RESTART_SECONDS)
        self._end(process)

    def _end(self, process: Process[Any]) -> None:
        self.timeline.say(f"{process.name} ends")
        process.is_alive = False
        process.backlog.clear()
        del self.processes[process.connection]
        if isinstance(process.actor, LearnerActor):
            self.num_losses += process.actor.num_resets

    def _num_losses(self) -> int:
        return self.num_losses + sum(one.actor.num_resets for one in self.learners())

    # --------------------------------------------------------------------------------------------------------- outers

    def outers(self) -> list[Process[OuterActor]]:
        """Those that nobody has replaced."""
        return [one for one in self.processes.values() if isinstance(one.actor, OuterActor) and not one.is_zombie]

    def _start_outer(self, name: str, region: str) -> None:
        self.timeline.say(f"{name} starts")
        actor = OuterActor(name, self._draw_token(), self.drawn.record, self._is_poisoned, self._draw_token)
        actor.num_kept = self.drawn.num_blobs_kept
        process = self._admit(name, region, actor)
        self.timeline.plan(self.timeline.now + OUTER_TICK_SECONDS, self._tick_outer, process, 0.0)

    def _tick_outer(self, process: Process[OuterActor], lease_at: float) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.timeline.now:
            self.timeline.plan(process.frozen_until, self._tick_outer, process, lease_at)
            return
        actor, now = process.actor, process.clock.at(self.timeline.now)
        actor.tick(now)
        if self.timeline.now >= lease_at:
            lease_at = self.timeline.now + LEASE_SECONDS
            actor.lease(now)
            for fragment in actor.desks:
                if self.chance.random() < CHECKPOINT_CHANCE:
                    actor.checkpoint(fragment, now)
        self.delivery.flush(process)
        if actor.client.is_refused:
            self._end_fenced(process)
            return
        if actor.given_up:
            self._restore_store(process)
            return
        self.timeline.plan(self.timeline.now + OUTER_TICK_SECONDS, self._tick_outer, process, lease_at)

    def _restore_store(self, process: Process[OuterActor]) -> None:
        """An outer cannot recompute a version and says of which blob that is; somebody puts the rotten ones back."""
        reason = process.actor.given_up
        self.laws.check_given_up(process.name, reason)
        self.timeline.say(f"{process.name} gives up: {reason}")
        self.num_restored += 1
        self.machine.put_copies_back()
        if not process.is_zombie:
            self.replace(process, self.timeline.now + RESTART_SECONDS)
        self._end(process)

    # --------------------------------------------------------------------------------------------------------- faults

    def _plan_strike(self) -> None:
        """The next fault comes in a while, or after a few versions, so that all runs have as many faults."""
        self._strike_at = self.timeline.now + self.chance.expovariate(1 / GAP_SECONDS)
        gap_versions = FAULTY_SHARE * VERSIONS_MIN / self.drawn.faults.num_faults
        self._strike_version = self.laws.num_versions_all + self.chance.expovariate(1 / gap_versions)

    def _consider_strike(self) -> None:
        if self._is_calm or self.num_faults >= self.drawn.faults.num_faults:
            return
        self.timeline.plan(self.timeline.now + STRIKE_TICK_SECONDS, self._consider_strike)
        if self.timeline.now >= self._strike_at or self.laws.num_versions_all >= self._strike_version:
            self._plan_strike()
            self._strike()

    def _strike(self) -> None:
        """Something happens."""
        kind = self.drawn.faults.next_kind(self.chance)
        self.num_faults += 1
        if kind in strikes.BLOWS:
            strikes.BLOWS[kind](self)
        else:
            strikes.worsen(self, cast(Weather, kind))

    def kill(self, process: Process[Any], restart_at: float) -> None:
        """A process ends; another one starts in its place."""
        self.replace(process, restart_at)
        self._end(process)

    def replace(self, process: Process[Any], time: float) -> None:
        """Another process of this name starts."""
        if isinstance(process.actor, OuterActor):
            self.timeline.plan(time, self._start_outer, process.name, process.region)
        else:
            self.timeline.plan(time, self._start_learner, self.places[process.actor.index], True)

    def freeze(self, process: Process[Any], until: float) -> None:
        """A process stands still."""
        if process.frozen_until <= self.timeline.now:
            process.frozen_until = until
            self.timeline.plan(until, self._thaw, process)

    def _thaw(self, process: Process[Any]) -> None:
        backlog, process.backlog = process.backlog, []
        for call in backlog:
            call()

    # ------------------------------------------------------------------------------------------------------ the end

    def _heal(self) -> None:
        """Every fault ends: zombies die, and nothing is lost from here on."""
        self.timeline.say("CALM")
        self._is_calm = True
        self.network.heal()
        self.machine.heal()
        for process in [one for one in self.processes.values() if one.is_zombie]:
            self._end(process)
        for process in self.processes.values():
            process.frozen_until = min(process.frozen_until, self.timeline.now)
            self.timeline.plan(self.timeline.now, self._thaw, process)

    def _drain(self) -> None:
        self.timeline.say("DRAIN")
        for process in self.learners():
            process.actor.drain(process.clock.at(self.timeline.now))
            self.delivery.flush(process)

    def _is_drained(self) -> bool:
        learners = self.learners()
        if any(not learner.actor.session.is_drained for learner in learners):
            return False
        return not any(self.machine.broker.index.num_pending().values()) and all(
            learner.actor.account(fragment).quantised(UP_QUANTUM).is_zero
            for learner in learners
            for fragment in range(self.drawn.record.sync.num_fragments)
        )


def _fault_words(error: Exception) -> str:
    """What went wrong; of an exception that no law raised, also where."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename})"
