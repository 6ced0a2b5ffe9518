"""Recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.outer.ledger import make_recipe, recipe_fault
from isles.proto.agreement import SyncSettings
from isles.proto.messages import Averages, Contribution, LearnerInfo, Recipe

SYNC = SyncSettings(merge_rule="mean")
TIMES: dict[str, Any] = {
    "head_version": 0,
    "learning_rate": None,
    "averages": Averages(step_seconds=0.1),
    "grace_seconds": 0.2,
    "waited_seconds": 0.3,
}


@pytest.fixture
def recipe(make_contribution: Callable[..., Contribution], make_learner: Callable[..., LearnerInfo]) -> Recipe:
    merged = [make_contribution("b", 9), make_contribution("a", 10)]
    return make_recipe(merged, [make_learner(name) for name in "abcd"], SYNC, **TIMES)


def test_a_recipe_lists_its_ingredients_in_id_order(recipe: Recipe) -> None:
    assert [ingredient.id.learner for ingredient in recipe.ingredients] == ["a", "b"]
    assert [ingredient.weight for ingredient in recipe.ingredients] == [100_000.0, 100_000.0]
    assert [ingredient.clip for ingredient in recipe.ingredients] == [1.0, 1.0]


def test_a_recipe_carries_fraction_rule_settings_and_times(recipe: Recipe) -> None:
    assert recipe.fraction == 0.5
    assert recipe.merge_rule == "mean"
    assert recipe.settings_digest == SYNC.digest
    assert (recipe.averages, recipe.grace_seconds, recipe.waited_seconds) == (TIMES["averages"], 0.2, 0.3)


def test_without_fractional_steps_every_round_takes_a_full_one(
    make_contribution: Callable[..., Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    sync = SyncSettings(merge_rule="mean", has_fractional_steps=False)
    recipe = make_recipe([make_contribution("a")], [make_learner("a"), make_learner("b")], sync, **TIMES)
    assert recipe.fraction == 1.0


@pytest.fixture
def two(
    make_contribution: Callable[..., Contribution], make_learner: Callable[..., LearnerInfo]
) -> Callable[..., Recipe]:
    """The recipe of a fresh contribution and one with an old base, among four equal learners."""

    def make(sync: SyncSettings, **fields: Any) -> Recipe:
        fresh, old = make_contribution("a", base_version=8), make_contribution("b", base_version=5)
        return make_recipe(
            [old, fresh], [make_learner(name) for name in "abcd"], sync, **{**TIMES, "head_version": 8, **fields}
        )

    return make


def test_an_old_base_counts_less_by_the_power_of_the_versions_behind(two: Callable[..., Recipe]) -> None:
    recipe = two(SyncSettings(merge_rule="mean", staleness_exponent=0.5))
    assert [ingredient.weight for ingredient in recipe.ingredients] == [100_000.0, 50_000.0]
    assert recipe.fraction == pytest.approx(0.5 * 0.75)


def test_a_discount_leaves_the_others_of_the_round_what_they_had(two: Callable[..., Recipe]) -> None:
    plain, discounted = two(SYNC), two(SyncSettings(merge_rule="mean", staleness_exponent=1.0))

    def effects(recipe: Recipe) -> list[float]:
        total = sum(ingredient.weight for ingredient in recipe.ingredients)
        return [recipe.fraction * ingredient.weight / total for ingredient in recipe.ingredients]

    assert effects(discounted) == pytest.approx([effects(plain)[0], effects(plain)[1] / 4])


def test_without_an_exponent_the_base_does_not_matter(two: Callable[..., Recipe]) -> None:
    recipe = two(SYNC)
    assert [ingredient.weight for ingredient in recipe.ingredients] == [100_000.0, 100_000.0]
    assert recipe.fraction == 0.5


def test_norms_are_recorded_where_the_rule_needs_them(two: Callable[..., Recipe]) -> None:
    assert [ingredient.norms for ingredient in two(SYNC).ingredients] == [(), ()]
    assert [ingredient.norms for ingredient in two(SyncSettings(merge_rule="rda")).ingredients] == [(1.0,), (1.0,)]


def test_a_recipe_carries_the_rate_of_its_step(two: Callable[..., Recipe]) -> None:
    assert two(SYNC, learning_rate=0.25).learning_rate == 0.25
    assert two(SYNC).learning_rate is None


def test_buffers_take_a_part_of_a_step_in_a_partial_round_whatever_the_settings(two: Callable[..., Recipe]) -> None:
    for sync in (SYNC, SyncSettings(merge_rule="mean", has_fractional_steps=False)):
        assert two(sync, is_buffers=True).fraction == 0.5


def test_learners_that_were_not_measured_yet_count_where_buffers_are_merged(
    make_contribution: Callable[..., Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    idle = make_learner("b", tokens_per_second=0.0)
    gone = make_learner("c", is_live=False)
    merged, learners = [make_contribution("a")], [make_learner("a"), idle, gone]
    assert make_recipe(merged, learners, SYNC, **TIMES).fraction == 1.0
    assert make_recipe(merged, learners, SYNC, **TIMES, is_buffers=True).fraction == 0.5


def test_the_digest_of_the_settings_tells_different_ones_apart() -> None:
    assert SYNC.digest == SyncSettings(merge_rule="mean").digest
    assert SYNC.digest != SyncSettings(merge_rule="mean", outer_learning_rate=0.71).digest


def test_a_recipe_of_this_run_has_no_fault(recipe: Recipe) -> None:
    assert recipe_fault(recipe, SYNC) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ingredients": ()}, "no ingredients"),
        ({"merge_rule": "median"}, "median"),
        ({"settings_digest": "0" * 64}, "other settings"),
        ({"fraction": 0.0}, "no step"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_named(changes: dict[str, Any], word: str, recipe: Recipe) -> None:
    fault = recipe_fault(recipe.model_copy(update=changes), SYNC)
    assert fault is not None
    assert word in fault


def test_a_recipe_of_rda_without_norms_is_a_fault(two: Callable[..., Recipe]) -> None:
    sync = SyncSettings(merge_rule="rda")
    recipe = two(sync)
    assert recipe_fault(recipe, sync) is None
    bare = recipe.model_copy(update={"ingredients": two(SYNC).ingredients})
    assert "norms" in str(recipe_fault(bare, sync))


def test_ingredients_out_of_order_are_a_fault(recipe: Recipe) -> None:
    backwards = recipe.model_copy(update={"ingredients": recipe.ingredients[::-1]})
    assert "order" in str(recipe_fault(backwards, SYNC))
