"""What is drawn for a fleet: as many failures as its chips should have, and the same ones for the same seed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.trace import draw, lock_step_share, step_seconds


def scenario(**given: object) -> Scenario:
    return Scenario.model_validate({"chips": 40_000, "days": 30, "chip_failure_years": 0.5, **given})


def test_the_same_seed_draws_the_same_trace_and_another_one_does_not() -> None:
    first, second, other = draw(scenario(seed=3)), draw(scenario(seed=3)), draw(scenario(seed=4))
    assert np.array_equal(first.times, second.times)
    assert np.array_equal(first.chips, second.chips)
    assert not np.array_equal(first.times[:10], other.times[:10])


@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
def test_a_fleet_has_as_many_failures_as_its_chips_should_have_whatever_their_distribution(shape: float) -> None:
    asked = scenario(failure_shape=shape, return_minutes=1)
    expected = asked.chips * 30 / (0.5 * 365.25)
    assert draw(asked).times.size == pytest.approx(expected, rel=0.05)


def test_failures_are_in_order_and_spread_evenly_over_time_and_chips() -> None:
    trace = draw(scenario())
    assert np.all(np.diff(trace.times) >= 0)
    halves = np.histogram(trace.times, bins=4, range=(0, trace.seconds))[0]
    quarters = np.histogram(trace.chips, bins=4, range=(0, 40_000))[0]
    assert halves.min() > 0.9 * halves.max()
    assert quarters.min() > 0.9 * quarters.max()


@pytest.mark.parametrize("distribution", ["constant", "exponential", "lognormal"])
def test_chips_return_after_the_mean_time_that_was_asked_for(distribution: str) -> None:
    trace = draw(scenario(return_distribution=distribution, return_minutes=20))
    assert np.mean(trace.returns - trace.times) == pytest.approx(1200, rel=0.06)
    assert np.all(trace.returns > trace.times)


def test_a_chip_fails_again_only_after_it_is_back() -> None:
    trace = draw(scenario(chips=50, chip_failure_years=0.005, return_minutes=300))
    for chip in range(50):
        mine = trace.chips == chip
        assert np.all(trace.times[mine][1:] >= trace.returns[mine][:-1])
    assert trace.times.size > 300


def test_a_group_has_its_own_chips_and_all_groups_have_all() -> None:
    trace = draw(scenario())
    groups = [trace.of_group(group, 7, 40_000) for group in range(7)]
    assert sum(times.size for times, _ in groups) == trace.times.size
    assert np.array_equal(np.sort(np.concatenate([returns for _, returns in groups])), np.sort(trace.returns))


def test_outages_and_deaths_do_not_overlap_themselves_and_come_as_often_as_asked() -> None:
    asked = scenario(
        chips=8, learners=4, broker_failure_days=0.05, broker_outage_seconds=600, outer_failure_days=0.1,
        learner_failure_days=0.2, learner_outage_seconds=3600,
    )  # fmt: skip
    trace = draw(asked)
    assert trace.broker_outages.shape[0] == pytest.approx(30 / 0.05, rel=0.3)
    assert np.all(trace.broker_outages[1:, 0] >= trace.broker_outages[:-1, 1])
    for learner in range(4):
        mine = [stop for stop in trace.stops if stop.learner == learner]
        assert len(mine) > 60
        assert all(before.start + before.seconds <= after.start for before, after in pairwise(mine))


def test_nothing_but_chips_fails_unless_it_is_asked_for() -> None:
    trace = draw(scenario())
    assert trace.stops == ()
    assert trace.broker_outages.size == trace.outer_outages.size == 0


def test_more_failures_than_can_be_simulated_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="take fewer days or chips"):
        draw(scenario(chips=100_000_000, chip_failure_years=0.01))


def test_equal_places_lose_nothing_in_lock_step_and_unequal_ones_do() -> None:
    assert lock_step_share(scenario()) == pytest.approx(1.0)
    assert lock_step_share(scenario(speed_spread=0.2)) < 0.9
    assert lock_step_share(scenario(step_jitter=0.2)) < lock_step_share(scenario(step_jitter=0.05)) < 1
    assert lock_step_share(scenario(places=1, step_jitter=0.2)) == 1


def test_learners_are_as_unequal_as_asked() -> None:
    assert np.all(step_seconds(scenario(step_seconds=2.0), 5) == 2.0)
    steps = step_seconds(scenario(speed_spread=0.1), 2000)
    assert np.std(steps) == pytest.approx(0.1, rel=0.1)
