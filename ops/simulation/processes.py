"""A process of the simulated world: its actor, its clock, whether it lives, and what waits for it while it sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from isles.ops.simulation.learner_actor import Checkpoint

OFFSET_SECONDS: Final = 10_000.0
"""Between two clocks, at most; no process may compare its clock with another's."""
RATES: Final = (0.7, 1.4)
"""How fast clocks run, at least and at most."""

Actor = TypeVar("Actor")


@dataclass(frozen=True, slots=True)
class Clock:
    """Of one process."""

    offset: float = 0.0
    rate: float = 1.0

    @classmethod
    def draw(cls, chance: random.Random, *, is_skewed: bool) -> Clock:
        """One that is off and runs at its own rate, or the world's."""
        return cls(chance.uniform(0.0, OFFSET_SECONDS), chance.uniform(*RATES)) if is_skewed else cls()

    def at(self, time: float) -> float:
        """What it shows."""
        return self.offset + self.rate * time


@dataclass(eq=False)
class Process(Generic[Actor]):
    """One incarnation of one process."""

    name: str
    region: str
    connection: bytes
    clock: Clock
    actor: Actor
    is_alive: bool = True
    frozen_until: float = 0.0
    is_zombie: bool = False
    """Another incarnation has taken its place."""
    backlog: list[Callable[[], None]] = field(default_factory=list)
    """What it will find when it wakes."""


@dataclass
class Place:
    """What of a learner outlives its processes."""

    name: str
    index: int
    region: str
    step_seconds: float
    look_seconds: float = 0.0
    """Between two looks at what it was hinted at."""
    checkpoints: list[Checkpoint] = field(default_factory=list)


@dataclass
class Rhythm:
    """When a learner will do next what it does now and then, in the world's time."""

    look_at: float = 0.0
    """Asks for what it was hinted at."""
    refresh_at: float = 0.0
    """Asks for everything."""
    beat_at: float = 0.0
    """Says that it lives."""
