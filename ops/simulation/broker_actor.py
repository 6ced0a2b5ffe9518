"""The broker of the simulated world: the real router and index around a disk that is a dictionary.

A crash loses what a crash of the process loses: the transaction under way, every message that was not sent yet,
partial uploads, sessions. What was committed and every blob that was reported durable stays.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from isles.brokers import vocabulary as broker
from isles.brokers.limits import RoutingSettings
from isles.brokers.router import Router
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.proto.messages import Hint

UNIX_AT_ZERO = 1_700_000_000.0
DISK_FREE_BYTES = 1 << 40

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
    index: SqliteIndex = field(default_factory=lambda: SqliteIndex(":memory:"))
    blobs: dict[str, bytes] = field(default_factory=dict)
    outbox: list[broker.Send] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    num_crashes: int = 0
    _partial: dict[int, bytearray] = field(default_factory=dict)
    _disk: deque[broker.DiskEvent] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.router = self._start()

    def _start(self) -> Router:
        return Router(self.index, self.settings, self.draw_token(), self.draw_token, self.now, UNIX_AT_ZERO + self.now)

    def crash(self) -> None:
        """The process dies and another one starts on its store."""
        self.num_crashes += 1
        self._partial.clear()
        self._disk.clear()
        self.outbox.clear()
        self.hints.clear()
        self.router = self._start()

    def hear(self, event: broker.Event, now: float, crash: Crash | None = None) -> None:
        """Handles one event as the shell does: in one transaction, answering only when that is durable."""
        self.now = now
        try:
            with self.index.transaction():
                instructions = self.router.handle(event, now, UNIX_AT_ZERO + now)
                if crash == "before commit":
                    raise _CrashError
        except _CrashError:
            self.crash()
            return
        self.on_durable(instructions)
        if crash == "before answers":
            self.crash()
            return
        for instruction in instructions:
            self._perform(instruction)

    @property
    def has_work(self) -> bool:
        """Whether the disk has something to report."""
        return bool(self._disk)

    def work(self, now: float, crash: Crash | None = None) -> None:
        """Reports the oldest thing that the disk has done."""
        self.hear(self._disk.popleft(), now, crash)

    def tick(self, now: float) -> None:
        self.hear(broker.Tick(DISK_FREE_BYTES), now)

    def _perform(self, instruction: broker.Instruction) -> None:
        match instruction:
            case broker.Send():
                self.outbox.append(instruction)
            case broker.Publish(hint):
                self.hints.append(hint)
            case broker.WriteChunk(transfer, _, offset, payload):
                partial = self._partial.setdefault(transfer, bytearray())
                assert offset == len(partial)
                partial += payload
                self._disk.append(broker.ChunkWritten(transfer, len(partial)))
            case broker.FinishUpload(transfer, blob):
                data = bytes(self._partial.pop(transfer, b""))
                if hashlib.sha256(data).hexdigest() == blob.digest:
                    self.blobs[blob.digest] = data
                    self._disk.append(broker.UploadDurable(transfer))
                else:
                    self._disk.append(broker.UploadFailed(transfer, "damaged", "digest"))
            case broker.AbandonUpload(transfer):
                self._partial.pop(transfer, None)
            case broker.ReadChunk(download, blob, offset, num_bytes):
                data = self.blobs.get(blob.digest, b"")
                if blob.digest in self.blobs:
                    self._disk.append(broker.ChunkRead(download, offset, data[offset : offset + num_bytes]))
                else:
                    self._disk.append(broker.ReadFailed(download, "not-found", "no such blob"))
            case broker.DeleteBlob(blob):
                self.blobs.pop(blob.digest, None)
