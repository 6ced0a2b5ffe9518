"""Sessions of those who come through relays: whose they are, and what a relay may do in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import AbandonUpload
from isles.proto.keys import AllowList, ClientKey
from isles.proto.messages import (
    Accepted,
    Alive,
    AskHeads,
    AskStatus,
    Channel,
    Chunk,
    Contribution,
    Done,
    Fenced,
    Grant,
    Heads,
    Leave,
    Message,
    Offer,
    Pardon,
    Progress,
    RelayAlive,
    RelayBeat,
    RelayFacts,
    Role,
    Status,
    Upload,
    Welcome,
)

Behinds = Callable[..., Any]
Come = Callable[..., Member]
Contribute = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Keys = dict[str, ClientKey]
Refusal = Callable[[Message, str], str]
SessionOf = Callable[[Member], Any]

A, B = "a1" * 8, "b2" * 8


def test_who_comes_through_a_relay_has_a_session_of_its_own_key(
    stage: Stage, worker: Any, session_of: SessionOf, keys: Keys
) -> None:
    session = session_of(worker)
    assert (session.key_name, session.public, session.via) == ("us-1", keys["us-1"].public, "relay-us")
    assert isinstance(worker.ask(Progress(tokens=10, steps=1)), Alive)
    assert isinstance(worker.ask(AskHeads()), Heads)
    [info] = [one for one in stage.router.state.membership.infos() if one.learner == "us-1"]
    assert (info.region, info.tokens, info.is_live) == ("us", 10, True)
    assert isinstance(worker.ask(Leave()), Done)


def test_an_evaluator_comes_through_a_relay_with_an_operators_key(relay: Member, behind: Behinds) -> None:
    assert isinstance(behind(relay, "admin", "evaluator", "evaluator").join(), Welcome)


@pytest.mark.parametrize(
    ("signs_with", "role", "name", "why"),
    [
        ("", "worker", "us-1", "has no proof"),
        ("relay-us", "worker", "us-1", "does not open worker"),
        ("admin", "worker", "us-1", "does not open worker"),
        ("us-1", "evaluator", "evaluator", "does not open evaluator"),
        ("outer-1", "outer", "outer-1", "let it dial the home broker"),
    ],
)
def test_what_no_key_proves_opens_nothing(
    relay: Member, behind: Behinds, signs_with: str, role: Role, name: str, why: str, refusal: Refusal
) -> None:
    assert why in refusal(behind(relay, signs_with, role, name).join(), "denied")


def test_a_relay_cannot_change_whose_hello_it_passes(relay: Member, behind: Behinds, refusal: Refusal) -> None:
    member = behind(relay)
    for change in ({"id": "us-2"}, {"incarnation": B}, {"rejoin": "00" * 16}, {"store": "00" * 16}):
        assert "does not fit" in refusal(member.ask(member.hello().changed(**change)), "denied")


def test_a_relay_cannot_make_a_hello_of_a_key_that_it_knows_the_name_of(
    relay: Member, behind: Behinds, refusal: Refusal, keys: Keys
) -> None:
    forger = behind(relay, "eu-1")
    hello = forger.hello()
    assert hello.proof is not None
    forged = hello.changed(proof=hello.proof.changed(public=keys["us-1"].public))
    assert "does not fit" in refusal(forger.ask(forged), "denied")


def test_the_learner_of_one_key_is_not_anothers_through_a_relay_either(
    worker: Any, relay: Member, behind: Behinds, refusal: Refusal
) -> None:
    assert "belongs to another key" in refusal(behind(relay, "eu-1", inc=B).join(), "denied")
    assert "with another key" in refusal(behind(relay, "eu-1", inc=A).join(), "denied")
    assert isinstance(worker.ask(AskHeads()), Heads)


def test_an_id_is_given_through_a_relay_and_taken_again_with_a_proof_of_its_token(
    relay: Member, behind: Behinds, refusal: Refusal
) -> None:
    member = behind(relay, "service", name="", inc=A)
    unnamed = member.hello()
    welcome = member.join()
    assert isinstance(welcome, Welcome)
    assert (welcome.learner, bool(welcome.rejoin)) == ("service-1", True)
    stale = unnamed.changed(id="service-1", rejoin=welcome.rejoin)
    assert "does not fit" in refusal(member.ask(stale), "denied"), "HELLO is proved anew once it says more"
    later = behind(relay, "service", name="service-1", inc=B)
    assert isinstance(later.join(rejoin=welcome.rejoin), Welcome)


def test_a_hello_of_an_incarnation_that_was_replaced_is_fenced(relay: Member, behind: Behinds, worker: Any) -> None:
    old = worker.hello()
    assert isinstance(behind(relay, inc=B).join(), Welcome)
    assert isinstance(worker.ask(old), Fenced)
    assert isinstance(worker.ask(AskHeads()), Fenced)


def test_a_broker_that_cannot_verify_takes_no_relay(stage: Stage, refusal: Refusal, keys: Keys) -> None:
    stage.verify = None
    stage.restart()
    answer = stage.member("relay", "relay-us", A, key=keys["relay-us"].public).join()
    assert "isles[relay]" in refusal(answer, "denied")


def test_a_relays_key_opens_only_a_relay_and_others_keys_none(stage: Stage, refusal: Refusal, keys: Keys) -> None:
    member = stage.member("relay", "relay-us", A, key=keys["us-1"].public)
    assert "opens worker, not relay" in refusal(member.join(), "denied")


# --------------------------------------------------------------------------------------------- the sessions of others


def test_a_relay_uses_no_session_that_was_opened_at_the_broker_itself(
    stage: Stage, relay: Member, come: Come, refusal: Refusal, session_of: SessionOf
) -> None:
    direct = come("us-1", "worker")
    for said in (Progress(tokens=10**9), Leave(), AskHeads()):
        refusal(relay.ask(said.changed(session=direct.session)), "unknown-session")
    assert isinstance(direct.ask(AskHeads()), Heads)
    assert session_of(direct).via == ""


def test_a_relay_uses_no_session_of_another_relays_clients(worker: Any, come: Come, refusal: Refusal) -> None:
    other = come("relay-eu", "relay")
    refusal(other.ask(Leave(session=worker.session)), "unknown-session")
    assert isinstance(worker.ask(AskHeads()), Heads)


def test_in_the_session_of_its_client_a_relay_sends_no_payload(
    stage: Stage, worker: Any, contribute: Contribute, refusal: Refusal
) -> None:
    blob = blob_of(b"x" * 100)
    for said in (worker.offer(contribute(worker, 0)), Upload(blob=blob), Pardon(learner="us-1")):
        assert "no relay may pass" in refusal(worker.ask(said), "bad-message")
    [answer] = worker.say(Chunk(transfer=1, offset=0), b"x", Channel.BULK)
    refusal(answer.message, "bad-message")
    assert stage.router.state.uploads.unused_of_key("us-1") == (0, 0)


def test_a_learner_that_changes_its_way_keeps_its_session(
    stage: Stage, worker: Any, relay: Member, come: Come, refusal: Refusal, session_of: SessionOf
) -> None:
    direct = come("us-1", "worker", incarnation=A)
    assert direct.session == worker.session
    assert session_of(direct).via == ""
    refusal(worker.ask(Progress()), "unknown-session")
    again = worker.join()
    assert isinstance(again, Welcome)
    assert again.new_session == direct.session
    assert session_of(direct).via == "relay-us"


def test_what_was_begun_at_the_broker_itself_is_never_answered_to_a_relay(
    stage: Stage, relay: Member, behind: Behinds, come: Come, contribute: Contribute, payload: Payload
) -> None:
    """Its number would mean another question of the relay's."""
    direct = come("us-1", "worker", incarnation=A)
    contribution, data = contribute(direct, 0), payload(direct, 0)
    grant = direct.ask(Offer(contribution=contribution))
    assert isinstance(grant, Grant)
    stage.is_disk_slow = True
    for offset in range(0, len(data), 4096):
        direct.say(Chunk(transfer=grant.transfer, offset=offset), data[offset : offset + 4096], Channel.BULK)
        if offset:
            stage.work()
    worker = behind(relay)
    worker.join()
    before = len(stage.sent)
    stage.is_disk_slow = False
    stage.work()
    stage.work()
    assert [send for send in stage.sent[before:] if send.connection == relay.connection] == []
    assert isinstance(relay.ask(worker.offer(contribution)), Accepted), "it is stored all the same"


