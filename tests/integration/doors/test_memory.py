"""What those who keep to no rule cost a broker process of its memory: strangers, messages without an end, connections
without number."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.key_files import read_client_key
from isles.proto.messages import AskHeads, Channel, Heads, Hello, Message
from isles.proto.transport.address import Address
from isles.proto.transport.curve import show_key
from isles.proto.transport.zmq_transport import ZmqClient

if TYPE_CHECKING:
    from tests.integration.doors.conftest import House, Lines

MIB = 1 << 20
WAIT_SECONDS = 90.0
WAITING_BYTES_MAX = 64 * MIB
"""The least that may be set."""
GROWTH_BYTES_MAX = 3 * WAITING_BYTES_MAX
"""That the broker's memory may ever grow: the bound; what loopback, which is faster than any link, brings between two
looks; and what a process keeps of memory that it has given back."""
NUM_STRANGERS = 60
FRAME_BYTES = 8 * MIB
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
OPEN_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
MORE = b"\x03"
"""Head of a long frame that is not the last one of its message."""


def memory(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith(f"{field}:")]
    return int(found.split()[1]) << 10


def send_until_cut(one: socket.socket, data: bytes, num_bytes_max: int) -> int:
    """How many bytes were taken before the other side hung up, or until it was so many."""
    one.setblocking(False)
    num_bytes = 0
    with suppress(ConnectionError):
        while num_bytes < num_bytes_max:
            readable, writable, _ = select.select([one], [one], [], WAIT_SECONDS)
            if readable and not one.recv(4096):
                break
            if writable:
                num_bytes += one.send(data[: num_bytes_max - num_bytes])
    return num_bytes


def test_strangers_who_fill_frames_are_hung_up_on_and_those_inside_notice_nothing(
    build: Callable[..., House], asking: Callable[..., Message]
) -> None:
    house = build("house", "--waiting-bytes-max", str(WAITING_BYTES_MAX))
    port = Address.parse(house.address).control_port
    honest = house.enter("us-1", "worker", "us-1")
    before = memory(house.process.pid, "VmRSS")
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_STRANGERS)]
    for one in strangers:
        one.sendall(GREETING)
        with suppress(OSError):
            one.sendall(b"\x06" + FRAME_BYTES.to_bytes(8, "big"))
        send_until_cut(one, bytes(MIB), FRAME_BYTES - 1)
    house.logs.wait_for(lambda said: said["event"] == "connections.cut" and said["stranger"] > 0)
    assert isinstance(asking(honest, AskHeads()), Heads)
    assert memory(house.process.pid, "VmHWM") - before < GROWTH_BYTES_MAX < NUM_STRANGERS * FRAME_BYTES
    assert len([said for said in house.events("client.joined") if said["id"] == "us-1"]) == 1
    for one in strangers:
        one.close()


def test_connections_of_a_key_beyond_its_number_are_cut_and_another_key_is_not_touched(
    build: Callable[..., House], asking: Callable[..., Message]
) -> None:
    house = build("house", "--connections-per-key-max", "8")
    honest = house.enter("us-1", "worker", "us-1")
    key = read_client_key(house.key("eu-1"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialled = []
    for _ in range(20):
        one = context.socket(zmq.DEALER)
        one.linger, one.reconnect_ivl = 0, -1
        show_key(one, key, key.broker[0])
        one.connect(Address.parse(house.address).control)
        one.send(b"anything")
        dialled.append(one)
    house.logs.wait_for(lambda said: said["event"] == "connections.cut" and said["surplus"] > 0)
    assert isinstance(asking(honest, AskHeads()), Heads)
    context.destroy(linger=0)


# ------------------------------------------------------------------------- without keys, where anybody may say anything


class Open:
    """A broker process without keys, and a client that keeps the rules."""

    def __init__(self, folder: Path, lines_of: Callable[[Any], Lines]) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        command = [Path(sys.executable).with_name("isles"), "broker", "--store", folder, "--port", "0"]
        command += ["--waiting-bytes-max", str(WAITING_BYTES_MAX)]
        self.process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.logs = lines_of(self.process.stderr)
        started = self.logs.wait_for(lambda said: said["event"] == "broker.started")
        self.address = Address.parse(started["address"])
        hello = Hello(role="worker", id="us-1", incarnation="ab" * 8)
        self.honest = Connection(hello, ZmqClient(self.address), SystemClock())
        self.honest.wait_for_welcome(60.0, address="here")

    def knock(self, channel: Channel) -> socket.socket:
        """A connection through its handshake, by hand: libzmq itself sends no message that is not whole."""
        port = dict(zip(Channel, (self.address.control_port, self.address.bulk_port), strict=False))[channel]
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(OPEN_GREETING + b"\x04" + bytes([len(READY)]) + READY)
        heard = b""
        while b"READY" not in heard:
            heard += one.recv(4096)
        return one

    def close(self) -> None:
        self.honest.close()
        self.process.kill()
        self.process.wait()
        self.logs.close()


@pytest.fixture
def opened(tmp_path: Path, lines_of: Callable[[Any], Lines]) -> Iterator[Open]:
    made = Open(tmp_path / "store", lines_of)
    yield made
    made.close()


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
def test_a_message_without_an_end_is_cut_off_before_it_fills_the_memory(
    opened: Open, asking: Callable[..., Message], channel: Channel
) -> None:
    before = memory(opened.process.pid, "VmRSS")
    endless = opened.knock(channel)
    part = MORE + MIB.to_bytes(8, "big") + bytes(MIB)
    num_bytes = send_until_cut(endless, part, 16 * WAITING_BYTES_MAX)
    assert num_bytes < 16 * WAITING_BYTES_MAX, "it was hung up on"
    opened.logs.wait_for(lambda said: said["event"] == "connections.cut" and said["overfull"] == 1)
    assert isinstance(asking(opened.honest, AskHeads()), Heads)
    assert memory(opened.process.pid, "VmHWM") - before < GROWTH_BYTES_MAX
    endless.close()
