"""How a round begins: the lease, the store, the payloads, the quorum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from isles.outer import orders
from isles.outer.orders import (
    Commit,
    FetchPayloads,
    ForgetPayloads,
    Hinted,
    LeaseGranted,
    LeaseLost,
    List,
    Listed,
    Log,
    Merge,
    Merged,
    TimerFired,
)
from isles.outer.rounds import State
from isles.proto.messages import (
    Contribution,
    Fenced,
    LearnerInfo,
    Listing,
)

if TYPE_CHECKING:
    from tests.unit.outer.rounds.conftest import Bench, MakeBench


def test_nothing_is_ordered_without_a_lease(
    make_bench: MakeBench, make_listing: Callable[..., Listing], rows: list[Contribution]
) -> None:
    bench = make_bench(has_lease=False)
    assert bench.tell(Hinted()) == []
    assert bench.tell(Listed(make_listing(rows, []))) == []
    assert bench.tell(TimerFired()) == []
    assert bench.state is State.STANDBY


def test_a_granted_lease_lists_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(has_lease=False)
    bench.tell(LeaseGranted(1))
    assert bench.has(List)
    assert bench.state is State.IDLE


def test_a_renewed_lease_changes_nothing(bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]) -> None:
    bench.merge_all(rows, learners)
    assert bench.tell(LeaseGranted(1)) == []
    assert bench.state is State.MERGING


@pytest.mark.parametrize("event", [LeaseLost(), Fenced(epoch=2)])
def test_whoever_loses_its_lease_forgets_everything(
    event: orders.Event, bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = bench.merge_all(rows, learners)
    bench.tell(event)
    assert set(bench.one(ForgetPayloads).ids) == {row.id for row in rows}
    assert bench.state is State.STANDBY
    assert bench.tell(Merged(plan, bench.blobs)) == []


def test_a_new_epoch_begins_again_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    old = bench.merge_all(rows, learners)
    bench.tell(LeaseGranted(2))
    assert bench.has(List)
    bench.tell(Merged(old, bench.blobs))
    assert not bench.has(Commit)
    bench.look(rows, learners)
    assert bench.one(FetchPayloads).contributions == tuple(rows)
    bench.pass_screen(*rows)
    assert bench.one(Merge).plan.epoch == 2


def test_payloads_are_fetched_once_as_their_rows_appear(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows[:1], learners)
    assert bench.one(FetchPayloads).contributions == (rows[0],)
    bench.hint(rows[:2], learners)
    assert bench.one(FetchPayloads).contributions == (rows[1],)
    bench.hint(rows[:2], learners)
    assert not bench.has(FetchPayloads)


def test_a_round_opens_with_its_first_row(bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]) -> None:
    bench.look([], learners)
    assert bench.state is State.IDLE
    bench.hint(rows[:1], learners)
    assert bench.state is State.COLLECTING
    opened = bench.one(Log)
    assert opened.event == "round.opened"
    assert opened.fields == {"fragment": 0, "version": 0, "learner": "a"}


def test_many_hints_during_one_list_ask_once_more(bench: Bench, learners: list[LearnerInfo]) -> None:
    assert not any(isinstance(order, List) for _ in range(5) for order in bench.tell(Hinted()))
    bench.look([], learners)
    assert bench.has(List)
    bench.look([], learners)
    assert not bench.has(List)


def test_the_store_is_looked_at_again_when_no_hint_came(bench: Bench, learners: list[LearnerInfo]) -> None:
    bench.look([], learners)
    assert bench.timer_at == bench.list_seconds
    assert not any(isinstance(order, List) for order in bench.wait(bench.list_seconds / 2))
    assert any(isinstance(order, List) for order in bench.wait(bench.list_seconds / 2))


def test_a_round_waits_for_its_quorum_of_screened_rows(
    make_bench: MakeBench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench = make_bench(quorum=2)
    bench.look(rows[:2], learners)
    bench.pass_screen(rows[0])
    assert bench.state is State.COLLECTING
    bench.pass_screen(rows[1])
    assert bench.state is State.GRACE


def test_a_round_wants_no_more_learners_than_live(
    make_bench: MakeBench, rows: list[Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    bench = make_bench(quorum=3)
    learners = [make_learner("a"), make_learner("b"), make_learner("c")]
    bench.look(rows[:1], learners)
    bench.pass_screen(rows[0])
    assert bench.state is State.COLLECTING
    gone = [make_learner(name, is_live=False) for name in ("b", "c")]
    bench.hint(rows[:1], [learners[0], *gone])
    assert bench.state is State.MERGING


def test_what_the_dead_have_left_is_merged_without_waiting(
    make_bench: MakeBench, rows: list[Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    bench = make_bench(quorum=3)
    plan = bench.merge_all(rows[:1], [make_learner(name, is_live=False) for name in "abc"])
    assert plan.contributions == (rows[0],)
    assert plan.recipe.fraction == 1.0
