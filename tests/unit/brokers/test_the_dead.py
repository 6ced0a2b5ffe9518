"""What a broker does about members that are dead, or that everybody takes for dead: nothing of theirs stays taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import DeleteBlob
from isles.proto.messages import (
    Alive,
    AskHeads,
    Channel,
    Contribution,
    Credit,
    Error,
    Fenced,
    Fetch,
    Grant,
    Heads,
    Hello,
    Lease,
    Leased,
    Leave,
    Offer,
    Progress,
    Role,
    Shards,
    ShardsLeased,
    Upload,
    Welcome,
)

Make = Callable[..., Contribution]


def leased_shards(answer: object) -> dict[int, int]:
    assert isinstance(answer, ShardsLeased)
    return dict(answer.shards)


def leased_fragments(answer: object) -> dict[int, int]:
    assert isinstance(answer, Leased)
    return dict(answer.epochs)


def test_whatever_the_dead_held_is_free_again(stage: Stage, worker: Member, outer: Member, contribute: Make) -> None:
    blob = blob_of(b"half of this" * 1000)
    assert leased_shards(worker.ask(Shards(num_wanted=8)))
    assert isinstance(worker.ask(Offer(contribution=contribute(worker, 0))), Grant)
    assert isinstance(outer.ask(Upload(blob=blob)), Grant)
    parameters = stage.router.state.index.version(0, 0)
    assert parameters is not None
    assert parameters.parameters is not None
    outer.say(Fetch(transfer=1, digest=parameters.parameters.digest), channel=Channel.BULK)
    settings, state = stage.settings, stage.router.state
    for _ in range(round(2 * max(settings.session_idle_seconds, settings.upload_idle_seconds))):
        stage.advance(1.0)
    assert not any(info.is_live for info in state.membership.infos())
    assert not state.uploads._open
    assert not state.downloads._open
    assert not state.downloads._numbers
    assert not state.sessions._by_token
    assert not state.sessions._by_identity
    heir, other = stage.member("worker", "eu-1"), stage.member("outer", "outer-2")
    heir.join()
    other.join()
    assert len(leased_shards(heir.ask(Shards(num_wanted=8)))) == 8
    assert leased_fragments(other.ask(Lease(fragments=(0, 1)))) == {0: 2, 1: 2}


def test_nothing_is_lent_to_a_learner_that_has_left(stage: Stage, worker: Member) -> None:
    worker.ask(Shards(num_wanted=3))
    worker.ask(Leave())
    assert leased_shards(worker.ask(Shards(num_wanted=3))) == {}, "a question that was repeated just then"
    heir = stage.member("worker", "eu-1")
    heir.join()
    assert len(leased_shards(heir.ask(Shards(num_wanted=8)))) == 8
    assert isinstance(worker.join(), Welcome)
    heir.ask(Leave())
    assert len(leased_shards(worker.ask(Shards(num_wanted=3)))) == 3, "it is back"


def test_nothing_is_lent_to_an_outer_that_has_left(stage: Stage, outer: Member) -> None:
    outer.ask(Leave())
    assert leased_fragments(outer.ask(Lease(fragments=(0, 1)))) == {}, "a question that was repeated just then"
    other = stage.member("outer", "outer-2")
    other.join()
    assert leased_fragments(other.ask(Lease(fragments=(0, 1)))) == {0: 2, 1: 2}


def test_nothing_is_lent_to_who_was_replaced(stage: Stage, worker: Member, outer: Member) -> None:
    mine = leased_shards(worker.ask(Shards(num_wanted=2)))
    for older, message in ((worker, Shards(num_wanted=8)), (outer, Lease(fragments=(0, 1)))):
        assert isinstance(stage.member(older.role, older.id, "99" * 8).join(), Welcome)
        assert isinstance(older.ask(message), Fenced)
    assert stage.router.state.membership.shards_of("us-1") == mine


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_learner_that_was_taken_for_dead_hears_that_its_shards_are_no_longer_its_own(
    stage: Stage, worker: Member, is_restarted: bool
) -> None:
    def has_lost(answer: object) -> bool:
        assert isinstance(answer, Alive)
        return answer.has_lost_shards

    worker.ask(Shards(num_wanted=3))
    assert not has_lost(worker.ask(Progress()))
    stage.advance(stage.settings.learner_lease_seconds + 1)
    heir = stage.member("worker", "eu-1")
    heir.join()
    theirs = leased_shards(heir.ask(Shards(num_wanted=3)))
    if is_restarted:
        stage.restart()
        assert isinstance(worker.ask(Progress()), Error), "the session is forgotten"
        answer = worker.join()
        assert isinstance(answer, Welcome)
        assert answer.shards == {}
    else:
        assert has_lost(worker.ask(Progress()))
        assert has_lost(worker.ask(Progress())), "until it has asked"
    mine = leased_shards(worker.ask(Shards(num_wanted=3)))
    assert len(mine) == 3
    assert not mine.keys() & theirs.keys()
    assert not has_lost(worker.ask(Progress()))


@pytest.mark.parametrize("role", ["worker", "outer", "evaluator"])
def test_a_restarted_process_gets_its_name_at_once_whatever_connection_the_dead_one_left_open(
    stage: Stage, role: Role
) -> None:
    dead = stage.member(role, "same-name", "01" * 8)
    dead.join()
    again = stage.member(role, "same-name", "02" * 8)
    assert again.connection != dead.connection
    assert isinstance(again.join(), Welcome)
    assert isinstance(again.ask(AskHeads()), Heads)
    assert isinstance(dead.ask(AskHeads()), Fenced)
    assert isinstance(again.ask(AskHeads()), Heads)


def test_a_restarted_outer_need_not_wait_for_the_lease_of_the_dead_one(stage: Stage, outer: Member) -> None:
    again = stage.member("outer", outer.id, "b2" * 8)
    again.join()
    assert leased_fragments(again.ask(Lease(fragments=(0, 1)))) == {0: 2, 1: 2}
    again.join()
    assert leased_fragments(again.ask(Lease(fragments=(0, 1)))) == {0: 2, 1: 2}, "which it keeps when it asks again"


def test_a_process_is_answered_on_the_connection_it_speaks_on_although_an_older_one_was_never_closed(
    stage: Stage, worker: Member
) -> None:
    class Redialled(Member):
        @property
        def connection(self) -> bytes:
            return b"a new one"

    again = Redialled(stage, worker.role, worker.id, worker.incarnation, worker.session)
    assert isinstance(again.ask(AskHeads()), Heads), "in the session that it had"
    assert isinstance(again.ask(Hello(role="worker", id=worker.id, incarnation=worker.incarnation)), Welcome)
    assert stage.router.state.sessions.get(worker.session).connections[Channel.CONTROL] == b"a new one"


def test_a_blob_that_somebody_still_fetches_is_kept_however_slowly_that_goes(
    stage: Stage, worker: Member, advance: Callable[[int, int], None], checkpoint: Callable[..., Any], outer: Member
) -> None:
    advance(0, 1)
    state = b"a state of several chunks " * 1000
    checkpoint(outer, 1, state=state)
    blob, reader = blob_of(state), stage.member("worker", "eu-1")
    reader.join()
    data = b"".join(
        bytes(send.payload) for send in reader.say(Fetch(transfer=7, digest=blob.digest), channel=Channel.BULK)
    )
    advance(1, 6)
    checkpoint(outer, 6)
    advance(6, 12)
    orders: list[Any] = []
    while len(data) < len(state):
        orders += stage.advance(stage.settings.flush_seconds + 0.1)
        for send in reader.say(Credit(transfer=7, offset=len(data)), channel=Channel.BULK):
            assert send.payload is not None, send.message
            data += bytes(send.payload)
    assert data == state
    assert DeleteBlob(blob) not in orders
    reader.say(Credit(transfer=7, offset=len(data)), channel=Channel.BULK)
    assert DeleteBlob(blob) in stage.advance(stage.settings.flush_seconds + 0.1), "and no longer"
