"""A world for learners: the real broker and the real outer in threads of one process, over the memory transport."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from torch import nn

from isles.brokers.broker import Broker
from isles.brokers.settings import BrokerSettings
from isles.brokers.store.store import Store
from isles.outer.outer import Outer
from isles.outer.settings import OuterSettings
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.logs import SilentLogger
from isles.proto.messages import (
    AskHistory,
    AskStatus,
    Hello,
    History,
    Lease,
    Leased,
    Leave,
    List,
    Listing,
    Message,
    Rejection,
    Role,
    Settle,
    Status,
)
from isles.proto.transport.memory import MemoryBroker
from isles.workers import Learner
from isles.workers.parameters import GlobalParameters, ParameterFetcher

WAIT_SECONDS = 30.0
"""Bound of every wait here; nothing takes a hundredth of it unless it is broken."""

SYNC = SyncSettings(
    num_fragments=2, interval_steps=4, codec_up="int8", codec_down="int8", merge_rule="mean", grace_max_seconds=0.01
)
BUDGET = Budget(tokens=100_000)


class Toy:
    """A learner with the small model that it trains."""

    def __init__(self, name: str, learner: Learner, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.learner = learner
        self.model = model
        self.optimizer = optimizer
        self.num_tokens = 0
        """Taken in this process."""

    def __enter__(self) -> Self:
        self.learner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.learner.__exit__(kind, error, traceback)

    @property
    def version(self) -> int:
        """The oldest version held."""
        return min(self.learner.versions.values())

    @property
    def values(self) -> torch.Tensor:
        """A copy of all parameters."""
        return torch.cat([one.detach().reshape(-1) for one in self.model.parameters()])

    def train(self, num_steps: int = 1, cursor: dict[int, int] | None = None) -> None:
        for _ in range(num_steps):
            inputs = torch.randn(16, 4)
            loss = ((self.model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.num_tokens += 10
            self.learner.step(tokens=10, cursor=cursor)

    def train_until(self, is_enough: Callable[[], bool], cursor: dict[int, int] | None = None) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_enough():
            assert time.monotonic() < deadline, "it did not happen"
            self.train(cursor=cursor)
            self.learner._running.courier.mailbox.wait(0.01)

    def train_to(self, version: int) -> None:
        self.train_until(lambda: self.version >= version)


class World:
    """A broker and an outer, each in a thread of its own; both can die and come back."""

    def __init__(self, folder: Path, sync: SyncSettings = SYNC) -> None:
        self.folder = folder
        self.sync = sync
        self.lease_seconds = 10.0
        """Of learners, under the next broker that is started."""
        self.transport = MemoryBroker()
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}

    def start_broker(self) -> None:
        settings = BrokerSettings(
            store=self.folder,
            heartbeat_seconds=0.05,
            tick_seconds=0.05,
            learner_lease_seconds=self.lease_seconds,
        )
        broker = Broker(settings, self.transport, Store.open(self.folder), SystemClock(), SilentLogger())
        self._start("broker", broker.run)

    def kill_broker(self) -> None:
        """Nobody answers any more; what arrives meanwhile is lost."""
        self._stop("broker")
        self.transport.poll(0.0)

    def start_outer(self) -> None:
        hello = Hello(role="outer", id="outer", incarnation=secrets.token_hex(8))
        connection = Connection(hello, self.transport.connect(), SystemClock())
        outer = Outer(OuterSettings(id="outer", list_seconds=0.2), connection, SilentLogger())
        self._start("outer", outer.run)

    def kill_outer(self) -> None:
        self._stop("outer")

    def close(self) -> None:
        self.kill_outer()
        self.kill_broker()

    def connect(self, role: Role, name: str) -> Connection:
        hello = Hello(role=role, id=name, incarnation=secrets.token_hex(8))
        connection = Connection(hello, self.transport.connect(), SystemClock())
        connection.wait_for_welcome(WAIT_SECONDS, address="memory")
        return connection

    def ask(self, message: Message) -> Message:
        connection = self.connect("operator", "asker")
        reply = connection.ask_and_wait(message, WAIT_SECONDS, address="memory")
        connection.close()
        return reply

    def status(self) -> Status:
        reply = self.ask(AskStatus())
        assert isinstance(reply, Status)
        return reply

    def parameters(self, record: RunRecord) -> GlobalParameters:
        """The newest ones, as an evaluator gets them."""
        connection = self.connect("operator", "reader")
        fetcher = ParameterFetcher(connection, record, address="memory", timeout_seconds=WAIT_SECONDS)
        found = fetcher.newest()
        connection.close()
        return found

    def digests(self, fragment: int) -> list[str]:
        """Of the parameters of every version."""
        reply = self.ask(AskHistory(fragment=fragment, num_max=256))
        assert isinstance(reply, History)
        return [version.parameters_sha256 for version in reply.versions]

    def reject_pending(self, fragment: int, reason: str) -> int:
        """Settles what is pending as an outer would; returns how many that were. No other outer may be at work."""
        connection = self.connect("outer", "judge")

        def ask(message: Message) -> Message:
            return connection.ask_and_wait(message, WAIT_SECONDS, address="memory")

        leased, listing = ask(Lease(fragments=(fragment,))), ask(List(fragment=fragment))
        assert isinstance(leased, Leased)
        assert isinstance(listing, Listing)
        if listing.pending:
            rejections = tuple(Rejection(id=one.id, reason=reason) for one in listing.pending)
            ask(Settle(fragment=fragment, epoch=leased.epochs[fragment], rejections=rejections))
        ask(Leave())
        connection.close()
        return len(listing.pending)

    def make(self, name: str = "us-0", *, seed: int = 0, width: int = 8, **arguments: Any) -> Toy:
        """A learner that may start the run `toy`, with a `model` that takes four numbers; nothing is started."""
        torch.manual_seed(seed)
        default = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        model: nn.Module = arguments.pop("model", default)
        if (dtype := arguments.pop("dtype", None)) is not None:
            model.to(dtype)
        kind = arguments.pop("optimizer", torch.optim.AdamW)
        optimizer = kind(model.parameters(), lr=0.01)
        settings = {
            "run": "toy",
            "sync": self.sync,
            "budget": BUDGET,
            "connect": self.transport.connect,
            "join_timeout_seconds": WAIT_SECONDS,
            **arguments,
        }
        return Toy(name, Learner(model, optimizer, learner=name, **settings), model, optimizer)

    def _start(self, name: str, run: Callable[[threading.Event], None]) -> None:
        stop = threading.Event()
        thread = threading.Thread(target=run, args=(stop,), name=name)
        self._threads[name] = thread, stop
        thread.start()

    def _stop(self, name: str) -> None:
        if name in self._threads:
            thread, stop = self._threads.pop(name)
            stop.set()
            self.transport.wake()
            thread.join(WAIT_SECONDS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A broker at work; `start_outer` is up to the test."""
    made = World(tmp_path / "store")
    made.start_broker()
    yield made
    made.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds with settings of their own, broker and outer at work."""
    worlds: list[World] = []

    def make(**settings: Any) -> World:
        made = World(tmp_path / f"store-{len(worlds)}", SYNC.model_copy(update=settings))
        worlds.append(made)
        made.start_broker()
        made.start_outer()
        return made

    yield make
    for world in worlds:
        world.close()