# ---------------------------------------------------------------------------------------------------------- revocation


def test_a_worker_whose_key_is_revoked_is_out_behind_its_relay(
    stage: Stage,
    relay: Member,
    worker: Any,
    contribute: Contribute,
    refusal: Refusal,
    session_of: SessionOf,
    without: Callable[..., AllowList],
) -> None:
    offer = worker.offer(contribute(worker, 0))
    assert isinstance(relay.ask(offer), Grant)
    before = len(stage.sent)
    instructions = stage.admit(without("us-1"))
    assert any(isinstance(one, AbandonUpload) for one in instructions)
    assert stage.sent[before:] == [], "nothing that its relay would take for a word about itself"
    assert session_of(worker) is None
    [info] = [one for one in stage.router.state.membership.infos() if one.learner == "us-1"]
    assert not info.is_live
    refusal(worker.ask(Progress()), "unknown-session")
    assert "not in the allow-list" in refusal(worker.join(), "denied")
    assert "not in the allow-list" in refusal(relay.ask(offer), "broken-rule")
    assert isinstance(relay.ask(RelayBeat()), RelayAlive)


def test_a_relay_whose_key_is_revoked_takes_nobody_along(
    stage: Stage, relay: Member, worker: Any, come: Come, refusal: Refusal, without: Callable[..., AllowList]
) -> None:
    stage.admit(without("relay-us"))
    told = [send.message for send in stage.sent if send.connection == relay.connection][-1]
    refusal(told, "denied")
    refusal(relay.ask(RelayBeat()), "denied")
    refusal(worker.ask(Progress()), "denied")
    [info] = [one for one in stage.router.state.membership.infos() if one.learner == "us-1"]
    assert info.is_live
    direct = come("us-1", "worker", incarnation=A)
    assert isinstance(direct.ask(AskHeads()), Heads)


