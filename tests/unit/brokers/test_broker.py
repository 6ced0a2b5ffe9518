"""The shell: one turn at a time over the in-memory transport, with the real client on the other side."""

from __future__ import annotations

import errno
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from isles.brokers.broker import Broker, _write_address
from isles.brokers.settings import BrokerSettings
from isles.brokers.stage import blob_of
from isles.brokers.store.disk import InlineDisk
from isles.brokers.store.store import Store
from isles.proto.agreement import RunRecord
from isles.proto.client import Answered, Fetched, Refused
from isles.proto.clock import ManualClock, SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import StoreError, StoreFullError
from isles.proto.ids import ContributionId
from isles.proto.logs import ListLogger
from isles.proto.messages import (
    Accepted,
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    Channel,
    Commit,
    Committed,
    Contribution,
    Error,
    Heads,
    Hello,
    History,
    Ingredient,
    Init,
    Initialised,
    Lease,
    Leased,
    Message,
    Offer,
    Recipe,
    Status,
    Stored,
    Upload,
    VersionInfo,
    VersionReply,
    pack,
    unpack,
)
from isles.proto.transport.memory import MemoryBroker


class House:
    """A broker's shell on a store in memory, turned by hand, and connections to it."""

    def __init__(self, store: Store | None = None) -> None:
        self.transport = MemoryBroker()
        self.clock = ManualClock()
        self.logger = ListLogger()
        self.store = store or Store.in_memory()
        settings = BrokerSettings(chunk_bytes=4096, credit_chunks=2)
        disk = InlineDisk(self.store.blobs, self.transport.wake)
        self.broker = Broker(settings, self.transport, self.store, self.clock, self.logger, disk)
        self.broker.start()

    def connect(self, role: Any, name: str) -> Connection:
        connection = Connection(Hello(role=role, id=name, incarnation="ab" * 8), self.transport.connect(), self.clock)
        connection.start()
        self.turn(connection)
        return connection

    def turn(self, connection: Connection, num_turns: int = 40) -> list[Any]:
        news: list[Any] = []
        for _ in range(num_turns):
            self.broker.work(0.0)
            news += connection.poll(0.0)
        return news

    def ask(self, connection: Connection, message: Message, payload: bytes | None = None) -> Message:
        connection.ask(message, payload)
        [answered] = [news for news in self.turn(connection) if isinstance(news, Answered)]
        return answered.reply


@pytest.fixture
def house() -> House:
    return House()


def test_the_golden_path_from_nothing_to_a_version_that_is_fetched(house: House, record: RunRecord) -> None:
    worker, outer = house.connect("worker", "us-1"), house.connect("outer", "outer-1")
    parameters, delta, update = b"parameters" * 2000, b"delta" * 3000, b"update" * 1000
    assert isinstance(house.ask(worker, Upload(blob=blob_of(parameters)), parameters), Stored)
    versions = tuple(
        VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(parameters))
        for number in range(2)
    )
    assert isinstance(house.ask(worker, Init(run_record=record, versions=versions)), Initialised)
    contribution = Contribution(
        id=ContributionId("us-1", 0, "ab" * 8, 0),
        base_version=0,
        blob=blob_of(delta),
        codec="int4",
        tokens=10,
        steps=1,
        seconds=1.0,
        norms=(1.0,),
    )
    assert isinstance(house.ask(worker, Offer(contribution=contribution), delta), Accepted)
    assert isinstance(house.ask(outer, Lease(fragments=(0, 1))), Leased)
    assert isinstance(house.ask(outer, Upload(blob=blob_of(update)), update), Stored)
    ingredient = Ingredient(
        id=contribution.id, digest=contribution.blob.digest, base_version=0, tokens=10, steps=1, weight=100.0
    )
    commit = Commit(
        commit_id="c0" * 8,
        fragment=0,
        epoch=1,
        base_version=0,
        parameters_sha256="1" * 64,
        update=blob_of(update),
        recipe=Recipe(ingredients=(ingredient,), fraction=1.0, merge_rule="mean", settings_digest="2" * 64),
    )
    assert isinstance(house.ask(outer, commit), Committed)
    reply = house.ask(worker, AskVersion(fragment=0, base_version=0))
    assert isinstance(reply, VersionReply)
    worker.fetch(reply.updates[0], bytes_max=10**6)
    [fetched] = [news for news in house.turn(worker) if isinstance(news, Fetched)]
    assert bytes(fetched.data) == update
    assert {"client.joined", "run.initialised", "contribution.accepted", "outer.leased", "round.committed"} <= set(
        house.logger.events()
    )


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
@pytest.mark.parametrize("header", [b"", b"\xff" * 40, pack(AskHeads())[:-1], pack(AskHeads(session="nobody"))])
def test_bytes_that_are_no_message_are_answered_and_change_nothing(
    house: House, header: bytes, channel: Channel
) -> None:
    client = house.transport.connect()
    client.send(channel, header)
    house.broker.work(0.0)
    [arrival] = [arrival for arrival in client.poll(0.0) if arrival.channel is channel]
    answer = unpack(arrival.header)
    assert isinstance(answer, Error)
    assert answer.code in ("bad-message", "unknown-session")
    assert "message.refused" in house.logger.events()


