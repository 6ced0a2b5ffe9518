from __future__ import annotations

import pytest

from isles.workers.schedule import LearningRateSchedule


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor() -> None:
    schedule = LearningRateSchedule(peak=2.0, warmup_fraction=0.1, floor_fraction=0.25, start_fraction=0.5)
    assert schedule.at(0.0) == 1.0
    assert schedule.at(0.05) == pytest.approx(1.5)
    assert schedule.at(0.1) == pytest.approx(2.0)
    assert schedule.at(0.55) == pytest.approx((2.0 + 0.5) / 2)
    assert schedule.at(1.0) == pytest.approx(0.5)


def test_the_first_rate_is_above_zero_because_progress_waits_for_the_first_version() -> None:
    assert LearningRateSchedule(peak=1e-3, warmup_fraction=0.5).at(0.0) > 0


def test_without_warm_up_the_peak_comes_first() -> None:
    assert LearningRateSchedule(peak=3.0, warmup_fraction=0.0).at(0.0) == 3.0


def test_after_the_warm_up_the_rate_never_rises() -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup_fraction=0.05)
    rates = [schedule.at(0.05 + 0.95 * step / 200) for step in range(201)]
    assert rates == sorted(rates, reverse=True)


def test_progress_outside_the_run_means_its_nearer_end() -> None:
    schedule = LearningRateSchedule(peak=1.0)
    assert schedule.at(-0.5) == schedule.at(0.0)
    assert schedule.at(1.5) == schedule.at(1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"peak": 0.0},
        {"peak": float("nan")},
        {"peak": float("inf")},
        {"peak": 1.0, "warmup_fraction": 1.0},
        {"peak": 1.0, "warmup_fraction": -0.1},
        {"peak": 1.0, "floor_fraction": 1.1},
        {"peak": 1.0, "start_fraction": 0.0},
    ],
)
def test_numbers_that_are_no_schedule_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=list(fields)[-1]):
        LearningRateSchedule(**fields)
