"""Who gets through the doors of a broker with keys, and how whoever does not learns why."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import RefusedError
from isles.proto.key_files import (
    generate_pair,
)
from isles.proto.messages import Channel, Hello
from isles.proto.transport import curve
from isles.proto.transport.address import Address
from isles.proto.transport.dialling import Outcome

if TYPE_CHECKING:
    from tests.unit.proto.doors.conftest import House

BOTH_WAYS = (Channel.CONTROL, Channel.BULK)


def test_a_message_names_the_key_that_its_sender_proved(house: House) -> None:
    keys = [house.make_key(name=name) for name in ("us", "eu")]
    clients = [house.dial(key) for key in keys]
    for channel in BOTH_WAYS:
        for client, key in zip(clients, keys, strict=True):
            assert house.send(client, channel).key == key.public
    for client in clients:
        house.hint(client)


def test_a_broker_without_keys_knows_no_key(house: House) -> None:
    house.restart(None)
    assert house.send(house.dial(None)).key == ""


def test_an_unknown_key_is_refused_at_every_socket_and_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.dial(house.make_key(is_allowed=False))
    seen: set[tuple[Channel, Outcome]] = set()
    handle = client._dialling.handle

    def listen(channel: Channel, outcome: Outcome, now: float) -> None:
        seen.add((channel, outcome))
        if {place for place, what in seen if what is Outcome.REFUSED} == set(Channel):
            handle(channel, outcome, now)

    monkeypatch.setattr(client._dialling, "handle", listen)
    assert house.denial(client).startswith("the key of worker us does not stand in the allow-list of this broker")
    assert Outcome.OPENED not in {outcome for _, outcome in seen}
    assert house.arrivals == []
    assert client.send(Channel.CONTROL, b"anyway") is False


def test_without_a_key_nobody_is_let_in_and_it_says_so(house: House) -> None:
    assert house.denial(house.dial(None)).startswith("nobody is let in here without a key")
    assert house.arrivals == []


def test_a_key_is_not_shown_to_a_broker_without_keys(house: House) -> None:
    house.restart(None)
    client = house.dial(house.make_key())
    assert house.denial(client).startswith("this broker has no keys, but this process was given the key of worker us")
    assert house.arrivals == []


@pytest.mark.parametrize("num_keys", [1, 2])
def test_a_broker_that_has_another_key_is_not_talked_to_and_it_says_so(house: House, num_keys: int) -> None:
    others = tuple(generate_pair().public for _ in range(num_keys))
    client = house.dial(house.make_key(broker=others))
    assert house.denial(client).startswith("this broker is not the one that the key of worker us was made for")
    assert house.arrivals == []


def test_a_port_where_everybody_is_hung_up_on_is_no_denial(
    house: House, lone_forwarder: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "PROBE_SECONDS", 0.05)
    probes: list[bool] = []
    client = house.dial(house.make_key(), lone_forwarder)
    monkeypatch.setattr(client._dialling, "probed", lambda *, has_keys: probes.append(has_keys))
    house.until(lambda: client.poll(0.0) == [] and len(probes) >= 3)
    assert not any(probes)
    assert client.denial is None


@pytest.mark.parametrize("has_key", [True, False])
def test_a_denial_ends_whoever_waits_for_the_broker_with_its_sentence(house: House, has_key: bool) -> None:
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            house.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    hello = Hello(role="operator", id="me", incarnation="ab" * 8)
    key = house.make_key(is_allowed=False) if has_key else None
    connection = Connection(hello, house.dial(key), SystemClock())
    try:
        with pytest.raises(RefusedError, match=r"\(denied\): (the key of worker us does not|nobody is let in here)"):
            connection.wait_for_welcome(60.0, address="here")
        assert connection.client.is_refused
    finally:
        stop.set()
        thread.join()
