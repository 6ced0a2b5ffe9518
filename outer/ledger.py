"""The recipe of a version: what it was made from, so that anybody can make it again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from isles.outer.weights import by_name, fraction, token_weight
from isles.proto.agreement import SyncSettings
from isles.proto.messages import Averages, Contribution, Ingredient, LearnerInfo, Recipe


def make_recipe(
    contributions: Sequence[Contribution],
    learners: Sequence[LearnerInfo],
    sync: SyncSettings,
    *,
    averages: Averages,
    grace_seconds: float,
    waited_seconds: float,
) -> Recipe:
    """The recipe of a version made from `contributions`, which are of distinct learners and at least one.

    Its ingredients are in sorted id order whatever the order here: sums of singles depend on it.
    """
    known = by_name(learners)
    ingredients = tuple(
        Ingredient(
            id=contribution.id,
            digest=contribution.blob.digest,
            base_version=contribution.base_version,
            tokens=contribution.tokens,
            steps=contribution.steps,
            weight=token_weight(contribution, known.get(contribution.id.learner)),
            size_bytes=contribution.blob.size_bytes,
        )
        for contribution in sorted(contributions, key=lambda contribution: contribution.id)
    )
    return Recipe(
        ingredients=ingredients,
        fraction=fraction(contributions, learners) if sync.has_fractional_steps else 1.0,
        merge_rule=sync.merge_rule,
        settings_digest=sync.digest,
        averages=averages,
        grace_seconds=grace_seconds,
        waited_seconds=waited_seconds,
    )


def recipe_fault(recipe: Recipe, sync: SyncSettings) -> str | None:
    """Why a version cannot be made from this recipe under these settings, as one sentence; None if it can."""
    ids = [ingredient.id for ingredient in recipe.ingredients]
    if not ids:
        return "the recipe has no ingredients"
    if any(first >= second for first, second in pairwise(ids)):
        return "the ingredients of the recipe are not in strictly rising id order"
    if recipe.merge_rule != sync.merge_rule:
        return f"the recipe was merged by {recipe.merge_rule!r}, the run merges by {sync.merge_rule!r}"
    if recipe.settings_digest != sync.digest:
        return f"the recipe was computed under other settings (digest {recipe.settings_digest[:12]})"
    if recipe.fraction == 0:
        return "the recipe takes no step at all: its fraction is 0"
    return None
