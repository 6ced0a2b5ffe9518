"""Time as an argument: shells read it here, cores are given it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a shell needs to know of time, both in float seconds."""

    def now(self) -> float:
        """Monotonic: for durations and deadlines inside one process."""

    def unix(self) -> float:
        """Seconds since 1970 UTC: for what is stored or read by another process."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; for tests and simulations."""

    def __init__(self, now: float = 0.0, unix_at_zero: float = 1_700_000_000.0) -> None:
        self._now = now
        self._unix_at_zero = unix_at_zero

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return self._unix_at_zero + self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock; time never goes back, so a negative value raises ValueError."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds} s")
        self._now += seconds
