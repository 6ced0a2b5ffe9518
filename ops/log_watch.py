"""Reads along in the logs of some processes for what somebody should see: warnings and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

READ_BYTES_MAX: Final = 1 << 20
"""Of one log at one look: more than a process says in the second between two looks, unless it is in trouble."""
LEVELS: Final = frozenset({"warning", "error", "critical"})
SHOWN_FIRST: Final = ("text", "reason", "error")
"""The fields that say what is wrong, the most telling first."""
OWN_FIELDS: Final = frozenset({"timestamp", "level", "process", "id", "event", "traceback", "exception"})
CHARACTERS_MAX: Final = 200


@dataclass(frozen=True)
class Warned:
    """One line that a process logged."""

    child: str
    level: str
    text: str
    """Event and reason, shortened."""


@dataclass
class _Place:
    path: Path
    inode: int = 0
    offset: int = 0


class LogWatch:
    """New lines of logs that may not exist yet, grow, or are moved away."""

    def __init__(self, logs: Mapping[str, Path]) -> None:
        """`logs` are the files by the name of their process; what stands in them now is not looked at."""
        self._places = {child: _Place(path) for child, path in logs.items()}
        for place in self._places.values():
            _, place.inode, place.offset = _state(place.path)

    def poll(self) -> list[Warned]:
        """Warnings and errors since the last call, process by process."""
        return [warned for child, place in self._places.items() for warned in _read(child, place)]


def _state(path: Path) -> tuple[bool, int, int]:
    """Whether there is a file, which one, and its size."""
    try:
        found = path.stat()
    except OSError:
        return False, 0, 0
    return True, found.st_ino, found.st_size


def _read(child: str, place: _Place) -> list[Warned]:
    exists, inode, size = _state(place.path)
    if not exists:
        return []
    if inode != place.inode or size < place.offset:
        place.inode, place.offset = inode, 0
    if size == place.offset:
        return []
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            data = file.read(READ_BYTES_MAX)
    except OSError:
        return []
    whole = data.rfind(b"\n") + 1
    # A line that is still being written is read when it is whole; one longer than a look is none of ours.
    place.offset += whole or (len(data) if len(data) == READ_BYTES_MAX else 0)
    lines = data[:whole].decode(errors="replace").splitlines()
    return [warned for line in lines if (warned := _warned(child, line)) is not None]


def _warned(child: str, line: str) -> Warned | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    level = entry.get("level") if isinstance(entry, dict) else None
    return Warned(child, level, _text(entry)) if isinstance(level, str) and level in LEVELS else None


def _text(entry: Mapping[str, Any]) -> str:
    event = str(entry.get("event", ""))
    said = next((str(entry[name]) for name in SHOWN_FIRST if entry.get(name)), "")
    if not said:
        said = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in OWN_FIELDS)
    text = " ".join(f"{event}: {said}".split() if said else event.split())
    return text if len(text) <= CHARACTERS_MAX else text[: CHARACTERS_MAX - 1] + "…"
