"""The recipe of a version: what it was made from, so that anybody can make it again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from isles.outer.conduct import Judgement
from isles.outer.weights import by_name, discounted_share, fraction, share_of_learners, staleness_discount, token_weight
from isles.proto.agreement import SyncSettings
from isles.proto.ids import Name, Version
from isles.proto.messages import Averages, Contribution, Ingredient, LearnerInfo, Recipe

AS_THEY_ARE: Final = Judgement()


def make_recipe(
    contributions: Sequence[Contribution],
    learners: Sequence[LearnerInfo],
    sync: SyncSettings,
    *,
    head_version: Version,
    learning_rate: float | None,
    is_buffers: bool = False,
    averages: Averages,
    grace_seconds: float,
    waited_seconds: float,
    judgement: Judgement = AS_THEY_ARE,
) -> Recipe:
    """The recipe of version `head_version` + 1, made from `contributions` of distinct learners, at least one.

    Its ingredients are in sorted id order whatever the order here: sums of singles depend on it. `learning_rate` is
    that of this outer step, None for the constant one of the settings. Buffers always take a partial step in a partial
    round, the share of the learners in it: whole ones of several learners in a row would carry a running variance past
    its value, and below zero. `judgement` limits what each counts, and has what the next round is judged by.
    """
    known = by_name(learners)
    merged = sorted(contributions, key=lambda contribution: contribution.id)
    weights = [
        min(token_weight(contribution, known.get(contribution.id.learner)), judgement.weight_max)
        for contribution in merged
    ]
    behind = [head_version - contribution.base_version for contribution in merged]
    discounts = [staleness_discount(versions, sync.staleness_exponent) for versions in behind]
    ingredients = tuple(
        _ingredient(
            contribution,
            weight * discount,
            clip=judgement.clips.get(contribution.id, 1.0),
            has_norms=sync.merge_rule == "rda",
        )
        for contribution, weight, discount in zip(merged, weights, discounts, strict=True)
    )
    part = (
        share_of_learners(contributions, learners)
        if is_buffers
        else fraction(contributions, learners, rate_factor=judgement.rate_factor)
    )
    part *= discounted_share(weights, discounts)
    return Recipe(
        ingredients=ingredients,
        fraction=part if sync.has_fractional_steps or is_buffers else 1.0,
        merge_rule=sync.merge_rule,
        settings_digest=sync.digest,
        learning_rate=learning_rate,
        averages=averages,
        grace_seconds=grace_seconds,
        waited_seconds=waited_seconds,
        conduct=judgement.conduct,
    )


def _ingredient(contribution: Contribution, weight: float, *, clip: float, has_norms: bool) -> Ingredient:
    return Ingredient(
        id=contribution.id,
        digest=contribution.blob.digest,
        base_version=contribution.base_version,
        tokens=contribution.tokens,
        steps=contribution.steps,
        weight=weight,
        clip=clip,
        norms=contribution.norms if has_norms else (),
        size_bytes=contribution.blob.size_bytes,
    )


def clipped(recipe: Recipe) -> list[tuple[Name, float]]:
    """The learners whose deltas were scaled down, and by which factors."""
    return [(one.id.learner, one.clip) for one in recipe.ingredients if one.clip < 1]


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
    if recipe.merge_rule == "rda" and not all(ingredient.norms for ingredient in recipe.ingredients):
        return "the recipe was merged by 'rda' and lacks norms"
    return None
