"""Keys that are revoked or exchanged while their owners work: an upload that breaks off, a worker that trains."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from isles.brokers.stage import blob_of
from isles.ops.main import run as isles
from isles.outer.outer import Outer
from isles.outer.settings import OuterSettings
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.client import Answered, Refused
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import RefusedError
from isles.proto.key_files import read_client_key
from isles.proto.logs import ListLogger, SilentLogger
from isles.proto.messages import AskHeads, Channel, Heads, Hello, Message, Stored, Upload, pack
from isles.proto.transport import zmq_transport
from isles.proto.transport.dial import dial
from isles.workers import Learner

if TYPE_CHECKING:
    from tests.integration.doors.conftest import House

WAIT_SECONDS = 60.0
LONG_BYTES = 24 << 20
"""Three windows of credit: an upload that is not attended to stands still in the middle."""


def begin_upload(house: House, name: str, key: str, data: bytes) -> Connection:
    """Somebody who has sent the beginning of an upload, and does not look at the answers for a while."""
    connection = house.enter(key, "worker", name)
    connection.ask(Upload(blob=blob_of(data)), data)
    while not partial_files(house, at_least=1 << 20):
        connection.poll(0.01)
    return connection


def partial_files(house: House, at_least: int = 0) -> list[Path]:
    found = []
    for path in (house.store / "blobs").glob("*.tmp"):
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # it was abandoned just now
            continue
        found += [path] if size >= at_least else []
    return found


def test_a_key_that_is_revoked_in_the_middle_of_an_upload_leaves_nothing_and_disturbs_nobody(
    build: Callable[..., House], waiting: Callable[..., Any], asking: Callable[..., Message], denied: Callable[..., str]
) -> None:
    house = build("house")
    lost, kept = b"a" * LONG_BYTES, secrets.token_bytes(LONG_BYTES)
    broken_off = begin_upload(house, "us-1", "us-1", lost)
    assert len(partial_files(house)) == 1
    honest = house.enter("eu-1", "worker", "eu-1")
    upload = Upload(blob=blob_of(kept))
    honest.ask(upload, kept)
    carried = house.keys.path / "us-1.carried"
    carried.write_bytes(house.key("us-1").read_bytes())
    carried.chmod(0o600)
    assert isles(["keys", "revoke", "us-1", "--keys", str(house.keys.path)]) == 0
    refused = waiting(broken_off, Refused)
    assert (refused.code, "is not in the allow-list" in refused.text) == ("denied", True)
    answered = waiting(honest, Answered, lambda news: news.ask is upload)
    assert isinstance(answered.reply, Stored)
    [revoked] = house.events("client.revoked")
    assert (revoked["id"], revoked["key"]) == ("us-1", "us-1")
    assert partial_files(house) == []
    assert [path.name for path in (house.store / "blobs").iterdir()] == [upload.blob.digest]
    assert isinstance(asking(honest, AskHeads()), Heads)
    carried.rename(house.key("us-1"))
    assert "does not stand in the allow-list" in denied(house.knock("us-1", "worker", "us-1"))


def test_what_whoever_is_revoked_still_sends_is_neither_stored_nor_answered_otherwise(
    build: Callable[..., House], waiting: Callable[..., Any]
) -> None:
    """A client that does not listen: it goes on to send over the connection that it has."""
    house = build("house")
    connection = house.enter("us-1", "worker", "us-1")
    transport, session = connection._transport, connection.client.session
    house.keys.revoke("us-1")
    house.logs.wait_for(lambda said: said["event"] == "client.revoked")
    data = b"late"
    message = Upload(blob=blob_of(data), session=session, request=7)
    transport.send(Channel.CONTROL, pack(message))
    house.logs.wait_for(lambda said: said["event"] == "message.refused" and said["code"] == "denied")
    assert list((house.store / "blobs").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ rotation


@pytest.fixture
def merging(build: Callable[..., House]) -> Iterator[House]:
    """A broker process with an outer."""
    house = build("house")
    hello = Hello(role="outer", id="outer", incarnation=secrets.token_hex(8))
    connection = Connection(hello, dial(house.address, house.key("outer")), SystemClock())
    stop = threading.Event()
    outer = Outer(OuterSettings(id="outer", list_seconds=0.2), connection, SilentLogger())
    thread = threading.Thread(target=outer.run, args=(stop,))
    thread.start()
    yield house
    stop.set()
    connection.wake()
    thread.join(WAIT_SECONDS)
    connection.close()


class Training:
    """A small model that learns to add four numbers, with a learner around it."""

    def __init__(self, house: House, logger: ListLogger) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.learner = Learner(
            self.model,
            self.optimizer,
            broker=house.address,
            key=house.key("us-1"),
            learner="us-1",
            run="toy",
            sync=SyncSettings(num_fragments=1, interval_steps=4, grace_max_seconds=0.01),
            budget=Budget(tokens=10**9),
            join_timeout_seconds=WAIT_SECONDS,
            log=logger,
        )

    def until(self, is_enough: Callable[[], bool]) -> None:
        clock = SystemClock()
        deadline = clock.now() + WAIT_SECONDS
        while not is_enough():
            assert clock.now() < deadline, "it did not happen"
            inputs = torch.randn(16, 4)
            ((self.model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.learner.step(tokens=10)
            self.learner._running.courier.mailbox.wait(0.01)

    def for_versions(self, num: int) -> None:
        """Trains until there are so many versions more."""
        goal = self.learner.versions[0] + num
        self.until(lambda: self.learner.versions[0] >= goal)

    @property
    def public(self) -> str:
        """The key with which its sockets are open."""
        transport: Any = self.learner._running.courier._connection._transport
        return str(transport._key.public)


def test_a_worker_that_trains_changes_over_to_its_next_key_and_never_stops(
    merging: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "KEY_CHECK_SECONDS", 0.1)
    house, logger = merging, ListLogger()
    folder = ("--keys", str(house.keys.path))
    training = Training(house, logger)
    with training.learner:
        training.for_versions(2)
        for _ in range(2):
            assert isles(["keys", "rotate", "us-1", *folder]) == 0
            public = read_client_key(house.key("us-1")).public
            training.until(lambda public=public: training.public == public)  # type: ignore[misc]
            training.for_versions(2)
            assert isles(["keys", "revoke", "us-1", "--old", *folder]) == 0
            assert [key.public for key in house.keys.allowed().of("us-1")] == [public]
            training.for_versions(2)
    joined = [said for said in house.events("client.joined") if said["id"] == "us-1"]
    assert len(joined) == 1, "it is the same session all the while"
    assert house.events("client.revoked") == []
    assert {event for level, event, _ in logger.records if level in ("warning", "error")} <= {"messages.dropped"}
    assert house.events("contribution.rejected") == house.events("message.refused") == []


def test_a_worker_whose_key_is_revoked_while_it_trains_ends_with_the_sentence(merging: House) -> None:
    training = Training(merging, ListLogger())

    def train() -> None:
        with training.learner:
            training.for_versions(1)
            merging.keys.revoke("us-1")
            training.until(lambda: False)

    with pytest.raises(RefusedError, match=r"\(denied\): .*allow-list") as caught:
        train()
    assert caught.value.exit_code == 3
