"""A courier's heartbeat, while something heavy is under way or the link is full."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import SystemClock
from isles.proto.codec.torch_codec import decode, encode
from isles.proto.connection import Connection
from isles.proto.ids import ContributionId
from isles.proto.logs import SilentLogger
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    Alive,
    AskVersion,
    BlobRef,
    Channel,
    Chunk,
    Fetch,
    Hello,
    Hint,
    Limits,
    Message,
    Offer,
    Progress,
    Row,
    VersionInfo,
    VersionReply,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.interface import Arrival
from isles.proto.transport.memory import MemoryBroker
from isles.workers.account import Account
from isles.workers.courier import Courier, Want
from isles.workers.description import describe
from isles.workers.encoding import Encode
from isles.workers.flat import FlatModel
from isles.workers.orders import PayloadEncoded, TakeAccount, VersionArrived
from isles.workers.parameters import parameters_digest
from isles.workers.versions import Held

PATIENCE_SECONDS = 20.0
"""Bound of a wait; nothing passes because of it."""
BEATS = 5
ID = ContributionId("us-0", 0, "aaaaaaaa", 1)
SYNC = SyncSettings(num_fragments=1, codec_up="int8", codec_down="int8")


class HeldWork(Executor):
    """Does nothing of what it was given before it is released: the heaviest work there is."""

    def __init__(self) -> None:
        self.num_given = 0
        self.is_released = False
        self._held: list[Callable[[], None]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(job(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the future hands it on
                future.set_exception(error)

        self._held.append(work)
        self.num_given += 1
        if self.is_released:
            self.do_one()
        return future

    def do_one(self) -> None:
        """Does what was given first."""
        self._held.pop(0)()

    def release(self) -> None:
        """Does everything, and at once from now on."""
        self.is_released = True
        while self._held:
            self.do_one()


class World:
    """A courier whose thread runs, and a broker that the test plays."""

    def __init__(self) -> None:
        model = nn.Linear(40, 5)
        tensors = describe(model)
        manifest = Manifest.build(tensors.specs, tensors.aliases, 1)
        self.flat = FlatModel(tensors, manifest)
        self.count = self.flat.num_values[0]
        self.record = RunRecord(
            run="toy",
            seed=1,
            sync=SYNC,
            budget=Budget(rounds=9),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )
        self.broker = MemoryBroker()
        self.work = HeldWork()
        self.heard: list[Message] = []
        self.peer = b""
        self.blobs: dict[str, bytes] = {}
        self.payload = encode("int8", torch.ones(self.count))
        hello = Hello(role="worker", id="us-0", incarnation="aaaaaaaa")
        connection = Connection(hello, self.broker.connect(), SystemClock())
        self.courier = Courier(
            connection,
            SYNC,
            self.flat,
            learner="us-0",
            address="memory",
            held={0: Held(0, torch.zeros(self.count))},
            payloads={ID: self.payload},
            shards={},
            progress=Progress,
            clock=SystemClock(),
            log=SilentLogger(),
            worker=self.work,
        )
        connection.start()
        self.courier.start()
        self.serve(lambda: self.count_of(Progress) > 0)

    def count_of(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.heard)

    def serve(self, is_enough: Callable[[], bool]) -> None:
        """Answers what comes, until something is so."""
        deadline = SystemClock().now() + PATIENCE_SECONDS
        while not is_enough():
            assert SystemClock().now() < deadline, "it did not happen"
            for arrival in self.broker.poll(0.05):
                self.answer(arrival)

    def answer(self, arrival: Arrival) -> None:
        message, self.peer = unpack(arrival.header), arrival.connection
        self.heard.append(message)
        match message:
            case Hello():
                limits = Limits(heartbeat_seconds=0.01)
                fields = {"new_session": "cc" * 8, "protocol": (1, 0), "broker_incarnation": "bb" * 8, "seq": 0}
                fields |= {"limits": limits, "run_record": self.record}
                self.say(message, Welcome.model_validate(fields))
            case Progress():
                self.say(message, Alive())
            case AskVersion():
                self.say(message, self.version_reply())
            case Fetch():
                chunk = Chunk(transfer=message.transfer, offset=0)
                self.broker.send(Channel.BULK, self.peer, pack(chunk), self.blobs[message.digest])

    def version_reply(self) -> VersionReply:
        """Version 1, with this learner's contribution in it."""
        update = encode("int8", torch.ones(self.count))
        blob = BlobRef(digest=hashlib.sha256(update).hexdigest(), size_bytes=len(update))
        self.blobs[blob.digest] = update
        digest = parameters_digest(decode(update, num_values=self.count))
        head = VersionInfo(fragment=0, version=1, parameters_sha256=digest)
        return VersionReply(head=head, updates=(blob,), row=Row(id=ID, state="merged", settled_in=1))

    def say(self, question: Message, reply: Message) -> None:
        answered = reply.model_copy(update={"request": question.request})
        self.broker.send(Channel.CONTROL, self.peer, pack(answered))

    def beats(self) -> None:
        """Waits for some heartbeats from now on."""
        before = self.count_of(Progress)
        self.serve(lambda: self.count_of(Progress) >= before + BEATS)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.work.release()
    made.courier.stop()