def test_nothing_is_answered_when_the_transaction_fails(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.transport.connect()
    client.send(Channel.CONTROL, pack(Hello(role="worker", id="us-1", incarnation="ab" * 8)))
    commits: list[str] = []

    class Refusing:
        def __init__(self, database: sqlite3.Connection) -> None:
            self._database = database

        def execute(self, sql: str, *arguments: Any) -> Any:
            if sql == "COMMIT":
                commits.append(sql)
                raise sqlite3.OperationalError("database or disk is full")
            return self._database.execute(sql, *arguments)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._database, name)

    transactions = house.store.index._transactions  # type: ignore[attr-defined]
    monkeypatch.setattr(transactions, "_database", Refusing(transactions._database))
    with pytest.raises(StoreError, match="disk is full"):
        house.broker.work(0.0)
    assert commits
    assert client.poll(0.0) == []


def test_a_full_disk_under_the_index_ends_the_process_and_loses_nothing(tmp_path: Path, record: RunRecord) -> None:
    house = House(Store.open(tmp_path / "store"))
    worker, [kept, lost] = house.connect("worker", "us-1"), [b"kept" * 2000, b"lost" * 3000]
    assert isinstance(house.ask(worker, Upload(blob=blob_of(kept)), kept), Stored)
    index: Any = house.store.index
    index._db.execute("PRAGMA max_page_count = 1")
    connections = (house.connect("outer", f"o-{number}") for number in range(1000))
    with pytest.raises(StoreFullError, match="make room, then start this broker again"):
        all(house.ask(connection, Upload(blob=blob_of(lost)), lost) for connection in connections)
    house.store.close()
    house = House(Store.open(tmp_path / "store"))
    worker = house.connect("worker", "us-1")
    assert house.store.index.blob(blob_of(kept).digest) == blob_of(kept)
    assert isinstance(house.ask(worker, Upload(blob=blob_of(lost)), lost), Stored)
    house.store.close()


def test_an_address_that_finds_no_room_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(StoreFullError, match="is full"):
        _write_address(tmp_path / "address", "tcp://127.0.0.1:7700")


def test_answers_that_nobody_takes_are_counted_and_told(house: House) -> None:
    for number in range(3):
        gone = house.connect("operator", f"op-{number}")
        gone.ask(AskHeads())
        gone.close()
    house.broker.work(0.0)
    assert "messages.dropped" not in house.logger.events(), "one line for many"
    for _ in range(4):
        house.clock.advance(20.0)
        house.broker.work(0.0)
    told = [fields for _, event, fields in house.logger.records if event == "messages.dropped"]
    assert told == [{"unsent": 3, "unread": 0, "hints": 0}]


