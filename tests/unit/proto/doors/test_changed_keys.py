"""Keys that are revoked or changed while connections stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from isles.proto.errors import ConfigError
from isles.proto.key_files import (
    client_file,
    generate_pair,
    read_client_key,
    write_client_key,
)
from isles.proto.keys import (
    BrokerKey,
)
from isles.proto.messages import Channel
from isles.proto.transport import zmq_transport
from isles.proto.transport.zmq_transport import ZmqBroker

if TYPE_CHECKING:
    from tests.unit.proto.doors.conftest import House

BOTH_WAYS = (Channel.CONTROL, Channel.BULK)


def test_a_revoked_key_hears_no_hints_and_ends_while_others_go_on(house: House) -> None:
    keys = {name: house.make_key(name=name) for name in ("us", "eu")}
    clients = {name: house.dial(key) for name, key in keys.items()}
    for client in clients.values():
        house.hint(client)
        house.send(client)
    house.revoke(keys["us"])
    assert "us does not stand in the allow-list" in house.denial(clients["us"])
    house.hint(clients["eu"])
    assert clients["us"].poll(0.0) == []
    # Whatever a revoked process had sent arrives with its key: the router sees that nobody has it any more.
    assert {arrival.key for arrival in house.arrivals} <= {key.public for key in keys.values()}
    assert house.allowed.find(keys["us"].public) is None
    assert house.send(clients["eu"]).key == keys["eu"].public


def test_the_events_port_is_given_back_and_taken_again_any_number_of_times(house: House) -> None:
    client = house.dial(house.make_key())
    for _ in range(5):
        house.broker.recheck()
        house.hint(client)
    assert client.denial is None


def test_an_events_port_that_somebody_else_took_ends_the_broker(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_transport, "REOPEN_SECONDS", 0.0)
    monkeypatch.setattr(house.broker, "_listen", refuse_to_listen(house.broker))
    with pytest.raises(ConfigError, match="taken"):
        house.until(lambda: house.broker.recheck() is not None)


def refuse_to_listen(broker: ZmqBroker) -> Callable[[Channel, int], int]:
    def listen(channel: Channel, port: int) -> int:
        broker._open(channel, zmq.XPUB)
        raise ConfigError("taken")

    return listen


def test_a_running_client_changes_over_to_the_key_in_its_file(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "KEY_CHECK_SECONDS", 0.0)
    path = client_file(tmp_path, "us")
    old = house.make_key()
    write_client_key(path, old)
    client = house.dial(read_client_key(path))
    assert house.send(client).key == old.public
    new = house.make_key()
    write_client_key(path, new)
    house.until(lambda: house.send(client).key == new.public)
    house.revoke(old)
    house.hint(client)
    assert (house.send(client).key, client.denial) == (new.public, None)


def test_a_client_that_knows_the_next_key_of_its_broker_comes_back_after_the_change(house: House) -> None:
    following = BrokerKey(**generate_pair().model_dump())
    key = house.make_key(broker=(house.key.public, following.public))
    client = house.dial(key)
    house.send(client)
    house.restart(following)
    for channel in BOTH_WAYS:
        assert house.send(client, channel).key == key.public
    house.hint(client)


def test_a_running_client_learns_the_next_key_of_its_broker_from_its_file(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "KEY_CHECK_SECONDS", 0.0)
    path = client_file(tmp_path, "us")
    key = house.make_key()
    write_client_key(path, key)
    client = house.dial(read_client_key(path))
    house.send(client)
    following = BrokerKey(**generate_pair().model_dump())
    write_client_key(path, key.model_copy(update={"broker": (house.key.public, following.public)}))
    house.restart(following)
    assert house.send(client).key == key.public
    house.hint(client)
