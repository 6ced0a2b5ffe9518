"""Token weights and the fraction of an outer step."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.weights import (
    RATE_MARGIN,
    credited_tokens,
    discounted_share,
    fraction,
    shares,
    staleness_discount,
    token_weight,
)
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Contribution, LearnerInfo

Make = Callable[..., Contribution]
MakeLearner = Callable[..., LearnerInfo]


def contribution_of(learner: str, tokens: int, steps: int, seconds: float) -> Contribution:
    return Contribution(
        id=ContributionId(learner, 0, "ab" * 8, 1),
        base_version=0,
        blob=BlobRef(digest="0" * 64, size_bytes=1),
        codec="int4",
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        norms=(),
    )


def learner_of(name: str, rate: float, *, is_live: bool = True) -> LearnerInfo:
    return LearnerInfo(
        learner=name, region="eu", incarnation="ab" * 8, is_live=is_live, last_seen_unix=0.0, tokens_per_second=rate
    )


def test_a_weight_is_tokens_times_tokens_per_step(make_contribution: Make, make_learner: MakeLearner) -> None:
    contribution = make_contribution("a", tokens=600, steps=3, seconds=1.0)
    assert token_weight(contribution, make_learner("a")) == 600 * 200
    assert token_weight(contribution, None) == 600 * 200


def test_work_without_steps_or_tokens_weighs_nothing(make_contribution: Make) -> None:
    assert token_weight(make_contribution("a", tokens=600, steps=0), None) == 0
    assert token_weight(make_contribution("a", tokens=0, steps=5), None) == 0


def test_a_learner_cannot_claim_more_tokens_than_its_measured_rate_allows(
    make_contribution: Make, make_learner: MakeLearner
) -> None:
    boaster = make_contribution("a", tokens=10**9, steps=10, seconds=2.0)
    assert credited_tokens(boaster, make_learner("a", tokens_per_second=100.0)) == RATE_MARGIN * 200


@pytest.mark.parametrize(("rate", "seconds"), [(0.0, 2.0), (100.0, 0.0)])
def test_what_was_not_measured_caps_nothing(
    rate: float, seconds: float, make_contribution: Make, make_learner: MakeLearner
) -> None:
    contribution = make_contribution("a", tokens=10**9, steps=10, seconds=seconds)
    assert credited_tokens(contribution, make_learner("a", tokens_per_second=rate)) == 10**9


def test_weights_that_are_all_zero_become_equal_shares() -> None:
    assert shares([0.0, 0.0, 0.0, 0.0]) == (0.25,) * 4
    assert shares([]) == ()


def test_a_single_contribution_has_the_whole_share() -> None:
    assert shares([12345.678]) == (1.0,)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50))
def test_shares_are_not_negative_and_sum_to_one(weights: list[float]) -> None:
    parts = shares(weights)
    assert all(0 <= part <= 1 for part in parts)
    assert math.isclose(math.fsum(parts), 1.0, rel_tol=1e-12)


def test_a_full_round_takes_a_full_step(make_contribution: Make, make_learner: MakeLearner) -> None:
    names = ["a", "b", "c"]
    assert fraction([make_contribution(name) for name in names], [make_learner(name) for name in names]) == 1.0


@pytest.mark.parametrize("num_learners", [2, 3, 5, 7, 8])
def test_a_round_of_one_among_equal_learners_takes_exactly_its_share(
    num_learners: int, make_contribution: Make, make_learner: MakeLearner
) -> None:
    learners = [make_learner(f"l{number}", tokens_per_second=333.3) for number in range(num_learners)]
    merged = [make_contribution("l1", tokens=3333, seconds=10.0)]
    assert fraction(merged, learners) == 1 / num_learners


def test_learners_that_are_gone_and_not_merged_do_not_count(make_contribution: Make, make_learner: MakeLearner) -> None:
    learners = [make_learner("a"), make_learner("b", is_live=False), make_learner("c")]
    assert fraction([make_contribution("a")], learners) == 0.5


def test_a_dead_learner_that_is_merged_counts(make_contribution: Make, make_learner: MakeLearner) -> None:
    learners = [make_learner("a", is_live=False), make_learner("b")]
    assert fraction([make_contribution("a")], learners) == 0.5


def test_a_faster_learner_is_a_larger_part(make_contribution: Make, make_learner: MakeLearner) -> None:
    learners = [make_learner("a", tokens_per_second=3000.0), make_learner("b", tokens_per_second=1000.0)]
    assert fraction([make_contribution("a", tokens=3000, seconds=1.0)], learners) == 0.75


def test_learners_are_counted_where_no_rate_is_known(make_contribution: Make, make_learner: MakeLearner) -> None:
    learners = [make_learner(name, tokens_per_second=0.0) for name in "abcd"]
    assert fraction([make_contribution("a", seconds=0.0)], learners) == 0.25
    assert fraction([make_contribution("a", tokens=0)], learners) == 0.25


def test_a_contribution_that_took_no_time_has_its_measured_rate(
    make_contribution: Make, make_learner: MakeLearner
) -> None:
    learners = [make_learner("a"), make_learner("b")]
    assert fraction([make_contribution("a", seconds=0.0)], learners) == 0.5


def test_a_learner_that_came_back_and_was_not_measured_yet_counts_as_an_average_one(
    make_contribution: Make, make_learner: MakeLearner
) -> None:
    learners = [make_learner("a"), make_learner("b", tokens_per_second=0.0, tokens=50), make_learner("c")]
    assert fraction([make_contribution("a")], learners) == 1 / 3


def test_a_learner_that_has_not_begun_to_work_does_not_count(
    make_contribution: Make, make_learner: MakeLearner
) -> None:
    learners = [make_learner("a"), make_learner("b", tokens_per_second=0.0, tokens=0)]
    assert fraction([make_contribution("a")], learners) == 1.0


books = st.tuples(st.integers(0, 10**12), st.integers(0, 10**6), st.floats(0, 1e9))
rates = st.floats(0, 1e300)


@given(
    merged=st.lists(books, min_size=1, max_size=8),
    others=st.lists(rates, max_size=8),
    measured=st.lists(rates, min_size=8, max_size=8),
)
def test_a_fraction_is_above_zero_and_at_most_one(
    merged: list[tuple[int, int, float]], others: list[float], measured: list[float]
) -> None:
    contributions = [contribution_of(f"m{index}", *values) for index, values in enumerate(merged)]
    learners = [learner_of(f"m{index}", rate) for index, rate in enumerate(measured)]
    learners += [learner_of(f"o{index}", rate) for index, rate in enumerate(others)]
    part = fraction(contributions, learners)
    assert 0 < part <= 1


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=10))
def test_rounds_of_one_learner_each_sum_to_one_full_round(tokens: list[int]) -> None:
    contributions = [contribution_of(f"l{index}", number, 10, 1.0) for index, number in enumerate(tokens)]
    learners = [learner_of(f"l{index}", float(number)) for index, number in enumerate(tokens)]
    parts = [fraction([contribution], learners) for contribution in contributions]
    assert math.isclose(math.fsum(parts), 1.0, rel_tol=1e-9)


# ----------------------------------------------------------------------------------------------------------- staleness


@given(versions=st.integers(0, 10**6), exponent=st.floats(0, 4))
def test_a_discount_is_the_power_that_its_paper_says(versions: int, exponent: float) -> None:
    assert staleness_discount(versions, exponent) == pytest.approx((versions + 1) ** -exponent)
    assert 0 < staleness_discount(versions, exponent) <= 1


def test_a_base_that_is_the_head_counts_in_full_whatever_the_exponent() -> None:
    assert staleness_discount(0, 3.5) == 1.0
    assert staleness_discount(7, 0.0) == 1.0


@given(
    weights=st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_the_step_of_discounted_deltas_is_the_sum_of_what_each_may_do(weights: list[float], seed: int) -> None:
    random = np.random.default_rng(seed)
    discounts, deltas = random.uniform(0.01, 1.0, len(weights)), random.standard_normal(len(weights))
    step = discounted_share(weights, discounts.tolist()) * float(np.average(deltas, weights=weights * discounts))
    wanted = float(np.dot(weights, discounts * deltas) / np.sum(weights))
    assert step == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50))
def test_without_discounts_a_step_is_whole_to_the_bit(weights: list[float]) -> None:
    assert discounted_share(weights, [1.0] * len(weights)) == 1.0


@given(st.floats(0, 1e300))
def test_a_learner_that_claims_any_rate_makes_the_steps_of_others_no_smaller_than_the_limit_says(rate: float) -> None:
    learners = [learner_of(f"h{number}", 100.0) for number in range(7)] + [learner_of("liar", rate)]
    part = fraction([contribution_of("h0", 100, 1, 1.0)], learners, rate_factor=4.0)
    assert part * (1 + 1e-12) >= 1 / 11
    liar = fraction([contribution_of("liar", 10**15, 1, 1e-3)], learners, rate_factor=4.0)
    assert liar <= 4 / 11 * (1 + 1e-12)
