"""Strangers, garbage and damage at the doors stop nobody who is let in."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

from isles.proto.messages import HEADER_BYTES_MAX, Channel
from isles.proto.transport.address import Address
from isles.proto.transport.tcp import allow_descriptors
from isles.proto.transport.zmq_transport import ZmqBroker

if TYPE_CHECKING:
    from tests.unit.proto.doors.conftest import House


def test_strangers_who_knock_all_the_time_do_not_stop_those_inside(house: House) -> None:
    honest = house.dial(house.make_key())
    house.send(honest)
    silent = [socket.create_connection(("127.0.0.1", port)) for port in house.ports for _ in range(50)]
    for one in silent[::2]:
        one.sendall(b"\xff" + bytes(8) + b"\x7f")
    strangers = [house.dial(house.make_key(is_allowed=False)) for _ in range(5)]
    late = house.dial(house.make_key(name="late"))
    for stranger in strangers:
        assert house.denial(stranger)
        assert house.send(honest).key == honest._key.public
    assert house.send(late).key == late._key.public
    house.hint(honest)
    for one in silent:
        one.close()


def test_garbage_at_a_port_costs_its_sender_the_connection_and_nobody_else(house: House) -> None:
    honest = house.dial(house.make_key())
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" * 4096,
        b"\xff" + bytes(8) + b"\x7f\x03" + bytes(500),
    ):
        for port in house.ports:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
                house.send(honest)
    assert {arrival.key for arrival in house.arrivals} == {honest._key.public}


def test_a_damaged_byte_costs_one_connection_not_the_socket(
    house: House, relay: Callable[[int, int], AbstractContextManager[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with relay(house.broker.address.control_port, 3) as port:
        client = house.dial(house.make_key(), with_control_port(house.broker.address, port))
        lost: list[Channel] = []
        due = client._dialling.due
        monkeypatch.setattr(client._dialling, "due", lambda now: (lost.extend(found := due(now)), found)[1])
        house.until(lambda: client.poll(0.0) == [] and len(lost) >= 3)
        assert set(lost) == {Channel.CONTROL}
        house.send(client)
        client.close()


def with_control_port(address: Address, port: int) -> Address:
    return Address(address.host, port, address.bulk_port, address.events_port)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_a_stranger_fills_no_longer_frame_than_a_message_of_ours_may_have(house: House) -> None:
    house.broker.close()
    house.broker = ZmqBroker("127.0.0.1", keys=house.key, chunk_bytes=4096)
    longest = {Channel.CONTROL: HEADER_BYTES_MAX, Channel.BULK: 4096, Channel.EVENTS: 0}
    for channel, port in zip(Channel, house.ports, strict=True):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(GREETING)
            size = longest[channel] + (1 << 20)
            stranger.sendall(b"\x06" + size.to_bytes(8, "big"))
            stranger.setblocking(False)  # it is told off by the length alone, before a byte of it is there
            house.until(lambda: is_hung_up(stranger))


def is_hung_up(one: socket.socket) -> bool:
    try:
        return not one.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_broker_may_have_all_the_descriptors_that_its_machine_permits() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        assert allow_descriptors() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
