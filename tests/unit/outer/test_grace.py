"""The grace window and the averages behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.outer.grace import AVERAGE_SHARE, OUTLIER_FACTOR, grace_seconds, typical_step_seconds, updated
from isles.proto.agreement import SyncSettings
from isles.proto.messages import Averages, LearnerInfo

SYNC = SyncSettings(overlap_steps=3.0, grace_share=0.5, grace_min_seconds=0.01, grace_max_seconds=1.0)


def test_the_window_is_a_share_of_the_slack() -> None:
    averages = Averages(step_seconds=0.2, quorum_seconds=0.1, sync_seconds=0.1)
    assert grace_seconds(averages, SYNC) == pytest.approx(0.5 * (3 * 0.2 - 0.2))


def test_the_window_stays_within_its_bounds() -> None:
    assert grace_seconds(Averages(step_seconds=0.1, sync_seconds=5.0), SYNC) == 0.01
    assert grace_seconds(Averages(step_seconds=50.0), SYNC) == 1.0
    assert grace_seconds(Averages(), SYNC) == 0.01


def test_the_first_value_is_the_average() -> None:
    assert updated(Averages(), step_seconds=0.2, quorum_seconds=0.3, sync_seconds=0.4) == Averages(
        step_seconds=0.2, quorum_seconds=0.3, sync_seconds=0.4
    )


def test_later_values_move_the_average_a_little() -> None:
    assert updated(Averages(step_seconds=1.0), step_seconds=2.0).step_seconds == pytest.approx(1.0 + AVERAGE_SHARE)


def test_what_was_not_measured_leaves_its_average_alone() -> None:
    averages = Averages(step_seconds=1.0, quorum_seconds=2.0, sync_seconds=3.0)
    assert updated(averages) == averages


def test_one_outlier_does_not_close_the_window_for_long() -> None:
    moved = updated(Averages(sync_seconds=0.1), sync_seconds=60.0)
    assert moved.sync_seconds == pytest.approx(0.1 + AVERAGE_SHARE * (OUTLIER_FACTOR - 1) * 0.1)


def test_the_typical_step_is_the_median_of_live_learners(make_learner: Callable[..., LearnerInfo]) -> None:
    learners = [make_learner("a", step_seconds=0.1), make_learner("b", step_seconds=0.3)]
    assert typical_step_seconds(learners) == pytest.approx(0.2)
    learners.append(make_learner("straggler", step_seconds=9.0))
    learners.append(make_learner("gone", step_seconds=99.0, is_live=False))
    learners.append(make_learner("new", step_seconds=0.0))
    assert typical_step_seconds(learners) == 0.3
    assert typical_step_seconds([]) == 0.0