def test_a_heartbeat_does_not_wait_for_an_account_to_be_encoded(world: World) -> None:
    take = TakeAccount(0, ID._replace(number=2), 0, 30, 3, 1.5, {})
    world.courier.submit(Encode(take, Account(torch.zeros(world.count)), torch.ones(world.count)))
    world.serve(lambda: world.work.num_given == 1)
    world.beats()
    assert world.count_of(Offer) == 0
    world.work.release()
    world.serve(lambda: world.count_of(Offer) == 1)
    assert world.courier.mailbox.take()[0] == [PayloadEncoded(take.id)]


def test_a_heartbeat_does_not_wait_for_a_version_to_be_built_nor_for_the_own_payload_in_it(world: World) -> None:
    world.courier.submit(Want(0))
    arrivals: list[Any] = []

    def has_arrived() -> bool:
        arrivals.extend(world.courier.mailbox.take()[1])
        return bool(arrivals)

    for number in range(3):  # the update is decoded and added, the sum is checked, the own payload is decoded
        world.serve(lambda number=number: world.work.num_given == number + 1)
        world.beats()
        assert not has_arrived()
        world.work.do_one()
    world.serve(has_arrived)
    (arrival,) = arrivals
    assert arrival.event == VersionArrived(0, 1, Row(id=ID, state="merged", settled_in=1))
    assert torch.equal(arrival.decoded, decode(world.payload, num_values=world.count))


def test_news_that_come_during_heavy_work_are_taken_afterwards_in_their_order(world: World) -> None:
    take = TakeAccount(0, ID._replace(number=2), 0, 30, 3, 1.5, {})
    world.courier.submit(Encode(take, Account(torch.zeros(world.count)), torch.ones(world.count)))
    world.serve(lambda: world.work.num_given == 1)
    for seq in range(1, 4):
        hint = Hint(broker_incarnation="bb" * 8, seq=seq, kind="contribution", version=seq, learner="eu-0")
        world.broker.publish(pack(hint))
    world.beats()
    assert world.courier.mailbox.take() == ([], [])
    world.work.release()
    cued: list[Any] = []

    def is_cued() -> bool:
        cued.extend(fact for fact in world.courier.mailbox.take()[0] if not isinstance(fact, PayloadEncoded))
        return bool(cued) and cued[-1].version == 3

    world.serve(is_cued)


def test_a_heartbeat_does_not_wait_for_bulk_traffic(world: World) -> None:
    stray = pack(Chunk(transfer=999, offset=0))
    before = world.count_of(Progress)

    def flood() -> bool:
        for _ in range(64):
            world.broker.send(Channel.BULK, world.peer, stray, b"x" * 4096)
        return world.count_of(Progress) >= before + BEATS

    world.serve(flood)


def test_a_heartbeat_does_not_wait_for_an_inner_step(world: World) -> None:
    before, total = world.count_of(Progress), 0
    while world.count_of(Progress) < before + BEATS:  # the training thread computes and never comes to a boundary
        total += sum(number * number for number in range(2000))
        for arrival in world.broker.poll(0.0):
            world.answer(arrival)
    assert total
