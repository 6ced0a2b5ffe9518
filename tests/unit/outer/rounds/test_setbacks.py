"""What a round does when something is refused, spoiled or late."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isles.outer.orders import (
    AskFailed,
    Hinted,
    List,
    Log,
    Merge,
    Merged,
    MergeFailed,
    PayloadScreened,
    SetTimer,
    Settle,
)
from isles.outer.rounds import RETRY_SECONDS, State
from isles.proto.messages import (
    Contribution,
    LearnerInfo,
    Rejection,
    Settled,
)

if TYPE_CHECKING:
    from tests.unit.outer.rounds.conftest import Bench


def test_what_fails_the_screen_is_settled_and_the_others_are_merged(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows, learners)
    bench.tell(PayloadScreened(rows[1].id, "not finite"))
    assert bench.one(Settle) == Settle(1, (Rejection(id=rows[1].id, reason="not finite"),))
    bench.pass_screen(rows[0], rows[2])
    bench.wait(bench.grace_seconds)
    assert bench.one(Merge).plan.contributions == (rows[0], rows[2])


def test_a_round_in_which_nothing_passes_is_abandoned_and_the_run_goes_on(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    bench.look(rows[:1], learners)
    bench.tell(PayloadScreened(rows[0].id, "not finite"))
    assert bench.has(Settle)
    assert bench.one(Log).event == "round.abandoned"
    assert "not finite" in bench.one(Log).fields["reason"]
    assert bench.state is State.IDLE
    bench.tell(Settled(fragment=0))
    assert bench.has(List)
    assert not bench.has(Settle)
    again = [make_contribution(name, 2) for name in "abc"]
    assert bench.merge_all(again, learners).contributions == tuple(again)


def test_a_rejection_is_ordered_once_at_a_time(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows, learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    bench.tell(PayloadScreened(rows[1].id, "worse"))
    assert not bench.has(Settle)
    bench.tell(Settled(fragment=0))
    assert [rejection.reason for rejection in bench.one(Settle).rejections] == ["worse"]


def test_a_settlement_that_was_refused_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    bench.tell(AskFailed("settle", "disk on fire"))
    assert not bench.has(Settle)
    bench.tell(Hinted())
    bench.look(rows[:1], learners)
    assert not bench.has(Settle)
    bench.clock.advance(RETRY_SECONDS)
    bench.tell(Hinted())
    assert bench.has(Settle)


def test_a_step_that_is_not_finite_rejects_who_spoiled_it(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(MergeFailed(plan, "not finite", (Rejection(id=rows[2].id, reason="too large"),)))
    assert bench.one(Log).event == "round.abandoned"
    bench.look(rows, learners)
    assert bench.one(Settle).rejections[0].id == rows[2].id
    bench.wait(bench.grace_seconds)
    assert bench.one(Merge).plan.contributions == tuple(rows[:2])


def test_a_merge_that_failed_for_nobodys_fault_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(MergeFailed(plan, "the state cannot be had"))
    bench.look(rows, learners)
    assert not bench.has(Merge)
    bench.wait(RETRY_SECONDS)
    assert bench.has(Merge)


def test_a_verdict_on_a_row_that_was_forgotten_means_nothing(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.hint([], learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    assert not bench.has(Settle)
    assert bench.state is State.IDLE


def test_a_list_that_failed_is_repeated_when_it_is_time(bench: Bench) -> None:
    bench.tell(AskFailed("list", "not initialised"))
    assert bench.timer_at == bench.list_seconds
    assert any(isinstance(order, List) for order in bench.wait(bench.list_seconds))


def test_a_timer_that_fires_early_is_set_again(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.wait(bench.grace_seconds / 4)
    assert bench.one(SetTimer).at == bench.grace_seconds


def test_no_timer_stands_in_the_past_once_it_has_fired(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    for _ in range(10):
        bench.wait(1.0)
        assert all(order.at > bench.clock.now() for order in bench.ordered if isinstance(order, SetTimer))
        if bench.has(List):
            bench.look(rows, learners)
    assert bench.tell(Merged(plan, bench.blobs))


def test_a_row_that_comes_back_while_it_is_being_settled_stays_out(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    bench.tell(PayloadScreened(rows[0].id, "not finite"))
    bench.tell(Hinted())
    bench.look([], learners)
    bench.tell(Hinted())
    bench.look(rows[:1], learners)
    assert bench.state is State.IDLE
    bench.tell(Settled(fragment=0))
    assert bench.state is State.IDLE
