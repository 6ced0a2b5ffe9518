"""H in proportion to a learner's speed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.workers.pace import INTERVAL_FACTOR_MAX, paced_interval

seconds = st.floats(1e-6, 1e6)


@given(interval=st.integers(1, 10_000), typical=seconds, own=seconds)
def test_an_interval_is_what_exact_numbers_say(interval: int, typical: float, own: float) -> None:
    exact = interval * Fraction(typical) / Fraction(own)
    wanted = min(max(exact, Fraction(1)), Fraction(INTERVAL_FACTOR_MAX * interval))
    found = paced_interval(interval, typical_seconds=typical, own_seconds=own)
    assert abs(found - wanted) <= Fraction(1, 2) + Fraction(1, 10**6)
    assert 1 <= found <= INTERVAL_FACTOR_MAX * interval


@given(interval=st.integers(100, 10_000), typical=seconds, factor=st.floats(0.2, 5))
def test_learners_of_any_usual_speed_take_about_the_same_time(interval: int, typical: float, factor: float) -> None:
    own = typical * factor
    time = own * paced_interval(interval, typical_seconds=typical, own_seconds=own)
    assert time == pytest.approx(interval * typical, rel=0.03)


def test_a_typical_learner_keeps_the_interval_of_the_run() -> None:
    assert paced_interval(48, typical_seconds=0.2, own_seconds=0.2) == 48


@pytest.mark.parametrize(("typical", "own"), [(0.0, 0.1), (0.1, 0.0), (0.0, 0.0)])
def test_what_was_not_measured_changes_nothing(typical: float, own: float) -> None:
    assert paced_interval(48, typical_seconds=typical, own_seconds=own) == 48
