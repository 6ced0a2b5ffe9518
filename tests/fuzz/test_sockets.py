"""The three ports of a broker process under fire from strangers and from a key that is let in: it stays small, and an
honest client gets its answers all the while."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from isles.ops.key_folder import KeyFolder
from isles.proto.client import Answered
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.key_files import read_client_key
from isles.proto.messages import AskHeads, Channel, Heads, Hello, Message
from isles.proto.transport.address import Address
from isles.proto.transport.curve import show_key
from isles.proto.transport.zmq_transport import ZmqClient

if TYPE_CHECKING:
    from tests.fuzz.conftest import Spoiler

WAIT_SECONDS = 60.0
"""Far above what anything takes here."""
BROKER_BYTES_MAX = 400 << 20
"""Resident memory that the broker of these tests may ever have had: 80 MiB of its own; one header as it is read; 16 of
the longest messages on control that wait unread; and what its sockets hold of everything else."""
HONEST = "honest"
HOSTILE = "hostile"

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
OPENINGS = [
    b"",
    b"\xff",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 64,
    b"\xff" * 4096,
    b"\x01\x00",
    GREETING[:9],
    GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x0e\x05HELLO\x01a\x01b",
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32),
    GREETING + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31),
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x02\x00" + bytes(192),
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\x09\x08INITIATE",
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8,
    GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff",
    GREETING + b"\xff" * 20 + bytes(32),
    b"\xff" + bytes(8) + b"\x7f\x00\x00" + b"CURVE".ljust(20, b"\0") + bytes(32),
]
"""How strangers may begin: with silence, other protocols, half a greeting, other mechanisms, other versions of CURVE,
commands that come too early, and lengths that are lies."""


class Target:
    """A broker process with keys, one client that keeps the rules, and sockets of one that does not."""

    def __init__(self, folder: Path) -> None:
        self.keys = KeyFolder(folder / "keys")
        for name, role in ((HONEST, "worker"), (HOSTILE, "worker")):
            self.keys.add(name, role, 1)  # type: ignore[arg-type]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        command = [Path(sys.executable).with_name("isles"), "broker", "--store", folder / "store", "--port", "0"]
        self.process = subprocess.Popen(
            [*map(str, command), "--keys", str(folder / "keys")], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.logs: list[str] = []
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._started.wait(WAIT_SECONDS), self.logs
        self.address = Address.parse((folder / "store" / "address").read_text())
        self.ports = (self.address.control_port, self.address.bulk_port, self.address.events_port)
        hello = Hello(role="worker", id="us-1", incarnation="ab" * 8)
        key = read_client_key(folder / "keys" / f"{HONEST}.key")
        self.honest = Connection(hello, ZmqClient(self.address, key), SystemClock())
        self.honest.wait_for_welcome(WAIT_SECONDS, address="here")
        self.hostile_key = read_client_key(folder / "keys" / f"{HOSTILE}.key")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.logs.append(line)
            if '"broker.started"' in line:
                self._started.set()

    def dial(self, channel: Channel) -> zmq.Socket[bytes]:
        """A socket of the hostile key."""
        dialled = self.context.socket(zmq.XSUB if channel is Channel.EVENTS else zmq.DEALER)
        dialled.linger = 0
        dialled.sndtimeo = 5000
        show_key(dialled, self.hostile_key, self.hostile_key.broker[0])
        dialled.connect(self.address.of(channel))
        return dialled

    def check_honest(self) -> None:
        """The honest one asks, and is answered."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_SECONDS
        self.honest.ask(AskHeads())
        while clock.now() < deadline:
            for news in self.honest.poll(0.5):
                if isinstance(news, Answered):
                    assert isinstance(news.reply, Heads)
                    return
        pytest.fail("the honest client was not answered")

    def wait_for(self, event: str) -> None:
        """Until the broker has logged it."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_SECONDS
        while event not in self.events():
            assert clock.now() < deadline, self.logs
            self.honest.poll(0.05)

    def check(self) -> None:
        """All is well: the honest one is answered, the broker small, and no mistake was made."""
        self.check_honest()
        assert self.process.poll() is None
        assert self.peak_bytes() <= BROKER_BYTES_MAX
        assert [line for line in self.logs if '"internal"' in line or "Traceback" in line] == []

    def peak_bytes(self) -> int:
        """The most memory that the broker has ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak.split()[1]) << 10

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.logs if line.startswith("{")]

    def close(self) -> None:
        self.honest.close()
        self.context.destroy(linger=0)
        self.process.kill()
        self.process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One for all tests here: whatever was done to it before, it has to bear what comes."""
    made = Target(tmp_path_factory.mktemp("target"))
    yield made
    made.close()


def knock(port: int, opening: bytes) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", port))
    with suppress(OSError):
        stranger.sendall(opening)
    return stranger


# ----------------------------------------------------------------------------------------------------------- strangers


def test_strangers_who_begin_in_any_way_disturb_nobody(target: Target) -> None:
    strangers = [knock(port, opening) for opening in OPENINGS for port in target.ports]
    target.check()
    for stranger in strangers:
        stranger.close()
    target.check()


@pytest.mark.parametrize("seed", range(2))
def test_strangers_who_send_random_bytes_disturb_nobody(target: Target, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(60):
        opening = chance.choice(OPENINGS)
        garbage = opening[: chance.randrange(len(opening) + 1)] + chance.randbytes(chance.choice((0, 9, 300, 5000)))
        knock(chance.choice(target.ports), garbage).close()
    target.check()


def test_connections_that_never_speak_cost_little(target: Target) -> None:
    before = target.peak_bytes()
    silent = [knock(port, b"") for port in target.ports for _ in range(200)]
    target.check()
    assert target.peak_bytes() - before < 64 << 20
    for one in silent:
        one.close()


def test_a_client_without_a_key_or_with_a_name_and_password_gets_nothing_through(target: Target) -> None:
    for has_password in (False, True):
        for channel in (Channel.CONTROL, Channel.BULK):
            dialled = target.context.socket(zmq.DEALER)
            dialled.linger = 0
            if has_password:
                dialled.plain_username, dialled.plain_password = b"admin", b"admin"
            dialled.connect(target.address.of(channel))
            for _ in range(20):
                with suppress(zmq.Again):
                    dialled.send_multipart([b"x", b"y"], zmq.DONTWAIT)
            target.check()
            dialled.close()


# ------------------------------------------------------------------------------------------- a key that is let in


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
def test_random_frames_of_a_key_that_is_let_in_disturb_nobody(
    target: Target, channel: Channel, spoilers: Callable[[int], Spoiler], every_message: tuple[Message, ...]
) -> None:
    spoiler, dialled = spoilers(3), target.dial(channel)
    chance = spoiler.chance
    for _ in range(300):
        frames = [spoiler.spoil_message(chance.choice(every_message))]
        frames += [chance.randbytes(chance.choice((0, 1, 5000))) for _ in range(chance.choice((0, 0, 1, 2, 5)))]
        dialled.send_multipart(frames)
    dialled.send_multipart([b""] * 400)
    dialled.send_multipart([b"x" * 1000] * 400)
    target.wait_for("message.refused")
    target.check()
    dialled.close()


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
def test_a_frame_that_is_too_long_costs_its_sender_the_connection(target: Target, channel: Channel) -> None:
    dialled = target.dial(channel)
    dialled.send(b"x" * (20 << 20), copy=False)
    target.check()
    dialled.close()


def test_long_messages_that_come_faster_than_they_are_read_wait_in_their_sender(target: Target) -> None:
    dialled = target.dial(Channel.CONTROL)
    dialled.sndtimeo = 0
    header = b"\x92\x20\x81\xa1x\xc5" + b"x" * (7 << 20)
    for _ in range(100):
        with suppress(zmq.Again):
            dialled.send(header)
    target.check()
    dialled.close()


def test_subscriptions_to_other_things_are_forgotten_before_they_fill_the_memory(target: Target) -> None:
    """All of these at once would take libzmq some 700 MB."""
    chance = random.Random(1)
    dialled = target.dial(Channel.EVENTS)
    for number in range(3000):
        dialled.send(b"\x01" + number.to_bytes(4, "big") + chance.randbytes(3000))
    target.check()
    dialled.close()


@pytest.mark.soak
def test_the_same_for_much_longer(
    target: Target, spoilers: Callable[[int], Spoiler], every_message: tuple[Message, ...]
) -> None:
    for seed in range(20):
        test_strangers_who_send_random_bytes_disturb_nobody(target, seed)
        for channel in (Channel.CONTROL, Channel.BULK):
            test_random_frames_of_a_key_that_is_let_in_disturb_nobody(target, channel, spoilers, every_message)
    for _ in range(5):
        test_subscriptions_to_other_things_are_forgotten_before_they_fill_the_memory(target)
