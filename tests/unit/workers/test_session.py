"""The session's rules, one sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.agreement import SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import Accepted, Expired, Fenced, Head, Merged, Rejected, Row
from isles.workers.session import (
    ApplyVersion,
    AskVersion,
    Await,
    Boundary,
    Cued,
    DrainRequested,
    ForgetPayload,
    FragmentBooks,
    FragmentSpoiled,
    Instruction,
    Log,
    OpenContribution,
    PayloadEncoded,
    PayloadFailed,
    Reset,
    Session,
    StepTaken,
    Stop,
    TakeAccount,
    VersionArrived,
    Welcomed,
)

INCARNATION = "aaaaaaaa"
OLDER = ContributionId("us-0", 0, "bbbbbbbb", 7)
OTHER = ContributionId("us-0", 0, "cccccccc", 7)


def make_session(*, restored: list[FragmentBooks] | None = None, **settings: Any) -> Session:
    sync = SyncSettings(**{"num_fragments": 1, "interval_steps": 4, **settings})
    return Session(sync, "us-0", INCARNATION, restored=restored)


def make_started(version: int = 0, **settings: Any) -> Session:
    """A fresh learner that holds `version` of every fragment."""
    session = make_session(**settings)
    count = session.sync.num_fragments
    session.handle(Welcomed([Head(fragment=fragment, version=version) for fragment in range(count)], []), 0.0)
    for fragment in range(count):
        session.handle(VersionArrived(fragment, version, None), 0.0)
    session.handle(Boundary(), 0.0)
    assert session.is_ready
    return session


def take_step(session: Session, tokens: int = 10) -> list[Instruction]:
    return session.handle(StepTaken(tokens, 0.5, {3: session.num_steps + 1}), 0.0)


def contribute(session: Session) -> TakeAccount:
    """Steps until the session takes an account, which encodes to something."""
    for _ in range(100):
        for one in take_step(session):
            if isinstance(one, TakeAccount):
                session.handle(PayloadEncoded(one.id), 0.0)
                return one
    raise AssertionError("no account was taken")


def arrive(session: Session, version: int, row: Row | None, fragment: int = 0) -> list[Instruction]:
    session.handle(VersionArrived(fragment, version, row, tokens_total=100 * version), 0.0)
    return session.handle(Boundary(), 0.0)


def row_of(named: ContributionId, state: str = "pending", settled_in: int | None = None, **fields: Any) -> Row:
    return Row.model_validate({"id": named, "state": state, "settled_in": settled_in, **fields})


def without_logs(instructions: list[Instruction]) -> list[Instruction]:
    return [one for one in instructions if not isinstance(one, Log)]


def accounts(instructions: list[Instruction]) -> list[int]:
    return [one.fragment for one in instructions if isinstance(one, TakeAccount)]


# ------------------------------------------------------------------------------------------------------ contributing


def test_a_fresh_learner_asks_for_everything_and_takes_the_heads_as_they_are() -> None:
    session = make_session(num_fragments=2)
    asked = session.handle(Welcomed([Head(fragment=0, version=3), Head(fragment=1, version=5)], []), 0.0)
    assert asked == [AskVersion(0, None), AskVersion(1, None)]
    assert not session.is_ready
    assert arrive(session, 3, None) == [Reset(0, 3)]
    assert arrive(session, 5, None, fragment=1) == [Reset(1, 5)]
    assert session.versions == {0: 3, 1: 5}
    assert session.tokens_merged == 400


def test_nothing_is_contributed_before_a_version_is_held() -> None:
    session = make_session()
    assert [accounts(take_step(session)) for _ in range(10)] == [[]] * 10


def test_a_fragment_is_due_every_interval_by_the_learners_own_clock() -> None:
    session = make_started()
    due = []
    for step in range(1, 13):
        if 0 in accounts(take_step(session)):
            due.append(step)
            opened = session.books[0].open
            assert opened is not None
            arrive(session, len(due), row_of(opened.id, "merged", len(due)))
    assert due == [4, 8, 12]


def test_fragments_come_due_evenly_spread_over_the_interval() -> None:
    session = make_started(num_fragments=4, interval_steps=8)
    assert [accounts(take_step(session)) for _ in range(8)] == [[], [0], [], [1], [], [2], [], [3]]


def test_by_the_clock_no_more_fragments_are_taken_at_once_than_keep_up_with_it() -> None:
    session = make_started(num_fragments=6, interval_steps=2)
    assert [accounts(take_step(session)) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_a_contribution_states_base_tokens_steps_seconds_and_cursor_of_the_unmerged_work() -> None:
    session = make_started(version=6)
    taken = contribute(session)
    assert taken == TakeAccount(0, ContributionId("us-0", 0, INCARNATION, 1), 6, 40, 4, 2.0, {3: 4})


def test_there_is_never_more_than_one_open_contribution_of_a_fragment() -> None:
    session = make_started()
    contribute(session)
    session.handle(Cued(0, 0), 0.0)
    assert [accounts(take_step(session)) for _ in range(20)] == [[]] * 20


def test_an_id_is_never_drawn_twice() -> None:
    session = make_started()
    ids = set()
    for version in range(1, 6):
        taken = contribute(session)
        ids.add(taken.id)
        arrive(session, version, row_of(taken.id, "merged", version))
    assert len(ids) == 5


def test_a_cue_makes_the_learner_contribute_at_its_next_boundary_with_whatever_it_has() -> None:
    session = make_started()
    take_step(session)
    session.handle(Cued(0, 0), 0.0)
    assert accounts(take_step(session)) == [0]


def test_a_cue_without_unmerged_work_waits_for_some() -> None:
    session = make_started()
    session.handle(Cued(0, 0), 0.0)
    assert accounts(session.handle(Boundary(), 0.0)) == []
    assert accounts(take_step(session)) == [0]


def test_a_cue_of_a_round_that_is_over_is_ignored() -> None:
    session = make_started(version=5)
    session.handle(Cued(0, 4), 0.0)
    assert accounts(take_step(session)) == []
    session.handle(Cued(0, 5), 0.0)
    session.handle(VersionArrived(0, 6, None), 0.0)
    assert accounts(take_step(session)) == []


def test_all_cued_fragments_are_taken_at_one_boundary() -> None:
    session = make_started(num_fragments=3, interval_steps=100)
    take_step(session)
    for fragment in range(3):
        session.handle(Cued(fragment, 0), 0.0)
    assert accounts(take_step(session)) == [0, 1, 2]


def test_cues_can_be_switched_off() -> None:
    session = make_started(has_cues=False)
    session.handle(Cued(0, 0), 0.0)
    assert accounts(take_step(session)) == []


def test_an_account_of_zeros_is_not_offered_and_its_tokens_stay() -> None:
    session = make_started()
    for _ in range(3):
        take_step(session)
    (taken,) = without_logs(take_step(session))
    assert isinstance(taken, TakeAccount)
    assert session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0) == [ForgetPayload(taken.id)]
    assert session.books[0].open is None
    assert session.books[0].tokens == 40


def test_versions_are_applied_before_anything_is_contributed() -> None:
    session = make_started()
    for _ in range(3):
        take_step(session)
    session.handle(VersionArrived(0, 1, None), 0.0)
    first, second = without_logs(take_step(session))
    assert first == ApplyVersion(0, 1, None)
    assert isinstance(second, TakeAccount)
    assert second.base_version == 1


# ----------------------------------------------------------------------------------------------------------- answers


def test_an_accepted_contribution_stays_open() -> None:
    session = make_started()
    taken = contribute(session)
    assert session.handle(Accepted(id=taken.id), 0.0) == []
    assert session.books[0].open is not None


def test_an_expired_contribution_is_closed_and_its_work_waits_for_a_newer_base() -> None:
    session = make_started()
    taken = contribute(session)
    assert session.handle(Expired(id=taken.id, head=9), 0.0) == [ForgetPayload(taken.id), AskVersion(0, 0)]
    assert (session.books[0].hold, session.books[0].tokens) == (9, 40)
    session.handle(Cued(0, 8), 0.0)
    assert accounts(take_step(session)) == []
    offered = arrive(session, 9, None)
    assert accounts(offered) == [0]
    (again,) = [one for one in offered if isinstance(one, TakeAccount)]
    assert again.id != taken.id
    assert (again.tokens, again.base_version) == (50, 9)


def test_the_answer_merged_does_nothing_before_a_version_that_contains_it_is_applied() -> None:
    session = make_started()
    taken = contribute(session)
    assert session.handle(Merged(id=taken.id, version=1), 0.0) == [AskVersion(0, 0)]
    assert session.books[0].open is not None
    assert without_logs(session.handle(Boundary(), 0.0)) == []
    assert without_logs(arrive(session, 1, row_of(taken.id, "merged", 1)))[0] == ApplyVersion(0, 1, taken.id)


def test_a_rejected_contribution_resets_the_fragment_at_the_next_boundary_and_counts_the_loss() -> None:
    session = make_started()
    taken = contribute(session)
    assert session.handle(Rejected(id=taken.id, reason="norm 9 is above 3"), 0.0) == []
    reset, log, forget = take_step(session)
    assert (reset, forget) == (Reset(0, None), ForgetPayload(taken.id))
    assert isinstance(log, Log)
    assert (log.event, log.fields["tokens"], log.fields["reason"]) == ("learner.reset", 50, "norm 9 is above 3")
    books = session.books[0]
    assert (books.tokens, books.steps, books.seconds, books.open, books.last) == (0, 0, 0.0, None, taken.id)


def test_a_rejection_for_nan_also_resets_the_inner_optimizer() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(Rejected(id=taken.id, reason="tensor wte: not finite"), 0.0)
    assert Reset(0, None, is_not_finite=True) in take_step(session)


def test_a_reset_takes_the_newest_version_that_is_here() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(VersionArrived(0, 4, row_of(taken.id)), 0.0)
    session.handle(Rejected(id=taken.id, reason="norm"), 0.0)
    assert Reset(0, 4) in take_step(session)
    assert session.versions == {0: 4}


def test_a_local_nan_is_never_offered_and_resets_fragment_and_inner_optimizer() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(PayloadFailed(taken.id, "not finite: nan in wte", is_not_finite=True), 0.0)
    orders = take_step(session)
    assert Reset(0, None, is_not_finite=True) in orders
    assert session.books[0].last is None


def test_spoiled_parameters_reset_a_fragment_but_its_open_contribution_may_still_be_merged() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    assert take_step(session)[0] == Reset(0, None, is_not_finite=True)
    assert [accounts(take_step(session)) for _ in range(8)] == [[]] * 8
    orders = without_logs(arrive(session, 1, row_of(taken.id, "merged", 1)))
    assert orders[:2] == [ApplyVersion(0, 1, None), ForgetPayload(taken.id)]
    assert session.books[0].tokens == 80


def test_spoiled_parameters_are_reset_to_a_version_that_already_has_the_open_contribution() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    assert arrive(session, 2, row_of(taken.id, "merged", 2))[0] == Reset(0, 2, is_not_finite=True)
    assert session.handle(Boundary(), 0.0) == [ForgetPayload(taken.id)]
    assert (session.books[0].open, session.books[0].last) == (None, taken.id)


@pytest.mark.parametrize("is_offered", [True, False])
def test_a_contribution_that_fails_after_its_work_was_discarded_is_just_dropped(is_offered: bool) -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    take_step(session)
    event = Rejected(id=taken.id, reason="norm") if is_offered else PayloadFailed(taken.id, "not finite", True)
    session.handle(event, 0.0)
    assert take_step(session) == [ForgetPayload(taken.id)]
    assert session.books[0].tokens == 10


def test_answers_about_another_contribution_are_ignored() -> None:
    session = make_started()
    taken = contribute(session)
    strangers = (taken.id._replace(number=99), taken.id._replace(incarnation="dddddddd"), taken.id._replace(fragment=5))
    for other in strangers:
        for answer in (Expired(id=other, head=3), Rejected(id=other, reason="x"), Merged(id=other, version=2)):
            assert session.handle(answer, 0.0) == []
    assert without_logs(session.handle(Boundary(), 0.0)) == []
    assert session.books[0].open is not None


def test_a_fenced_learner_stops_and_does_nothing_more() -> None:
    session = make_started()
    (stop,) = session.handle(Fenced(), 0.0)
    assert isinstance(stop, Stop)
    assert stop.is_fenced
    assert take_step(session) == []


# ---------------------------------------------------------------------------------------------------------- versions


def test_a_version_with_the_own_contribution_subtracts_it_and_its_tokens() -> None:
    session = make_started()
    taken = contribute(session)
    take_step(session)
    orders = without_logs(arrive(session, 1, row_of(taken.id, "merged", 1)))
    assert orders == [ApplyVersion(0, 1, taken.id), ForgetPayload(taken.id)]
    books = session.books[0]
    assert (books.tokens, books.steps, books.seconds, books.last, books.open) == (10, 1, 0.5, taken.id, None)


def test_a_skipped_version_that_had_the_own_contribution_subtracts_it_too() -> None:
    session = make_started()
    taken = contribute(session)
    assert without_logs(arrive(session, 5, row_of(taken.id, "merged", 2)))[0] == ApplyVersion(0, 5, taken.id)


def test_a_version_without_the_own_contribution_subtracts_nothing() -> None:
    session = make_started()
    taken = contribute(session)
    for row in (row_of(taken.id), row_of(OLDER, "merged", 1), None):
        version = (session.books[0].base or 0) + 1
        assert without_logs(arrive(session, version, row)) == [ApplyVersion(0, version, None)]
    assert session.books[0].open is not None


def test_a_row_that_settles_in_a_later_version_is_not_subtracted_yet() -> None:
    session = make_started()
    taken = contribute(session)
    assert without_logs(arrive(session, 1, row_of(taken.id, "merged", 2))) == [ApplyVersion(0, 1, None)]


def test_versions_may_be_skipped_and_the_row_of_the_newest_reply_counts() -> None:
    session = make_started()
    taken = contribute(session)
    session.handle(VersionArrived(0, 1, row_of(taken.id)), 0.0)
    session.handle(VersionArrived(0, 3, row_of(taken.id, "merged", 2)), 0.0)
    session.handle(VersionArrived(0, 2, row_of(taken.id)), 0.0)
    assert without_logs(session.handle(Boundary(), 0.0))[0] == ApplyVersion(0, 3, taken.id)


def test_a_version_that_is_not_newer_is_ignored() -> None:
    session = make_started(version=4)
    assert arrive(session, 4, None) == []
    assert arrive(session, 2, None) == []
    assert session.versions == {0: 4}


def test_a_row_that_says_rejected_resets_even_without_a_newer_version() -> None:
    session = make_started(version=4)
    taken = contribute(session)
    orders = arrive(session, 4, row_of(taken.id, "rejected", reason="not finite"))
    assert orders[0] == Reset(0, None, is_not_finite=True)


def test_a_row_that_says_rejected_with_a_newer_version_resets_to_that_version() -> None:
    session = make_started(version=4)
    taken = contribute(session)
    assert arrive(session, 6, row_of(taken.id, "rejected", reason="norm"))[0] == Reset(0, 6)
    assert session.versions == {0: 6}


def test_overwrite_with_published_books_loses_the_tokens_of_the_work_it_loses() -> None:
    session = make_started(apply_rule="overwrite", books="published")
    take_step(session)
    arrive(session, 1, None)
    assert session.books[0].tokens == 0


# ----------------------------------------------------------------------------------------------------------- restart


def restart(books: FragmentBooks, row: Row | None, head: int = 5) -> tuple[Session, list[Instruction]]:
    session = make_session(restored=[books])
    return session, session.handle(Welcomed([Head(fragment=0, version=head)], [row] if row else []), 0.0)


def checkpoint_books(**fields: Any) -> FragmentBooks:
    defaults = {"base": 3, "open": OpenContribution(OLDER, 20, 2, 1.0), "tokens": 30, "steps": 3, "seconds": 1.5}
    return FragmentBooks(0, **{**defaults, **fields})


def test_a_checkpoint_whose_open_contribution_is_in_the_store_goes_on_with_it() -> None:
    session, orders = restart(checkpoint_books(), row_of(OLDER))
    assert orders == [AskVersion(0, 3)]
    assert without_logs(arrive(session, 5, row_of(OLDER, "merged", 5)))[0] == ApplyVersion(0, 5, OLDER)
    assert session.books[0].tokens == 10


def test_a_checkpoint_whose_open_contribution_was_never_accepted_keeps_its_work() -> None:
    for last, row in ((OTHER, row_of(OTHER, "merged", 2)), (None, None)):
        session, orders = restart(checkpoint_books(last=last), row)
        assert orders == [ForgetPayload(OLDER), AskVersion(0, 3)]
        assert (session.books[0].open, session.books[0].tokens) == (None, 30)


def test_a_checkpoint_behind_the_store_starts_over_from_the_head_and_the_loss_is_logged() -> None:
    session, orders = restart(checkpoint_books(), row_of(OTHER, "merged", 4))
    assert without_logs(orders) == [ForgetPayload(OLDER), AskVersion(0, None)]
    assert [one.fields["tokens"] for one in orders if isinstance(one, Log)] == [30]
    assert arrive(session, 5, row_of(OTHER, "merged", 4)) == [Reset(0, 5)]
    books = session.books[0]
    assert (books.base, books.last, books.open, books.tokens) == (5, OTHER, None, 0)


def test_equal_numbers_of_two_branches_are_not_the_same_contribution() -> None:
    assert OLDER.number == OTHER.number
    session, _ = restart(checkpoint_books(), row_of(OTHER))
    assert session.books[0].base is None


def test_a_store_without_a_row_is_not_the_store_of_a_checkpoint_that_knows_one() -> None:
    session, _ = restart(checkpoint_books(last=OTHER), None)
    assert session.books[0].base is None


def test_a_pending_row_found_at_a_restart_is_open_with_nothing_to_subtract() -> None:
    session, _ = restart(checkpoint_books(), row_of(OTHER))
    assert arrive(session, 5, row_of(OTHER)) == [Reset(0, 5)]
    assert [accounts(take_step(session)) for _ in range(8)] == [[]] * 8
    orders = without_logs(arrive(session, 6, row_of(OTHER, "merged", 6)))
    assert orders[:2] == [ApplyVersion(0, 6, None), ForgetPayload(OTHER)]
    assert accounts(orders) == [0]
    assert session.books[0].last == OTHER
    assert session.books[0].tokens == 80


def test_a_pending_row_found_at_a_restart_and_rejected_later_is_just_dropped() -> None:
    session, _ = restart(checkpoint_books(), row_of(OTHER))
    arrive(session, 5, row_of(OTHER))
    take_step(session)
    assert without_logs(arrive(session, 5, row_of(OTHER, "rejected", reason="norm"))) == [ForgetPayload(OTHER)]
    assert (session.books[0].tokens, session.books[0].last) == (10, OTHER)


def test_a_pending_row_that_was_settled_before_the_head_came_is_not_open() -> None:
    session, _ = restart(checkpoint_books(), row_of(OTHER))
    arrive(session, 6, row_of(OTHER, "merged", 6))
    assert (session.books[0].open, session.books[0].last) == (None, OTHER)


def test_each_fragment_decides_for_itself_and_the_largest_cursor_counts() -> None:
    first = checkpoint_books()
    second = FragmentBooks(1, base=2, last=OTHER._replace(fragment=1))
    sync = SyncSettings(num_fragments=2, interval_steps=4)
    session = Session(sync, "us-0", INCARNATION, restored=[first, second], cursor={1: 10, 2: 5})
    rows = [row_of(OLDER, cursor={1: 8, 2: 9}), row_of(OLDER._replace(fragment=1), cursor={3: 4})]
    session.handle(Welcomed([Head(fragment=0, version=3), Head(fragment=1, version=3)], rows), 0.0)
    assert [books.base for books in session.books] == [3, None]
    assert session.cursor == {1: 10, 2: 9, 3: 4}


def test_a_store_older_than_the_checkpoint_is_refused_in_one_sentence() -> None:
    _, orders = restart(checkpoint_books(base=9), None, head=4)
    (stop,) = orders
    assert isinstance(stop, Stop)
    assert "version 9" in stop.text
    assert "newest is 4" in stop.text


def test_a_later_welcome_changes_nothing() -> None:
    session = make_started()
    contribute(session)
    assert session.handle(Welcomed([Head(fragment=0, version=0)], [row_of(OTHER)]), 0.0) == []
    assert session.books[0].open is not None


def test_the_books_of_a_checkpoint_are_copies() -> None:
    session = make_started()
    books = session.checkpoint_books()
    take_step(session)
    assert books[0].tokens == 0


# ------------------------------------------------------------------------------------------------------------- drain


def test_a_drain_hands_in_all_unmerged_work_at_once_and_is_done_when_it_is_merged() -> None:
    session = make_started(num_fragments=2, interval_steps=100)
    take_step(session)
    session.handle(DrainRequested(), 0.0)
    taken = [one for one in session.handle(Boundary(), 0.0) if isinstance(one, TakeAccount)]
    assert [one.fragment for one in taken] == [0, 1]
    for one in taken:
        assert not session.is_drained
        arrive(session, 1, row_of(one.id, "merged", 1), fragment=one.fragment)
    assert session.is_drained


def test_a_drain_waits_for_an_open_contribution_and_hands_in_the_rest_afterwards() -> None:
    session = make_started()
    taken = contribute(session)
    take_step(session)
    session.handle(DrainRequested(), 0.0)
    assert accounts(session.handle(Boundary(), 0.0)) == []
    assert accounts(arrive(session, 1, row_of(taken.id, "merged", 1))) == [0]


def test_a_drain_does_not_offer_zeros_for_ever() -> None:
    session = make_started()
    take_step(session)
    session.handle(DrainRequested(), 0.0)
    (taken,) = session.handle(Boundary(), 0.0)
    assert isinstance(taken, TakeAccount)
    session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0)
    assert session.handle(Boundary(), 0.0) == []
    assert session.is_drained


def test_an_exact_drain_offers_what_no_token_stands_for_until_it_encodes_to_zeros() -> None:
    session = make_started()
    session.handle(DrainRequested(is_exact=True), 0.0)
    (taken,) = session.handle(Boundary(), 0.0)
    assert isinstance(taken, TakeAccount)
    assert taken.tokens == 0
    assert not session.is_drained
    session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0)
    assert session.is_drained


# ----------------------------------------------------------------------------------------------------- deterministic


def make_deterministic(overlap_steps: float = 2.0) -> Session:
    return make_started(is_deterministic=True, overlap_steps=overlap_steps)


def test_a_deterministic_run_applies_a_version_exactly_tau_steps_after_its_contribution() -> None:
    session = make_deterministic()
    taken = contribute(session)
    assert arrive(session, 1, row_of(taken.id, "merged", 1)) == []
    assert take_step(session) == []
    assert without_logs(take_step(session))[0] == ApplyVersion(0, 1, taken.id)


@pytest.mark.parametrize("overlap_steps", [0.0, 2.0])
def test_a_deterministic_run_waits_for_the_version_when_tau_steps_have_passed(overlap_steps: float) -> None:
    session = make_deterministic(overlap_steps)
    for _ in range(3):
        take_step(session)
    orders = take_step(session)
    (taken,) = [one for one in orders if isinstance(one, TakeAccount)]
    for _ in range(int(overlap_steps)):
        assert Await(0) not in orders
        orders = take_step(session)
    assert Await(0) in orders
    assert arrive(session, 1, row_of(taken.id)) == [Await(0)]
    assert without_logs(arrive(session, 2, row_of(taken.id, "merged", 2)))[0] == ApplyVersion(0, 2, taken.id)


def test_a_deterministic_run_ignores_cues() -> None:
    session = make_deterministic()
    session.handle(Cued(0, 0), 0.0)
    assert take_step(session) == []
