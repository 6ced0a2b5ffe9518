"""Whether a contribution is in proportion: how far it goes, and what it claims, beside what its fragment is used to.

    usual norm   T min(max(1, sqrt(n / n_T)), G)      n: steps of the contribution; T, n_T: medians over the votes
    clip         min(1, F usual / norm);  rejected if norm > R usual, and R times the median of the round alone
    weight       at most W times the median weight over the votes
    direction    cosine with the sum of all others of the round, each with length 1: not below -D
    tokens       all that a learner has claimed so far, at most C times what one of the median rate can have done

A vote is what a learner's last merged contribution was like, or what one of this round is like. So a learner that is in
the round has two votes and another one has one, however often it contributes. A round without a past is judged by
itself; and where all norms change alike, as at the beginning of a run, the median goes along. For its norm, nothing is
rejected but one of three or more: the past alone may have become wrong for everybody, and then what is merged clipped
moves the median until it is right again.

Nothing is remembered here: the past is in the recipe of the head. Whoever merges next, after whatever failure, judges
the same contributions alike, and what it decided is in the recipe that it commits. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from isles.outer.directions import oppositions
from isles.proto.ids import ContributionId, Version
from isles.proto.messages import COUNT_MAX, Conduct, Contribution, Habit, LearnerInfo, Rejection, VersionInfo

GROWTH_MAX: Final = 4.0
"""G: the usual norm grows with the root of the steps, as steps that have nothing in common do, up to those of 16 usual
contributions. Whoever claims more gets no larger bound."""

HABITS_MAX: Final = 64
"""Learners whose habits travel in a recipe, those merged last: one more hardly moves a median of so many."""

HABIT_VERSIONS: Final = 64
"""A habit that is older than so many versions says little about the model of today."""

SLACK_SECONDS: Final = 60.0
"""Work may have begun before its time was counted, such as while the run was being initialised."""

COMPANY_MIN: Final = 3
"""Contributions of one round from which on the odd one out can be told."""


REASON_CHARACTERS_MAX: Final = 2000
"""As long as a text of the wire may be."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a contribution may go beyond what is usual. A factor of 0 sets no limit."""

    clip_factor: float = 3.0
    """F: times the usual norm above which a delta is scaled down."""
    reject_factor: float = 30.0
    """R: times the usual norm above which a delta is rejected."""
    weight_factor: float = 4.0
    """W: times the usual weight, and times the usual rate, that a learner counts for at most."""
    claim_factor: float = 64.0
    """C: times the usual rate at which what a learner claims to have done must have been possible."""
    opposition_max: float = 0.25
    """D: how far a delta may be opposed to the others of its round, as a cosine; 1 sets no limit."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A contribution that passed the screen of its books and payload, and what is judged of it."""

    contribution: Contribution
    weight: float
    """Without any limit."""
    norm: float | None
    """L2 norm of the decoded delta, counters left out; None = not measured, and not judged."""
    sketch: bytes = b""
    """Of its direction; empty = it has none, or is not judged by it."""

    @property
    def rate(self) -> float:
        """Tokens per second by its own word; 0 if it took no time."""
        rate = self.contribution.tokens / self.contribution.seconds if self.contribution.seconds > 0 else 0.0
        return rate if math.isfinite(rate) else 0.0


USUAL: Final = Limits()
"""Where nothing else was set."""


class Fault(NamedTuple):
    """Why a contribution may not be merged."""

    kind: str
    """In one word, as in a Rejection."""
    text: str
    """Half a sentence."""


NOTHING_KNOWN: Final = Conduct()
"""Before the first recipe."""


def reason_of(contribution_id: ContributionId, fault: str) -> str:
    """What a learner and the log are told of a fault, which is half a sentence."""
    return f"learner {contribution_id.learner}, fragment {contribution_id.fragment}: {fault}"[:REASON_CHARACTERS_MAX]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of the candidates of a round. Without anything said, all are merged as they are."""

    faults: Mapping[ContributionId, Fault] = field(default_factory=dict)
    """Why some may not be merged."""
    clips: Mapping[ContributionId, float] = field(default_factory=dict)
    """Factors below 1 on the deltas of others."""
    weight_max: float = math.inf
    """The most that any contribution counts."""
    rate_factor: float = math.inf
    """Times the median rate that any learner counts for at most in the fraction of the step."""
    conduct: Conduct = NOTHING_KNOWN
    """What the next round is judged by, if all are merged."""

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The faults as they are settled, in sorted id order."""
        return tuple(
            Rejection(id=name, reason=reason_of(name, fault.text), kind=fault.kind)
            for name, fault in sorted(self.faults.items())
        )


