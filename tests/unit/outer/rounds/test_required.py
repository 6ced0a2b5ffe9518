"""Rounds of a run that must not go on with fewer learners than it was begun with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from isles.outer.orders import LeaseGranted, Listed, Merge
from isles.outer.quorum import num_present
from isles.outer.rounds import Rounds, State
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.messages import Contribution, LearnerInfo, Listing

if TYPE_CHECKING:
    from tests.unit.outer.rounds.conftest import Bench

Rows = list[Contribution]
Learners = list[LearnerInfo]


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """Rounds that require three live learners and a quorum of one."""
    return make_bench(num_required=3)


def without(learners: Learners, name: str) -> Learners:
    """The same learners, one of them no longer live."""
    return [info.model_copy(update={"is_live": info.is_live and info.learner != name}) for info in learners]


def test_with_too_few_live_learners_nothing_is_merged_however_long_it_takes(
    bench: Bench, rows: Rows, learners: Learners
) -> None:
    bench.look(rows, without(learners, "c"))
    bench.pass_screen(*rows)
    for _ in range(100):
        bench.wait(bench.list_seconds)
        assert not bench.has(Merge)
        bench.look(rows, without(learners, "c"))
    assert bench.state is State.COLLECTING


def test_when_the_missing_one_is_back_the_round_goes_on(bench: Bench, rows: Rows, learners: Learners) -> None:
    bench.look(rows, without(learners, "c"))
    bench.pass_screen(*rows)
    bench.hint(rows, learners)
    assert bench.one(Merge).plan.contributions == tuple(rows)


def test_a_quorum_is_enough_once_all_are_live(bench: Bench, rows: Rows, learners: Learners) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.wait(bench.grace_seconds)
    assert len(bench.one(Merge).plan.contributions) == 1


def test_a_learner_that_goes_missing_during_the_grace_window_stops_the_round(
    bench: Bench, rows: Rows, learners: Learners
) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    assert bench.state is State.GRACE
    bench.hint(rows[:1], without(learners, "b"))
    bench.wait(bench.grace_seconds)
    assert not bench.has(Merge)
    assert bench.state is State.COLLECTING


def test_the_wait_for_learners_is_no_part_of_the_time_that_a_quorum_takes(
    bench: Bench, rows: Rows, learners: Learners
) -> None:
    bench.look(rows, without(learners, "c"))
    bench.pass_screen(*rows)
    for _ in range(50):
        bench.wait(bench.list_seconds)
        bench.look(rows, without(learners, "c"))
    bench.hint(rows, learners)
    recipe = bench.one(Merge).plan.recipe
    assert recipe.averages.quorum_seconds <= bench.list_seconds
    assert recipe.waited_seconds <= bench.list_seconds


def test_it_is_said_once_that_learners_are_missing_and_once_that_all_are_here(
    bench: Bench, rows: Rows, learners: Learners
) -> None:
    for listed in (learners, without(learners, "c"), without(without(learners, "c"), "b"), learners, learners):
        bench.hint(rows, listed)
    assert bench.log_names().count("learners.missing") == 1
    assert bench.log_names().count("learners.complete") == 1


def test_the_rounds_of_other_fragments_leave_that_to_the_first(
    make_listing: Callable[..., Listing], rows: Rows, learners: Learners
) -> None:
    rounds = Rounds(1, SyncSettings(), Budget(rounds=100), num_required=5)
    rounds.handle(LeaseGranted(1), 0.0)
    orders = rounds.handle(Listed(make_listing(rows, learners, 0)), 1.0)
    assert [order for order in orders if getattr(order, "event", "") == "learners.missing"] == []


def test_without_a_requirement_any_number_will_do(make_bench: Callable[..., Bench], rows: Rows) -> None:
    bench = make_bench()
    bench.look(rows[:1], [])
    bench.pass_screen(rows[0])
    assert bench.has(Merge)


def test_learners_that_left_count_once_nobody_trains_any_more(make_learner: Callable[..., LearnerInfo]) -> None:
    def info(name: str, *, is_live: bool, is_draining: bool) -> LearnerInfo:
        return make_learner(name, is_live=is_live, is_draining=is_draining)

    left, dead = info("a", is_live=False, is_draining=True), info("b", is_live=False, is_draining=False)
    draining, training = info("c", is_live=True, is_draining=True), info("d", is_live=True, is_draining=False)
    assert num_present([left, dead, draining]) == 2
    assert num_present([left, dead, draining, training]) == 2
    assert num_present([left, dead, training]) == 1
    assert num_present([]) == 0
