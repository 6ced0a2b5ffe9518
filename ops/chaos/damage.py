"""Damage to a store: a flipped bit, a file system without room."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from isles.brokers.store.store import BLOBS_NAME
from isles.ops.chaos.plan import Chance
from isles.proto.errors import UsageError
from isles.proto.ids import DIGEST_PATTERN

BALLAST_NAME: Final = "chaos.ballast"
FILE_SYSTEM_BYTES_MAX: Final = 8 << 30
"""A larger file system is more likely the machine's own than one that was made to be filled."""
BALLAST_PIECE_BYTES: Final = 1 << 20


def corrupt_blob(store: Path, chance: Chance, spared: Sequence[str] = ()) -> tuple[str, int]:
    """Flips one bit of some stored payload; its digest and the position of the byte.

    `spared` digests are left alone. Raises UsageError if there is none.
    """
    import re

    folder = store / BLOBS_NAME
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if re.match(DIGEST_PATTERN, entry.name))
    except OSError as error:
        raise UsageError(f"the blobs in {folder} cannot be listed ({error.strerror})") from error
    names = [name for name in names if name not in spared]
    if not names:
        raise UsageError(f"there is no payload in {folder} that could be damaged yet")
    name = chance.choice(names)
    try:
        with (folder / name).open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            position = min(size - 1, int(chance.uniform(0, size)))
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 1]))
    except (OSError, IndexError, ValueError) as error:
        raise UsageError(f"blob {name[:12]} was gone before it could be damaged ({error})") from error
    return name, position


class Ballast:
    """A file that takes the room of a store's file system. Only of a small one that is not the machine's own."""

    def __init__(self, store: Path) -> None:
        self._path = store / BALLAST_NAME

    def refusal(self) -> str:
        """Why this file system must not be filled; empty if it may."""
        try:
            found = os.statvfs(self._path.parent)
            is_own = self._path.parent.stat().st_dev not in (Path("/").stat().st_dev, Path.home().stat().st_dev)
        except OSError as error:
            return f"{self._path.parent} cannot be looked at ({error.strerror})"
        if found.f_blocks * found.f_frsize <= FILE_SYSTEM_BYTES_MAX and is_own:
            return ""
        return (
            f"the file system of {self._path.parent} is not filled: it is the machine's own, or larger than "
            f"{FILE_SYSTEM_BYTES_MAX >> 30} GiB; put the run folder on one of its own, such as "
            "`mount -t tmpfs -o size=256m tmpfs DIR`"
        )

    def fill(self) -> int:
        """Takes all room; the bytes taken. Raises UsageError where that must not be."""
        if refusal := self.refusal():
            raise UsageError(refusal)
        piece = bytes(BALLAST_PIECE_BYTES)
        try:
            with self._path.open("wb", buffering=0) as file:
                while file.write(piece) == len(piece):
                    pass
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UsageError(f"{self._path} cannot be written ({error.strerror})") from error
        return self._path.stat().st_size

    def free(self) -> None:
        """Gives the room back; idempotent."""
        self._path.unlink(missing_ok=True)
