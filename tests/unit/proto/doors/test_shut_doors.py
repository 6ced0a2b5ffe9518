"""A door stays shut, whatever was forgotten or fails, and an open one is found at the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from isles.proto.errors import ConfigError
from isles.proto.key_files import (
    generate_pair,
)
from isles.proto.keys import (
    BrokerKey,
    KeyPair,
)
from isles.proto.messages import Channel
from isles.proto.transport import curve, zmq_transport
from isles.proto.transport.address import Address
from isles.proto.transport.curve import prove_closed
from isles.proto.transport.dialling import Outcome
from isles.proto.transport.zmq_transport import ZmqBroker, ZmqClient

if TYPE_CHECKING:
    from tests.unit.proto.doors.conftest import House


def test_an_allow_list_that_fails_lets_nobody_in_and_works_again_afterwards(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = house.make_key()
    sound = house.allowed
    monkeypatch.setattr(house, "allowed", None)
    assert "does not stand in the allow-list" in house.denial(house.dial(key))
    house.allowed = sound
    assert house.send(house.dial(key)).key == key.public


def heard_by(client: ZmqClient, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the monitors of a client report from now on."""
    outcomes: list[Outcome] = []
    handle = client._dialling.handle

    def listen(channel: Channel, outcome: Outcome, now: float) -> None:
        outcomes.append(outcome)
        handle(channel, outcome, now)

    monkeypatch.setattr(client._dialling, "handle", listen)
    return outcomes


def test_nobody_is_let_in_when_nobody_answers_at_the_door(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = house.broker._doors
    assert doors is not None
    house.broker._poller.unregister(doors.socket)
    doors.close()
    house.broker._doors = None
    monkeypatch.setattr(zmq_transport, "HANDSHAKE_MILLISECONDS", 200)  # some wait for an answer that never comes
    client = house.dial(house.make_key())
    outcomes = heard_by(client, monkeypatch)
    house.until(lambda: client.poll(0.0) == [] and outcomes.count(Outcome.CUT) >= 3)
    assert Outcome.OPENED not in outcomes
    assert house.arrivals == []


def test_a_broker_that_lets_everybody_in_does_not_start(house: House) -> None:
    with pytest.raises(ConfigError, match=r"let an unknown key in at tcp://127.0.0.1:.* tried its own doors"):
        ZmqBroker("127.0.0.1", keys=house.key, is_allowed=lambda public: True)


@contextmanager
def left_open(kind: str, key: BrokerKey, channel: Channel) -> Iterator[int]:
    """The port of a socket at which something was forgotten."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = context.socket(zmq.XPUB if channel is Channel.EVENTS else zmq.ROUTER)
    opened.linger = 0
    if kind != "no keys":
        opened.setsockopt(zmq.CURVE_SERVER, 1)
        opened.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    if kind == "a domain that is not enforced":
        opened.setsockopt_string(zmq.ZAP_DOMAIN, "isles")
    opened.bind("tcp://127.0.0.1:*")
    try:
        yield int(opened.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
    finally:
        opened.close()
        context.term()


@pytest.mark.parametrize("channel", list(Channel))
@pytest.mark.parametrize("kind", ["no keys", "no domain", "a domain that is not enforced"])
def test_the_self_test_finds_the_one_door_that_is_open(house: House, channel: Channel, kind: str) -> None:
    with left_open(kind, house.key, channel) as port:
        ports = dict(zip(Channel, house.ports, strict=True)) | {channel: port}
        address = Address("127.0.0.1", *ports.values())
        with pytest.raises(ConfigError, match=f"in at {address.of(channel)} when it tried its own doors"):
            prove_closed(address, house.key.public, house.turn)


def test_a_door_that_does_not_answer_the_self_test_is_no_proof(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "SELF_TEST_SECONDS", 0.1)
    with pytest.raises(
        ConfigError, match=r"strangers were not refused at tcp://\S+, tcp://\S+, tcp://\S+ within 0.1 s"
    ):
        prove_closed(house.broker.address, house.key.public, lambda: None)


def test_halves_that_do_not_belong_together_are_found_at_once(house: House) -> None:
    mixed = {"public": generate_pair().public, "secret": generate_pair().secret}
    with pytest.raises(ConfigError, match="the broker's key is damaged"):
        ZmqBroker("127.0.0.1", keys=BrokerKey(**mixed))
    with pytest.raises(ConfigError, match="the key of worker us is damaged"):
        ZmqClient(house.broker.address, house.make_key().model_copy(update=mixed))


def test_a_pair_is_shown_without_its_secret() -> None:
    pair = KeyPair(**generate_pair().model_dump())
    assert pair.secret not in repr(pair)
