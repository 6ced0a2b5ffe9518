"""Every state in which a crash may leave a store: its operations are recorded, then played up to any of them.

For tests. `RecordingFiles` and `RecordingIndex` do what they are told on a real folder and take notes. `Disk` plays the
notes again, up to a crash. A process that dies leaves all that was done; a power failure leaves what was synced, and of
the rest whatever it likes: any of the changes to a folder since its last sync, any part of the bytes of a file.

The index counts as one operation per commit: what SQLite does within one is its own promise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

from isles.brokers.store.files import DiskFiles
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.brokers.vocabulary import Bytes

Fate = Literal["all of it", "what was synced"] | int
"""What a crash leaves: of a dead process, of a power failure, or as drawn with this seed in between."""

ZEROS_CHANCE: Final = 0.3
"""That a file has its length but not its bytes, as on a disk that allocates late."""


@dataclass(frozen=True, slots=True)
class Created:
    """A new file `number` is there under a name."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """Bytes were appended to a file."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Synced:
    """The bytes of a file are durable."""

    number: int


@dataclass(frozen=True, slots=True)
class Renamed:
    """A file has another name."""

    name: str
    new_name: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """A name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class FolderSynced:
    """The names in the folder are durable."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The index is durable, as these bytes."""

    image: bytes


@dataclass(frozen=True, slots=True)
class Promised:
    """Something was said that a crash must not take back; what, is up to the test."""

    what: object


Note = Created | Wrote | Synced | Renamed | Deleted | FolderSynced | Committed | Promised


class RecordingFiles(DiskFiles):
    """Works in one folder of blobs, and takes notes."""

    def __init__(self, notes: list[Note]) -> None:
        super().__init__()
        self._notes = notes
        self._numbers: dict[int, int] = {}

    def create(self, path: Path) -> IO[bytes]:
        file = super().create(path)
        number = self._numbers[id(file)] = len(self._notes)
        self._notes.append(Created(path.name, number))
        return file

    def write(self, file: IO[bytes], payload: Bytes) -> None:
        super().write(file, payload)
        self._notes.append(Wrote(self._numbers[id(file)], bytes(payload)))

    def sync(self, file: IO[bytes]) -> None:
        super().sync(file)
        self._notes.append(Synced(self._numbers[id(file)]))

    def rename(self, path: Path, new_path: Path) -> None:
        super().rename(path, new_path)
        self._notes.append(Renamed(path.name, new_path.name))

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self._notes.append(FolderSynced())

    def delete(self, path: Path) -> None:
        super().delete(path)
        self._notes.append(Deleted(path.name))


class RecordingIndex(SqliteIndex):
    """Takes a note of each commit that has changed something."""

    def __init__(self, path: Path, notes: list[Note]) -> None:
        self._notes: list[Note] | None = None
        super().__init__(path)
        self._notes = notes
        self._take_note()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
        if self._transactions.depth == 0:
            self._take_note()

    def _take_note(self) -> None:
        if self._notes is not None:
            image = self._db.serialize()
            if image != self._last_image():
                self._notes.append(Committed(image))

    def _last_image(self) -> bytes | None:
        found = (note.image for note in reversed(self._notes or []) if isinstance(note, Committed))
        return next(found, None)


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    num_synced: int = 0


@dataclass
class CrashedDisk:
    """What a crash has left."""

    files: dict[str, bytes]
    """Name -> bytes of what is in the folder of blobs."""
    image: bytes | None
    """Of the index; None = it was not made yet."""
    promises: list[object]
    """Everything that was said before."""

    @property
    def digest(self) -> str:
        """Equal for equal states of the disk and equal promises."""
        parts = [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(self.files.items())]
        parts += [hashlib.sha256(self.image or b"").hexdigest(), str(len(self.promises))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def put_into(self, index: Path, blobs: Path) -> None:
        """Makes a folder of blobs and an index file of it."""
        blobs.mkdir(parents=True)
        for name, data in self.files.items():
            (blobs / name).write_bytes(data)
        if self.image is not None:
            index.write_bytes(self.image)


def crash(notes: Sequence[Note], fate: Fate) -> CrashedDisk:
    """The disk after a crash behind the last of these notes."""
    files: dict[int, _File] = {}
    names: dict[str, int] = {}
    durable: dict[str, int] = {}
    changes: list[_Change] = []
    image: bytes | None = None
    for note in notes:
        match note:
            case Created(_, number):
                files[number] = _File()
            case Wrote(number, data):
                files[number].data += data
            case Synced(number):
                files[number].num_synced = len(files[number].data)
            case FolderSynced():
                durable, changes = dict(names), []
            case Committed(image):
                pass
        if (change := _change_of(note, names)) is not None:
            change.apply(names)
            changes.append(change)
    chance = random.Random(fate)
    for change in changes:
        if fate == "all of it" or (fate != "what was synced" and chance.random() < 0.5):
            change.apply(durable)
    found = {name: _remains(files[number], fate, chance) for name, number in durable.items()}
    return CrashedDisk(found, image, [note.what for note in notes if isinstance(note, Promised)])


@dataclass(frozen=True, slots=True)
class _Change:
    """Of the names in the folder."""

    gone: str | None
    name: str | None = None
    number: int = 0

    def apply(self, names: dict[str, int]) -> None:
        if self.gone is not None:
            names.pop(self.gone, None)
        if self.name is not None:
            names[self.name] = self.number


def _change_of(note: Note, names: dict[str, int]) -> _Change | None:
    match note:
        case Created(name, number):
            return _Change(None, name, number)
        case Renamed(name, new_name):
            return _Change(name, new_name, names[name])
        case Deleted(name):
            return _Change(name)
    return None


def _remains(file: _File, fate: Fate, chance: random.Random) -> bytes:
    """The bytes of a file after a crash."""
    if fate == "all of it":
        return bytes(file.data)
    if fate == "what was synced":
        return bytes(file.data[: file.num_synced])
    length = chance.randint(file.num_synced, len(file.data))
    if chance.random() < ZEROS_CHANCE:
        return bytes(file.data[: file.num_synced]).ljust(length, b"\0")
    return bytes(file.data[:length])
