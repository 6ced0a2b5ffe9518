"""Disk work beside the thread that owns the sockets: orders in, events out.

All orders about one digest go to one thread, in order: chunks of an upload are written as they came, and a blob that is
deleted and sent again ends up stored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

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
from isles.proto.messages import BlobRef


class _OfBlob(Protocol):
    """What every order is about."""

    @property
    def blob(self) -> BlobRef: ...


_Order = TypeVar("_Order", bound=_OfBlob)
_Done = TypeVar("_Done")

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


class OrderThreads(Generic[_Order, _Done]):
    """Some threads, each with a queue; `wake` is called when something has been completed."""

    def __init__(self, perform: Callable[[_Order], _Done | None], num_threads: int, wake: Callable[[], None]) -> None:
        """Starts nothing; `start` does. `perform` does an order, and raises StoreError if the disk failed."""
        self._perform = perform
        self._wake = wake
        # What waits here is bounded by the credit of the transfers that it belongs to.
        self._orders: list[queue.SimpleQueue[_Order | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._completed: queue.SimpleQueue[_Done | StoreError] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(orders,), name=f"disk-{number}", daemon=True)
            for number, orders in enumerate(self._orders)
        ]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, order: _Order) -> None:
        """Takes an order; returns at once."""
        self._orders[int(order.blob.digest[:8], 16) % len(self._orders)].put(order)

    def completed(self) -> list[_Done]:
        """What has come of orders since the last call. Raises StoreError if the disk failed."""
        events: list[_Done] = []
        while True:
            try:
                found = self._completed.get_nowait()
            except queue.Empty:
                return events
            if isinstance(found, StoreError):
                raise found
            events.append(found)

    def _work(self, orders: queue.SimpleQueue[_Order | None]) -> None:
        while (order := orders.get()) is not None:
            try:
                event: _Done | StoreError | None = self._perform(order)
            except StoreError as error:
                event = error
            except (OSError, AssertionError) as error:
                event = StoreError(f"the store failed while doing {type(order).__name__}: {error!r}")
            if event is not None:
                self._completed.put(event)
                self._wake()

    def close(self) -> None:
        """Ends what is under way; idempotent."""
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_SECONDS)


class DiskThreads(OrderThreads[DiskOrder, DiskEvent]):
    """Those of a home broker."""

    def __init__(self, blobs: BlobStore, num_threads: int, wake: Callable[[], None]) -> None:
        super().__init__(partial(perform, blobs), num_threads, wake)
