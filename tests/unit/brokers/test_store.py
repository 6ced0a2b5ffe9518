"""Blobs, index and lock on a real folder."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.brokers.stage import blob_of
from isles.brokers.store.blobs import BlobStore, DiskFullError, FolderBlobs, MemoryBlobs, MissingBlobError
from isles.brokers.store.disk import perform
from isles.brokers.store.fullness import is_full
from isles.brokers.store.index import Commitment, StoredLease
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.brokers.store.store import Store
from isles.brokers.vocabulary import (
    ChunkRead,
    ReadChunk,
    ReadFailed,
)
from isles.proto.errors import PayloadError, StoreError, StoreLockedError, UsageError
from isles.proto.messages import VersionInfo

DATA = bytes(range(256)) * 64


@pytest.fixture(params=["folder", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return FolderBlobs(tmp_path / "blobs") if request.param == "folder" else MemoryBlobs()


def put(blobs: BlobStore, data: bytes, transfer: int = 1) -> None:
    half = len(data) // 2
    blobs.write(transfer, 0, data[:half])
    blobs.write(transfer, half, memoryview(data)[half:])
    blobs.finish(transfer, blob_of(data))


# --------------------------------------------------------------------------------------------------------------- blobs


def test_a_blob_is_read_back_in_pieces(blobs: BlobStore) -> None:
    put(blobs, DATA)
    assert blobs.read(blob_of(DATA), 0, 100) + blobs.read(blob_of(DATA), 100, len(DATA) - 100) == DATA


def test_a_partial_blob_is_no_blob(blobs: BlobStore) -> None:
    blobs.write(1, 0, DATA)
    with pytest.raises(MissingBlobError):
        blobs.read(blob_of(DATA), 0, 1)
    blobs.abandon(1)
    blobs.abandon(1)
    put(blobs, DATA, transfer=1)


@pytest.mark.parametrize("sent", [DATA[:-1], DATA[:-1] + b"x", DATA + b"x", b""])
def test_other_bytes_than_announced_are_refused_and_forgotten(blobs: BlobStore, sent: bytes) -> None:
    if sent:
        blobs.write(1, 0, sent)
    with pytest.raises(PayloadError, match="send them again"):
        blobs.finish(1, blob_of(DATA))
    put(blobs, DATA)


def test_a_deleted_blob_is_missing_and_deleting_again_is_fine(blobs: BlobStore) -> None:
    put(blobs, DATA)
    blobs.delete(blob_of(DATA).digest)
    blobs.delete(blob_of(DATA).digest)
    with pytest.raises(MissingBlobError):
        blobs.read(blob_of(DATA), 0, 1)


def test_a_sweep_leaves_what_is_known(blobs: BlobStore) -> None:
    put(blobs, DATA)
    put(blobs, b"unknown", transfer=2)
    blobs.write(3, 0, b"half")
    num_blobs, num_bytes = blobs.sweep({blob_of(DATA).digest})
    assert num_blobs >= 1
    assert num_bytes >= len(b"unknown")
    assert blobs.read(blob_of(DATA), 0, len(DATA)) == DATA
    with pytest.raises(MissingBlobError):
        blobs.read(blob_of(b"unknown"), 0, 1)


def test_a_flipped_bit_is_found_when_a_read_begins(tmp_path: Path) -> None:
    put(FolderBlobs(tmp_path), DATA)
    path = tmp_path / blob_of(DATA).digest
    path.write_bytes(DATA[:9000] + bytes([DATA[9000] ^ 1]) + DATA[9001:])
    with pytest.raises(PayloadError, match="damaged"):
        FolderBlobs(tmp_path).read(blob_of(DATA), 0, 10)
    assert path.exists(), "nothing is deleted"


def test_damage_after_the_first_check_is_found_too(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    put(blobs, DATA)
    assert blobs.read(blob_of(DATA), 0, 10) == DATA[:10]
    path = tmp_path / blob_of(DATA).digest
    path.write_bytes(b"other" + DATA[5:])
    os.utime(path, ns=(1, 1))
    with pytest.raises(PayloadError, match="damaged"):
        blobs.read(blob_of(DATA), 0, 10)


def test_damage_that_changes_no_time_is_found_once_somebody_doubts(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    put(blobs, DATA)
    path = tmp_path / blob_of(DATA).digest
    stamp = path.stat().st_mtime_ns
    path.write_bytes(b"\xff" + DATA[1:])
    os.utime(path, ns=(stamp, stamp))
    assert isinstance(perform(blobs, ReadChunk(1, blob_of(DATA), 0, 10)), ChunkRead)
    found = perform(blobs, ReadChunk(1, blob_of(DATA), 0, 10, is_doubted=True))
    assert isinstance(found, ReadFailed)
    assert found.code == "damaged"


def test_a_sweep_of_a_folder_that_was_named_by_mistake_deletes_nothing_of_its_owner(tmp_path: Path) -> None:
    for name in ("photo.jpg", "1.tmp.txt", "a" * 63):
        (tmp_path / name).write_text("precious")
    (tmp_path / "7.tmp").write_text("a partial blob of a crashed process")
    assert FolderBlobs(tmp_path).sweep(set())[0] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(("photo.jpg", "1.tmp.txt", "a" * 63))


def test_a_blob_that_was_cut_short_is_damaged(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    put(blobs, DATA)
    os.truncate(tmp_path / blob_of(DATA).digest, 100)
    with pytest.raises(PayloadError, match="ends before"):
        blobs.read(blob_of(DATA), 90, 20)


def test_a_full_disk_gives_the_upload_up_and_later_chunks_of_it_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FolderBlobs(tmp_path)

    class FullFile:
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: FullFile())
        with pytest.raises(DiskFullError):
            blobs.write(1, 0, DATA)
    with pytest.raises(DiskFullError):
        blobs.write(1, len(DATA), DATA)
    put(blobs, DATA)


def test_a_disk_that_refuses_a_write_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match="check it"):
        FolderBlobs(tmp_path).write(1, 0, DATA)


@pytest.mark.parametrize("which", [0, 1])
def test_a_failed_fsync_of_file_or_folder_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.write(1, 0, DATA)
    calls: list[int] = []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > which:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="promise"):
        blobs.finish(1, blob_of(DATA))


def test_the_file_is_synced_before_its_name_exists_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FolderBlobs(tmp_path)
    blobs.write(1, 0, DATA)
    named: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: named.append((tmp_path / blob_of(DATA).digest).exists()))
    blobs.finish(1, blob_of(DATA))
    assert named == [False, True]


# ---------------------------------------------------------------------------------------------------------------- lock


def test_a_second_broker_on_one_store_is_refused(tmp_path: Path) -> None:
    first = Store.open(tmp_path / "store")
    with pytest.raises(StoreLockedError, match="another broker"):
        Store.open(tmp_path / "store")
    first.close()
    first.close()
    Store.open(tmp_path / "store").close()


def test_a_store_is_free_again_however_its_process_ended(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path; from isles.brokers.store.store import Store\n"
        "store = Store.open(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], check=False)
    assert ended.returncode == -9
    Store.open(tmp_path).close()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="is a file or lies in one: name a folder"):
        Store.open(tmp_path / "file")


def test_a_store_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="is a file"):
        Store.open(tmp_path / "file" / "store")
    (tmp_path / "store" / "lock").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be used"):
        Store.open(tmp_path / "store")


@pytest.mark.parametrize("name", ["photo.jpg", "address", "blobs/" + "0" * 64])
def test_a_folder_that_was_named_by_mistake_is_not_taken_over(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("precious")
    with pytest.raises(UsageError, match="is no store, and not empty"):
        Store.open(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [name]


@pytest.mark.parametrize("other", ["blobs/" + "0" * 64, "address"])
def test_a_store_whose_index_was_emptied_keeps_its_blobs(tmp_path: Path, other: str) -> None:
    """As a copy that ran out of room leaves it: to a new index all blobs would be strangers, and swept."""
    Store.open(tmp_path).close()
    (tmp_path / other).write_text("precious")
    (tmp_path / "index.sqlite").write_bytes(b"")
    with pytest.raises(UsageError, match=r"index\.sqlite is empty.*restore it from a copy"):
        Store.open(tmp_path)
    assert (tmp_path / other).read_text() == "precious"


def test_what_a_crash_left_before_there_was_an_index_is_an_empty_store(tmp_path: Path) -> None:
    for folder in ("lost+found", "blobs"):
        (tmp_path / folder).mkdir()
    for file in ("lock", "index.sqlite", "index.sqlite-wal"):
        (tmp_path / file).touch()
    Store.open(tmp_path).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MB; only root may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system takes root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_store_on_a_disk_that_fills_up_goes_on_where_it_was_once_there_is_room(small_disk: Path) -> None:
    store = Store.open(small_disk / "store")
    (ballast := small_disk / "ballast").write_bytes(bytes(1 << 20))
    num_written, fault = 0, None
    while fault is None:
        try:
            with store.index.transaction():
                store.index.put_value(f"key {num_written}", bytes(10_000))
            num_written += 1
        except sqlite3.Error as error:
            fault = error
    assert is_full(fault, small_disk)
    store.close()
    ballast.unlink()
    store = Store.open(small_disk / "store")
    found = [store.index.value(f"key {number}") for number in range(num_written + 1)]
    assert found == [bytes(10_000)] * num_written + [None], "what was committed is there, and nothing else"
    store.close()


def test_a_damaged_index_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=r"index\.sqlite"):
        Store.open(tmp_path)
    assert (tmp_path / "index.sqlite").read_bytes().startswith(b"no database")


@pytest.mark.parametrize("found", [b"1", b"99", b"what?"])
def test_an_index_of_another_format_is_refused_and_left_alone(tmp_path: Path, found: bytes) -> None:
    database = sqlite3.connect(tmp_path / "index.sqlite")
    database.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
    database.execute("CREATE TABLE versions (fragment INTEGER, version INTEGER)")
    database.execute("INSERT INTO meta VALUES ('format', ?)", (found,))
    database.commit()
    database.close()
    with pytest.raises(StoreError, match="use the build that began its run"):
        SqliteIndex(tmp_path / "index.sqlite")
    database = sqlite3.connect(tmp_path / "index.sqlite")
    assert len(database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()) == 2
    database.close()


# --------------------------------------------------------------------------------------------------------------- index


@pytest.fixture
def index() -> Iterator[SqliteIndex]:
    index = SqliteIndex(IN_MEMORY)
    yield index
    index.close()


def test_the_index_syncs_every_commit_and_writes_ahead(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    assert index._one("PRAGMA journal_mode")[0] == "wal"
    assert index._one("PRAGMA synchronous")[0] == 2
    index.close()


def fail_after_writing(index: SqliteIndex, key: str) -> None:
    def fail() -> None:
        with index.transaction():
            index.put_value(key, b"1")
            raise KeyError(key)

    with pytest.raises(KeyError):
        fail()


def test_a_transaction_is_all_or_nothing_and_an_inner_one_rolls_back_alone(index: SqliteIndex) -> None:
    with index.transaction():
        index.put_value("kept", b"1")
        fail_after_writing(index, "lost")
        with index.transaction():
            index.put_value("too", b"1")
    fail_after_writing(index, "gone")
    assert [index.value(key) is not None for key in ("kept", "lost", "too", "gone")] == [True, False, True, False]


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")
    with index.transaction():
        index.put_lease(3, StoredLease("outer-1", "ab" * 8, 4))
        index.add_to_counter("rounds", 2)
        index.add_to_counter("rounds", 3)
    index.close()
    again = SqliteIndex(tmp_path / "index.sqlite")
    assert again.leases() == {3: StoredLease("outer-1", "ab" * 8, 4)}
    assert again.counter("rounds") == 5
    again.close()


def test_one_version_of_a_fragment_cannot_be_written_twice(index: SqliteIndex) -> None:
    info = VersionInfo(fragment=0, version=1, parameters_sha256="0" * 64)
    index.put_version(info, Commitment("c0" * 8, 1, 1, 1.0, 0))
    with pytest.raises(sqlite3.IntegrityError):
        index.put_version(info, Commitment("c1" * 8, 1, 1, 1.0, 0))
    with pytest.raises(sqlite3.IntegrityError):
        index.put_version(info.model_copy(update={"version": 2}), Commitment("c0" * 8, 1, 1, 1.0, 0))


def test_a_blob_is_unused_when_its_last_reference_is_dropped(index: SqliteIndex) -> None:
    blob = blob_of(DATA)
    index.put_blob(blob, 1000.0)
    assert index.unused_blobs() == [(blob, False)], "a message may still refer to it"
    index.add_reference(blob.digest, "row/a/0")
    index.add_reference(blob.digest, "version/0/1")
    index.move_references("row/a/0", "version/0/2")
    index.drop_references("version/0/1")
    assert index.unused_blobs() == []
    index.drop_references("version/0/2")
    assert index.unused_blobs() == [(blob, True)], "it was used, so nothing new will refer to it"
