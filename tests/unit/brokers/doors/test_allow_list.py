"""A running broker and its allow-list: read again when it changes, and never opened up by a list that is broken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.brokers.allow_list import REMIND_SECONDS, AllowListFile
from isles.brokers.broker import Broker
from isles.brokers.settings import BrokerSettings
from isles.brokers.store.disk import InlineDisk
from isles.brokers.store.store import Store
from isles.proto.client import Refused, Welcomed
from isles.proto.clock import ManualClock
from isles.proto.connection import Connection
from isles.proto.errors import ConfigError
from isles.proto.key_files import ALLOW_LIST_FILE, write_allow_list
from isles.proto.keys import AllowList
from isles.proto.logs import ListLogger
from isles.proto.messages import AskHeads, Hello, Role
from isles.proto.transport.memory import MemoryBroker

Allow = Callable[..., AllowList]


class CountingBroker(MemoryBroker):
    """Counts how often it was told that the list has changed."""

    num_rechecks = 0

    def recheck(self) -> None:
        self.num_rechecks += 1


class House:
    """A broker's shell with a key folder, turned by hand."""

    def __init__(self, folder: Path) -> None:
        self.transport = CountingBroker()
        self.clock = ManualClock()
        self.logger = ListLogger()
        store = Store.in_memory()
        self.allow_list = AllowListFile(folder)
        disk = InlineDisk(store.blobs, self.transport.wake)
        self.broker = Broker(
            BrokerSettings(), self.transport, store, self.clock, self.logger, disk, allow_list=self.allow_list
        )
        self.broker.start()

    def come(self, letter: str, role: Role = "worker", name: str = "us-1") -> Connection:
        hello = Hello(role=role, id=name, incarnation="ab" * 8)
        connection = Connection(hello, self.transport.connect(letter * 40), self.clock)
        connection.start()
        return connection

    def turn(self, connection: Connection) -> list[Any]:
        news: list[Any] = []
        for _ in range(5):
            self.broker.work(0.0)
            news += connection.poll(0.0)
        return news

    def tick(self) -> None:
        self.clock.advance(1.0)
        self.broker.work(0.0)

    def said(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.logger.records if name == event]


@pytest.fixture
def folder(tmp_path: Path, allow: Allow) -> Path:
    write_allow_list(tmp_path, allow("ua"))
    return tmp_path


def is_in(news: list[Any]) -> bool:
    return any(isinstance(one, Welcomed) for one in news)


def denial(news: list[Any]) -> str:
    [refused] = [one for one in news if isinstance(one, Refused)]
    assert refused.code == "denied"
    return str(refused.text)


def test_who_is_in_the_list_comes_in_and_nobody_else(folder: Path) -> None:
    house = House(folder)
    assert is_in(house.turn(house.come("u")))
    assert "allow-list" in denial(house.turn(house.come("e", name="eu-1")))


def test_a_key_that_is_added_while_the_broker_runs_opens_it(folder: Path, allow: Allow) -> None:
    house = House(folder)
    write_allow_list(folder, allow("uae"))
    house.tick()
    assert is_in(house.turn(house.come("e", name="eu-1")))
    assert house.said("keys.changed") == [{"num_keys": 3, "num_names": 3}]
    assert house.transport.num_rechecks == 0, "whoever hears hints may go on to hear them"


def test_a_key_that_is_taken_off_ends_its_sessions_at_the_next_look(folder: Path, allow: Allow) -> None:
    house = House(folder)
    worker = house.come("u")
    assert is_in(house.turn(worker))
    write_allow_list(folder, allow("a"))
    house.tick()
    assert "not in the allow-list any more" in denial(worker.poll(0.0))
    assert house.transport.num_rechecks == 1
    assert not house.allow_list.lets_in("u" * 40)
    assert [fields["id"] for fields in house.said("client.revoked")] == ["us-1"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("[[keys]\n"),
        lambda path: path.write_text('[[keys]]\nname = "x"\nrole = "king"\npublic = "short"\n'),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: path.write_bytes(b"#" * (2 << 20)),
    ],
    ids=["no TOML", "no allow-list", "no text", "gone", "a folder", "a pipe", "far too long"],
)
def test_a_list_that_breaks_while_the_broker_runs_lets_nobody_in_and_nobody_out(
    folder: Path, allow: Allow, spoil: Callable[[Path], object]
) -> None:
    house = House(folder)
    worker = house.come("u")
    house.turn(worker)
    spoil(folder / ALLOW_LIST_FILE)
    house.tick()
    [complaint] = house.said("keys.unreadable")
    assert ALLOW_LIST_FILE in complaint["text"]
    assert "those are let in whom it named before, and nobody else" in complaint["text"]
    worker.ask(AskHeads())
    assert [type(one).__name__ for one in house.turn(worker)] == ["Answered"]
    denial(house.turn(house.come("e", name="eu-1")))
    house.tick()
    assert len(house.said("keys.unreadable")) == 1, "once is enough for a minute"
    house.clock.advance(REMIND_SECONDS)
    house.tick()
    assert len(house.said("keys.unreadable")) == 2
    path = folder / ALLOW_LIST_FILE
    if path.is_dir():
        path.rmdir()
    write_allow_list(folder, allow("e"))
    house.tick()
    denial(worker.poll(0.0))
    assert is_in(house.turn(house.come("e", name="eu-1"))), "the mended one counts at once"


def test_without_a_list_a_broker_with_keys_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="isles keys new"):
        AllowListFile(tmp_path)


def test_a_list_that_was_only_touched_changes_nothing(folder: Path) -> None:
    house = House(folder)
    os.utime(folder / ALLOW_LIST_FILE, ns=(1, 1))
    house.tick()
    assert house.said("keys.changed") == []
    assert house.transport.num_rechecks == 0
