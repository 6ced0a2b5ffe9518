"""The calibrated defaults make the published table."""

from __future__ import annotations

import pytest

from isles.ops.goodput.fast import simulate
from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.published import CHIPS, PUBLISHED, differences, published
from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.trace import draw


@pytest.fixture(scope="module")
def table() -> list[Outcome]:
    """All 30 figures, of ten days: 130,000 failures."""
    found = []
    for chips in CHIPS:
        trace = draw(Scenario(chips=chips, days=10))
        for system, learners in PUBLISHED:
            found.append(simulate(Scenario(chips=chips, days=10, learners=learners), trace, system))
    return found


def test_every_published_figure_has_a_counterpart(table: list[Outcome]) -> None:
    assert len(table) == len(differences(table)) == 30


def test_the_published_table_comes_out_with_a_mean_difference_of_at_most_two_points_and_none_above_five(
    table: list[Outcome],
) -> None:
    found = [abs(one) for one in differences(table)]
    assert sum(found) / len(found) <= 2.0
    assert max(found) <= 5.0


def test_more_learners_are_better_and_more_chips_worse(table: list[Outcome]) -> None:
    decoupled = {(one.learners, one.chips): one.goodput for one in table if one.system == "decoupled"}
    for chips in CHIPS:
        row = [decoupled[learners, chips] for learners in (2, 4, 8, 16)]
        assert row == sorted(row)
    for learners in (2, 4, 8, 16):
        column = [decoupled[learners, chips] for chips in CHIPS]
        assert column == sorted(column, reverse=True)


def test_the_run_of_many_learners_never_stands_still_as_a_whole(table: list[Outcome]) -> None:
    assert all(one.uptime > 0.999 for one in table if one.system == "decoupled" and one.learners >= 8)


def test_what_was_not_published_has_no_counterpart(table: list[Outcome]) -> None:
    assert published(Outcome("decoupled", 3, CHIPS[0], 0.9, 1.0)) is None
    assert published(Outcome("decoupled", 4, 12_345, 0.9, 1.0)) is None
