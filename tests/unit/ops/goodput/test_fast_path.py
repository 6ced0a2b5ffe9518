"""The fast path finds what the discrete-event world finds, where both can go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isles.ops.goodput.fast import simulate
from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.scenario import Scenario, System
from isles.ops.goodput.trace import Stop, Trace, draw
from isles.ops.goodput.world import World

BUSY = {
    "chips": 2_000,
    "learners": 4,
    "days": 0.15,
    "chip_failure_years": 0.003,
    "slice_chips": 8,
    "return_minutes": 6,
    "interval_steps": 12,
    "num_fragments": 3,
}
"""A failure every 47 s in a fleet of four learners, for three and a half hours."""


def both(system: System, **given: object) -> tuple[Outcome, Outcome]:
    """What the world and the fast path make of one trace."""
    scenario = Scenario.model_validate({**BUSY, **given}).for_system(system)
    trace = draw(scenario)
    return World(scenario, trace, system).run(), simulate(scenario, trace, system, has_rounds=True)


@pytest.mark.parametrize("system", ["data-parallel", "elastic", "decoupled"])
@pytest.mark.parametrize(
    "given",
    [
        {"seed": 1},
        {"seed": 2, "return_distribution": "constant", "failure_shape": 0.7},
        {"seed": 3, "return_distribution": "lognormal", "return_wait_seconds": 0, "chip_failure_years": 0.0005},
    ],
)
def test_goodput_and_uptime_are_the_same_to_the_last_digits(system: System, given: dict[str, object]) -> None:
    world, fast = both(system, interval_steps=600, num_fragments=1, **given)
    assert fast.goodput == pytest.approx(world.goodput, abs=1e-9)
    assert fast.uptime == pytest.approx(world.uptime, abs=1e-9)
    assert fast.num_failures == world.num_failures > 100
    assert 0 < world.goodput <= world.uptime + 1e-9


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"quorum": 4},
        {"quorum": 3, "grace_share": 0.0, "speed_spread": 0.2},
        {"has_cues": False},
        {"has_cues": False, "grace_share": 0.0, "speed_spread": 0.1},
        {"speed_spread": 0.3, "overlap_steps": 4},
        {"learners": 7, "interval_steps": 30, "step_seconds": 0.7},
        {"broker_failure_days": 0.01, "outer_failure_days": 0.01, "outer_outage_seconds": 40},
    ],
)
def test_rounds_take_as_many_learners_as_often_and_as_soon(given: dict[str, object]) -> None:
    world, fast = both("decoupled", **given)
    assert world.rounds is not None
    assert fast.rounds is not None
    assert fast.rounds.participation == pytest.approx(world.rounds.participation, abs=0.03)
    assert fast.rounds.per_hour == pytest.approx(world.rounds.per_hour, rel=0.06)
    assert fast.rounds.merge_seconds == pytest.approx(world.rounds.merge_seconds, rel=0.12, abs=0.15)


def test_what_is_lost_with_the_memory_of_learners_is_about_the_same() -> None:
    given = {"chips": 8, "chip_failure_years": 1e5, "learner_failure_days": 0.003, "learner_outage_seconds": 60}
    world, fast = both("decoupled", **given, checkpoint_seconds=8, days=0.2)
    assert world.lost > 0.005
    assert fast.lost == pytest.approx(world.lost, rel=0.1)
    assert fast.goodput == pytest.approx(world.goodput, abs=0.001)


def test_a_learner_that_is_frozen_loses_time_and_no_work() -> None:
    scenario = Scenario(**{**BUSY, "chip_failure_years": 1e5})
    trace = replace(draw(scenario), stops=(Stop(1, 100.0, 648.0, loses_memory=False),))
    world, fast = World(scenario, trace, "decoupled").run(), simulate(scenario, trace, "decoupled")
    assert world.lost == fast.lost == 0
    assert world.goodput == pytest.approx(1 - 648 / (4 * trace.seconds))
    assert fast.goodput == pytest.approx(world.goodput)


def test_who_dies_while_its_work_is_under_way_loses_it_and_what_the_store_has_is_kept() -> None:
    scenario = Scenario(
        chips=2, learners=2, days=200 / 86_400, chip_failure_years=1e6, num_fragments=1, interval_steps=50,
        checkpoint_seconds=1e6, transfer_seconds=5, has_cues=False,
    )  # fmt: skip
    nothing = np.empty(0)
    quiet = Trace(seconds=200.0, times=nothing, chips=np.empty(0, dtype=np.int64), returns=nothing)

    def lost(start: float) -> float:
        world = World(scenario, replace(quiet, stops=(Stop(0, start, 10.0),)), "decoupled")
        return world.run().lost * 2 * 200

    assert lost(40) == pytest.approx(40)
    assert lost(54) == pytest.approx(54)  # handed in at 50, not there before 55
    assert lost(56) == pytest.approx(6)
