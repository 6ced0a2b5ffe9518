"""Disk work beside the thread that owns the sockets: orders in, events out.

All orders about one digest go to one thread, in order: chunks of an upload are written as they came, and a blob that is
deleted and sent again ends up stored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, Protocol

from isles.brokers.store.blobs import BlobStore, DiskFullError, MissingBlobError
from isles.brokers.vocabulary import (
    AbandonUpload,
    ChunkRead,
    ChunkWritten,
    DeleteBlob,
    DiskEvent,
    DiskOrder,
    FinishUpload,
    ReadChunk,
    ReadFailed,
    UploadDurable,
    UploadFailed,
    WriteChunk,
)
from isles.proto.errors import PayloadError, StoreError

STOP_SECONDS: Final = 10.0
"""Longest wait for disk work under way at the end; what is not finished was not promised either."""


def perform(blobs: BlobStore, order: DiskOrder) -> DiskEvent | None:
    """Does what a core ordered and says what came of it. Raises StoreError if the disk cannot be trusted any more."""
    try:
        match order:
            case WriteChunk():
                blobs.write(order.transfer, order.offset, order.payload)
                return ChunkWritten(order.transfer, order.offset + len(order.payload))
            case FinishUpload():
                blobs.finish(order.transfer, order.blob)
                return UploadDurable(order.transfer)
            case ReadChunk():
                if order.is_doubted:
                    blobs.doubt(order.blob.digest)
                payload = blobs.read(order.blob, order.offset, order.num_bytes)
                return ChunkRead(order.download, order.offset, payload)
            case AbandonUpload():
                blobs.abandon(order.transfer)
            case DeleteBlob():
                blobs.delete(order.blob.digest)
    except DiskFullError as error:
        assert isinstance(order, WriteChunk | FinishUpload)
        return UploadFailed(order.transfer, "full", str(error))
    except MissingBlobError as error:
        assert isinstance(order, ReadChunk)
        return ReadFailed(order.download, "not-found", str(error))
    except PayloadError as error:
        if isinstance(order, ReadChunk):
            return ReadFailed(order.download, "damaged", str(error))
        assert isinstance(order, FinishUpload)
        return UploadFailed(order.transfer, "damaged", str(error))
    return None


class Disk(Protocol):
    """Where a shell hands its disk orders."""

    def start(self) -> None:
        """Makes it work; called once."""

    def submit(self, order: DiskOrder) -> None:
        """Takes an order; returns at once."""

    def completed(self) -> list[DiskEvent]:
        """What has come of orders since the last call. Raises StoreError if the disk failed."""

    def close(self) -> None:
        """Ends; idempotent."""


class InlineDisk:
    """Does everything at once in the caller's thread; for tests and simulations."""

    def __init__(self, blobs: BlobStore, wake: Callable[[], None]) -> None:
        self._blobs = blobs
        self._wake = wake
        self._events: list[DiskEvent] = []

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, order: DiskOrder) -> None:
        event = perform(self._blobs, order)
        if event is not None:
            self._events.append(event)
            self._wake()

    def completed(self) -> list[DiskEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing to end."""


class DiskThreads:
    """Some threads, each with a queue; `wake` is called when something has been completed."""

    def __init__(self, blobs: BlobStore, num_threads: int, wake: Callable[[], None]) -> None:
        """Starts nothing; `start` does."""
        self._blobs = blobs
        self._wake = wake
        # What waits here is bounded by the credit of the transfers that it belongs to.
        self._orders: list[queue.SimpleQueue[DiskOrder | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._completed: queue.SimpleQueue[DiskEvent | StoreError] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(orders,), name=f"disk-{number}", daemon=True)
            for number, orders in enumerate(self._orders)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, order: DiskOrder) -> None:
        self._orders[int(order.blob.digest[:8], 16) % len(self._orders)].put(order)

    def completed(self) -> list[DiskEvent]:
        events: list[DiskEvent] = []
        while True:
            try:
                found = self._completed.get_nowait()
            except queue.Empty:
                return events
            if isinstance(found, StoreError):
                raise found
            events.append(found)

    def _work(self, orders: queue.SimpleQueue[DiskOrder | None]) -> None:
        while (order := orders.get()) is not None:
            try:
                event: DiskEvent | StoreError | None = perform(self._blobs, order)
            except StoreError as error:
                event = error
            except (OSError, AssertionError) as error:
                event = StoreError(f"the store failed while doing {type(order).__name__}: {error!r}")
            if event is not None:
                self._completed.put(event)
                self._wake()

    def close(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_SECONDS)