def judge(
    candidates: Sequence[Candidate], past: Conduct, limits: Limits, *, unix: float, is_buffers: bool = False
) -> Judgement:
    """Judges the candidates of one round, of distinct learners; `past` is that of the head, `unix` the broker's time.

    Buffers are measured, not learned, and jump when the data does: they are clipped, never rejected for their norm.
    """
    norm = _median([*(habit.norm for habit in past.habits), *(one.norm or 0.0 for one in candidates)])
    steps = _median([*(habit.steps for habit in past.habits), *(one.contribution.steps for one in candidates)])
    weight = _median([*(habit.weight for habit in past.habits), *(one.weight for one in candidates)])
    rate = _usual_rate(past, candidates)
    tokens_max = limits.claim_factor * (_usual_tokens(past, rate, unix) + rate * SLACK_SECONDS)
    measured = [one.norm for one in candidates if one.norm]
    company = _median(measured) if len(measured) >= COMPANY_MIN and not is_buffers else math.inf
    tokens_before = {habit.learner: habit.tokens for habit in past.habits}
    opposed = oppositions({one.contribution.id: one.sketch for one in candidates}, limits.opposition_max)
    faults: dict[ContributionId, Fault] = {}
    clips: dict[ContributionId, float] = {}
    for one in candidates:
        name, growth = one.contribution.id, _growth(one.contribution.steps, steps)
        usual = growth * norm
        tokens = tokens_before.get(name.learner, 0) + one.contribution.tokens
        if tokens_max and tokens > tokens_max:
            faults[name] = Fault(
                "claim",
                f"with its {one.contribution.tokens} tokens the learner would have {tokens} in this fragment, but with "
                f"{limits.claim_factor:g} times the usual rate there was time for only {tokens_max:.4g}",
            )
        elif name in opposed:
            faults[name] = Fault(
                "direction",
                f"its delta is opposed to those of the others, with a cosine of {opposed[name]:.2f}; the limit is "
                f"{-limits.opposition_max:g}",
            )
        elif not one.norm or not usual:
            continue
        elif limits.reject_factor and one.norm > limits.reject_factor * max(usual, growth * company):
            faults[name] = Fault(
                "norm",
                f"its delta has the norm {one.norm:.4g}, {one.norm / usual:.4g} times what is usual for "
                f"{one.contribution.steps} steps; the limit is {limits.reject_factor:g} times",
            )
        elif limits.clip_factor and one.norm > limits.clip_factor * usual:
            clips[name] = limits.clip_factor * usual / one.norm
    return Judgement(
        faults,
        clips,
        weight_max=limits.weight_factor * weight or math.inf,
        rate_factor=limits.weight_factor or math.inf,
    )


def judge_round(
    candidates: Sequence[Candidate],
    head: VersionInfo,
    learners: Sequence[LearnerInfo],
    limits: Limits,
    *,
    is_buffers: bool = False,
) -> Judgement:
    """Judges the candidates of the round on `head` by what a listing says, and nothing else."""
    past = head.recipe.conduct if head.recipe is not None else NOTHING_KNOWN
    unix = max((info.last_seen_unix for info in learners), default=past.seen_unix)
    judgement = judge(candidates, past, limits, unix=unix, is_buffers=is_buffers)
    if judgement.faults:
        return judgement
    return replace(judgement, conduct=next_conduct(past, candidates, judgement, version=head.version + 1, unix=unix))


def next_conduct(
    past: Conduct, merged: Sequence[Candidate], judgement: Judgement, *, version: Version, unix: float
) -> Conduct:
    """The conduct for the recipe of `version`, made from these by this judgement: what the next round is judged by.

    Norms and weights enter as they were merged, so that one that went too far moves the median no more than it moved
    the model.
    """
    before = {habit.learner: habit for habit in past.habits if habit.version > version - HABIT_VERSIONS}
    for one in merged:
        name = one.contribution.id
        tokens = before[name.learner].tokens if name.learner in before else 0
        before[name.learner] = Habit(
            learner=name.learner,
            version=version,
            norm=(one.norm or 0.0) * judgement.clips.get(name, 1.0),
            steps=one.contribution.steps,
            weight=min(one.weight, judgement.weight_max),
            rate=one.rate,
            tokens=min(COUNT_MAX, tokens + one.contribution.tokens),
        )
    newest = sorted(before.values(), key=lambda habit: (-habit.version, habit.learner))[:HABITS_MAX]
    habits = tuple(sorted(newest, key=lambda habit: habit.learner))
    usual_tokens = _usual_tokens(past, _usual_rate(past, merged), unix)
    return Conduct(habits=habits, usual_tokens=usual_tokens, seen_unix=unix)


def _median(values: Iterable[float]) -> float:
    """Of those that are known; 0 if none is."""
    known = [value for value in values if value > 0]
    return float(statistics.median(known)) if known else 0.0


def _growth(steps: int, usual_steps: float) -> float:
    return min(max(1.0, math.sqrt(steps / usual_steps)), GROWTH_MAX) if usual_steps else 1.0


def _usual_rate(past: Conduct, candidates: Sequence[Candidate]) -> float:
    return _median([*(habit.rate for habit in past.habits), *(one.rate for one in candidates)])


def _usual_tokens(past: Conduct, rate: float, unix: float) -> float:
    """What one of the median rate can have done since the first recipe, each stretch at the rate of its time.

    A clock that is set back stops it, and does not turn it back.
    """
    seconds = max(0.0, unix - past.seen_unix) if past.seen_unix else 0.0
    return min(float(COUNT_MAX), past.usual_tokens + rate * seconds)
