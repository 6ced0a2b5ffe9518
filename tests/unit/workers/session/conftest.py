"""What the tests of the session share: a session of one learner, driven by hand."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.agreement import SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import Head, Row
from isles.workers.session import (
    Boundary,
    FragmentBooks,
    Instruction,
    Log,
    PayloadEncoded,
    Session,
    StepTaken,
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


class Kit:
    """The functions above, for tests."""

    INCARNATION = INCARNATION
    OLDER = OLDER
    OTHER = OTHER
    accounts = staticmethod(accounts)
    arrive = staticmethod(arrive)
    contribute = staticmethod(contribute)
    make_session = staticmethod(make_session)
    make_started = staticmethod(make_started)
    row_of = staticmethod(row_of)
    take_step = staticmethod(take_step)
    without_logs = staticmethod(without_logs)


@pytest.fixture
def kit() -> Kit:
    """One learner's session, driven by hand."""
    return Kit()
