"""A world in one thread: a real broker, real outers, and learners that do what a test says."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from isles.brokers.broker import Broker
from isles.brokers.settings import BrokerSettings
from isles.brokers.store.disk import InlineDisk
from isles.brokers.store.store import Store
from isles.outer.outer import Outer
from isles.outer.settings import OuterSettings
from isles.outer.workshop import produce
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.client import Answered, Fetched, FetchFailed, Welcomed
from isles.proto.clock import ManualClock
from isles.proto.codec import encode
from isles.proto.connection import Connection
from isles.proto.ids import ContributionId
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    AskHeads,
    AskHistory,
    BlobRef,
    Contribution,
    Heads,
    Hello,
    History,
    Init,
    Message,
    Offer,
    Progress,
    Role,
    Row,
    Upload,
    VersionInfo,
)
from isles.proto.transport.memory import MemoryBroker

Vector = npt.NDArray[np.float32]
_Kind = TypeVar("_Kind", bound=Message)

TURN_SECONDS = 0.02
TURNS_MAX = 3000
LEASE_SECONDS = 3.0
SHAPES = {"a.weight": (40, 10), "b.bias": (40,), "c.weight": (30, 10)}


class HeldJobs(Executor):
    """Does jobs at once in the caller's thread, but keeps merges back on demand: they take long then."""

    def __init__(self) -> None:
        self.is_holding = False
        self._held: list[Callable[[], None]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            future.set_result(job(*args, **kwargs))

        if self.is_holding and isinstance(job, partial) and job.func is produce:
            self._held.append(work)
        else:
            work()
        return future

    @property
    def num_held(self) -> int:
        return len(self._held)

    def release(self) -> None:
        self.is_holding = False
        held, self._held = self._held, []
        for work in held:
            work()


class Outside:
    """A process as the broker sees it: asks, and is told."""

    def __init__(self, world: World, role: Role, name: str, incarnation: str = "ab" * 8) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        hello = Hello(role=role, id=name, incarnation=incarnation)
        self.connection = Connection(hello, world.transport.connect(), world.clock)
        self.answers: list[Answered] = []
        self.blobs: dict[str, bytes] = {}
        self.failed: dict[str, str] = {}
        self.is_welcome = False
        self.connection.start()
        world.outsiders.append(self)
        world.until(lambda: self.is_welcome)

    def turn(self) -> None:
        for news in self.connection.poll(0.0):
            match news:
                case Welcomed():
                    self.is_welcome = True
                case Answered():
                    self.answers.append(news)
                case Fetched():
                    self.blobs[news.blob.digest] = bytes(news.data)
                case FetchFailed():
                    self.failed[news.blob.digest] = news.text

    def ask(self, message: Message, kind: type[_Kind], payload: bytes | None = None) -> _Kind:
        """The answer, which must be of that kind."""
        self.connection.ask(message, payload)
        self.world.until(lambda: any(answer.ask is message for answer in self.answers))
        [answer] = [answer for answer in self.answers if answer.ask is message]
        assert isinstance(answer.reply, kind), answer.reply
        return answer.reply

    def upload(self, payload: bytes) -> BlobRef:
        blob = blob_of(payload)
        self.ask(Upload(blob=blob), Message, payload)
        return blob

    def fetch(self, blob: BlobRef | None) -> bytes:
        assert blob is not None
        self.connection.fetch(blob, bytes_max=blob.size_bytes)
        self.world.until(lambda: blob.digest in self.blobs)
        return self.blobs[blob.digest]

    def history(self, fragment: int = 0) -> tuple[VersionInfo, ...]:
        return self.ask(AskHistory(fragment=fragment), History).versions

    def head(self, fragment: int = 0) -> int:
        return self.ask(AskHeads(), Heads).heads[fragment].version


class Learner(Outside):
    """A worker that contributes what a test gives it."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, "worker", name)
        self.number = 0

    def init(self, record: RunRecord, parameters: list[Vector]) -> None:
        infos = []
        for fragment, vector in enumerate(parameters):
            digest = hashlib.sha256(vector.astype("<f4").tobytes()).hexdigest()
            blob = self.upload(encode("fp32", vector))
            infos.append(VersionInfo(fragment=fragment, version=0, parameters_sha256=digest, parameters=blob))
        self.ask(Init(run_record=record, versions=tuple(infos)), Message)

    def contribute(self, delta: Vector | bytes, fragment: int = 0, **fields: Any) -> ContributionId:
        """Hands in a delta; returns when it is durable at the broker."""
        payload = delta if isinstance(delta, bytes) else encode(self.world.record.sync.codec_up, delta)
        self.number += 1
        contribution_id = ContributionId(self.name, fragment, self.incarnation, self.number)
        values: dict[str, Any] = {
            "id": contribution_id,
            "base_version": 0,
            "blob": blob_of(payload),
            "codec": self.world.record.sync.codec_up,
            "tokens": 100,
            "steps": 10,
            "seconds": 1.0,
            "norms": (1.0,) * len(self.world.manifest.slices(fragment)),
        }
        self.ask(Offer(contribution=Contribution(**(values | fields))), Message, payload)
        return contribution_id

    def progress(self) -> None:
        self.ask(Progress(steps=10, tokens=100, step_seconds=0.1), Message)

    def row(self, fragment: int = 0) -> Row:
        [row] = [row for row in self.ask(AskHeads(), Heads).rows if row.id.fragment == fragment]
        return row


class World:
    """Everybody, and the one loop that moves them."""

    def __init__(self, sync: SyncSettings) -> None:
        self.clock = ManualClock()
        self.transport = MemoryBroker()
        self.store = Store.in_memory()
        self.broker_logger = ListLogger()
        self.broker: Broker | None = self._make_broker()
        self.outsiders: list[Outside] = []
        self.outers: list[Outer] = []
        specs = [TensorSpec(name, shape, "float32", "parameter") for name, shape in SHAPES.items()]
        self.manifest = Manifest.build(specs, {}, sync.num_fragments)
        self.record = RunRecord(
            run="trial",
            seed=1,
            sync=sync,
            budget=Budget(tokens=10**9),
            manifest_digest=self.manifest.digest,
            manifest=self.manifest.to_text(),
        )

    def _make_broker(self) -> Broker:
        disk = InlineDisk(self.store.blobs, self.transport.wake)
        settings = BrokerSettings(outer_lease_seconds=LEASE_SECONDS, chunk_bytes=4096)
        broker = Broker(settings, self.transport, self.store, self.clock, self.broker_logger, disk)
        broker.start()
        return broker

    def restart_broker(self) -> None:
        """A broker that was killed: it finds its store and knows nobody."""
        self.broker = self._make_broker()

    def turn(self, seconds: float = TURN_SECONDS) -> None:
        self.clock.advance(seconds)
        if self.broker is not None:
            self.broker.work(0.0)
        for outsider in self.outsiders:
            outsider.turn()
        for outer in self.outers:
            outer.turn(0.0)

    def until(self, is_reached: Callable[[], bool]) -> None:
        """Lets everybody work until something is so."""
        for _ in range(TURNS_MAX):
            if is_reached():
                return
            self.turn()
        raise AssertionError(f"not reached in {TURNS_MAX * TURN_SECONDS:g} s of this world")

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TURN_SECONDS)):
            self.turn()

    def learner(self, name: str) -> Learner:
        learner = Learner(self, name)
        learner.progress()
        return learner

    def outside(self, role: Role, name: str, incarnation: str) -> Outside:
        return Outside(self, role, name, incarnation)

    def outer(
        self, name: str, clock: ManualClock | None = None, *, incarnation: str = "", **settings: Any
    ) -> tuple[Outer, ListLogger, HeldJobs]:
        """An outer that takes part from now on."""
        logger, jobs = ListLogger(), HeldJobs()
        incarnation = incarnation or hashlib.sha256(name.encode()).hexdigest()[:16]
        hello = Hello(role="outer", id=name, incarnation=incarnation)
        connection = Connection(hello, self.transport.connect(), clock or self.clock)
        outer = Outer(OuterSettings(id=name, **settings), connection, logger, clock or self.clock, jobs)
        outer.start()
        self.outers.append(outer)
        return outer, logger, jobs

    def first_parameters(self) -> list[Vector]:
        random = np.random.default_rng(7)
        return [random.standard_normal(f.num_values).astype(np.float32) for f in self.manifest.fragments]

    def delta(self, seed: int, fragment: int = 0) -> Vector:
        num_values = self.manifest.fragments[fragment].num_values
        return (np.random.default_rng(seed).standard_normal(num_values) * 0.01).astype(np.float32)


def blob_of(payload: bytes) -> BlobRef:
    return BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))


@pytest.fixture
def sync() -> SyncSettings:
    return SyncSettings(
        num_fragments=2,
        codec_up="fp32",
        codec_down="int4",
        merge_rule="mean",
        outer_momentum=0.9,
        grace_max_seconds=0.1,
    )


@pytest.fixture
def bare_world(sync: SyncSettings) -> World:
    """A broker whose run has not begun."""
    return World(sync)


@pytest.fixture
def world(bare_world: World) -> World:
    """A run of two fragments with the learners a and b."""
    first = bare_world.learner("a")
    first.init(bare_world.record, bare_world.first_parameters())
    bare_world.learner("b")
    return bare_world


@pytest.fixture
def learners(world: World) -> list[Learner]:
    return [outsider for outsider in world.outsiders if isinstance(outsider, Learner)]
