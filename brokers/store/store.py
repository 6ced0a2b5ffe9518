"""A whole store: the index and the blobs, under one lock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from isles.brokers.store.blobs import BlobStore, FolderBlobs, MemoryBlobs
from isles.brokers.store.files import DiskFiles
from isles.brokers.store.fullness import store_error
from isles.brokers.store.index import Index
from isles.brokers.store.lock import StoreLock
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.proto.errors import StoreError, UsageError

INDEX_NAME = "index.sqlite"
BLOBS_NAME = "blobs"
LEFTOVERS: Final = frozenset({"lock", "lost+found", f"{INDEX_NAME}-journal", f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm"})
"""What is in an empty store: it was left before there was an index, or it is a disk of its own."""


@dataclass
class Store:
    """What a broker keeps."""

    index: Index
    blobs: BlobStore
    lock: StoreLock | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store in a folder, made durably if it is missing.

        Raises UsageError if the folder is somebody else's, StoreLockedError, or StoreError.
        """
        _refuse_foreign(folder)
        with suppress(OSError):  # what cannot be made cannot be locked either, and that says why
            DiskFiles().make_folder(folder)
        lock = StoreLock(folder)
        try:
            return cls(SqliteIndex(folder / INDEX_NAME), FolderBlobs(folder / BLOBS_NAME), lock)
        except StoreError:
            lock.release()
            raise
        except OSError as error:
            lock.release()
            text = f"the store folder {folder} cannot be used ({error}): mend it or choose another"
            raise store_error(text, error, folder) from error

    @classmethod
    def in_memory(cls) -> Self:
        """A store that ends with the process; for tests and simulations."""
        return cls(SqliteIndex(IN_MEMORY), MemoryBlobs())

    def sweep(self) -> tuple[int, int]:
        """Deletes what an earlier process left half done: blobs without an entry; their number and bytes."""
        return self.blobs.sweep(self.index.digests())

    def close(self) -> None:
        """Gives the folder back; idempotent."""
        self.blobs.close()
        self.index.close()
        if self.lock is not None:
            self.lock.release()


def _refuse_foreign(folder: Path) -> None:
    """A broker sweeps its folder: one that was named by mistake, or lost its index, is not to be taken over."""
    index = folder / INDEX_NAME
    try:
        names = {found.name for found in folder.iterdir()}
        if index.is_file() and not index.stat().st_size:  # of no store: one that was opened has tables
            names.remove(INDEX_NAME)
    except NotADirectoryError as error:
        raise UsageError(f"the store {folder} is a file or lies in one: name a folder") from error
    except OSError:
        return  # not there yet, or not to be read: making and locking it says more
    foreign = sorted(names - LEFTOVERS - ({BLOBS_NAME} if _is_empty(folder / BLOBS_NAME) else set()))
    if foreign and INDEX_NAME not in names:
        raise UsageError(
            f"{folder} is no store, and not empty ({foreign[0]!r} is in it, {INDEX_NAME} "
            f"{'is empty' if index.is_file() else 'is not'}): name an empty folder "
            "or one that does not exist yet; if it was a store, restore it from a copy"
        )


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
