"""The threads that work on the disk, and what becomes of their orders."""

from __future__ import annotations

import errno
import os
import queue
from pathlib import Path

import pytest

from isles.brokers.stage import blob_of
from isles.brokers.store.blobs import FolderBlobs, MemoryBlobs
from isles.brokers.store.disk import DiskThreads, InlineDisk
from isles.brokers.vocabulary import (
    AbandonUpload,
    ChunkRead,
    ChunkWritten,
    DeleteBlob,
    FinishUpload,
    ReadChunk,
    ReadFailed,
    UploadDurable,
    UploadFailed,
    WriteChunk,
)
from isles.proto.errors import StoreError

DATA = bytes(range(256)) * 64


def test_disk_threads_do_what_is_ordered_in_order(tmp_path: Path) -> None:
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    disk = DiskThreads(FolderBlobs(tmp_path), 2, lambda: woken.put(None))
    blob = blob_of(DATA)
    disk.start()
    disk.submit(WriteChunk(1, blob, 0, DATA[:5000]))
    disk.submit(WriteChunk(1, blob, 5000, DATA[5000:]))
    disk.submit(FinishUpload(1, blob))
    disk.submit(ReadChunk(7, blob, 0, 300))
    disk.submit(DeleteBlob(blob))
    disk.submit(ReadChunk(8, blob, 0, 300))
    disk.submit(WriteChunk(2, blob, 0, DATA[:7]))
    disk.submit(AbandonUpload(2, blob))
    for _ in range(6):
        woken.get(timeout=30)
    events = disk.completed()
    disk.close()
    assert events[:4] == [
        ChunkWritten(1, 5000),
        ChunkWritten(1, len(DATA)),
        UploadDurable(1),
        ChunkRead(7, 0, DATA[:300]),
    ]
    assert isinstance(events[4], ReadFailed)
    assert events[4].code == "not-found"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_trusted_is_raised_in_the_thread_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    disk = DiskThreads(FolderBlobs(tmp_path), 1, lambda: woken.put(None))
    disk.start()

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    disk.submit(WriteChunk(1, blob_of(DATA), 0, DATA))
    disk.submit(FinishUpload(1, blob_of(DATA)))
    for _ in range(2):
        woken.get(timeout=30)
    with pytest.raises(StoreError):
        disk.completed()
    disk.close()


def test_what_the_disk_refuses_becomes_an_event() -> None:
    disk = InlineDisk(MemoryBlobs(), lambda: None)
    disk.start()
    blob = blob_of(DATA)
    disk.submit(WriteChunk(1, blob, 0, b"other"))
    disk.submit(FinishUpload(1, blob))
    disk.submit(ReadChunk(2, blob, 0, 5))
    written, failed, missing = disk.completed()
    assert written == ChunkWritten(1, 5)
    assert isinstance(failed, UploadFailed)
    assert failed.code == "damaged"
    assert isinstance(missing, ReadFailed)
    assert disk.completed() == []
    disk.close()
