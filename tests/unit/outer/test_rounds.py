"""The round machine, driven by events on a clock that moves only when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from isles.outer import orders
from isles.outer.orders import (
    AskFailed,
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
    MergeFailed,
    NewBlobs,
    PayloadScreened,
    Plan,
    Rejoined,
    SetTimer,
    Settle,
    TimerFired,
)
from isles.outer.rounds import RETRY_SECONDS, Rounds, State
from isles.proto.agreement import SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.messages import (
    Averages,
    BlobRef,
    Committed,
    Contribution,
    Fenced,
    LearnerInfo,
    Listing,
    Recipe,
    Rejection,
    Settled,
    Stale,
)

BLOBS = NewBlobs(parameters_sha256="1" * 64, update=BlobRef(digest="2" * 64, size_bytes=10))
LIST_SECONDS = 2.0
GRACE_SECONDS = 0.5
SYNC = SyncSettings(quorum=1, grace_min_seconds=GRACE_SECONDS, grace_max_seconds=GRACE_SECONDS)

_Kind = TypeVar("_Kind")


class Bench:
    """Rounds with a clock and a memory of what they ordered last."""

    def __init__(self, sync: SyncSettings, make_listing: Callable[..., Listing]) -> None:
        self.clock = ManualClock()
        self.rounds = Rounds(0, sync, list_seconds=LIST_SECONDS)
        self.ordered: list[orders.Instruction] = []
        self.logged: list[Log] = []
        self.timer_at: float | None = None
        self.make_listing = make_listing

    def tell(self, event: orders.Event) -> list[orders.Instruction]:
        self.ordered = self.rounds.handle(event, self.clock.now())
        self.logged += [order for order in self.ordered if isinstance(order, Log)]
        for order in self.ordered:
            if isinstance(order, SetTimer):
                self.timer_at = order.at
        return self.ordered

    def list(self, pending: list[Contribution], learners: list[LearnerInfo], version: int = 0, **head: Any) -> None:
        self.tell(Listed(self.make_listing(pending, learners, version, **head)))

    def hint(self, pending: list[Contribution], learners: list[LearnerInfo], version: int = 0) -> None:
        self.tell(Hinted())
        self.list(pending, learners, version)

    def pass_screen(self, *contributions: Contribution) -> None:
        for contribution in contributions:
            self.tell(PayloadScreened(contribution.id))

    def wait(self, seconds: float) -> list[orders.Instruction]:
        self.clock.advance(seconds)
        return self.tell(TimerFired())

    def one(self, kind: type[_Kind]) -> _Kind:
        [found] = [order for order in self.ordered if isinstance(order, kind)]
        return found

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(order, kind) for order in self.ordered)

    @property
    def state(self) -> State:
        return self.rounds.state

    def log_names(self) -> list[str]:
        return [log.event for log in self.logged]


MakeBench = Callable[[SyncSettings], Bench]


@pytest.fixture
def make_bench(make_listing: Callable[..., Listing]) -> MakeBench:
    def make(sync: SyncSettings) -> Bench:
        bench = Bench(sync, make_listing)
        bench.tell(LeaseGranted(1))
        return bench

    return make


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench(SYNC)


@pytest.fixture
def learners(make_learner: Callable[..., LearnerInfo]) -> list[LearnerInfo]:
    return [make_learner(name) for name in ("a", "b", "c")]


@pytest.fixture
def rows(make_contribution: Callable[..., Contribution]) -> list[Contribution]:
    return [make_contribution(name) for name in ("a", "b", "c")]


def merge_all(bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], version: int = 0) -> Plan:
    bench.list(rows, learners, version)
    bench.pass_screen(*rows)
    return bench.one(Merge).plan


# ------------------------------------------------------------------------------------------------------------- standby


def test_nothing_is_ordered_without_a_lease(make_listing: Callable[..., Listing], rows: list[Contribution]) -> None:
    bench = Bench(SYNC, make_listing)
    assert bench.tell(Hinted()) == []
    assert bench.tell(Listed(make_listing(rows, []))) == []
    assert bench.tell(TimerFired()) == []
    assert bench.state is State.STANDBY


def test_a_granted_lease_lists_at_once(make_listing: Callable[..., Listing]) -> None:
    bench = Bench(SYNC, make_listing)
    bench.tell(LeaseGranted(1))
    assert bench.has(List)
    assert bench.state is State.IDLE


def test_a_renewed_lease_changes_nothing(bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]) -> None:
    merge_all(bench, rows, learners)
    assert bench.tell(LeaseGranted(1)) == []
    assert bench.state is State.MERGING


@pytest.mark.parametrize("event", [LeaseLost(), Fenced(epoch=2)])
def test_whoever_loses_its_lease_forgets_everything(
    event: orders.Event, bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(event)
    assert set(bench.one(ForgetPayloads).ids) == {row.id for row in rows}
    assert bench.state is State.STANDBY
    assert bench.tell(Merged(plan, BLOBS)) == []


def test_a_new_epoch_begins_again_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    old = merge_all(bench, rows, learners)
    bench.tell(LeaseGranted(2))
    assert bench.has(List)
    bench.tell(Merged(old, BLOBS))
    assert not bench.has(Commit)
    bench.list(rows, learners)
    assert bench.one(FetchPayloads).contributions == tuple(rows)
    bench.pass_screen(*rows)
    assert bench.one(Merge).plan.epoch == 2


# ---------------------------------------------------------------------------------------------------------- collecting


def test_payloads_are_fetched_once_as_their_rows_appear(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    assert bench.one(FetchPayloads).contributions == (rows[0],)
    bench.hint(rows[:2], learners)
    assert bench.one(FetchPayloads).contributions == (rows[1],)
    bench.hint(rows[:2], learners)
    assert not bench.has(FetchPayloads)


def test_a_round_opens_with_its_first_row(bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]) -> None:
    bench.list([], learners)
    assert bench.state is State.IDLE
    bench.hint(rows[:1], learners)
    assert bench.state is State.COLLECTING
    opened = bench.one(Log)
    assert opened.event == "round.opened"
    assert opened.fields == {"fragment": 0, "version": 0, "learner": "a"}


def test_many_hints_during_one_list_ask_once_more(bench: Bench, learners: list[LearnerInfo]) -> None:
    assert not any(isinstance(order, List) for _ in range(5) for order in bench.tell(Hinted()))
    bench.list([], learners)
    assert bench.has(List)
    bench.list([], learners)
    assert not bench.has(List)


def test_the_store_is_looked_at_again_when_no_hint_came(bench: Bench, learners: list[LearnerInfo]) -> None:
    bench.list([], learners)
    assert bench.timer_at == LIST_SECONDS
    assert not any(isinstance(order, List) for order in bench.wait(LIST_SECONDS / 2))
    assert any(isinstance(order, List) for order in bench.wait(LIST_SECONDS / 2))


def test_a_round_waits_for_its_quorum_of_screened_rows(
    make_bench: MakeBench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench = make_bench(SYNC.model_copy(update={"quorum": 2}))
    bench.list(rows[:2], learners)
    bench.pass_screen(rows[0])
    assert bench.state is State.COLLECTING
    bench.pass_screen(rows[1])
    assert bench.state is State.GRACE


def test_a_round_wants_no_more_learners_than_live(
    make_bench: MakeBench, rows: list[Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    bench = make_bench(SYNC.model_copy(update={"quorum": 3}))
    learners = [make_learner("a"), make_learner("b"), make_learner("c")]
    bench.list(rows[:1], learners)
    bench.pass_screen(rows[0])
    assert bench.state is State.COLLECTING
    gone = [make_learner(name, is_live=False) for name in ("b", "c")]
    bench.hint(rows[:1], [learners[0], *gone])
    assert bench.state is State.MERGING


def test_what_the_dead_have_left_is_merged_without_waiting(
    make_bench: MakeBench, rows: list[Contribution], make_learner: Callable[..., LearnerInfo]
) -> None:
    bench = make_bench(SYNC.model_copy(update={"quorum": 3}))
    plan = merge_all(bench, rows[:1], [make_learner(name, is_live=False) for name in "abc"])
    assert plan.contributions == (rows[0],)
    assert plan.recipe.fraction == 1.0


# --------------------------------------------------------------------------------------------------------------- grace


def test_a_round_that_has_everyone_merges_at_once(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    assert [contribution.id.learner for contribution in plan.contributions] == ["a", "b", "c"]
    assert plan.recipe.fraction == 1.0
    assert bench.state is State.MERGING


def test_a_round_without_everyone_merges_when_the_grace_window_ends(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.pass_screen(rows[0])
    assert bench.timer_at == GRACE_SECONDS
    bench.wait(GRACE_SECONDS / 2)
    assert bench.state is State.GRACE
    bench.wait(GRACE_SECONDS / 2)
    plan = bench.one(Merge).plan
    assert plan.contributions == (rows[0],)
    assert plan.recipe.fraction == pytest.approx(1 / 3)
    assert plan.recipe.grace_seconds == GRACE_SECONDS
    assert plan.recipe.waited_seconds == GRACE_SECONDS


def test_who_arrives_within_the_grace_window_is_merged_too(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.clock.advance(GRACE_SECONDS / 2)
    bench.hint(rows[:2], learners)
    bench.pass_screen(rows[1])
    assert bench.state is State.GRACE
    bench.wait(GRACE_SECONDS / 2)
    assert len(bench.one(Merge).plan.contributions) == 2


def test_a_row_still_being_fetched_when_the_window_ends_waits_for_the_next_round(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows, learners)
    bench.pass_screen(rows[1], rows[2])
    bench.wait(GRACE_SECONDS)
    plan = bench.one(Merge).plan
    assert plan.contributions == tuple(rows[1:])
    bench.pass_screen(rows[0])
    bench.tell(Merged(plan, BLOBS))
    bench.tell(Committed(fragment=0, version=1))
    bench.list(rows[:1], learners, version=1)
    assert not bench.has(FetchPayloads)
    assert bench.state is State.GRACE


def test_the_averages_go_on_where_the_last_version_left_them(
    make_bench: MakeBench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    sync = SyncSettings(quorum=1, overlap_steps=10.0, grace_share=0.5, grace_max_seconds=100.0)
    before = Averages(step_seconds=0.6, quorum_seconds=1.0, sync_seconds=2.0)
    recipe = Recipe(ingredients=(), fraction=1.0, merge_rule="mean", settings_digest="0" * 64, averages=before)
    bench = make_bench(sync)
    bench.list(rows[:1], learners, 5, recipe=recipe)
    bench.clock.advance(1.0)
    bench.pass_screen(rows[0])
    # step: 0.6 + 0.2 (0.1 - 0.6); quorum: another second; sync: not measured by this outer yet
    grace = 0.5 * (10 * 0.5 - (1.0 + 2.0))
    bench.wait(grace)
    made = bench.one(Merge).plan.recipe
    assert made.grace_seconds == pytest.approx(grace)
    assert made.averages.step_seconds == pytest.approx(0.5)
    assert (made.averages.quorum_seconds, made.averages.sync_seconds) == (1.0, 2.0)


def test_the_next_window_knows_how_long_the_last_synchronisation_took(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.clock.advance(0.25)
    bench.tell(Merged(plan, BLOBS))
    bench.clock.advance(0.5)
    bench.tell(Committed(fragment=0, version=1))
    again = [make_contribution(name, 2) for name in "abc"]
    assert merge_all(bench, again, learners, version=1).recipe.averages.sync_seconds == 0.75


# -------------------------------------------------------------------------------------------------------------- commit


def test_a_merge_is_committed_and_the_next_round_starts_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(Merged(plan, BLOBS))
    assert bench.one(Commit) == Commit(plan, BLOBS)
    bench.tell(Committed(fragment=0, version=1))
    assert bench.has(List)
    assert set(bench.one(ForgetPayloads).ids) == {row.id for row in rows}
    assert bench.state is State.IDLE
    [merged] = [log for log in bench.logged if log.event == "round.merged"]
    assert merged.fields["version"] == 1
    assert merged.fields["participants"] == merged.fields["live"] == 3


def test_a_listing_older_than_the_own_commit_is_not_believed(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(Merged(plan, BLOBS))
    bench.tell(Committed(fragment=0, version=1))
    bench.list(rows, learners, version=0)
    assert bench.has(List)
    assert not bench.has(FetchPayloads)
    assert bench.state is State.IDLE


def test_after_a_new_session_even_an_older_store_is_believed(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list([], learners, version=7)
    bench.tell(Rejoined())
    bench.list(rows[:1], learners, version=5)
    assert bench.state is State.COLLECTING


def test_rows_that_arrive_during_a_merge_are_fetched_but_not_added(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    plan = merge_all(bench, rows, learners)
    late = make_contribution("d")
    bench.hint([*rows, late], learners)
    assert bench.one(FetchPayloads).contributions == (late,)
    bench.tell(Merged(plan, BLOBS))
    assert bench.one(Commit).plan.contributions == tuple(rows)


def test_a_stale_commit_starts_again_from_the_store(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(Merged(plan, BLOBS))
    bench.tell(Stale(fragment=0, head=1, reason="the head is 1"))
    assert bench.has(List)
    assert bench.one(Log).event == "round.abandoned"
    bench.list(rows[2:], learners, version=1)
    bench.wait(GRACE_SECONDS)
    plan = bench.one(Merge).plan
    assert plan.head.version == 1
    assert plan.contributions == (rows[2],)


def test_another_outers_version_restarts_the_round(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.clock.advance(GRACE_SECONDS / 2)
    bench.hint(rows[1:2], learners, version=1)
    assert bench.one(ForgetPayloads).ids == (rows[0].id,)
    bench.pass_screen(rows[1])
    bench.wait(GRACE_SECONDS / 2)
    assert bench.state is State.GRACE
    bench.wait(GRACE_SECONDS / 2)
    assert bench.one(Merge).plan.head.version == 1


def test_a_commit_that_was_refused_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(Merged(plan, BLOBS))
    bench.tell(AskFailed("commit", "blob is not in the store"))
    bench.list(rows, learners)
    assert bench.state is State.GRACE
    assert bench.timer_at == RETRY_SECONDS
    bench.wait(RETRY_SECONDS)
    assert bench.has(Merge)


def test_a_lonely_round_among_live_learners_warns_once_until_it_changes(
    bench: Bench, learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    for version in range(3):
        row = make_contribution("a", version + 1)
        bench.list([row], learners, version)
        bench.pass_screen(row)
        bench.wait(GRACE_SECONDS)
        bench.tell(Merged(bench.one(Merge).plan, BLOBS))
        bench.tell(Committed(fragment=0, version=version + 1))
    assert bench.log_names().count("round.alone") == 1


def test_a_lonely_learner_that_is_all_alone_is_no_reason_to_warn(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows[:1], learners[:1])
    bench.tell(Merged(plan, BLOBS))
    bench.tell(Committed(fragment=0, version=1))
    assert "round.alone" not in bench.log_names()


# ----------------------------------------------------------------------------------------------------------- rejection


def test_what_fails_the_screen_is_settled_and_the_others_are_merged(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows, learners)
    bench.tell(PayloadScreened(rows[1].id, "not finite"))
    assert bench.one(Settle) == Settle(1, (Rejection(id=rows[1].id, reason="not finite"),))
    bench.pass_screen(rows[0], rows[2])
    bench.wait(GRACE_SECONDS)
    assert bench.one(Merge).plan.contributions == (rows[0], rows[2])


def test_a_round_in_which_nothing_passes_is_abandoned_and_the_run_goes_on(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo], make_contribution: Callable[..., Contribution]
) -> None:
    bench.list(rows[:1], learners)
    bench.tell(PayloadScreened(rows[0].id, "not finite"))
    assert bench.has(Settle)
    assert bench.one(Log).event == "round.abandoned"
    assert "not finite" in bench.one(Log).fields["reason"]
    assert bench.state is State.IDLE
    bench.tell(Settled(fragment=0))
    assert bench.has(List)
    assert not bench.has(Settle)
    again = [make_contribution(name, 2) for name in "abc"]
    assert merge_all(bench, again, learners).contributions == tuple(again)


def test_a_rejection_is_ordered_once_at_a_time(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows, learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    bench.tell(PayloadScreened(rows[1].id, "worse"))
    assert not bench.has(Settle)
    bench.tell(Settled(fragment=0))
    assert [rejection.reason for rejection in bench.one(Settle).rejections] == ["worse"]


def test_a_settlement_that_was_refused_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    bench.tell(AskFailed("settle", "disk on fire"))
    assert not bench.has(Settle)
    bench.tell(Hinted())
    bench.list(rows[:1], learners)
    assert not bench.has(Settle)
    bench.clock.advance(RETRY_SECONDS)
    bench.tell(Hinted())
    assert bench.has(Settle)


def test_a_step_that_is_not_finite_rejects_who_spoiled_it(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(MergeFailed(plan, "not finite", (Rejection(id=rows[2].id, reason="too large"),)))
    assert bench.one(Log).event == "round.abandoned"
    bench.list(rows, learners)
    assert bench.one(Settle).rejections[0].id == rows[2].id
    bench.wait(GRACE_SECONDS)
    assert bench.one(Merge).plan.contributions == tuple(rows[:2])


def test_a_merge_that_failed_for_nobodys_fault_is_tried_again_later(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    bench.tell(MergeFailed(plan, "the state cannot be had"))
    bench.list(rows, learners)
    assert not bench.has(Merge)
    bench.wait(RETRY_SECONDS)
    assert bench.has(Merge)


def test_a_verdict_on_a_row_that_was_forgotten_means_nothing(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.hint([], learners)
    bench.tell(PayloadScreened(rows[0].id, "bad"))
    assert not bench.has(Settle)
    assert bench.state is State.IDLE


# ---------------------------------------------------------------------------------------------------------------- time


def test_a_list_that_failed_is_repeated_when_it_is_time(bench: Bench) -> None:
    bench.tell(AskFailed("list", "not initialised"))
    assert bench.timer_at == LIST_SECONDS
    assert any(isinstance(order, List) for order in bench.wait(LIST_SECONDS))


def test_a_timer_that_fires_early_is_set_again(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.list(rows[:1], learners)
    bench.pass_screen(rows[0])
    bench.wait(GRACE_SECONDS / 4)
    assert bench.one(SetTimer).at == GRACE_SECONDS


def test_no_timer_stands_in_the_past_once_it_has_fired(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    plan = merge_all(bench, rows, learners)
    for _ in range(10):
        bench.wait(1.0)
        assert all(order.at > bench.clock.now() for order in bench.ordered if isinstance(order, SetTimer))
        if bench.has(List):
            bench.list(rows, learners)
    assert bench.tell(Merged(plan, BLOBS))
