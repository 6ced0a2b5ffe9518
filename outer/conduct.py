"""Whether a contribution is in proportion: how far it goes, and what it claims, beside what its fragment is used to.

    usual norm   U: median over the votes of T_i min(max(1, n / n_i), G)       n: steps of the contribution,
                 or, if that is more, the same over those of the round alone   n_i, T_i: steps and norm of a vote
    clip         min(1, F U / norm) among three or more, else min(1, 3 F U / norm)
    reject       norm > R U, among three or more; or norm > F U after N of this learner that were clipped so, in a row
    weight       at most W times the median weight over the votes
    direction    cosine with the sum of all others of the round, each with length 1: not below -D
    tokens       all that a learner has claimed so far, at most C times what one of the median rate can have done

A vote is what a learner's last merged contribution was like, or what one of this round is like. So a learner that is in
the round has two votes and another one has one, however often it contributes. A round without a past is judged by
itself; and where all norms change alike, as at the beginning of a run, the median goes along. Of fewer than three
nothing is rejected for its norm, as the past alone may have become wrong for everybody: what is merged clipped then
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
"""G: four times the steps may go four times as far; those that have nothing in common take sixteen times as many to.
Whoever claims more gets no larger bound."""

HABITS_MAX: Final = 64
"""Learners whose habits travel in a recipe, those merged last: one more hardly moves a median of so many."""

HABIT_VERSIONS: Final = 64
"""A habit that is older than so many versions says little about the model of today."""

SLACK_SECONDS: Final = 60.0
"""Work may have begun before its time was counted, such as while the run was being initialised."""

COMPANY_MIN: Final = 3
"""Contributions of one round from which on the odd one out can be told."""

ALONE_FACTOR: Final = 3.0
"""How much farther one may go where it cannot be told: norms grow by as much from one version to the next when a short
run begins."""

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
    clips_max: int = 2
    """N: contributions of a learner to a fragment that are scaled down in a row; the next one is rejected."""


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
    company = [(one.norm, one.contribution.steps) for one in candidates if one.norm]
    has_company = len(company) >= COMPANY_MIN
    votes = [*((habit.norm, habit.steps) for habit in past.habits), *company]
    clip_factor = limits.clip_factor if has_company else ALONE_FACTOR * limits.clip_factor
    weight = _median([*(habit.weight for habit in past.habits), *(one.weight for one in candidates)])
    rate = _usual_rate(past, candidates)
    tokens_max = limits.claim_factor * (_usual_tokens(past, rate, unix) + rate * SLACK_SECONDS)
    habits = {habit.learner: habit for habit in past.habits}
    opposed = oppositions({one.contribution.id: one.sketch for one in candidates}, limits.opposition_max)
    usual_norms: dict[int, float] = {}
    faults: dict[ContributionId, Fault] = {}
    clips: dict[ContributionId, float] = {}
    for one in candidates:
        name, num_steps = one.contribution.id, one.contribution.steps
        if num_steps not in usual_norms:
            alone = _usual_norm(company, num_steps) if has_company else 0.0
            usual_norms[num_steps] = max(alone, _usual_norm(votes, num_steps))
        usual = usual_norms[num_steps]
        habit = habits.get(name.learner)
        fault = _claim_fault(one, habit.tokens if habit else 0, tokens_max, limits)
        fault = fault or _direction_fault(opposed.get(name), limits)
        if fault is None and has_company and not is_buffers:
            fault = _norm_fault(one, usual, habit.clips if habit else 0, limits)
        if fault is not None:
            faults[name] = fault
        elif one.norm and usual and clip_factor and one.norm > clip_factor * usual:
            clips[name] = clip_factor * usual / one.norm
    return Judgement(
        faults,
        clips,
        weight_max=limits.weight_factor * weight or math.inf,
        rate_factor=limits.weight_factor or math.inf,
    )


def _claim_fault(one: Candidate, tokens_before: int, tokens_max: float, limits: Limits) -> Fault | None:
    """Whether its learner would have claimed more in all than there was time for; a `tokens_max` of 0 is unknown."""
    tokens = tokens_before + one.contribution.tokens
    if not tokens_max or tokens <= tokens_max:
        return None
    text = (
        f"with its {one.contribution.tokens} tokens the learner would have {tokens} in this fragment, but with "
        f"{limits.claim_factor:g} times the usual rate there was time for only {tokens_max:.4g}"
    )
    return Fault("claim", text)


def _direction_fault(cosine: float | None, limits: Limits) -> Fault | None:
    """Whether it is opposed to the others; None = it is not, or is not compared."""
    if cosine is None:
        return None
    text = f"its delta is opposed to those of the others, with a cosine of {cosine:.2f}; the limit is "
    return Fault("direction", text + f"{-limits.opposition_max:g}")


def _norm_fault(one: Candidate, usual: float, num_clips: int, limits: Limits) -> Fault | None:
    """Whether it goes too far, after so many in a row that went far; a `usual` of 0 is unknown."""
    if not one.norm or not usual:
        return None
    times = one.norm / usual
    if limits.reject_factor and times > limits.reject_factor:
        limit = f"the limit is {limits.reject_factor:g} times"
    elif limits.clip_factor and limits.clips_max and times > limits.clip_factor and num_clips >= limits.clips_max:
        limit = f"{limits.clip_factor:g} times is far, and the last {num_clips} went as far"
    else:
        return None
    text = f"its delta has the norm {one.norm:.4g}, {times:.4g} times what is usual for {one.contribution.steps} steps"
    return Fault("norm", f"{text}; {limit}")


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
    the model. Where nobody can tell the odd one out, nothing is learnt about how often one was it.
    """
    has_company = sum(bool(one.norm) for one in merged) >= COMPANY_MIN
    before = {habit.learner: habit for habit in past.habits if habit.version > version - HABIT_VERSIONS}
    for one in merged:
        name = one.contribution.id
        habit = before.get(name.learner)
        tokens, clips = (habit.tokens, habit.clips) if habit else (0, 0)
        if has_company:
            clips = clips + 1 if name in judgement.clips else 0
        before[name.learner] = Habit(
            learner=name.learner,
            version=version,
            norm=(one.norm or 0.0) * judgement.clips.get(name, 1.0),
            steps=one.contribution.steps,
            weight=min(one.weight, judgement.weight_max),
            rate=one.rate,
            tokens=min(COUNT_MAX, tokens + one.contribution.tokens),
            clips=clips,
        )
    newest = sorted(before.values(), key=lambda habit: (-habit.version, habit.learner))[:HABITS_MAX]
    habits = tuple(sorted(newest, key=lambda habit: habit.learner))
    usual_tokens = _usual_tokens(past, _usual_rate(past, merged), unix)
    return Conduct(habits=habits, usual_tokens=usual_tokens, seen_unix=unix)


def _median(values: Iterable[float]) -> float:
    """Of those that are known; 0 if none is."""
    known = [value for value in values if value > 0]
    return float(statistics.median(known)) if known else 0.0


def _usual_norm(votes: Iterable[tuple[float, int]], steps: int) -> float:
    """The median of how far each vote says that so many steps go."""
    return _median(norm * min(max(1.0, steps / max(1, others)), GROWTH_MAX) for norm, others in votes)


def _usual_rate(past: Conduct, candidates: Sequence[Candidate]) -> float:
    return _median([*(habit.rate for habit in past.habits), *(one.rate for one in candidates)])


def _usual_tokens(past: Conduct, rate: float, unix: float) -> float:
    """What one of the median rate can have done since the first recipe, each stretch at the rate of its time.

    A clock that is set back stops it, and does not turn it back.
    """
    seconds = max(0.0, unix - past.seen_unix) if past.seen_unix else 0.0
    return min(float(COUNT_MAX), past.usual_tokens + rate * seconds)
