"""Where payloads are: files named by their digest, or memory. Opaque bytes either way.

A blob exists when its name does: it is written under another name, checked, synced, renamed, and the folder synced.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Final, Protocol

from isles.brokers.store.files import DiskFiles, Files
from isles.brokers.store.fullness import FULL_ERRORS, store_error
from isles.brokers.vocabulary import Bytes
from isles.proto.errors import IslesError, PayloadError, StoreError
from isles.proto.messages import BlobRef

HASH_BYTES: Final = 1 << 20
"""Read at once while a digest is checked."""
PATHS_KEPT: Final = 1024
"""Paths that are remembered: every learner reads the newest blobs, and to make a path takes as long as a small read."""
OWN_FILE: Final = re.compile(r"[0-9a-f]{64}|[0-9]+\.tmp")
"""What a sweep may delete: a folder that was named by mistake keeps everything else."""


class DiskFullError(IslesError):
    """There is no room; nothing was stored, nothing was lost."""


class MissingBlobError(IslesError):
    """No blob of this digest is here."""


class BlobStore(Protocol):
    """Blobs and the partial ones of uploads. The calls of one upload and of one digest come from one thread."""

    def write(self, transfer: int, offset: int, payload: Bytes) -> None:
        """Appends to a partial blob; the first call, with offset 0, begins it. Raises DiskFullError, StoreError."""

    def finish(self, transfer: int, blob: BlobRef) -> None:
        """Makes a partial blob durable under its digest.

        Raises PayloadError if it has another digest or size, and DiskFullError; either way it is gone. Raises
        StoreError if the disk cannot promise that it is durable: then nothing this process knows can be trusted.
        """

    def abandon(self, transfer: int) -> None:
        """Deletes a partial blob, if there is one."""

    def read(self, blob: BlobRef, offset: int, num_bytes: int) -> bytes:
        """Some bytes of a blob. A read at offset 0 checks the whole of one that has changed since it was checked.

        Raises MissingBlobError, and PayloadError if the blob is damaged.
        """

    def doubt(self, digest: str) -> None:
        """Somebody says that a blob is damaged: the next read at offset 0 checks all of it.

        A disk that rots tells no new time of change.
        """

    def delete(self, digest: str) -> None:
        """Deletes a blob, if there is one."""

    def sweep(self, known: set[str]) -> tuple[int, int]:
        """Deletes all partial blobs and those not in `known`; their number and bytes. For the start of a process.

        Touches nothing that no broker has written.
        """

    def free_bytes(self) -> int:
        """What the disk has left for us."""

    def close(self) -> None:
        """Gives up all partial blobs; idempotent."""


@dataclass
class _Partial:
    file: IO[bytes]
    path: Path
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    size_bytes: int = 0


class FolderBlobs:
    """Blobs in a folder."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Makes the folder if it is missing; deletes nothing."""
        self._folder = folder
        self._path = lru_cache(PATHS_KEPT)(folder.joinpath)
        self._files = files or DiskFiles()
        self._partials: dict[int, _Partial] = {}
        self._checked: dict[str, tuple[int, int]] = {}
        """Digest -> time and size of the file when it was found to be right."""
        self._files.make_folder(folder)

    def write(self, transfer: int, offset: int, payload: Bytes) -> None:
        try:
            partial = self._partials.get(transfer)
            if partial is None:
                if offset:
                    raise DiskFullError(f"upload {transfer} was given up before its byte {offset}")
                path = self._path(f"{transfer}.tmp")
                partial = self._partials[transfer] = _Partial(self._files.create(path), path)
            assert offset == partial.size_bytes, f"upload {transfer} writes at {offset}, has {partial.size_bytes}"
            self._files.write(partial.file, payload)
        except OSError as error:
            self.abandon(transfer)
            raise _disk_error(error, "write", self._folder) from error
        partial.digest.update(payload)
        partial.size_bytes += len(payload)

    def finish(self, transfer: int, blob: BlobRef) -> None:
        partial = self._partials.get(transfer)
        found = "nothing" if partial is None else partial.digest.hexdigest()
        if partial is None or found != blob.digest or partial.size_bytes != blob.size_bytes:
            size = 0 if partial is None else partial.size_bytes
            self.abandon(transfer)
            raise PayloadError(
                f"{size} bytes with digest {found[:12]} arrived where {blob.size_bytes} with {blob.digest[:12]} were "
                "announced: they were damaged on their way; send them again"
            )
        path = self._path(blob.digest)
        del self._partials[transfer]
        try:
            with partial.file:
                self._files.sync(partial.file)
            self._files.rename(partial.path, path)
            self._files.sync_folder(self._folder)
            self._checked[blob.digest] = self._files.stamp(path)
        except OSError as error:
            text = (
                f"the disk under {self._folder} could not make a blob durable ({error}): this broker ends rather than "
                "promise what it cannot keep; check the disk, then start it again"
            )
            raise store_error(text, error, self._folder) from error

    def abandon(self, transfer: int) -> None:
        partial = self._partials.pop(transfer, None)
        if partial is not None:
            partial.file.close()
            self._files.delete(partial.path)

    def read(self, blob: BlobRef, offset: int, num_bytes: int) -> bytes:
        path = self._path(blob.digest)
        try:
            with self._files.open(path) as file:
                if offset == 0:
                    self._check(file, blob, path)
                file.seek(offset)
                data = file.read(num_bytes)
        except FileNotFoundError as error:
            raise MissingBlobError(f"blob {blob.digest[:12]} is not in the store") from error
        except OSError as error:
            raise PayloadError(f"blob {blob.digest[:12]} cannot be read from {path} ({error.strerror})") from error
        if len(data) != num_bytes:
            raise PayloadError(f"blob {blob.digest[:12]} in {path} ends before byte {offset + num_bytes}")
        return data

    def _check(self, file: IO[bytes], blob: BlobRef, path: Path) -> None:
        stamp = self._files.stamp(path)
        if self._checked.get(blob.digest) == stamp:
            return
        digest = hashlib.sha256()
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
        if digest.hexdigest() != blob.digest:
            raise PayloadError(
                f"blob {blob.digest[:12]} in {self._folder} is damaged: its bytes have digest {digest.hexdigest()[:12]}"
            )
        self._checked[blob.digest] = stamp

    def doubt(self, digest: str) -> None:
        self._checked.pop(digest, None)

    def delete(self, digest: str) -> None:
        self._checked.pop(digest, None)
        self._files.delete(self._path(digest))

    def sweep(self, known: set[str]) -> tuple[int, int]:
        self.close()
        num_blobs = num_bytes = 0
        for name in self._files.names(self._folder):
            if name not in known and OWN_FILE.fullmatch(name):
                path = self._path(name)
                num_blobs += 1
                num_bytes += self._files.stamp(path)[1]
                self._files.delete(path)
        return num_blobs, num_bytes

    def free_bytes(self) -> int:
        return self._files.free_bytes(self._folder)

    def close(self) -> None:
        for transfer in list(self._partials):
            self.abandon(transfer)


