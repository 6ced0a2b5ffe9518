"""The files of a simulated machine: in memory, and lost in part when its power fails.

What was not synced is at the mercy of chance: of the bytes of a file any part, of the changes to a folder any of them.
Files may rot as well, whether they were synced or not.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal, cast

from isles.brokers.vocabulary import Bytes

FOLDER: Final = Path("blobs")
"""The only one."""
FREE_BYTES: Final = 1 << 40
ZEROS_CHANCE: Final = 0.3
"""That a file has its length but not its bytes, as on a disk that allocates late."""


Rot = Literal["flip", "truncation", "loss"]
"""One bit is another one, which no time of change tells; the end of the file is gone; the whole file is."""
ROTS: Final[tuple[Rot, ...]] = ("flip", "truncation", "loss")


class PowerLostError(Exception):
    """The machine stops in the middle of what it does."""


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    num_synced: int = 0
    changed_at: int = 0


class _Handle(io.BytesIO):
    """An open file."""

    def __init__(self, file: _File, data: bytes = b"") -> None:
        super().__init__(data)
        self.file = file


@dataclass
class SimulatedFiles:
    """`isles.brokers.store.files.Files` of one machine, in one folder."""

    chance: random.Random
    free: int = FREE_BYTES
    operations_left: int | None = None
    """The power fails before the operation after so many."""
    num_lost: int = 0
    """Files of which a power failure took something."""
    _names: dict[str, _File] = field(default_factory=dict)
    _durable: dict[str, _File] = field(default_factory=dict)
    _changes: list[tuple[str | None, str | None, _File | None]] = field(default_factory=list)
    """To the folder since its last sync: the name that went, the name that came, and of which file."""
    _num_changes: int = 0
    _healthy: dict[str, bytes] = field(default_factory=dict)
    """Name -> what was in the file before it rotted for the first time."""

    def rot(self, name: str) -> Rot:
        """Damages a file that is there, while nobody looks; how."""
        file = self._names[name]
        self._healthy.setdefault(name, bytes(file.data))
        how = self.chance.choice(ROTS)
        match how:
            case "flip":
                file.data[self.chance.randrange(len(file.data))] ^= 1 << self.chance.randrange(8)
            case "truncation":
                del file.data[self.chance.randrange(len(file.data)) :]
                file.num_synced = min(file.num_synced, len(file.data))
            case "loss":
                self._names.pop(name)
                self._durable.pop(name, None)
        return how

    def is_rotten(self, name: str) -> bool:
        """Whether a file is not what it was before it rotted; one that was written anew is."""
        if name not in self._healthy:
            return False
        file = self._names.get(name)
        return file is None or file.data != self._healthy[name]

    def mend(self, name: str) -> None:
        """Puts a copy of a rotten file back, durably."""
        data = bytearray(self._healthy[name])
        self._num_changes += 1
        self._names[name] = self._durable[name] = _File(data, len(data), self._num_changes)

    def fail_power(self) -> None:
        """What is left is what was synced, and of the rest what chance leaves."""
        for change in self._changes:
            if self.chance.random() < 0.5:
                _apply(change, self._durable)
        self._names = dict(self._durable)
        self._changes.clear()
        self.operations_left = None
        for file in self._names.values():
            if len(file.data) > file.num_synced:
                self._tear(file)

    def _tear(self, file: _File) -> None:
        self.num_lost += 1
        length = self.chance.randint(file.num_synced, len(file.data))
        if self.chance.random() < ZEROS_CHANCE:
            file.data[file.num_synced :] = bytes(length - file.num_synced)
        del file.data[length:]
        file.num_synced = length

    def _count(self) -> None:
        if self.operations_left is not None:
            if self.operations_left == 0:
                raise PowerLostError
            self.operations_left -= 1

    def _change(self, gone: str | None, name: str | None = None, file: _File | None = None) -> None:
        change = gone, name, file
        _apply(change, self._names)
        self._changes.append(change)

    # -------------------------------------------------------------------------------------- what a store does with them

    def make_folder(self, folder: Path) -> None:
        """It is there."""

    def create(self, path: Path) -> IO[bytes]:
        self._count()
        file = _File()
        self._change(None, path.name, file)
        return _Handle(file)

    def write(self, file: IO[bytes], payload: Bytes) -> None:
        self._count()
        self._num_changes += 1
        written = cast(_Handle, file).file
        written.data += payload
        written.changed_at = self._num_changes

    def sync(self, file: IO[bytes]) -> None:
        self._count()
        synced = cast(_Handle, file).file
        synced.num_synced = len(synced.data)

    def rename(self, path: Path, new_path: Path) -> None:
        self._count()
        self._change(path.name, new_path.name, self._names[path.name])

    def sync_folder(self, folder: Path) -> None:
        self._count()
        self._durable = dict(self._names)
        self._changes.clear()

    def delete(self, path: Path) -> None:
        self._count()
        if path.name in self._names:
            self._change(path.name)

    def open(self, path: Path) -> IO[bytes]:
        file = self._file(path)
        return _Handle(file, bytes(file.data))

    def stamp(self, path: Path) -> tuple[int, int]:
        file = self._file(path)
        return file.changed_at, len(file.data)

    def names(self, folder: Path) -> list[str]:
        return list(self._names)

    def free_bytes(self, folder: Path) -> int:
        return self.free

    def _file(self, path: Path) -> _File:
        found = self._names.get(path.name)
        if found is None:
            raise FileNotFoundError(path)
        return found


def _apply(change: tuple[str | None, str | None, _File | None], names: dict[str, _File]) -> None:
    gone, name, file = change
    if gone is not None:
        names.pop(gone, None)
    if name is not None and file is not None:
        names[name] = file
