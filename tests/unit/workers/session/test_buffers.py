"""A session of a model with buffers to merge: one fragment more, which no mean counts."""

from __future__ import annotations

from isles.proto.agreement import SyncSettings
from isles.proto.messages import Head
from isles.workers.session import (
    Boundary,
    DrainRequested,
    PayloadEncoded,
    Session,
    StepTaken,
    TakeAccount,
    VersionArrived,
    Welcomed,
)


def make_started(interval_steps: int = 6) -> Session:
    """A session of two fragments of parameters, 0 and 1, and one of buffers, 2; all hold version 0."""
    session = Session(
        SyncSettings(num_fragments=2, interval_steps=interval_steps), "us-0", "aaaaaaaa", has_buffers=True
    )
    session.handle(Welcomed([Head(fragment=fragment, version=0) for fragment in range(3)], []), 0.0)
    for fragment in range(3):
        assert not session.is_ready
        session.handle(VersionArrived(fragment, 0, None), 0.0)
        session.handle(Boundary(), 0.0)
    assert session.is_ready
    return session


def test_buffers_are_contributed_like_any_fragment_spread_over_the_interval() -> None:
    session = make_started()
    ordered = [session.handle(StepTaken(10, 0.1), 0.0) for _ in range(6)]
    taken = [
        (step, one.fragment) for step, orders in enumerate(ordered, 1) for one in orders if isinstance(one, TakeAccount)
    ]
    assert taken == [(2, 0), (4, 1), (6, 2)]


def test_buffers_that_fall_behind_do_not_hold_the_runs_progress_up() -> None:
    session = make_started()
    for fragment in (0, 1):
        session.handle(VersionArrived(fragment, 3, None, tokens_total=600), 0.0)
    session.handle(Boundary(), 0.0)
    assert session.versions == {0: 3, 1: 3, 2: 0}
    assert (session.tokens_merged, session.rounds_committed) == (600, 6)
    session.handle(VersionArrived(2, 9, None, tokens_total=9999), 0.0)
    session.handle(Boundary(), 0.0)
    assert (session.tokens_merged, session.rounds_committed) == (600, 6)


def test_buffers_that_did_not_change_are_drained() -> None:
    session = make_started()
    session.handle(StepTaken(10, 0.1), 0.0)
    session.handle(DrainRequested(), 0.0)
    taken = [one for one in session.handle(Boundary(), 0.0) if isinstance(one, TakeAccount)]
    assert [one.fragment for one in taken] == [0, 1, 2]
    for one in taken:
        session.handle(PayloadEncoded(one.id, is_zero=True), 0.0)
    assert session.is_drained
