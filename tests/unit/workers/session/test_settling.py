"""What answers, rows and versions do to a learner's books."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.messages import Accepted, Expired, Fenced, Merged, Rejected
from isles.workers.session import (
    ApplyVersion,
    AskVersion,
    Boundary,
    Cued,
    ForgetPayload,
    FragmentSpoiled,
    Log,
    PayloadFailed,
    Reset,
    Stop,
    TakeAccount,
    VersionArrived,
)


def test_an_accepted_contribution_stays_open(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert session.handle(Accepted(id=taken.id), 0.0) == []
    assert session.books[0].open is not None


def test_an_expired_contribution_is_closed_and_its_work_waits_for_a_newer_base(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert session.handle(Expired(id=taken.id, head=9), 0.0) == [ForgetPayload(taken.id), AskVersion(0, 0)]
    assert (session.books[0].hold, session.books[0].tokens) == (9, 40)
    session.handle(Cued(0, 8), 0.0)
    assert kit.accounts(kit.take_step(session)) == []
    offered = kit.arrive(session, 9, None)
    assert kit.accounts(offered) == [0]
    (again,) = [one for one in offered if isinstance(one, TakeAccount)]
    assert again.id != taken.id
    assert (again.tokens, again.base_version) == (50, 9)


def test_the_answer_merged_does_nothing_before_a_version_that_contains_it_is_applied(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert session.handle(Merged(id=taken.id, version=1), 0.0) == [AskVersion(0, 0)]
    assert session.books[0].open is not None
    assert kit.without_logs(session.handle(Boundary(), 0.0)) == []
    assert kit.without_logs(kit.arrive(session, 1, kit.row_of(taken.id, "merged", 1)))[0] == ApplyVersion(
        0, 1, taken.id
    )


def test_a_rejected_contribution_resets_the_fragment_at_the_next_boundary_and_counts_the_loss(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert session.handle(Rejected(id=taken.id, reason="norm 9 is above 3"), 0.0) == []
    reset, log, forget = kit.take_step(session)
    assert (reset, forget) == (Reset(0, None), ForgetPayload(taken.id))
    assert isinstance(log, Log)
    assert (log.event, log.fields["tokens"], log.fields["reason"]) == ("learner.reset", 50, "norm 9 is above 3")
    books = session.books[0]
    assert (books.tokens, books.steps, books.seconds, books.open, books.last) == (0, 0, 0.0, None, taken.id)


def test_a_rejection_for_nan_also_resets_the_inner_optimizer(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(Rejected(id=taken.id, reason="tensor wte: not finite"), 0.0)
    assert Reset(0, None, is_not_finite=True) in kit.take_step(session)


def test_a_reset_takes_the_newest_version_that_is_here(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(VersionArrived(0, 4, kit.row_of(taken.id)), 0.0)
    session.handle(Rejected(id=taken.id, reason="norm"), 0.0)
    assert Reset(0, 4) in kit.take_step(session)
    assert session.versions == {0: 4}


def test_a_local_nan_is_never_offered_and_resets_fragment_and_inner_optimizer(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(PayloadFailed(taken.id, "not finite: nan in wte", is_not_finite=True), 0.0)
    orders = kit.take_step(session)
    assert Reset(0, None, is_not_finite=True) in orders
    assert session.books[0].last is None


def test_spoiled_parameters_reset_a_fragment_but_its_open_contribution_may_still_be_merged(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    assert kit.take_step(session)[0] == Reset(0, None, is_not_finite=True)
    assert [kit.accounts(kit.take_step(session)) for _ in range(8)] == [[]] * 8
    orders = kit.without_logs(kit.arrive(session, 1, kit.row_of(taken.id, "merged", 1)))
    assert orders[:2] == [ApplyVersion(0, 1, None), ForgetPayload(taken.id)]
    assert session.books[0].tokens == 80


def test_spoiled_parameters_are_reset_to_a_version_that_already_has_the_open_contribution(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    assert kit.arrive(session, 2, kit.row_of(taken.id, "merged", 2))[0] == Reset(0, 2, is_not_finite=True)
    assert session.handle(Boundary(), 0.0) == [ForgetPayload(taken.id)]
    assert (session.books[0].open, session.books[0].last) == (None, taken.id)


@pytest.mark.parametrize("is_offered", [True, False])
def test_a_contribution_that_fails_after_its_work_was_discarded_is_just_dropped(kit: Any, is_offered: bool) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(FragmentSpoiled(0, "not finite"), 0.0)
    kit.take_step(session)
    event = Rejected(id=taken.id, reason="norm") if is_offered else PayloadFailed(taken.id, "not finite", True)
    session.handle(event, 0.0)
    assert kit.take_step(session) == [ForgetPayload(taken.id)]
    assert session.books[0].tokens == 10


def test_answers_about_another_contribution_are_ignored(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    strangers = (taken.id._replace(number=99), taken.id._replace(incarnation="dddddddd"), taken.id._replace(fragment=5))
    for other in strangers:
        for answer in (Expired(id=other, head=3), Rejected(id=other, reason="x"), Merged(id=other, version=2)):
            assert session.handle(answer, 0.0) == []
    assert kit.without_logs(session.handle(Boundary(), 0.0)) == []
    assert session.books[0].open is not None


def test_a_fenced_learner_stops_and_does_nothing_more(kit: Any) -> None:
    session = kit.make_started()
    (stop,) = session.handle(Fenced(), 0.0)
    assert isinstance(stop, Stop)
    assert stop.is_fenced
    assert kit.take_step(session) == []


def test_a_version_with_the_own_contribution_subtracts_it_and_its_tokens(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    kit.take_step(session)
    orders = kit.without_logs(kit.arrive(session, 1, kit.row_of(taken.id, "merged", 1)))
    assert orders == [ApplyVersion(0, 1, taken.id), ForgetPayload(taken.id)]
    books = session.books[0]
    assert (books.tokens, books.steps, books.seconds, books.last, books.open) == (10, 1, 0.5, taken.id, None)


def test_a_skipped_version_that_had_the_own_contribution_subtracts_it_too(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert kit.without_logs(kit.arrive(session, 5, kit.row_of(taken.id, "merged", 2)))[0] == ApplyVersion(
        0, 5, taken.id
    )


def test_a_version_without_the_own_contribution_subtracts_nothing(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    for row in (kit.row_of(taken.id), kit.row_of(kit.OLDER, "merged", 1), None):
        version = (session.books[0].base or 0) + 1
        assert kit.without_logs(kit.arrive(session, version, row)) == [ApplyVersion(0, version, None)]
    assert session.books[0].open is not None


def test_a_row_that_settles_in_a_later_version_is_not_subtracted_yet(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    assert kit.without_logs(kit.arrive(session, 1, kit.row_of(taken.id, "merged", 2))) == [ApplyVersion(0, 1, None)]


def test_versions_may_be_skipped_and_the_row_of_the_newest_reply_counts(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    session.handle(VersionArrived(0, 1, kit.row_of(taken.id)), 0.0)
    session.handle(VersionArrived(0, 3, kit.row_of(taken.id, "merged", 2)), 0.0)
    session.handle(VersionArrived(0, 2, kit.row_of(taken.id)), 0.0)
    assert kit.without_logs(session.handle(Boundary(), 0.0))[0] == ApplyVersion(0, 3, taken.id)


def test_a_version_that_is_not_newer_is_ignored(kit: Any) -> None:
    session = kit.make_started(version=4)
    assert kit.arrive(session, 4, None) == []
    assert kit.arrive(session, 2, None) == []
    assert session.versions == {0: 4}


def test_a_row_that_says_rejected_resets_even_without_a_newer_version(kit: Any) -> None:
    session = kit.make_started(version=4)
    taken = kit.contribute(session)
    orders = kit.arrive(session, 4, kit.row_of(taken.id, "rejected", reason="not finite"))
    assert orders[0] == Reset(0, None, is_not_finite=True)


def test_a_row_that_says_rejected_with_a_newer_version_resets_to_that_version(kit: Any) -> None:
    session = kit.make_started(version=4)
    taken = kit.contribute(session)
    assert kit.arrive(session, 6, kit.row_of(taken.id, "rejected", reason="norm"))[0] == Reset(0, 6)
    assert session.versions == {0: 6}


def test_overwrite_with_published_books_loses_the_tokens_of_the_work_it_loses(kit: Any) -> None:
    session = kit.make_started(apply_rule="overwrite", books="published")
    kit.take_step(session)
    kit.arrive(session, 1, None)
    assert session.books[0].tokens == 0
