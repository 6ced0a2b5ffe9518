"""The goodput of millions of chips in seconds: arrays over all failures at once, instead of one event after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isles.ops.goodput.outcome import Outcome, Rounds
from isles.ops.goodput.pauses import (
    Clock,
    Pauses,
    all_still_seconds,
    elastic_pauses,
    lock_step_pauses,
    missing_seconds,
)
from isles.ops.goodput.scenario import Scenario, System
from isles.ops.goodput.synchronised import synchronise
from isles.ops.goodput.trace import Stop, Trace, lock_step_share

PHASES = np.linspace(0.0, 1.0, 64, endpoint=False) + 1 / 128
"""Of a fragment's clock at a learner's death: the fragments are spread evenly over it."""


def simulate(scenario: Scenario, trace: Trace, system: System, *, has_rounds: bool = False) -> Outcome:
    """One system under this trace; the rounds of a decoupled one only if they are wanted."""
    if system == "data-parallel":
        return _lock_step(scenario, trace)
    if system == "elastic":
        pauses = elastic_pauses(trace.times, trace.returns, scenario)
        missing = scenario.slice_chips * missing_seconds(pauses, trace.times, trace.returns)
        trained = trace.seconds - pauses.total
        share = max(0.0, trained - missing / scenario.chips) / trace.seconds
        return Outcome(
            system=system,
            learners=1,
            chips=scenario.chips,
            goodput=share * lock_step_share(scenario),
            uptime=trained / trace.seconds,
            num_failures=trace.times.size,
        )
    return _decoupled(scenario, trace, has_rounds=has_rounds)


def _lock_step(scenario: Scenario, trace: Trace) -> Outcome:
    pauses = lock_step_pauses(trace.times, trace.seconds, scenario.restart_seconds)
    uptime = 1 - pauses.total / trace.seconds
    return Outcome(
        system="data-parallel",
        learners=1,
        chips=scenario.chips,
        goodput=uptime * lock_step_share(scenario),
        uptime=uptime,
        num_failures=trace.times.size,
    )


def _decoupled(scenario: Scenario, trace: Trace, *, has_rounds: bool) -> Outcome:
    groups = [learner_pauses(scenario, trace, learner) for learner in range(scenario.learners)]
    rounds = None
    if has_rounds or any(stop.loses_memory for stop in trace.stops):
        rounds = synchronise(scenario, trace, [pauses for pauses, _ in groups])
    own_chips = scenario.chips / scenario.learners
    useful = [
        max(0.0, trace.seconds - pauses.total - scenario.slice_chips * missing / own_chips)
        for pauses, missing in groups
    ]
    lost = 0.0 if rounds is None else _lost_seconds(scenario, trace, [pauses for pauses, _ in groups], rounds)
    whole = trace.seconds * scenario.learners
    still = all_still_seconds([pauses for pauses, _ in groups])
    return Outcome(
        system="decoupled",
        learners=scenario.learners,
        chips=scenario.chips,
        goodput=max(0.0, sum(useful) - lost) / whole,
        uptime=1 - still / trace.seconds,
        num_failures=trace.times.size,
        lost=lost / whole,
        merging=1 - _closed(trace).total / trace.seconds,
        rounds=rounds if has_rounds else None,
    )


def learner_pauses(scenario: Scenario, trace: Trace, learner: int) -> tuple[Pauses, float]:
    """When a learner stands still, and the seconds of training that it did without one slice or another."""
    times, returns = trace.of_group(learner, scenario.learners, scenario.chips)
    pauses = elastic_pauses(times, returns, scenario)
    missing = missing_seconds(pauses, times, returns)
    mine = [stop for stop in trace.stops if stop.learner == learner]
    if not mine:
        return pauses, missing
    starts = np.array([stop.start for stop in mine])
    return pauses.with_more(starts, starts + np.array([stop.seconds for stop in mine])), missing


def _closed(trace: Trace) -> Pauses:
    """When no round can be committed."""
    outages = np.concatenate((trace.broker_outages, trace.outer_outages))
    return Pauses.of(trace.seconds, outages[:, 0], outages[:, 1])


def _lost_seconds(scenario: Scenario, trace: Trace, groups: Sequence[Pauses], rounds: Rounds) -> float:
    """Seconds of training that were lost with the memory of learners, summed over them; mean over fragments."""
    clocks = [Clock(pauses) for pauses in groups]
    broker = Clock(Pauses.of(trace.seconds, trace.broker_outages[:, 0], trace.broker_outages[:, 1]))
    deaths = [stop for stop in trace.stops if stop.loses_memory and stop.start < trace.seconds]
    return sum(_lost_by(stop, scenario, clocks[stop.learner], broker, rounds) for stop in deaths)


def _lost_by(stop: Stop, scenario: Scenario, clock: Clock, broker: Clock, rounds: Rounds) -> float:
    """What a learner did since its last checkpoint and since its last contribution that was accepted."""
    cut = scenario.checkpoint_seconds * np.floor(stop.start / scenario.checkpoint_seconds)
    since_checkpoint, until = clock.trained(np.array([cut, stop.start]))
    silent_since = float(broker.still_since(np.array([stop.start]))[0])
    silence = stop.start - silent_since if np.isfinite(silent_since) else scenario.transfer_seconds
    since_accepted = silence + PHASES * rounds.gap_seconds
    return float(np.mean(np.minimum(since_accepted, until - since_checkpoint)))
