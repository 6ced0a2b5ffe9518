"""What is in proportion, whatever one learner says and however the honest ones differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.conduct import (
    GROWTH_MAX,
    HABIT_VERSIONS,
    HABITS_MAX,
    SLACK_SECONDS,
    USUAL,
    Candidate,
    Judgement,
    Limits,
    judge,
    next_conduct,
)
from isles.proto.ids import ContributionId
from isles.proto.messages import COUNT_MAX, BlobRef, Conduct, Contribution

UNIX = 1e9
NOTHING = Conduct()
NO_LIMITS = Limits(0.0, 0.0, 0.0, 0.0, 1.0)


def candidate(learner: str, norm: float | None = 1.0, weight: float = 1000.0, **fields: Any) -> Candidate:
    values: dict[str, Any] = {
        "id": ContributionId(learner, 0, "ab" * 8, 1),
        "base_version": 0,
        "blob": BlobRef(digest="0" * 64, size_bytes=1),
        "codec": "int4",
        "tokens": 100,
        "steps": 10,
        "seconds": 1.0,
        "norms": (1.0,),
    }
    return Candidate(Contribution(**(values | fields)), weight, norm)


def after(rounds: Sequence[Sequence[Candidate]], past: Conduct = NOTHING, limits: Limits = USUAL) -> Conduct:
    """The conduct after these rounds, one second apart."""
    for version, candidates in enumerate(rounds, start=1):
        unix = UNIX + version
        judgement = judge(candidates, past, limits, unix=unix)
        passed = [one for one in candidates if one.contribution.id not in judgement.faults]
        past = next_conduct(past, passed, judgement, version=version, unix=unix)
    return past


def honest(num: int = 7) -> list[Candidate]:
    return [candidate(f"h{number}") for number in range(num)]


def kinds(judgement: Judgement) -> list[str]:
    return [fault.kind for fault in judgement.faults.values()]


# --------------------------------------------------------------------------------------------------- what is left alone


@given(st.lists(st.floats(1.0, 2.9), min_size=1, max_size=20), st.floats(1e-20, 1e20))
def test_learners_that_differ_as_honest_ones_do_are_left_alone(sizes: list[float], unit: float) -> None:
    candidates = [candidate(f"h{number}", size * unit) for number, size in enumerate(sizes)]
    judgement = judge(candidates, NOTHING, USUAL, unix=UNIX)
    assert not judgement.faults
    assert not judgement.clips


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_one_learner_alone_is_judged_by_itself_and_never_rejected(norms: list[float]) -> None:
    past = NOTHING
    for version, norm in enumerate(norms, start=1):
        one = candidate("only", norm)
        judgement = judge([one], past, USUAL, unix=UNIX)
        assert not judgement.faults
        assert not judgement.clips, "of two votes, one is at most twice their median"
        past = next_conduct(past, [one], judgement, version=version, unix=UNIX)


@given(st.floats(1e-3, 1e3))
def test_a_change_that_all_make_together_is_followed_at_once(change: float) -> None:
    past = after([honest()])
    judgement = judge([candidate(f"h{number}", change) for number in range(7)], past, USUAL, unix=UNIX + 2)
    assert not judgement.faults
    assert not judgement.clips


@given(st.integers(1, 10))
def test_few_steps_are_as_good_as_many(steps: int) -> None:
    past = after([honest()])
    one = candidate("h0", norm=math.sqrt(steps / 10), weight=10.0, steps=steps, tokens=10 * steps)
    judgement = judge([one], past, USUAL, unix=UNIX + 2)
    assert not judgement.faults
    assert not judgement.clips


@given(st.integers(10, 100_000))
def test_the_first_contribution_after_a_long_absence_is_not_rejected(steps: int) -> None:
    """Work whose norm grows with the root of its steps, handed in after all that time has passed."""
    past = after([honest()] * 3)
    one = candidate("late", math.sqrt(steps / 10), 1e9, steps=steps, tokens=10 * steps, seconds=steps / 10)
    judgement = judge([*honest(3), one], past, USUAL, unix=UNIX + 3 + steps / 10)
    assert not judgement.faults
    if steps <= 10 * GROWTH_MAX**2:
        assert not judgement.clips


@given(st.floats(1 / 30, 30))
def test_slow_and_fast_learners_are_believed(speed: float) -> None:
    fast = candidate("fast", tokens=max(1, round(100 * speed)), seconds=1.0)
    past = after([[*honest(), fast]] * 20)
    assert not judge([*honest(), fast], past, USUAL, unix=UNIX + 21).faults


@pytest.mark.parametrize("num_together", [1, 2, 3, 6])
def test_norms_that_change_for_all_are_followed_however_few_are_in_a_round(num_together: int) -> None:
    past, version = NOTHING, 0
    for size in [0.001, 1.0, 1.0, 1.0, 1.0, 1e-6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]:
        for first in range(0, 6, num_together):
            version += 1
            together = [candidate(f"h{first + number}", size) for number in range(num_together)]
            judgement = judge(together, past, USUAL, unix=UNIX + version)
            assert not judgement.faults
            past = next_conduct(past, together, judgement, version=version, unix=UNIX + version)
    assert {habit.norm for habit in past.habits} == {1.0}


@pytest.mark.parametrize("slowdown", [1e-4, 1e4])
def test_learners_that_all_become_slower_or_faster_are_believed(slowdown: float) -> None:
    past = after([honest()] * 1000)
    seconds = 1.0 * slowdown
    for version in range(1001, 1010):
        slow = [candidate(f"h{number}", seconds=seconds) for number in range(7)]
        judgement = judge(slow, past, USUAL, unix=past.seen_unix + seconds)
        assert not judgement.faults
        past = next_conduct(past, slow, judgement, version=version, unix=past.seen_unix + seconds)


def test_what_was_not_measured_is_not_judged() -> None:
    candidates = [candidate("a", None), candidate("b", 0.0), candidate("c", 5.0)]
    judgement = judge(candidates, NOTHING, USUAL, unix=UNIX)
    assert not judgement.faults
    assert not judgement.clips


# ------------------------------------------------------------------------------------------------- what is not believed


@given(st.floats(1e-300, 1e300), st.integers(0, COUNT_MAX), st.booleans())
def test_whatever_one_of_many_says_its_delta_is_merged_no_longer_than_the_limit(
    norm: float, steps: int, has_past: bool
) -> None:
    past = after([honest()] * 2) if has_past else NOTHING
    one = candidate("liar", norm, steps=steps)
    judgement = judge([*honest(), one], past, USUAL, unix=UNIX + 3)
    assert set(judgement.faults) | set(judgement.clips) <= {one.contribution.id}
    if not judgement.faults:
        assert norm * judgement.clips.get(one.contribution.id, 1.0) <= 1.001 * USUAL.clip_factor * GROWTH_MAX


@given(st.floats(0, 1e300))
def test_whatever_one_of_many_claims_it_counts_no_more_than_the_limit(weight: float) -> None:
    judgement = judge([*honest(), candidate("liar", weight=weight)], NOTHING, USUAL, unix=UNIX)
    assert judgement.weight_max == USUAL.weight_factor * 1000.0
    assert judgement.rate_factor == USUAL.weight_factor


@given(st.lists(st.integers(0, COUNT_MAX), min_size=1, max_size=30), st.floats(0.1, 1e6))
def test_the_tokens_that_one_learner_gets_merged_are_bounded_by_the_time_that_there_was(
    claims: list[int], seconds: float
) -> None:
    past = after([honest()])
    total = 0
    for version, tokens in enumerate(claims, start=2):
        one = candidate("liar", tokens=tokens, seconds=seconds)
        judgement = judge([one], past, USUAL, unix=UNIX + version)
        if not judgement.faults:
            total += tokens
            past = next_conduct(past, [one], judgement, version=version, unix=UNIX + version)
    assert total <= USUAL.claim_factor * 100.0 * (len(claims) + 1 + SLACK_SECONDS)


@pytest.mark.parametrize("num_honest", [2, 3, 7])
def test_a_hundredfold_delta_is_rejected_in_the_first_round_with_two_others(num_honest: int) -> None:
    judgement = judge([*honest(num_honest), candidate("loud", 100.0)], NOTHING, USUAL, unix=UNIX)
    [(name, fault)] = judgement.faults.items()
    assert (name.learner, fault.kind) == ("loud", "norm")
    assert "100 times what is usual for 10 steps; the limit is 30 times" in fault.text
    [rejection] = judgement.rejections
    assert (rejection.kind, rejection.reason) == ("norm", f"learner loud, fragment 0: {fault.text}")


def test_one_of_two_is_judged_by_the_past_of_both() -> None:
    past = after([honest(2)])
    assert not judge([*honest(1), candidate("h1", 100.0)], NOTHING, USUAL, unix=UNIX).faults
    judgement = judge([*honest(1), candidate("h1", 100.0)], past, USUAL, unix=UNIX)
    assert judgement.clips == {candidate("h1").contribution.id: pytest.approx(0.09)}


def test_who_contributes_often_has_no_more_votes_than_others() -> None:
    loud = [[candidate("loud", 2.5, weight=3000.0)] for _ in range(HABIT_VERSIONS - 1)]
    past = after([honest(5), *loud])
    judgement = judge([candidate("loud", 10.0)], past, USUAL, unix=UNIX + 100)
    assert judgement.clips == {candidate("loud").contribution.id: pytest.approx(9.0 / 10.0)}


def test_what_went_too_far_enters_the_past_as_it_was_merged() -> None:
    past = after([[*honest(), candidate("loud", 10.0, weight=1e6)]])
    [habit] = [habit for habit in past.habits if habit.learner == "loud"]
    assert (habit.norm, habit.weight) == (pytest.approx(3.0), 4000.0)


def test_who_goes_too_far_again_and_again_is_rejected_in_the_end() -> None:
    far = candidate("far", norm=5.0)
    twice = after([[*honest(3), far]] * 2)
    [fault] = judge([*honest(3), far], twice, USUAL, unix=UNIX + 3).faults.values()
    assert fault.kind == "norm"
    assert "the last 2 went as far" in fault.text
    assert not judge([*honest(3), far], after([[*honest(3), far]]), USUAL, unix=UNIX + 2).faults
    without = Limits(clips_max=0)
    assert not judge([*honest(3), far], twice, without, unix=UNIX + 3).faults


def test_one_that_is_as_long_as_others_is_forgiven_what_was_clipped_before() -> None:
    far, usual = candidate("far", norm=5.0), candidate("far")
    past = after([[*honest(3), far], [*honest(3), far], [*honest(3), usual], [*honest(3), far]])
    assert not judge([*honest(3), far], past, USUAL, unix=UNIX + 5).faults


def test_a_rejection_does_not_forgive_it() -> None:
    far = candidate("far", norm=5.0)
    past = after([[*honest(3), far]] * 5)
    assert judge([*honest(3), far], past, USUAL, unix=UNIX + 6).faults


def test_where_nobody_can_tell_the_odd_one_out_nobody_is_rejected_for_what_was_clipped() -> None:
    far = candidate("far", norm=20.0)
    past = after([honest(3), *([[honest(1)[0], far]] * 4)])
    assert not judge([honest(1)[0], far], past, USUAL, unix=UNIX + 6).faults
    assert all(habit.clips == 0 for habit in past.habits)


def test_buffers_are_clipped_and_not_rejected() -> None:
    judgement = judge([*honest(), candidate("loud", 1000.0)], NOTHING, USUAL, unix=UNIX, is_buffers=True)
    assert not judgement.faults
    assert judgement.clips == {candidate("loud").contribution.id: pytest.approx(0.003)}


def test_what_grows_as_fast_as_when_a_short_run_begins_is_left_alone() -> None:
    """Norms and steps of the first versions of a run whose learning rate rises within two contributions."""
    rounds = [
        [("a", 0.31, 24)],
        [("b", 0.20, 14), ("c", 0.09, 6), ("d", 0.02, 1)],
        [("c", 1.78, 48)],
        [("d", 1.94, 45)],
        [("a", 1.56, 44), ("b", 1.70, 41)],
        [("a", 5.95, 48)],
        [("e", 3.42, 24), ("b", 5.88, 44), ("c", 6.11, 48), ("d", 6.02, 48)],
    ]
    past = NOTHING
    for version, contributions in enumerate(rounds, start=1):
        candidates = [candidate(name, norm, steps=steps, seconds=float(steps)) for name, norm, steps in contributions]
        judgement = judge(candidates, past, USUAL, unix=UNIX + 10 * version)
        assert not judgement.faults
        assert not judgement.clips
        past = next_conduct(past, candidates, judgement, version=version, unix=UNIX + 10 * version)


def test_without_limits_nothing_is_judged() -> None:
    loud = candidate("loud", 1e30, weight=1e30, tokens=COUNT_MAX, steps=1)
    assert judge([*honest(), loud], NOTHING, NO_LIMITS, unix=UNIX) == Judgement()


# ------------------------------------------------------------------------------------------------------------- the past


@given(st.permutations(range(6)))
def test_the_order_in_which_contributions_came_decides_nothing(order: list[int]) -> None:
    candidates = [candidate(f"h{number}", 1.0 + number**3) for number in range(6)]
    straight = judge(candidates, NOTHING, USUAL, unix=UNIX)
    shuffled = [candidates[number] for number in order]
    assert judge(shuffled, NOTHING, USUAL, unix=UNIX) == straight
    assert next_conduct(NOTHING, shuffled, straight, version=1, unix=UNIX) == next_conduct(
        NOTHING, candidates, straight, version=1, unix=UNIX
    )


def test_the_past_has_a_bound() -> None:
    past = after([[candidate(f"l{number}")] for number in range(3 * HABITS_MAX)])
    assert len(past.habits) == HABITS_MAX
    assert min(habit.version for habit in past.habits) == 2 * HABITS_MAX + 1


def test_a_learner_that_was_not_merged_for_long_has_no_vote() -> None:
    past = after([[candidate("gone")], *[[candidate("here")]] * HABIT_VERSIONS])
    assert [habit.learner for habit in past.habits] == ["here"]


def test_a_clock_that_is_set_back_stops_the_time_and_does_not_turn_it_back() -> None:
    past = next_conduct(NOTHING, honest(), Judgement(), version=1, unix=UNIX)
    past = next_conduct(past, honest(), Judgement(), version=2, unix=UNIX + 100)
    past = next_conduct(past, honest(), Judgement(), version=3, unix=UNIX - 1e6)
    past = next_conduct(past, honest(), Judgement(), version=4, unix=UNIX - 1e6 + 10)
    assert past.usual_tokens == pytest.approx(110 * 100.0)


def test_what_a_learner_has_had_merged_is_added_up() -> None:
    past = after([[candidate("a", tokens=10)], [candidate("b", tokens=1)], [candidate("a", tokens=5)]])
    assert {habit.learner: habit.tokens for habit in past.habits} == {"a": 15, "b": 1}