# --------------------------------------------------------------------------------------------------------------- beats


def relays(member: Member) -> list[tuple[str, bool, int]]:
    status = member.ask(AskStatus())
    assert isinstance(status, Status)
    return [(one.relay, one.is_live, one.facts.num_waiting) for one in status.relays]


def test_beats_bring_the_allow_list_and_are_shown(
    stage: Stage, relay: Member, come: Come, without: Callable[..., AllowList], keys: Keys
) -> None:
    first = relay.ask(RelayBeat(facts=RelayFacts(region="us", num_waiting=3)))
    assert isinstance(first, RelayAlive)
    assert {(key.name, key.role, key.public) for key in first.keys or ()} == {
        (key.name, key.role, key.public) for key in keys.values()
    }
    same = relay.ask(RelayBeat(facts=RelayFacts(region="us", num_waiting=4), keys_sha256=first.keys_sha256))
    assert isinstance(same, RelayAlive)
    assert (same.keys, same.keys_sha256) == (None, first.keys_sha256)
    stage.admit(without("us-1"))
    changed = relay.ask(RelayBeat(keys_sha256=first.keys_sha256))
    assert isinstance(changed, RelayAlive)
    assert "us-1" not in {key.name for key in changed.keys or ()}
    assert changed.keys_sha256 != first.keys_sha256


def test_a_relay_is_live_as_long_as_it_beats(stage: Stage, relay: Member, come: Come) -> None:
    admin = come("admin", "operator")
    assert relays(admin) == []
    relay.ask(RelayBeat(facts=RelayFacts(num_waiting=4)))
    assert relays(admin) == [("relay-us", True, 4)]
    stage.advance(stage.settings.learner_lease_seconds)
    assert relays(admin) == [("relay-us", False, 4)]
    relay.ask(RelayBeat())
    assert relays(admin) == [("relay-us", True, 0)]
    relay.ask(Leave())
    assert relays(admin) == [("relay-us", False, 0)]


def test_only_relays_beat(stage: Stage, come: Come, worker: Any, refusal: Refusal) -> None:
    refusal(come("eu-1", "worker").ask(RelayBeat()), "bad-message")
    refusal(worker.ask(RelayBeat()), "bad-message")
