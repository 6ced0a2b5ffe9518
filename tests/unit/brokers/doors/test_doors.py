"""Whom a broker with keys hears: by the role and the name of a key, message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from isles.brokers.router import VERBS
from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import AbandonUpload, GarbageArrived, Send
from isles.proto.client import Client, Refused
from isles.proto.ids import ContributionId
from isles.proto.keys import AllowList
from isles.proto.messages import (
    Accepted,
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    BlobRef,
    Channel,
    Checkpoint,
    Chunk,
    Commit,
    Contribution,
    Credit,
    Error,
    Fetch,
    Grant,
    Heads,
    Hello,
    Init,
    Lease,
    Leased,
    Leave,
    List,
    Message,
    Offer,
    Pardon,
    Progress,
    Recipe,
    RelayBeat,
    Report,
    Role,
    Settle,
    Shards,
    Status,
    Stored,
    Upload,
    Welcome,
)

Come = Callable[..., Member]
Contribute = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Allow = Callable[..., AllowList]

ID = ContributionId("us-1", 0, "ab" * 8, 1)
BLOB = BlobRef(digest="5e" * 32, size_bytes=99)
WANTED: dict[str, set[Role]] = {"s": {"worker"}, "o": {"outer"}, "a": {"operator", "evaluator"}, "r": {"relay"}}
"""Letter of a key -> the roles that it opens."""
ROLES: tuple[Role, ...] = get_args(Role)


def messages(record_init: Init) -> dict[type[Message], Message]:
    """One of each message that needs a session."""
    contribution = Contribution(
        id=ID, base_version=0, blob=BLOB, codec="int4", tokens=1, steps=1, seconds=1.0, norms=(1.0,)
    )
    recipe = Recipe(ingredients=(), fraction=1.0, merge_rule="mean", settings_digest="2" * 64)
    made: list[Message] = [
        record_init,
        Progress(),
        Leave(),
        Shards(num_wanted=1),
        Offer(contribution=contribution),
        Upload(blob=BLOB),
        Chunk(transfer=1, offset=0),
        Fetch(transfer=1, digest=BLOB.digest),
        Credit(transfer=1, offset=1),
        AskVersion(fragment=0),
        AskHeads(),
        AskHistory(fragment=0),
        Report(name="loss", value=1.0),
        Lease(fragments=(0,)),
        List(fragment=0),
        Settle(fragment=0, epoch=1, rejections=()),
        Commit(
            commit_id="c0" * 8,
            fragment=0,
            epoch=1,
            base_version=0,
            parameters_sha256="1" * 64,
            update=BLOB,
            recipe=recipe,
        ),
        Checkpoint(fragment=0, epoch=1, version=0, parameters=BLOB),
        Pardon(learner="us-1"),
        RelayBeat(),
    ]
    return {type(message): message for message in made}


def code_of(answer: Message) -> str:
    return answer.code if isinstance(answer, Error) else ""


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("letter", WANTED)
def test_a_key_opens_the_sessions_of_its_own_role_and_no_others(
    stage: Stage, public: Callable[[str], str], letter: str, role: Role
) -> None:
    answer = stage.member(role, "us-7", key=public(letter)).join()
    if role in WANTED[letter]:
        assert isinstance(answer, Welcome)
    else:
        assert isinstance(answer, Error)
        assert (answer.code, role in answer.text) == ("denied", True)
        assert stage.events()[-1] == "client.refused"


def test_the_table_of_verbs_names_every_message_that_needs_a_session(first_init: Init) -> None:
    assert set(messages(first_init)) == set(VERBS)


@pytest.mark.parametrize(
    ("letter", "role"), [("s", "worker"), ("o", "outer"), ("a", "operator"), ("a", "evaluator"), ("r", "relay")]
)
@pytest.mark.parametrize("kind", VERBS)
def test_a_message_is_heard_from_the_roles_that_may_say_it_and_from_no_other(
    stage: Stage, come: Come, first_init: Init, kind: type[Message], letter: str, role: Role
) -> None:
    member = come(letter, role, "us-1")
    channel = VERBS[kind].channel
    before = stage.index.heads()
    answers = [send.message for send in member.say(messages(first_init)[kind], b"x", channel)]
    is_refused = any(code_of(answer) == "bad-message" and "may not send" in answer.text for answer in answers)  # type: ignore[attr-defined]
    assert is_refused is (role not in VERBS[kind].roles)
    assert stage.index.heads() == before


@pytest.mark.parametrize("kind", VERBS)
def test_nothing_is_heard_in_a_session_that_another_key_opened(
    stage: Stage, worker: Member, public: Callable[[str], str], first_init: Init, kind: type[Message]
) -> None:
    thief = stage.member("worker", "us-1", worker.incarnation, key=public("e"))
    thief.session = worker.session
    [send] = thief.say(messages(first_init)[kind], b"x", VERBS[kind].channel)
    assert code_of(send.message) == "denied"
    assert isinstance(worker.ask(AskHeads()), Heads), "its owner goes on"


@pytest.mark.parametrize("letter", ["x", ""])
@pytest.mark.parametrize("kind", [*VERBS, Hello, AskStatus])
def test_a_key_that_is_not_in_the_list_hears_nothing_but_no(
    stage: Stage, worker: Member, public: Callable[[str], str], first_init: Init, kind: type[Message], letter: str
) -> None:
    stranger = stage.member("worker", "us-1", worker.incarnation, key=public(letter) if letter else "")
    stranger.session = worker.session
    more = {Hello: Hello(role="worker", id="us-1", incarnation="ab" * 8), AskStatus: AskStatus()}
    channel = VERBS[kind].channel if kind in VERBS else Channel.CONTROL
    [send] = stranger.say({**messages(first_init), **more}[kind], b"x", channel)
    assert isinstance(send.message, Error)
    assert (send.message.code, "allow-list" in send.message.text) == ("denied", True)


def test_bytes_that_are_no_message_tell_a_stranger_nothing(stage: Stage, public: Callable[[str], str]) -> None:
    for key, code in ((public("x"), "denied"), ("", "denied"), (public("u"), "bad-message")):
        [send, _] = stage.hear(GarbageArrived(Channel.CONTROL, b"c", "no msgpack", key))
        assert isinstance(send, Send)
        assert code_of(send.message) == code


@pytest.mark.parametrize("letter", ["s", "o", "a", "r"])
def test_the_status_is_shown_to_every_key(stage: Stage, public: Callable[[str], str], letter: str) -> None:
    assert isinstance(stage.member("operator", "onlooker", key=public(letter)).ask(AskStatus()), Status)


def test_without_keys_everybody_is_whom_they_say_they_are(
    stage: Stage, come: Come, public: Callable[[str], str]
) -> None:
    stage.admit(None)
    for letter, role in (("", "outer"), ("", "worker"), ("x", "operator")):
        member = come(letter, role, "anybody")
        assert isinstance(member.ask(AskHeads()), Heads)


# ---------------------------------------------------------------------------------------------------------- learners


def test_the_id_of_a_learner_belongs_to_the_key_that_first_used_it(
    stage: Stage, worker: Member, public: Callable[[str], str]
) -> None:
    other = stage.member("worker", "us-1", "bb" * 8, key=public("e"))
    answer = other.join()
    assert isinstance(answer, Error)
    assert (answer.code, "belongs to another key" in answer.text) == ("denied", True)
    assert isinstance(worker.ask(AskHeads()), Heads), "and its incarnation is still the current one"
    stage.restart()
    assert code_of(other.join()) == "denied", "for ever"
    assert isinstance(worker.join(), Welcome)


def test_a_learner_of_the_time_before_keys_belongs_to_the_first_one_that_comes(
    stage: Stage, come: Come, public: Callable[[str], str], allow: Allow
) -> None:
    stage.admit(None)
    come("", "worker", "old-1")
    stage.admit(allow("ue"))
    assert isinstance(stage.member("worker", "old-1", "c1" * 8, key=public("e")).join(), Welcome)
    assert code_of(stage.member("worker", "old-1", "c2" * 8, key=public("u")).join()) == "denied"


def test_nobody_offers_what_is_anothers(
    stage: Stage, worker: Member, come: Come, contribute: Contribute, payload: Payload
) -> None:
    other = come("e", "worker", "eu-1")
    answer = other.ask(Offer(contribution=contribute(worker, 1)))
    assert code_of(answer) == "broken-rule"
    grant = worker.ask(Offer(contribution=contribute(worker, 1)))
    assert isinstance(grant, Grant)
    [send] = other.say(Chunk(transfer=grant.transfer, offset=0), payload(worker, 1)[:4096], Channel.BULK)
    assert code_of(send.message) == "not-found", "nor sends into another's upload"
    assert isinstance(worker.send(Offer(contribution=contribute(worker, 1)), payload(worker, 1)), Accepted)


def test_operators_of_one_name_do_not_share_an_upload(stage: Stage, come: Come, allow: Allow) -> None:
    stage.admit(allow("suoa", b=("other-admin", "operator")))
    data = b"weights" * 4000
    first, second = come("a", "operator", "init"), come("b", "operator", "init")
    grant = first.ask(Upload(blob=blob_of(data)))
    assert isinstance(grant, Grant)
    [send] = second.say(Chunk(transfer=grant.transfer, offset=0), b"x" * 4096, Channel.BULK)
    assert code_of(send.message) == "not-found"
    assert isinstance(first.send(Upload(blob=blob_of(data)), data), Stored)


def test_one_incarnation_is_not_taken_over_with_another_key_of_the_same_role(
    stage: Stage, come: Come, allow: Allow
) -> None:
    stage.admit(allow("suoa", p=("outer-2", "outer")))
    first = come("o", "outer", "merger")
    second = stage.member("outer", "merger", first.incarnation, key="p" * 40)
    answer = second.join()
    assert code_of(answer) == "denied"
    assert isinstance(first.ask(Lease(fragments=(0,))), Leased)


# --------------------------------------------------------------------------------------------------------- revocation


def test_a_key_that_is_revoked_in_the_middle_of_an_upload_ends_it(
    stage: Stage, worker: Member, contribute: Contribute, payload: Payload, allow: Allow
) -> None:
    worker.ask(Shards(num_wanted=3))
    contribution, data = contribute(worker, 1), payload(worker, 1)
    grant = worker.ask(Offer(contribution=contribution))
    assert isinstance(grant, Grant)
    worker.say(Chunk(transfer=grant.transfer, offset=0), data[:4096], Channel.BULK)
    ordered = stage.admit(allow("seoar"))
    assert [one.transfer for one in ordered if isinstance(one, AbandonUpload)] == [grant.transfer]
    told = [one for one in ordered if isinstance(one, Send)]
    assert [(send.connection, code_of(send.message)) for send in told] == [(worker.connection, "denied")]
    assert "client.revoked" in stage.events()
    [send] = worker.say(Chunk(transfer=grant.transfer, offset=4096), data[4096:8192], Channel.BULK)
    assert code_of(send.message) == "denied"
    assert code_of(worker.ask(Offer(contribution=contribution))) == "denied"
    assert code_of(worker.join()) == "denied"
    [info] = [one for one in stage.router.state.membership.infos() if one.learner == "us-1"]
    assert (info.is_live, info.num_shards) == (False, 0)
    assert stage.index.row("us-1", 0) is None


def test_what_a_revoked_key_had_sent_in_full_is_not_accepted_any_more(
    stage: Stage, worker: Member, contribute: Contribute, payload: Payload, allow: Allow
) -> None:
    contribution = contribute(worker, 1)
    stage.is_disk_slow = True
    worker.send(Offer(contribution=contribution), payload(worker, 1))
    *writes, finish = stage.waiting
    stage.waiting = writes
    stage.work()
    stage.admit(allow("seoar"))
    stage.waiting = [finish]
    stage.work()
    assert stage.index.row("us-1", 0) is None
    stage.is_disk_slow = False
    stage.advance(stage.settings.flush_seconds)
    assert contribution.blob.digest not in stage.index.digests(), "and its bytes go"


def test_what_was_accepted_of_a_revoked_key_stays(
    stage: Stage, worker: Member, contribute: Contribute, payload: Payload, allow: Allow
) -> None:
    worker.send(Offer(contribution=contribute(worker, 1)), payload(worker, 1))
    stage.admit(allow("seoar"))
    row = stage.index.row("us-1", 0)
    assert row is not None
    assert row.state == "pending"


def test_the_leases_of_a_revoked_outer_are_free_at_once(stage: Stage, outer: Member, come: Come, allow: Allow) -> None:
    stage.admit(allow("usea", p=("outer-2", "outer")))
    other = come("p", "outer", "outer-2")
    answer = other.ask(Lease(fragments=(0, 1)))
    assert isinstance(answer, Leased)
    assert answer.epochs == {0: 2, 1: 2}


def test_what_a_revoked_key_was_fetching_makes_room(
    stage: Stage, come: Come, allow: Allow, public: Callable[[str], str]
) -> None:
    reader = come("a", "evaluator", "eval")
    data = b"p" * 50_000
    worker = come("o", "outer", "outer-1")
    assert isinstance(worker.send(Upload(blob=blob_of(data)), data), Stored)
    reader.say(Fetch(transfer=1, digest=blob_of(data).digest), channel=Channel.BULK)
    flight = stage.router.state.downloads.flight
    assert flight.total > 0
    stage.admit(allow("usoer"))
    assert flight.total == 0


def test_one_name_may_have_two_keys_so_that_one_can_be_exchanged_without_a_pause(
    stage: Stage, worker: Member, allow: Allow, contribute: Contribute, payload: Payload
) -> None:
    both = allow("usoea", n=("us-1", "worker"))
    assert stage.admit(both) == []
    grant = worker.ask(Offer(contribution=contribute(worker, 1)))
    assert isinstance(grant, Grant)
    data = payload(worker, 1)
    worker.say(Chunk(transfer=grant.transfer, offset=0), data[:4096], Channel.BULK)
    old, worker.key = worker.key, "n" * 40
    assert isinstance(worker.ask(AskHeads()), Heads), "the session is the name's"
    assert isinstance(worker.send(Offer(contribution=contribute(worker, 1)), data), Accepted), "and so is the upload"
    sent = [one for one in stage.admit(allow("soea", n=("us-1", "worker"))) if isinstance(one, Send)]
    assert sent == [], "whoever uses the new key notices nothing when the old one goes"
    assert isinstance(worker.ask(AskHeads()), Heads)
    worker.key = old
    assert code_of(worker.ask(AskHeads())) == "denied"


def test_who_still_uses_the_old_key_when_it_goes_has_to_go(stage: Stage, worker: Member, allow: Allow) -> None:
    stage.admit(allow("soea", n=("us-1", "worker")))
    assert code_of(worker.ask(AskHeads())) == "denied"
    worker.key = "n" * 40
    assert isinstance(worker.join(), Welcome), "and comes back with the new one, under the same id"


def test_a_key_whose_role_was_changed_opens_its_old_sessions_no_more(
    stage: Stage, worker: Member, allow: Allow, public: Callable[[str], str]
) -> None:
    stage.admit(allow("soea", u=("us-1", "operator")))
    assert code_of(worker.ask(Progress())) in ("denied", "unknown-session")
    assert "client.revoked" in stage.events()
    assert code_of(worker.join()) == "denied"


def test_a_client_that_is_denied_at_any_time_stops(stage: Stage, worker: Member, allow: Allow) -> None:
    client = Client(Hello(role="worker", id="us-1", incarnation=worker.incarnation))
    [hello] = client.start(0.0)
    welcome = Welcome(
        request=hello.message.request,  # type: ignore[union-attr]
        new_session="ab" * 8,
        protocol=(1, 1),
        broker_incarnation="cd" * 8,
        seq=0,
        limits=stage.settings.limits,
    )
    client.handle(welcome, 0.0)
    client.ask(Progress(), 0.0)
    assert client.handle(Error(code="denied", text="revoked"), 1.0) == [Refused("denied", "revoked")]
    assert client.tick(60.0) == []
