"""When a group stands still: the rules, one example each, and the clock that is made of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.ops.goodput.pauses import (
    Clock,
    Pauses,
    all_still_seconds,
    elastic_pauses,
    lock_step_pauses,
    missing_seconds,
)
from isles.ops.goodput.scenario import Scenario

SCENARIO = Scenario(
    days=10_000 / 86_400, scale_down_seconds=20, scale_up_seconds=15, return_wait_seconds=120, restart_seconds=75
)
FAR = 99_999.0


def elastic(*events: tuple[float, float]) -> list[tuple[float, float]]:
    """Pauses of a group whose chips fail and return at these times."""
    times, returns = np.array([one[0] for one in events]), np.array([one[1] for one in events])
    found = elastic_pauses(times, returns, SCENARIO)
    return list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))


def test_a_group_that_is_not_elastic_mends_what_fails_during_a_restart_along_with_it() -> None:
    found = lock_step_pauses(np.array([100.0, 130.0, 174.9, 200.0]), 10_000, 75)
    assert list(zip(found.starts, found.ends, strict=True)) == [(100, 175), (200, 275)]


def test_a_failure_costs_an_elastic_group_a_scale_down_and_a_scale_up_after_the_wait() -> None:
    assert elastic((100, 500)) == [(100, 120), (620, 635)]


def test_chips_that_return_within_the_wait_are_taken_back_together() -> None:
    assert elastic((100, 500), (200, 600)) == [(100, 120), (200, 220), (620, 635)]


def test_a_failure_takes_waiting_chips_back_in_its_own_pause() -> None:
    assert elastic((100, 500), (550, FAR)) == [(100, 120), (550, 570)]


def test_what_fails_or_returns_during_a_pause_is_part_of_it() -> None:
    assert elastic((100, 118), (110, FAR)) == [(100, 120)]


def test_a_chip_that_returns_as_the_pause_ends_waits() -> None:
    assert elastic((100, 120)) == [(100, 120), (240, 255)]


def test_a_group_does_without_a_chip_from_its_failure_until_the_pause_that_takes_it_back() -> None:
    times, returns = np.array([100.0]), np.array([500.0])
    found = elastic_pauses(times, returns, SCENARIO)
    assert missing_seconds(found, times, returns) == 620 - 120


def test_a_chip_that_never_returns_is_missed_until_the_end() -> None:
    times, returns = np.array([100.0]), np.array([FAR])
    assert missing_seconds(elastic_pauses(times, returns, SCENARIO), times, returns) == 10_000 - 120


def test_a_chip_that_returns_within_a_pause_is_not_missed() -> None:
    times, returns = np.array([100.0]), np.array([110.0])
    assert missing_seconds(elastic_pauses(times, returns, SCENARIO), times, returns) == 0


def test_without_failures_nothing_stands_still() -> None:
    nothing = np.empty(0)
    for found in (elastic_pauses(nothing, nothing, SCENARIO), lock_step_pauses(nothing, 10_000, 75)):
        assert found.total == 0
        assert Clock(found).trained(np.array([0.0, 7.0])).tolist() == [0, 7]
        assert np.isinf(Clock(found).still_since(np.array([7.0])))[0]


def test_stretches_that_overlap_are_one_and_end_with_the_time() -> None:
    found = Pauses.of(100, np.array([50.0, 10.0, 15.0, 90.0, 100.0]), np.array([60.0, 20.0, 30.0, 120.0, 130.0]))
    assert list(zip(found.starts, found.ends, strict=True)) == [(10, 30), (50, 60), (90, 100)]
    assert found.with_more(np.array([29.0]), np.array([51.0])).total == 60


def test_the_run_stands_still_only_while_every_group_does() -> None:
    one = Pauses.of(100, np.array([10.0, 50.0]), np.array([30.0, 60.0]))
    other = Pauses.of(100, np.array([20.0, 58.0]), np.array([40.0, 70.0]))
    third = Pauses.of(100, np.array([0.0]), np.array([25.0]))
    assert all_still_seconds([one]) == 30
    assert all_still_seconds([one, other]) == 12
    assert all_still_seconds([one, other, third]) == 5


stretches = st.lists(st.tuples(st.floats(0, 900), st.floats(0.1, 80)), max_size=12)


@given(stretches, st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_a_clock_counts_what_is_outside_the_pauses_and_leads_back(
    given_pauses: list[tuple[float, float]], times: list[float]
) -> None:
    starts = np.array([one[0] for one in given_pauses])
    pauses = Pauses.of(1000, starts, starts + np.array([one[1] for one in given_pauses]))
    clock, asked = Clock(pauses), np.array(times)
    trained = clock.trained(asked)
    for time, value in zip(asked, trained, strict=True):
        still = sum(
            min(end, time) - start for start, end in zip(pauses.starts, pauses.ends, strict=True) if start < time
        )
        assert value == pytest.approx(time - still, abs=1e-9)
    again = clock.trained(clock.time_at(trained))
    assert again == pytest.approx(trained, abs=1e-6)
    assert np.all(clock.end_of(asked) >= asked)
