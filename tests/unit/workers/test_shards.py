from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.proto.errors import UsageError
from isles.workers.data.shards import NUM_SHARDS, ShardPlan, ShardReader, validation_windows

CONTEXT = 4
PLAN = ShardPlan(num_bytes=250, context=CONTEXT, seed=7, num_shards=10)
"""Ten shards of six windows each: window w of shard s starts at byte 4 * (10 w + s)."""
TEXT = torch.arange(250, dtype=torch.uint8)
"""Each byte is its own offset, so that a window tells where it came from."""


def reader(shards: dict[int, int], batch_size: int = 3) -> ShardReader:
    return ShardReader(TEXT, PLAN, batch_size, shards)


def shard_of(start: int) -> int:
    return start // CONTEXT % PLAN.num_shards


def starts(subject: ShardReader, num_batches: int) -> list[int]:
    """The offset in the text of every window drawn."""
    return [int(row[0]) for _ in range(num_batches) for row in subject.next_batch()[0]]


def test_a_batch_is_rows_of_the_text_and_the_same_rows_one_byte_later() -> None:
    inputs, targets = reader({0: 0, 5: 0, 9: 0}).next_batch()
    assert inputs.shape == targets.shape == (3, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(CONTEXT))


def test_a_pass_takes_every_window_of_a_shard_once() -> None:
    drawn = starts(reader({3: 0}, batch_size=1), PLAN.windows_per_shard)
    assert sorted(drawn) == [PLAN.start(3, window) for window in range(6)]


def test_each_pass_has_its_own_order_that_repeats_with_the_seed() -> None:
    plan = ShardPlan(num_bytes=10_000, context=8, seed=7, num_shards=4)
    assert plan.order(1, 0) == ShardPlan(num_bytes=10_000, context=8, seed=7, num_shards=4).order(1, 0)
    others = [plan.order(1, 1), plan.order(2, 0), ShardPlan(10_000, 8, seed=8, num_shards=4).order(1, 0)]
    assert all(other != plan.order(1, 0) for other in others)
    assert all(sorted(other) == list(range(plan.windows_per_shard)) for other in others)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ShardPlan(num_bytes=1000, context=8, seed=3, num_shards=10).order(4, 2) == [
        4,
        6,
        3,
        2,
        11,
        9,
        5,
        7,
        10,
        8,
        1,
        0,
    ]


def test_a_batch_takes_one_window_of_each_of_as_many_shards_as_it_can() -> None:
    subject = reader(dict.fromkeys(range(5), 0), batch_size=3)
    drawn = [shard_of(start) for start in starts(subject, 5)]
    assert drawn[:3] == [0, 1, 2]
    assert drawn[3:6] == [3, 4, 0]
    assert Counter(drawn) == dict.fromkeys(range(5), 3)


def test_fewer_shards_than_rows_give_several_windows_each() -> None:
    subject = reader({2: 0}, batch_size=4)
    assert len(set(starts(subject, 1))) == 4
    assert subject.cursors == {2: 4}


def test_the_cursor_alone_says_what_comes_next() -> None:
    whole = starts(reader({4: 0}, batch_size=1), 20)
    subject = reader({4: 0}, batch_size=1)
    first = starts(subject, 8)
    heir = reader(subject.cursors, batch_size=1)
    assert first + starts(heir, 12) == whole


def test_cursors_is_a_copy() -> None:
    subject = reader({4: 0})
    subject.cursors[4] = 99
    assert subject.cursors == {4: 0}


def test_a_kept_shard_goes_on_from_the_larger_cursor() -> None:
    subject = reader({1: 0, 2: 5}, batch_size=2)
    subject.next_batch()
    subject.replace({1: 0, 2: 9, 3: 4})
    assert subject.cursors == {1: 1, 2: 9, 3: 4}


def test_a_shard_that_is_lost_is_not_read_again() -> None:
    subject = reader({1: 0, 2: 0, 3: 0})
    subject.next_batch()
    subject.replace({2: 1, 6: 0})
    assert {shard_of(start) for start in starts(subject, 4)} == {2, 6}
    assert set(subject.cursors) == {2, 6}


