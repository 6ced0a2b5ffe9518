"""How the bytes of a long file reach the disk while more of them come."""

from __future__ import annotations

import errno
import os
import queue
from pathlib import Path

import pytest

from isles.brokers.store.files import SYNC_AHEAD_BYTES, DiskFiles

PIECE = bytes(SYNC_AHEAD_BYTES // 4)
PATIENCE_SECONDS = 20.0


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[int]:
    """The size of each file that was synced, in order; the sync itself fails, as on a broken disk."""
    seen: queue.Queue[int] = queue.Queue()

    def fsync(handle: int) -> None:
        seen.put(os.fstat(handle).st_size)
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def wait_until_idle(files: DiskFiles) -> None:
    assert files._may_sync_ahead.acquire(timeout=PATIENCE_SECONDS)
    files._may_sync_ahead.release()


def test_a_long_file_is_synced_while_it_is_written(tmp_path: Path, syncs: queue.Queue[int]) -> None:
    files = DiskFiles()
    with files.create(tmp_path / "long") as file:
        for _ in range(4):
            assert syncs.empty()
            files.write(file, PIECE)
        assert syncs.get(timeout=PATIENCE_SECONDS) == SYNC_AHEAD_BYTES


def test_a_sync_ahead_that_failed_is_tried_again_and_told_by_the_last_one(
    tmp_path: Path, syncs: queue.Queue[int]
) -> None:
    files = DiskFiles()
    with files.create(tmp_path / "long") as file:
        for number in range(1, 4):
            files.write(file, 4 * PIECE)
            assert syncs.get(timeout=PATIENCE_SECONDS) == number * SYNC_AHEAD_BYTES
            wait_until_idle(files)
        with pytest.raises(OSError, match="I/O error"):
            files.sync(file)


def test_a_file_that_is_gone_meanwhile_is_no_matter(tmp_path: Path, syncs: queue.Queue[int]) -> None:
    files = DiskFiles()
    with files.create(tmp_path / "given-up") as file:
        files.delete(tmp_path / "given-up")
        files.write(file, 4 * PIECE)
    with files.create(tmp_path / "next") as file:
        files.write(file, 4 * PIECE)
        assert syncs.get(timeout=PATIENCE_SECONDS) == SYNC_AHEAD_BYTES


def test_syncing_ahead_leaves_no_descriptor_open(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("only Linux says which descriptors are open")
    files = DiskFiles()
    before = set(os.listdir("/proc/self/fd"))
    with files.create(tmp_path / "long") as file:
        files.write(file, 4 * PIECE)
        wait_until_idle(files)
    assert set(os.listdir("/proc/self/fd")) <= before
