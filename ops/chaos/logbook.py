"""The log of a process, read while it grows or afterwards."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final

LINE_BYTES_MAX: Final = 1 << 20
"""Longest line that is read; longer ones are no log of ours."""

LINE_BEGIN: Final = b'{"timestamp":'
"""As `isles.proto.logs` writes it."""

Line = dict[str, Any]


class LogReader:
    """Reads what has been added to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Line]:
        """Whole new lines; one that is no JSON object is left out. A file that is not there has none."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        found = (parse(line) for line in data[:end].splitlines() if len(line) <= LINE_BYTES_MAX)
        return [line for line in found if line is not None]


def parse(data: bytes) -> Line | None:
    """One line; None if it is no JSON object with an event, as the last words of a killed process may be.

    A line that a full disk cut short has the next one behind it: that one is read.
    """
    try:
        line = json.loads(data)
    except ValueError:
        start = data.rfind(LINE_BEGIN)
        return parse(data[start:]) if start > 0 else None
    return line if isinstance(line, dict) and isinstance(line.get("event"), str) else None


def unix_of(line: Line) -> float:
    """When it was written, in seconds since 1970; 0 if it does not say."""
    try:
        return datetime.fromisoformat(str(line.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0
