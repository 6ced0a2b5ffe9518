"""States of fragments: in memory as far as a budget goes, beyond it in a scratch file.

A state is 12 bytes a parameter, so that of a large model is more than the outer may take. The scratch file has no name:
the system frees it however this process ends. What it gives back is compared with a checksum.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from isles.outer.optimizer import FragmentState, Vector
from isles.proto.errors import StoreError, UsageError

PARTS: Final = ("parameters", "momentum", "remainder")

IO_BYTES_MAX: Final = 64 << 20
"""Bytes of one read or write: a system may do fewer than it is asked for, and none does more than 2 GiB at once."""

FILE_PREFIX: Final = "isles-outer-"


@dataclass(frozen=True)
class _Extent:
    offset: int
    num_bytes: int
    checksum: int


@dataclass(eq=False)
class Slot:
    """One state in a cache, until its last owner drops it."""

    parts: dict[str, Vector | _Extent]
    num_bytes: int
    num_owners: int = 1


@dataclass(eq=False)
class StateCache:
    """All states of one outer. Every method may be called on any thread; those that may touch the disk say so."""

    bytes_max: int
    scratch_dir: str = ""
    """Folder of the scratch file; empty = the system's one for temporary files."""
    bytes_in_memory: int = 0
    bytes_on_disk: int = 0
    """Of the states that are on disk now; the file may be as long as they ever were."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _file: int | None = None
    """Its descriptor."""
    _close_file: Callable[[], object] | None = None
    _file_bytes: int = 0
    _free: dict[int, list[int]] = field(default_factory=dict)
    """Length -> offsets of that many free bytes: the states of a fragment are all equally long."""

    def put(self, state: FragmentState) -> Slot:
        """Keeps a state: in memory if the budget has room for it, else on disk. The caller owns the slot.

        Raises UsageError if the disk cannot take it.
        """
        vectors = {name: vector for name in PARTS if (vector := getattr(state, name)) is not None}
        num_bytes = sum(vector.nbytes for vector in vectors.values())
        with self._lock:
            is_room = self.bytes_in_memory + num_bytes <= self.bytes_max
            if is_room:
                self.bytes_in_memory += num_bytes
        if is_room:
            return Slot(dict(vectors), num_bytes)
        slot = Slot({}, num_bytes)
        try:
            for name, vector in vectors.items():
                slot.parts[name] = self._write(vector)
        except OSError as error:
            self.drop(slot)
            raise self._full(num_bytes, error) from error
        return slot

    def read(self, slot: Slot) -> FragmentState:
        """The state of a slot, perhaps from disk. Raises StoreError if the disk did not keep it."""
        parameters = self.read_part(slot, "parameters")
        assert parameters is not None, "a state has parameters"
        return FragmentState(parameters, self.read_part(slot, "momentum"), self.read_part(slot, "remainder"))

    def read_part(self, slot: Slot, name: str) -> Vector | None:
        """One vector of a state, perhaps from disk; None for zeros. Raises StoreError if the disk did not keep it."""
        part = slot.parts.get(name)
        return self._read(part) if isinstance(part, _Extent) else part

    def share(self, slot: Slot) -> Slot:
        """The same slot with one more owner, who drops it, too."""
        with self._lock:
            slot.num_owners += 1
        return slot

    def drop(self, slot: Slot) -> None:
        """One owner less; the last one frees the bytes."""
        with self._lock:
            slot.num_owners -= 1
            if slot.num_owners > 0:
                return
            for part in slot.parts.values():
                if isinstance(part, _Extent):
                    self._free.setdefault(part.num_bytes, []).append(part.offset)
                    self.bytes_on_disk -= part.num_bytes
                else:
                    self.bytes_in_memory -= part.nbytes
            slot.parts = {}

    def close(self) -> None:
        """Frees the scratch file; no slot can be read any more."""
        with self._lock:
            if self._close_file is not None:
                self._close_file()
                self._file = self._close_file = None

    # ---------------------------------------------------------------------------------------------------------- scratch

    def _write(self, vector: Vector) -> _Extent:
        data = np.ascontiguousarray(vector).data.cast("B")
        with self._lock:
            handle = self._open()
            free = self._free.get(len(data))
            if free:
                offset = free.pop()
            else:
                offset = self._file_bytes
                self._file_bytes += len(data)
            self.bytes_on_disk += len(data)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(handle, data[done : done + IO_BYTES_MAX], offset + done)
        except OSError:
            with self._lock:
                self._free.setdefault(len(data), []).append(offset)
                self.bytes_on_disk -= len(data)
            raise
        return _Extent(offset, len(data), zlib.crc32(data))

    def _read(self, extent: _Extent) -> Vector:
        with self._lock:
            handle = self._open()
        vector: Vector = np.empty(extent.num_bytes // 4, np.float32)
        data = vector.data.cast("B")
        done, got = 0, 1
        try:
            while done < len(data) and got:
                got = os.preadv(handle, [data[done : done + IO_BYTES_MAX]], extent.offset + done)
                done += got
        except OSError as error:
            raise StoreError(f"the outer's scratch file in {self._folder} cannot be read: {error.strerror}") from error
        if done < len(data) or zlib.crc32(data) != extent.checksum:
            raise StoreError(
                f"the outer's scratch file in {self._folder} gave back other bytes than were written: this disk must "
                "not be used; the run itself is unharmed, and an outer started with another outer.scratch_dir goes on"
            )
        return vector

    @property
    def _folder(self) -> str:
        return self.scratch_dir or tempfile.gettempdir()

    def _open(self) -> int:
        """The file descriptor of the scratch file. Called with the lock held."""
        if self._file is None:
            if self.scratch_dir:
                Path(self.scratch_dir).mkdir(parents=True, exist_ok=True)
            self._file, path = tempfile.mkstemp(prefix=FILE_PREFIX, dir=self._folder)
            os.unlink(path)
            self._close_file = weakref.finalize(self, os.close, self._file)
        return self._file

    def _full(self, num_bytes: int, error: OSError) -> UsageError:
        return UsageError(
            f"the outer cannot write {num_bytes} bytes of state to its scratch folder {self._folder}: "
            f"{error.strerror or error}; free some space there, name another folder in outer.scratch_dir, or raise "
            "outer.state_cache_bytes if this machine has the memory"
        )
