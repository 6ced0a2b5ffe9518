"""When a learner contributes, and with what."""

from __future__ import annotations

from typing import Any

from isles.proto.ids import ContributionId
from isles.proto.messages import Head
from isles.workers.session import (
    ApplyVersion,
    AskVersion,
    Boundary,
    Cued,
    ForgetPayload,
    PayloadEncoded,
    Reset,
    TakeAccount,
    VersionArrived,
    Welcomed,
)


def test_a_fresh_learner_asks_for_everything_and_takes_the_heads_as_they_are(kit: Any) -> None:
    session = kit.make_session(num_fragments=2)
    asked = session.handle(Welcomed([Head(fragment=0, version=3), Head(fragment=1, version=5)], []), 0.0)
    assert asked == [AskVersion(0, None), AskVersion(1, None)]
    assert not session.is_ready
    assert kit.arrive(session, 3, None) == [Reset(0, 3)]
    assert kit.arrive(session, 5, None, fragment=1) == [Reset(1, 5)]
    assert session.versions == {0: 3, 1: 5}
    assert session.tokens_merged == 400


def test_nothing_is_contributed_before_a_version_is_held(kit: Any) -> None:
    session = kit.make_session()
    assert [kit.accounts(kit.take_step(session)) for _ in range(10)] == [[]] * 10


def test_a_fragment_is_due_every_interval_by_the_learners_own_clock(kit: Any) -> None:
    session = kit.make_started()
    due = []
    for step in range(1, 13):
        if 0 in kit.accounts(kit.take_step(session)):
            due.append(step)
            opened = session.books[0].open
            assert opened is not None
            kit.arrive(session, len(due), kit.row_of(opened.id, "merged", len(due)))
    assert due == [4, 8, 12]


def test_fragments_come_due_evenly_spread_over_the_interval(kit: Any) -> None:
    session = kit.make_started(num_fragments=4, interval_steps=8)
    assert [kit.accounts(kit.take_step(session)) for _ in range(8)] == [[], [0], [], [1], [], [2], [], [3]]


def test_by_the_clock_no_more_fragments_are_taken_at_once_than_keep_up_with_it(kit: Any) -> None:
    session = kit.make_started(num_fragments=6, interval_steps=2)
    assert [kit.accounts(kit.take_step(session)) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_a_contribution_states_base_tokens_steps_seconds_and_cursor_of_the_unmerged_work(kit: Any) -> None:
    session = kit.make_started(version=6)
    taken = kit.contribute(session)
    assert taken == TakeAccount(0, ContributionId("us-0", 0, kit.INCARNATION, 1), 6, 40, 4, 2.0, {3: 4})


def test_there_is_never_more_than_one_open_contribution_of_a_fragment(kit: Any) -> None:
    session = kit.make_started()
    kit.contribute(session)
    session.handle(Cued(0, 0), 0.0)
    assert [kit.accounts(kit.take_step(session)) for _ in range(20)] == [[]] * 20


def test_an_id_is_never_drawn_twice(kit: Any) -> None:
    session = kit.make_started()
    ids = set()
    for version in range(1, 6):
        taken = kit.contribute(session)
        ids.add(taken.id)
        kit.arrive(session, version, kit.row_of(taken.id, "merged", version))
    assert len(ids) == 5


def test_a_cue_makes_the_learner_contribute_at_its_next_boundary_with_whatever_it_has(kit: Any) -> None:
    session = kit.make_started()
    kit.take_step(session)
    session.handle(Cued(0, 0), 0.0)
    assert kit.accounts(kit.take_step(session)) == [0]


def test_a_cue_without_unmerged_work_waits_for_some(kit: Any) -> None:
    session = kit.make_started()
    session.handle(Cued(0, 0), 0.0)
    assert kit.accounts(session.handle(Boundary(), 0.0)) == []
    assert kit.accounts(kit.take_step(session)) == [0]


def test_a_cue_of_a_round_that_is_over_is_ignored(kit: Any) -> None:
    session = kit.make_started(version=5)
    session.handle(Cued(0, 4), 0.0)
    assert kit.accounts(kit.take_step(session)) == []
    session.handle(Cued(0, 5), 0.0)
    session.handle(VersionArrived(0, 6, None), 0.0)
    assert kit.accounts(kit.take_step(session)) == []


def test_all_cued_fragments_are_taken_at_one_boundary(kit: Any) -> None:
    session = kit.make_started(num_fragments=3, interval_steps=100)
    kit.take_step(session)
    for fragment in range(3):
        session.handle(Cued(fragment, 0), 0.0)
    assert kit.accounts(kit.take_step(session)) == [0, 1, 2]


def test_cues_can_be_switched_off(kit: Any) -> None:
    session = kit.make_started(has_cues=False)
    session.handle(Cued(0, 0), 0.0)
    assert kit.accounts(kit.take_step(session)) == []


def test_an_account_of_zeros_is_not_offered_and_its_tokens_stay(kit: Any) -> None:
    session = kit.make_started()
    for _ in range(3):
        kit.take_step(session)
    (taken,) = kit.without_logs(kit.take_step(session))
    assert isinstance(taken, TakeAccount)
    assert session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0) == [ForgetPayload(taken.id)]
    assert session.books[0].open is None
    assert session.books[0].tokens == 40


def test_versions_are_applied_before_anything_is_contributed(kit: Any) -> None:
    session = kit.make_started()
    for _ in range(3):
        kit.take_step(session)
    session.handle(VersionArrived(0, 1, None), 0.0)
    first, second = kit.without_logs(kit.take_step(session))
    assert first == ApplyVersion(0, 1, None)
    assert isinstance(second, TakeAccount)
    assert second.base_version == 1
