"""Whom a relay with a key lets in: whom the home broker lets in, as soon and as long as it does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.relay.limits import RelayingSettings
from isles.brokers.stage import Stage
from isles.proto.client import Refused, Welcomed
from isles.proto.keys import AllowedKey, AllowList, KeyRole
from isles.proto.messages import Accepted, AskHeads, Error, Hello, Init, Message, Offer, Proof, RelayBeat
from isles.proto.proofs import hello_words, offer_words

ROLES: dict[str, KeyRole] = {"us-1": "worker", "us-2": "worker", "admin": "operator", "relay-us": "relay"}
KEYS = {name: f"{number}" * 40 for number, name in enumerate(ROLES)}
BEAT_SECONDS = 2.0
LONG_SECONDS = 30.0


def allow(*names: str) -> AllowList:
    return AllowList(keys=tuple(AllowedKey(name=name, role=ROLES[name], public=KEYS[name]) for name in names))


def tag(public: str, words: bytes) -> str:
    """As good as the real one where nobody forges."""
    return hashlib.sha256(public.encode() + words).hexdigest()


def verify(proof: Proof, words: bytes) -> bool:
    return tag(proof.public, words) in proof.tags


def prover(name: str) -> Callable[[Message, str], Message]:
    def prove(message: Message, store: str) -> Message:
        assert isinstance(message, Hello | Offer)
        words = hello_words(message) if isinstance(message, Hello) else offer_words(message, store)
        return message.changed(proof=Proof(public=KEYS[name], tags=(tag(KEYS[name], words),)))

    return prove


@pytest.fixture
def keyed(
    settings: Any, relaying: dict[str, Any], make_keyed: Callable[[Stage], Any], first_init: Init, begin: Any
) -> Any:
    """A relay with a key before a home broker with keys, whose run a worker of the relay has begun."""
    home = Stage(settings, allowed=allow(*ROLES), verify=verify)
    world = make_keyed(home)
    world.advance(BEAT_SECONDS)
    founder = come(world, "us-1")
    begin(founder, (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40))
    return world


@pytest.fixture
def make_keyed(make_on: Callable[..., Any], relaying: dict[str, Any]) -> Callable[[Stage], Any]:
    return lambda home: make_on(home, RelayingSettings(**relaying), relay_key=KEYS["relay-us"])


def come(world: Any, name: str, *, signs_with: str = "", incarnation: str = "a1" * 8) -> Any:
    speaker = world.speaker(
        name,
        ROLES[name] if ROLES[name] == "worker" else "operator",
        incarnation,
        key=KEYS[name],
        prove=prover(signs_with or name),
    )
    return speaker.join()


def test_who_is_in_the_home_brokers_list_is_let_in(keyed: Any) -> None:
    worker = come(keyed, "us-2")
    assert worker.told(Welcomed)
    assert keyed.home.router.state.sessions.find("worker", "us-2", "a1" * 8).key_name == "us-2"
    assert keyed.disk.keys is not None


def test_nobody_is_let_in_before_the_home_broker_has_said_whom(settings: Any, make_keyed: Any) -> None:
    world = make_keyed(Stage(settings, allowed=allow(*ROLES), verify=verify))
    world.is_link_up = False
    early = come(world, "us-1")
    assert [refused.code for refused in early.told(Refused)] == ["denied"]
    assert not any(isinstance(message, Hello) and message.role == "worker" for message in world.passed_up)


def test_a_relay_that_starts_while_its_link_is_cut_lets_in_whom_it_knew(keyed: Any) -> None:
    keyed.is_link_up = False
    keyed.restart()
    worker = come(keyed, "us-2")
    assert worker.told(Refused) == []
    keyed.is_link_up = True
    keyed.advance(LONG_SECONDS)
    assert worker.told(Welcomed)


def test_a_stranger_is_told_so_and_nothing_of_it_passes(keyed: Any) -> None:
    before = len(keyed.passed_up)
    stranger = keyed.speaker("us-9", key="9" * 40).join()
    assert [refused.code for refused in stranger.told(Refused)] == ["denied"]
    assert not any(isinstance(message, Hello) for message in keyed.passed_up[before:])


def test_a_key_that_is_taken_off_the_list_is_cut_within_a_beat(keyed: Any) -> None:
    worker = come(keyed, "us-2")
    keyed.home.admit(allow("us-1", "admin", "relay-us"))
    keyed.advance(BEAT_SECONDS)
    assert [refused.code for refused in worker.told(Refused)] == ["denied"]
    assert [fields["id"] for fields in keyed.said("client.revoked")] == ["us-2"]
    assert keyed.num_rechecks == 1
    assert keyed.relay.state.sessions.find("worker", "us-2", "a1" * 8) is None


def test_a_list_that_has_not_changed_is_not_sent_again(keyed: Any) -> None:
    keyed.advance(LONG_SECONDS)
    beats = [message for message in keyed.passed_up if isinstance(message, RelayBeat)]
    assert [beat.keys_sha256 for beat in beats[1:]] == [keyed.home.allowed.sha256] * (len(beats) - 1)
    assert len(keyed.said("keys.changed")) == 1


def test_an_offer_with_its_makers_proof_is_accepted_and_one_with_anothers_is_not(keyed: Any, offer_of: Any) -> None:
    honest = come(keyed, "us-2")
    honest.ask(*offer_of("us-2"))
    assert honest.answers(Accepted)
    thief = keyed.speaker("us-1", key=KEYS["us-1"], prove=prover("us-1")).join()
    thief.client.prove = prover("us-2")
    thief.ask(*offer_of("us-1"))
    [error] = thief.answers(Error)
    assert error.code == "broken-rule"


def test_the_proof_is_kept_over_a_crash(keyed: Any, offer_of: Any) -> None:
    worker = come(keyed, "us-2")
    keyed.is_link_up = False
    worker.ask(*offer_of("us-2"))
    worker.die()
    keyed.restart()
    keyed.is_link_up = True
    keyed.advance(LONG_SECONDS)
    assert [row.id.learner for row in keyed.home.index.rows_of("us-2")] == ["us-2"]


def test_an_operator_asks_through_the_relay_in_a_session_of_its_own(keyed: Any) -> None:
    admin = come(keyed, "admin")
    admin.ask(AskHeads())
    assert admin.answers()
