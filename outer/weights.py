"""How much each contribution counts, and how much of a full outer step a round may take. Pure.

A learner's books are its own word; what its measured rate allows bounds the tokens that it can claim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from isles.proto.messages import Contribution, LearnerInfo

RATE_MARGIN: Final = 4.0
"""A learner may claim tokens up to so many times what its measured rate explains: the measurement is a moving average
over some ten seconds, and lags behind a start or a pause."""


def credited_tokens(contribution: Contribution, learner: LearnerInfo | None) -> float:
    """The tokens of a contribution, capped by what the learner's measured rate allows in the time it took.

    A rate or a time of zero was not measured yet and caps nothing.
    """
    if learner is None or learner.tokens_per_second == 0 or contribution.seconds == 0:
        return float(contribution.tokens)
    return min(float(contribution.tokens), RATE_MARGIN * learner.tokens_per_second * contribution.seconds)


def token_weight(contribution: Contribution, learner: LearnerInfo | None) -> float:
    """The weight tokens * (tokens / steps) of Decoupled DiLoCo (arXiv 2604.21428); 0 for work without steps."""
    tokens = credited_tokens(contribution, learner)
    return tokens * (tokens / contribution.steps) if contribution.steps else 0.0


def staleness_discount(versions_behind: int, exponent: float) -> float:
    """(1 + s)^-a in (0, 1], s = head - base version: the polynomial discount of FedAsync (arXiv 1903.03934).

    With the exponent 0 everything counts in full.
    """
    return float((1.0 + max(0, versions_behind)) ** -exponent)


def discounted_share(weights: Sequence[float], discounts: Sequence[float]) -> float:
    """What a round's step shrinks by for being discounted: sum of w_m s_m / sum of w_m, in (0, 1].

    A weight alone only moves a delta against the others of its round: two learners of which one is discounted would
    move the model as far as before, the fresh one further. With the fraction shrunk by this share, each contribution
    moves it by exactly its discount times what it would have; a round of one included. 1 if no weight is known.
    """
    if not any(weights):
        return 1.0
    parts = shares(weights)
    return math.fsum(part * discount for part, discount in zip(parts, discounts, strict=True)) / math.fsum(parts)


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Each weight as a share of all of them; equal shares if every weight is zero. Sums to 1 up to rounding."""
    largest = max(weights, default=0.0)
    if largest == 0:
        return (1.0 / len(weights),) * len(weights) if weights else ()
    relative = [weight / largest for weight in weights]
    total = math.fsum(relative)
    return tuple(weight / total for weight in relative)


def fraction(
    merged: Sequence[Contribution], learners: Sequence[LearnerInfo], *, rate_factor: float = math.inf
) -> float:
    """The fraction f in (0, 1]: the merged learners' share of the token rate of all that are live or merged.

    The rate of a merged learner is tokens / seconds of its contribution, that of another one what the broker measured.
    One that has worked but was not measured yet, because it has just come back, counts as an average one. A full round
    has f = 1, and M rounds of one equal learner have f = 1/M each. Where no rate is known, learners are counted
    instead. `merged` must not be empty.

    Nobody's rate counts for more than `rate_factor` times the median one: a live learner that claims to be faster than
    all others together would else make every round without it a step of nothing.
    """
    known = by_name(learners)
    merged_rates = {c.id.learner: _rate(c, known.get(c.id.learner)) for c in merged}
    others = [info for info in learners if info.is_live and info.learner not in merged_rates]
    if not others:
        return 1.0
    average = _average([*merged_rates.values(), *(info.tokens_per_second for info in others)])
    other_rates = {info.learner: info.tokens_per_second or (average if info.tokens else 0.0) for info in others}
    typical = _median([*merged_rates.values(), *other_rates.values()])
    limit = rate_factor * typical if typical else math.inf
    merged_rates = {name: min(rate, limit) for name, rate in merged_rates.items()}
    other_rates = {name: min(rate, limit) for name, rate in other_rates.items()}
    fastest = max(*merged_rates.values(), *other_rates.values())
    if fastest == 0 or max(merged_rates.values()) == 0:
        return len(merged_rates) / (len(merged_rates) + len(other_rates))
    # Rates relative to the fastest: equal learners then count exactly one each, and no sum overflows.
    part = math.fsum(rate / fastest for rate in merged_rates.values())
    rest = math.fsum(rate / fastest for rate in other_rates.values())
    return min(1.0, part / (part + rest)) or _smallest_share(len(merged_rates), len(other_rates))


def share_of_learners(merged: Sequence[Contribution], learners: Sequence[LearnerInfo]) -> float:
    """How many of the learners that are live or merged are merged, in (0, 1]; a slow one counts like a fast one."""
    names = {contribution.id.learner for contribution in merged}
    return len(names) / len(names | {info.learner for info in learners if info.is_live})


def _rate(contribution: Contribution, learner: LearnerInfo | None) -> float:
    """Tokens per second of merged work; what was measured where the contribution itself took no time."""
    if contribution.seconds > 0:
        rate = credited_tokens(contribution, learner) / contribution.seconds
        if math.isfinite(rate):
            return rate
    return learner.tokens_per_second if learner is not None else 0.0


def _average(rates: Sequence[float]) -> float:
    """The mean of those that are known, found without overflow."""
    positive = [rate for rate in rates if rate > 0]
    return math.fsum(rate / len(positive) for rate in positive)


def _median(rates: Sequence[float]) -> float:
    """Of those that are known; 0 if none is."""
    positive = [rate for rate in rates if rate > 0]
    return statistics.median(positive) if positive else 0.0


def _smallest_share(num_merged: int, num_others: int) -> float:
    return num_merged / (num_merged + num_others)


def by_name(learners: Sequence[LearnerInfo]) -> Mapping[str, LearnerInfo]:
    """The learners of a listing, by their names."""
    return {info.learner: info for info in learners}
