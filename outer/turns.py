"""Work that takes much memory, a few pieces at a time; the others wait in line. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Leave = Callable[[], None]
"""Ends a turn; only the first call does anything."""

Start = Callable[[Leave], None]


class Turns:
    """A line in front of something of which there is a limited amount."""

    def __init__(self, num_max: int, bytes_max: int | None = None) -> None:
        """At most `num_max` at a time, and at most `bytes_max` together; one alone may be larger than that."""
        self._num_max = num_max
        self._bytes_max = bytes_max
        self._line: deque[tuple[Start, int]] = deque()
        self._is_calling = False
        self.num_started = 0
        """Turns under way."""
        self.bytes_started = 0
        """What they said they take, together."""

    def join(self, start: Start, num_bytes: int = 0) -> None:
        """Calls `start` when it is this one's turn, perhaps at once, with what ends the turn.

        Who no longer wants its turn then ends it at once.
        """
        self._line.append((start, num_bytes))
        self._call()

    def _call(self) -> None:
        """Starts whoever may start; ends of turns during that are noticed by the same loop."""
        if self._is_calling:
            return
        self._is_calling = True
        try:
            while self._line and self._has_room(self._line[0][1]):
                start, num_bytes = self._line.popleft()
                self.num_started += 1
                self.bytes_started += num_bytes
                start(self._make_leave(num_bytes))
        finally:
            self._is_calling = False

    def _has_room(self, num_bytes: int) -> bool:
        if self.num_started == 0:
            return True
        has_bytes = self._bytes_max is None or self.bytes_started + num_bytes <= self._bytes_max
        return has_bytes and self.num_started < self._num_max

    def _make_leave(self, num_bytes: int) -> Leave:
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if has_left:
                return
            has_left = True
            self.num_started -= 1
            self.bytes_started -= num_bytes
            self._call()

        return leave