def _disk_error(error: OSError, verb: str, folder: Path) -> IslesError:
    if error.errno in FULL_ERRORS:
        return DiskFullError(f"the broker's disk is full ({error.strerror})")
    return StoreError(f"the disk under {folder} refused a {verb} ({error}): check it, then start this broker again")


class MemoryBlobs:
    """Blobs in memory; for tests and simulations. `free` is what `free_bytes` says."""

    def __init__(self, free: int = 2**50) -> None:
        self.blobs: dict[str, bytes] = {}
        self.free = free
        self._partials: dict[int, bytearray] = {}

    def write(self, transfer: int, offset: int, payload: Bytes) -> None:
        partial = self._partials.setdefault(transfer, bytearray())
        assert offset == len(partial), f"upload {transfer} writes at {offset}, has {len(partial)}"
        partial += payload

    def finish(self, transfer: int, blob: BlobRef) -> None:
        data = bytes(self._partials.pop(transfer, b""))
        if len(data) != blob.size_bytes or hashlib.sha256(data).hexdigest() != blob.digest:
            raise PayloadError(f"{len(data)} bytes arrived that are not blob {blob.digest[:12]}: send them again")
        self.blobs[blob.digest] = data

    def abandon(self, transfer: int) -> None:
        self._partials.pop(transfer, None)

    def read(self, blob: BlobRef, offset: int, num_bytes: int) -> bytes:
        data = self.blobs.get(blob.digest)
        if data is None:
            raise MissingBlobError(f"blob {blob.digest[:12]} is not in the store")
        if offset == 0 and hashlib.sha256(data).hexdigest() != blob.digest:
            raise PayloadError(f"blob {blob.digest[:12]} in memory is damaged")
        return data[offset : offset + num_bytes]

    def doubt(self, digest: str) -> None:
        """Every read at offset 0 checks."""

    def delete(self, digest: str) -> None:
        self.blobs.pop(digest, None)

    def sweep(self, known: set[str]) -> tuple[int, int]:
        unknown = [self.blobs.pop(digest) for digest in list(self.blobs) if digest not in known]
        self.close()
        return len(unknown), sum(map(len, unknown))

    def free_bytes(self) -> int:
        return self.free

    def close(self) -> None:
        self._partials.clear()
