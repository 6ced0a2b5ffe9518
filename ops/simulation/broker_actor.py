"""The broker of the simulated world: the real router, index and blob store around a disk in memory.

A crash loses what a crash of the process loses: the transaction under way, every message that was not sent yet,
partial uploads, sessions. What was committed stays, and of the blobs what the disk has.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from isles.brokers import retained
from isles.brokers import vocabulary as broker
from isles.brokers.limits import RoutingSettings
from isles.brokers.router import Router
from isles.brokers.store.blobs import BlobStore, MemoryBlobs
from isles.brokers.store.disk import perform
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.proto.agreement import RunRecord
from isles.proto.messages import BlobRef, Hint, Init, Initialised, VersionInfo

UNIX_AT_ZERO = 1_700_000_000.0

Crash = Literal["before commit", "before answers"]


class _CrashError(Exception):
    """Rolls back the transaction under way."""


@dataclass
class BrokerActor:
    """One store and the broker process on it. The world calls `hear` and `work`, and carries what is in `outbox`."""

    settings: RoutingSettings
    draw_token: Callable[[], str]
    now: float = 0.0
    on_durable: Callable[[list[broker.Instruction]], None] = lambda _: None
    """Told the instructions of each transaction the moment it is durable, even if a crash then swallows them."""
    index: SqliteIndex = field(default_factory=lambda: SqliteIndex(IN_MEMORY))
    open_blobs: Callable[[], BlobStore] | None = None
    """How a process that starts finds the blobs; None: in a memory that outlives it."""
    outbox: list[broker.Send] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    num_crashes: int = 0
    is_up: bool = True
    orders: deque[broker.DiskOrder] = field(default_factory=deque)
    """What the disk has still to do, the oldest first."""

    def __post_init__(self) -> None:
        self.blobs: BlobStore = MemoryBlobs()
        self.start()

    def start(self) -> None:
        """A process starts on the store, and deletes what an earlier one left half done."""
        self.is_up = True
        if self.open_blobs is not None:
            self.blobs = self.open_blobs()
        self.blobs.sweep(self.index.digests())
        unix = UNIX_AT_ZERO + self.now
        self.router = Router(self.index, self.settings, self.draw_token(), self.draw_token, self.now, unix)

    def die(self) -> None:
        """The process ends, whatever it was doing."""
        self.num_crashes += 1
        self.is_up = False
        self.orders.clear()
        self.outbox.clear()
        self.hints.clear()

    def crash(self) -> None:
        """The process dies and another one starts on its store."""
        self.die()
        self.start()

    def hear(self, event: broker.Event, now: float, crash: Crash | None = None) -> bool:
        """Handles one event as the shell does: in one transaction, answering only when that is durable.

        False if the process crashes and does not answer: whether there is another one, is up to the world.
        """
        self.now = now
        try:
            with self.index.transaction():
                instructions = self.router.handle(event, now, UNIX_AT_ZERO + now)
                if crash == "before commit":
                    raise _CrashError
        except _CrashError:
            return False
        self.on_durable(instructions)
        if crash == "before answers":
            return False
        for instruction in instructions:
            match instruction:
                case broker.Send():
                    self.outbox.append(instruction)
                case broker.Publish(hint):
                    self.hints.append(hint)
                case broker.Log():
                    pass
                case _:
                    self.orders.append(instruction)
        return True

    def work(self, now: float, crash: Crash | None = None) -> bool:
        """Does the oldest thing that the disk was told to do; otherwise as `hear`."""
        event = perform(self.blobs, self.orders.popleft())
        return event is None or self.hear(event, now, crash)

    def tick(self, now: float) -> None:
        self.hear(broker.Tick(self.blobs.free_bytes()), now)

    def begin(self, record: RunRecord, parameters: bytes) -> None:
        """Makes the run; its fragments all begin with the same parameters."""
        blob = BlobRef(digest=hashlib.sha256(parameters).hexdigest(), size_bytes=len(parameters))
        self.blobs.write(0, 0, parameters)
        self.blobs.finish(0, blob)
        first = [
            VersionInfo(fragment=fragment, version=0, parameters_sha256=blob.digest, parameters=blob)
            for fragment in range(record.sync.num_fragments)
        ]
        with self.index.transaction():
            self.index.put_blob(blob, UNIX_AT_ZERO)
            message = Init(run_record=record, versions=tuple(first))
            answer = retained.init(self.index, message, initialiser="worker/l0", unix=UNIX_AT_ZERO)
        assert answer == Initialised(is_mine=True), answer

    def stored(self, blob: BlobRef) -> bytes:
        """The bytes of a blob. Raises MissingBlobError or PayloadError."""
        return self.blobs.read(blob, 0, blob.size_bytes)
