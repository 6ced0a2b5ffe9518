"""The time of a simulated world: what happens next, and what has happened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """A heap of events to come, and the history of those that were."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """`note` is told the history, line by line."""
        self.now = 0.0
        """Seconds since the world began; no process sees them, each has a clock of its own."""
        self.num_events = 0
        self._note = note
        self._digest = hashlib.sha256()
        self._lines: list[str] = []
        """Of the history, not yet in its digest."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0

    def plan(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Something will happen; of two events at the same moment the one that was planned first is the first."""
        self._num_planned += 1
        heappush(self._heap, (time, self._num_planned, call, arguments))

    def advance(self) -> None:
        """The next event happens."""
        self.now, _, call, arguments = heappop(self._heap)
        self.num_events += 1
        call(*arguments)

    def say(self, text: str) -> None:
        """Writes a line of the history."""
        line = f"{self.now:9.4f} {text}"
        self._lines.append(line)
        if self._note is not None:
            self._note(line)

    @property
    def digest(self) -> str:
        """Of the history up to now."""
        self._digest.update("".join(self._lines).encode())
        self._lines.clear()
        return self._digest.hexdigest()
