"""The time of a simulated world: what happens next, and what has happened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import msgpack

from isles.proto.messages import Chunk, Hint, Message


class Timeline:
    """A heap of events to come, and the history of those that were."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        """`note` is told the history, line by line."""
        self.now = 0.0
        """Seconds since the world began; no process sees them, each has a clock of its own."""
        self._note = note
        self._digest = hashlib.sha256()
        self._facts: list[Any] = []
        """Of the history, not yet in its digest: its lines before they are put in words, as nobody reads most runs."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0

    def plan(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Something will happen; of two events at the same moment the one that was planned first is the first."""
        self._num_planned += 1
        heappush(self._heap, (time, self._num_planned, call, arguments))

    @property
    def num_events(self) -> int:
        """Those that have happened."""
        return self._num_planned - len(self._heap)

    def advance(self) -> None:
        """The next event happens."""
        self.now, _, call, arguments = heappop(self._heap)
        call(*arguments)

    def advance_to(self, time: float) -> None:
        """Everything happens that is to happen before some time, and then the next event, which is not before it."""
        heap = self._heap
        while True:
            self.now, _, call, arguments = heappop(heap)
            is_last = self.now >= time
            call(*arguments)
            if is_last:
                return

    def say(self, text: str) -> None:
        """Writes a line of the history."""
        self._facts += (self.now, text)
        if self._note is not None:
            self._note(f"{self.now:9.4f} {text}")

    def say_heard(self, listener: str, speaker: str, message: Message) -> None:
        """Writes that somebody hears a message."""
        self._facts += (self.now, listener, speaker, message.tag, message.request)
        if self._note is not None:
            self._note(f"{self.now:9.4f} {listener} hears {speaker}: {_words(message)}")

    @property
    def digest(self) -> str:
        """Of the history up to now."""
        self._digest.update(msgpack.packb(self._facts))
        self._facts.clear()
        return self._digest.hexdigest()


def _words(message: Message) -> str:
    """A message in short."""
    match message:
        case Hint():
            return f"Hint {message.kind} {message.fragment} {message.version} {message.learner}"
        case Chunk():
            return f"Chunk {message.transfer} {message.offset}"
    return f"{type(message).__name__} {message.request}"
