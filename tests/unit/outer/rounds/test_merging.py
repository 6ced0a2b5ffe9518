"""How a round ends well: grace window, merge, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from isles.outer.orders import (
    AskFailed,
    Commit,
    FetchPayloads,
    ForgetPayloads,
    Hinted,
    List,
    Log,
    Merge,
    Merged,
    Rejoined,
)
from isles.outer.rounds import RETRY_SECONDS, State
from isles.proto.messages import (
    Averages,
    Committed,
    Contribution,
    LearnerInfo,
    Recipe,
    Stale,
)

if TYPE_CHECKING:
    from tests.unit.outer.rounds.conftest import Bench, MakeBench


def test_a_round_that_has_everyone_merges_at_once(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    assert [contribution.id.learner for contribution in plan.contributions] == ["a", "b", "c"]
    assert plan.recipe.fraction == 1.0
    assert bench.state is State.MERGING


def test_a_recipe_has_the_rate_of_its_heads_progress_and_discounts_by_its_version(
    make_bench: MakeBench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    """The budget of the bench is 100 rounds over the fragments."""
    bench = make_bench(outer_schedule="linear", outer_final_share=0.0, staleness_exponent=1.0, num_fragments=4)
    recipe = bench.merge_all(rows, learners, version=15).recipe
    assert recipe.learning_rate == pytest.approx(bench.rounds.sync.outer_learning_rate * 0.4)
    assert [ingredient.weight for ingredient in recipe.ingredients] == pytest.approx([100_000 / 16] * 3)
    assert recipe.fraction == pytest.approx(1 / 16)


def test_a_round_without_everyone_merges_when_the_grace_window_ends(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    assert bench.timer_at == bench.grace_seconds
    bench.wait(bench.grace_seconds / 2)
    assert bench.state is State.GRACE
    bench.wait(bench.grace_seconds / 2)
    plan = bench.one(Merge).plan
    assert plan.contributions == (rows[0],)
    assert plan.recipe.fraction == pytest.approx(1 / 3)
    assert plan.recipe.grace_seconds == bench.grace_seconds
    assert plan.recipe.waited_seconds == bench.grace_seconds


def test_who_arrives_within_the_grace_window_is_merged_too(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.clock.advance(bench.grace_seconds / 2)
    bench.hint(rows[:2], learners)
    bench.pass_screen(rows[1])
    assert bench.state is State.GRACE
    bench.wait(bench.grace_seconds / 2)
    assert len(bench.one(Merge).plan.contributions) == 2


def test_a_row_still_being_fetched_when_the_window_ends_waits_for_the_next_round(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows, learners)
    bench.pass_screen(rows[1], rows[2])
    bench.wait(bench.grace_seconds)
    plan = bench.one(Merge).plan
    assert plan.contributions == tuple(rows[1:])
    bench.pass_screen(rows[0])
    bench.tell(Merged(plan, bench.blobs))
    bench.tell(Committed(fragment=0, version=1))
    bench.look(rows[:1], learners, version=1)
    assert not bench.has(FetchPayloads)
    assert bench.state is State.GRACE


def test_the_averages_go_on_where_the_last_version_left_them(
    make_bench: MakeBench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    before = Averages(step_seconds=0.6, quorum_seconds=1.0, sync_seconds=2.0)
    recipe = Recipe(ingredients=(), fraction=1.0, merge_rule="mean", settings_digest="0" * 64, averages=before)
    bench = make_bench(overlap_steps=10.0, grace_share=0.5, grace_min_seconds=0.0, grace_max_seconds=100.0)
    bench.look(rows[:1], learners, 5, recipe=recipe)
    bench.clock.advance(1.0)
    bench.pass_screen(rows[0])
    # step: 0.6 + 0.2 (0.1 - 0.6); quorum: another second; sync: not measured by this outer yet
    grace = 0.5 * (10 * 0.5 - (1.0 + 2.0))
    bench.wait(grace)
    made = bench.one(Merge).plan.recipe
    assert made.grace_seconds == pytest.approx(grace)
    assert made.averages.step_seconds == pytest.approx(0.5)
    assert (made.averages.quorum_seconds, made.averages.sync_seconds) == (1.0, 2.0)


def test_the_next_window_knows_how_long_the_last_synchronisation_took(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.clock.advance(0.25)
    bench.tell(Merged(plan, bench.blobs))
    bench.clock.advance(0.5)
    bench.tell(Committed(fragment=0, version=1))
    again = [make_contribution(name, 2) for name in "abc"]
    assert bench.merge_all(again, learners, version=1).recipe.averages.sync_seconds == 0.75


def test_a_merge_is_committed_and_the_next_round_starts_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(Merged(plan, bench.blobs))
    assert bench.one(Commit) == Commit(plan, bench.blobs)
    bench.tell(Committed(fragment=0, version=1))
    assert bench.has(List)
    assert set(bench.one(ForgetPayloads).ids) == {row.id for row in rows}
    assert bench.state is State.IDLE
    [merged] = [log for log in bench.logged if log.event == "round.merged"]
    assert merged.fields["version"] == 1
    assert merged.fields["participants"] == merged.fields["live"] == 3


def test_a_listing_older_than_the_own_commit_is_not_believed(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(Merged(plan, bench.blobs))
    bench.tell(Committed(fragment=0, version=1))
    bench.look(rows, learners, version=0)
    assert bench.has(List)
    assert not bench.has(FetchPayloads)
    assert bench.state is State.IDLE


def test_a_hint_at_a_version_of_its_own_tells_an_outer_nothing(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.tell(Merged(bench.merge_all(rows, learners), bench.blobs))
    assert bench.tell(Hinted(1)) == [], "the answer to the commit is still to come"
    bench.tell(Committed(fragment=0, version=1))
    bench.look([], learners, version=1)
    assert bench.tell(Hinted(1)) == [], "the hint comes after the answer"
    assert bench.tell(Hinted(2))[0] == List(), "somebody else has committed"


def test_after_a_new_session_even_an_older_store_is_believed(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look([], learners, version=7)
    bench.tell(Rejoined())
    bench.look(rows[:1], learners, version=5)
    assert bench.state is State.COLLECTING


def test_rows_that_arrive_during_a_merge_are_fetched_but_not_added(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    plan = bench.merge_all(rows, learners)
    late = make_contribution("d")
    bench.hint([*rows, late], learners)
    assert bench.one(FetchPayloads).contributions == (late,)
    bench.tell(Merged(plan, bench.blobs))
    assert bench.one(Commit).plan.contributions == tuple(rows)


def test_a_stale_commit_starts_again_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(Merged(plan, bench.blobs))
    bench.tell(Stale(fragment=0, head=1, reason="the head is 1"))
    assert bench.has(List)
    assert bench.one(Log).event == "round.abandoned"
    bench.look(rows[2:], learners, version=1)
    bench.wait(bench.grace_seconds)
    plan = bench.one(Merge).plan
    assert plan.head.version == 1
    assert plan.contributions == (rows[2],)


def test_another_outers_version_restarts_the_round(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.clock.advance(bench.grace_seconds / 2)
    bench.hint(rows[1:2], learners, version=1)
    assert bench.one(ForgetPayloads).ids == (rows[0].id,)
    bench.pass_screen(rows[1])
    bench.wait(bench.grace_seconds / 2)
    assert bench.state is State.GRACE
    bench.wait(bench.grace_seconds / 2)
    assert bench.one(Merge).plan.head.version == 1


def test_a_commit_that_was_refused_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(Merged(plan, bench.blobs))
    bench.tell(AskFailed("commit", "blob is not in the store"))
    bench.look(rows, learners)
    assert bench.state is State.GRACE
    assert bench.timer_at == RETRY_SECONDS
    bench.wait(RETRY_SECONDS)
    assert bench.has(Merge)