def test_a_mistake_of_ours_costs_one_event_and_is_answered(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = house.connect("worker", "us-1")
    handle = house.broker.router.handle

    def break_once(event: Any, now: float, unix: float) -> Any:
        instructions = handle(event, now, unix)
        if isinstance(getattr(event, "message", None), AskHeads):
            house.store.index.put_value("half", b"done")
            raise KeyError("a mistake")
        return instructions

    monkeypatch.setattr(house.broker.router, "handle", break_once)
    answer = house.ask(worker, AskHeads())
    assert isinstance(answer, Error)
    assert answer.code == "internal"
    assert house.store.index.value("half") is None
    assert isinstance(house.ask(worker, AskStatus()), Status)


def test_a_damaged_entry_is_answered_and_logged_with_its_name_and_no_traceback(house: House, record: RunRecord) -> None:
    begin(house, record)
    onlooker = house.connect("operator", "onlooker")
    spoil(house.store.index, fragment=1)
    answer = house.ask(onlooker, AskHistory(fragment=1, first=0))
    assert isinstance(answer, Error)
    assert (answer.code, "entry of version 0 of fragment 1" in answer.text) == ("damaged", True)
    [fields] = [fields for _, event, fields in house.logger.records if event == "message.refused"]
    assert (fields["code"], fields["about"], fields["text"]) == ("damaged", "AskHistory", answer.text)
    assert "traceback" not in fields
    assert isinstance(house.ask(onlooker, AskHistory(fragment=0, first=0)), History)


def test_a_store_whose_newest_version_is_damaged_lets_nobody_in_and_says_why(house: House, record: RunRecord) -> None:
    begin(house, record)
    spoil(house.store.index, fragment=1)
    client = Connection(Hello(role="worker", id="us-2", incarnation="ab" * 8), house.transport.connect(), house.clock)
    client.start()
    [refused] = [news for news in house.turn(client) if isinstance(news, Refused)]
    assert (refused.code, "entry of version 0 of fragment 1" in refused.text) == ("damaged", True)


def spoil(index: Any, *, fragment: int) -> None:
    index._do("UPDATE versions SET info = x'c1' WHERE fragment = ?", fragment)


def begin(house: House, record: RunRecord) -> None:
    """A worker comes and starts the run."""
    worker, parameters = house.connect("worker", "us-1"), b"parameters" * 2000
    assert isinstance(house.ask(worker, Upload(blob=blob_of(parameters)), parameters), Stored)
    versions = tuple(
        VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(parameters))
        for number in range(2)
    )
    assert isinstance(house.ask(worker, Init(run_record=record, versions=versions)), Initialised)


def test_a_client_goes_on_by_itself_after_the_broker_was_restarted(tmp_path: Path) -> None:
    house = House(Store.open(tmp_path))
    client = house.connect("worker", "us-1")
    house.broker.close()
    again = House(Store.open(tmp_path))
    again.transport, house.transport._inbox = house.transport, again.transport._inbox
    again.broker._transport = house.transport
    answer = again.ask(client, AskHeads())
    assert isinstance(answer, Heads)
    assert answer.broker_incarnation == again.broker.incarnation
    again.broker.close()


def test_a_start_sweeps_what_an_earlier_process_left(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    (tmp_path / "blobs" / "17.tmp").write_bytes(b"half")
    (tmp_path / "blobs" / ("0" * 64)).write_bytes(b"never promised")
    house = House(Store.open(tmp_path))
    assert list((tmp_path / "blobs").iterdir()) == []
    assert house.logger.events() == ["store.swept"]
    house.broker.close()


def test_run_works_until_it_is_told_to_stop(tmp_path: Path, record: RunRecord) -> None:
    transport, clock, stop = MemoryBroker(), SystemClock(), threading.Event()
    broker = Broker(BrokerSettings(tick_seconds=0.01), transport, Store.open(tmp_path), clock, ListLogger())
    thread = threading.Thread(target=broker.run, args=(stop,))
    thread.start()
    try:
        connection = Connection(Hello(role="worker", id="us-1", incarnation="ab" * 8), transport.connect(), clock)
        connection.wait_for_welcome(30.0, address="memory")
        connection.ask(Upload(blob=blob_of(b"payload")), b"payload")
        answers: list[Any] = []
        while not answers:
            answers = [news for news in connection.poll(30.0) if isinstance(news, Answered)]
        assert isinstance(answers[0].reply, Stored)
    finally:
        stop.set()
        transport.wake()
        thread.join(30)
    assert not thread.is_alive()
    Store.open(tmp_path).close()
