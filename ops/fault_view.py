"""Faults that happen to a run on purpose, as a person is shown them: said by whoever makes them happen. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class FaultShown:
    """One fault that lasts at the moment."""

    text: str
    """Which of how many it is, and what happens to whom: `fault 3 of 12: freeze us-0`."""
    ends_at: float
    """In monotonic seconds."""
    processes: frozenset[str] = frozenset()
    """Names of those it happens to."""
    state: str = ""
    """What they are meanwhile: `frozen`."""
    started_before: float | None = None
    """If whoever takes the place of such a process is not hit: when it began, in monotonic seconds."""


@dataclass(frozen=True, slots=True)
class FaultsShown:
    """All faults of a run so far."""

    num_faults: int
    num_begun: int = 0
    next_at: float | None = None
    """When the next one happens, in monotonic seconds; None if that is not known, or none is left."""
    lasting: tuple[FaultShown, ...] = ()
    """Those of this moment, the oldest first."""
    is_over: bool = False
    """Whether nothing is left to happen or to end."""


class FaultSource(Protocol):
    """Whoever makes faults happen. May be asked from another thread than the one in which it works."""

    def news(self) -> list[str]:
        """Sentences about what has happened since the last call."""

    def shown(self) -> FaultsShown:
        """How things stand."""


class NoFaults:
    """Nobody makes any."""

    def news(self) -> list[str]:
        return []

    def shown(self) -> None:
        return None