def test_a_lost_shard_comes_back_with_the_cursor_of_the_broker() -> None:
    subject = reader({1: 0}, batch_size=4)
    subject.next_batch()
    subject.replace({})
    subject.replace({1: 2})
    assert subject.cursors == {1: 2}


def test_a_shard_is_finished_when_a_pass_ended_since_it_was_leased() -> None:
    subject = reader({1: 0, 2: 5, 3: 12}, batch_size=3)
    assert subject.finished_shards() == {}
    subject.next_batch()
    assert subject.finished_shards() == {2: 6}
    subject.replace(subject.cursors)
    assert subject.finished_shards() == {2: 6}
    subject.replace({1: 1, 3: 13})
    assert subject.finished_shards() == {}


def test_a_finished_shard_is_read_again_while_nothing_replaces_it() -> None:
    drawn = starts(reader({1: 0}, batch_size=6), 2)
    assert sorted(drawn[:6]) == sorted(drawn[6:])


def test_a_learner_without_shards_is_told_why_it_cannot_read() -> None:
    with pytest.raises(UsageError, match="holds no data shard"):
        reader({}).next_batch()


@pytest.mark.parametrize("leased", [{10: 0}, {-1: 0}, {0: -1}])
def test_shards_that_the_plan_does_not_have_are_refused_and_nothing_changes(leased: dict[int, int]) -> None:
    subject = reader({1: 0})
    with pytest.raises(UsageError, match="none of this run's 10 shards"):
        subject.replace({5: 0, **leased})
    assert subject.cursors == {1: 0}


def test_a_text_too_short_for_its_shards_is_refused_with_the_size_it_needs() -> None:
    needed = NUM_SHARDS * 64 + 1
    assert ShardPlan(num_bytes=needed, context=64).windows_per_shard == 1
    with pytest.raises(UsageError, match=f"need {needed}"):
        ShardPlan(num_bytes=needed - 1, context=64)


@settings(max_examples=50, deadline=None)
@given(num_bytes=st.integers(1, 5000), context=st.integers(1, 60), num_shards=st.integers(1, 50))
def test_windows_follow_each_other_through_the_text_dealt_to_the_shards_in_turn(
    num_bytes: int, context: int, num_shards: int
) -> None:
    if num_bytes < num_shards * context + 1:
        return
    plan = ShardPlan(num_bytes=num_bytes, context=context, num_shards=num_shards)
    starts = [plan.start(shard, window) for window in range(plan.windows_per_shard) for shard in range(num_shards)]
    assert starts == [context * number for number in range(len(starts))]
    assert starts[-1] + context + 1 <= num_bytes
    assert num_bytes - (starts[-1] + context + 1) <= num_shards * context


def test_validation_windows_are_fixed_spread_over_the_text_and_never_overlap() -> None:
    inputs, targets = validation_windows(TEXT, 10, CONTEXT)
    again, _ = validation_windows(TEXT, 10, CONTEXT)
    assert inputs.shape == (10, CONTEXT)
    assert torch.equal(inputs, again)
    assert torch.equal(targets, inputs + 1)
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 249
    assert (inputs[1:, 0] - inputs[:-1, 0] >= CONTEXT).all()


@pytest.mark.parametrize(("length", "expected"), [(5, 1), (8, 1), (9, 2), (250, 62)])
def test_a_short_text_gives_as_many_validation_windows_as_fit(length: int, expected: int) -> None:
    inputs, _ = validation_windows(TEXT[:length], 1000, CONTEXT)
    assert len(inputs) == expected
    assert (inputs[1:, 0] - inputs[:-1, 0] >= CONTEXT).all()


def test_one_validation_window_is_the_first() -> None:
    assert validation_windows(TEXT, 1, CONTEXT)[0].tolist() == [[0, 1, 2, 3]]


def test_a_held_out_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(UsageError, match="held-out text has 4 bytes"):
        validation_windows(TEXT[:4], 8, CONTEXT)
