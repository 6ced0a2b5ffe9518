"""How a learner hands in the last of its work, and how a deterministic one waits."""

from __future__ import annotations

from typing import Any

import pytest

from isles.workers.session import (
    ApplyVersion,
    Await,
    Boundary,
    Cued,
    DrainRequested,
    PayloadEncoded,
    Session,
    TakeAccount,
)


def test_a_drain_hands_in_all_unmerged_work_at_once_and_is_done_when_it_is_merged(kit: Any) -> None:
    session = kit.make_started(num_fragments=2, interval_steps=100)
    kit.take_step(session)
    session.handle(DrainRequested(), 0.0)
    taken = [one for one in session.handle(Boundary(), 0.0) if isinstance(one, TakeAccount)]
    assert [one.fragment for one in taken] == [0, 1]
    for one in taken:
        assert not session.is_drained
        kit.arrive(session, 1, kit.row_of(one.id, "merged", 1), fragment=one.fragment)
    assert session.is_drained


def test_a_drain_waits_for_an_open_contribution_and_hands_in_the_rest_afterwards(kit: Any) -> None:
    session = kit.make_started()
    taken = kit.contribute(session)
    kit.take_step(session)
    session.handle(DrainRequested(), 0.0)
    assert kit.accounts(session.handle(Boundary(), 0.0)) == []
    assert kit.accounts(kit.arrive(session, 1, kit.row_of(taken.id, "merged", 1))) == [0]


def test_a_drain_does_not_offer_zeros_for_ever(kit: Any) -> None:
    session = kit.make_started()
    kit.take_step(session)
    session.handle(DrainRequested(), 0.0)
    (taken,) = session.handle(Boundary(), 0.0)
    assert isinstance(taken, TakeAccount)
    session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0)
    assert session.handle(Boundary(), 0.0) == []
    assert session.is_drained


def test_an_exact_drain_offers_what_no_token_stands_for_until_it_encodes_to_zeros(kit: Any) -> None:
    session = kit.make_started()
    session.handle(DrainRequested(is_exact=True), 0.0)
    (taken,) = session.handle(Boundary(), 0.0)
    assert isinstance(taken, TakeAccount)
    assert taken.tokens == 0
    assert not session.is_drained
    session.handle(PayloadEncoded(taken.id, is_zero=True), 0.0)
    assert session.is_drained


def make_deterministic(kit: Any, overlap_steps: float = 2.0) -> Session:
    return kit.make_started(is_deterministic=True, overlap_steps=overlap_steps)


def test_a_deterministic_run_applies_a_version_exactly_tau_steps_after_its_contribution(kit: Any) -> None:
    session = make_deterministic(kit)
    taken = kit.contribute(session)
    assert kit.arrive(session, 1, kit.row_of(taken.id, "merged", 1)) == []
    assert kit.take_step(session) == []
    assert kit.without_logs(kit.take_step(session))[0] == ApplyVersion(0, 1, taken.id)


@pytest.mark.parametrize("overlap_steps", [0.0, 2.0])
def test_a_deterministic_run_waits_for_the_version_when_tau_steps_have_passed(kit: Any, overlap_steps: float) -> None:
    session = make_deterministic(kit, overlap_steps)
    for _ in range(3):
        kit.take_step(session)
    orders = kit.take_step(session)
    (taken,) = [one for one in orders if isinstance(one, TakeAccount)]
    for _ in range(int(overlap_steps)):
        assert Await(0) not in orders
        orders = kit.take_step(session)
    assert Await(0) in orders
    assert kit.arrive(session, 1, kit.row_of(taken.id)) == [Await(0)]
    assert kit.without_logs(kit.arrive(session, 2, kit.row_of(taken.id, "merged", 2)))[0] == ApplyVersion(
        0, 2, taken.id
    )


def test_a_deterministic_run_ignores_cues(kit: Any) -> None:
    session = make_deterministic(kit)
    session.handle(Cued(0, 0), 0.0)
    assert kit.take_step(session) == []
