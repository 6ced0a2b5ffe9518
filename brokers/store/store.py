"""A whole store: the index and the blobs, under one lock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from isles.brokers.store.blobs import BlobStore, FolderBlobs, MemoryBlobs
from isles.brokers.store.files import DiskFiles
from isles.brokers.store.index import Index
from isles.brokers.store.lock import StoreLock
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.proto.errors import StoreError

INDEX_NAME = "index.sqlite"
BLOBS_NAME = "blobs"


@dataclass
class Store:
    """What a broker keeps."""

    index: Index
    blobs: BlobStore
    lock: StoreLock | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store in a folder, made durably if it is missing. Raises StoreLockedError or StoreError."""
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
            raise StoreError(
                f"the store folder {folder} cannot be used ({error}): mend it or choose another"
            ) from error

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
