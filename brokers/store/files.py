"""Everything that is done to the folder of a store, but for its index: few operations.

Each change is durable only once synced.

A file's bytes survive a power failure after `sync`; that it is there, under this name, after `sync_folder` of its
folder. One who records these operations can tell every state in which a crash may leave the disk.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Protocol

from isles.brokers.vocabulary import Bytes

SYNC_AHEAD_BYTES: Final = 4 << 20
"""After so many further bytes of a file the disk begins with them: a fast one takes 10 ms for so many, and a sync costs
it some by itself."""


class Files(Protocol):
    """All of them raise OSError."""

    def make_folder(self, folder: Path) -> None:
        """Makes it, with those above it, if it is missing; durably."""

    def create(self, path: Path) -> IO[bytes]:
        """An empty file to write to; one of this name is emptied."""

    def write(self, file: IO[bytes], payload: Bytes) -> None:
        """Appends all of the bytes."""

    def sync(self, file: IO[bytes]) -> None:
        """Makes the bytes of a file durable."""

    def rename(self, path: Path, new_path: Path) -> None:
        """Gives a file another name in the same folder, which no other file then has."""

    def sync_folder(self, folder: Path) -> None:
        """Makes durable which files are in a folder."""

    def delete(self, path: Path) -> None:
        """Removes a file, if it is there."""

    def open(self, path: Path) -> IO[bytes]:
        """A file to read from, at its first byte."""

    def stamp(self, path: Path) -> tuple[int, int]:
        """Time of the last change of a file, in nanoseconds, and its size in bytes."""

    def names(self, folder: Path) -> list[str]:
        """The files in a folder."""

    def free_bytes(self, folder: Path) -> int:
        """What the disk under a folder has left for us."""


class DiskFiles:
    """The operating system's."""

    def __init__(self) -> None:
        self._may_sync_ahead = threading.Semaphore()

    def make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self.make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self.sync_folder(folder.parent)

    def create(self, path: Path) -> IO[bytes]:
        return path.open("wb", buffering=0)

    def write(self, file: IO[bytes], payload: Bytes) -> None:
        view = memoryview(payload)
        while view:
            view = view[file.write(view) :]
        end = file.tell()
        if end // SYNC_AHEAD_BYTES > (end - len(payload)) // SYNC_AHEAD_BYTES:
            self._sync_ahead(Path(file.name))

    def _sync_ahead(self, path: Path) -> None:
        """Makes what a file has so far durable, beside what is done here, so that `sync` has less to wait for.

        One file at a time: the disk has one queue. Its own descriptor is what keeps an error of it from being taken
        for told: that of the file still gets it in `sync`.
        """
        if not self._may_sync_ahead.acquire(blocking=False):
            return
        try:
            handle = os.open(path, os.O_RDONLY)
            threading.Thread(target=self._sync_and_close, args=(handle,), name="sync-ahead", daemon=True).start()
        except OSError:
            self._may_sync_ahead.release()

    def _sync_and_close(self, handle: int) -> None:
        with suppress(OSError):
            os.fsync(handle)
        os.close(handle)
        self._may_sync_ahead.release()

    def sync(self, file: IO[bytes]) -> None:
        os.fsync(file.fileno())

    def rename(self, path: Path, new_path: Path) -> None:
        path.rename(new_path)

    def sync_folder(self, folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def open(self, path: Path) -> IO[bytes]:
        return path.open("rb", buffering=0)

    def stamp(self, path: Path) -> tuple[int, int]:
        found = path.stat()
        return found.st_mtime_ns, found.st_size

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in folder.iterdir() if path.is_file()]

    def free_bytes(self, folder: Path) -> int:
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
