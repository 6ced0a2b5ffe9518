"""What a simulation found. Pure values, without a numerical library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isles.ops.goodput.scenario import System


@dataclass(frozen=True, slots=True)
class Rounds:
    """How a decoupled run synchronises; every mean is over rounds."""

    participation: float
    """Mean share of the learners that a round merges, in [0, 1]."""
    per_hour: float
    """Rounds committed in an hour, of all fragments."""
    merge_seconds: float
    """Mean time from the moment a learner hands work in until a version with it is committed, in seconds."""
    gap_seconds: float
    """Mean training time between two contributions of a learner to a fragment, in seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way to train on one fleet."""

    system: System
    learners: int
    chips: int
    goodput: float
    """Share of what all chips could do in the simulated time that was useful, in [0, 1]."""
    uptime: float
    """Share of the time in which the run advances: somebody trains, and nobody else has to be waited for."""
    num_failures: int = 0
    """Chips that failed."""
    lost: float = 0.0
    """Share of the fleet's time whose work was done and then lost with a learner's memory."""
    merging: float = 1.0
    """Share of the time in which broker and outer are there, so that rounds can be committed."""
    rounds: Rounds | None = None
    """If they were simulated."""

    def as_json(self) -> dict[str, Any]:
        """The outcome for programs; figures of the rounds only if they were simulated."""
        plain: dict[str, Any] = {
            "system": self.system,
            "learners": self.learners,
            "chips": self.chips,
            "goodput": round(self.goodput, 6),
            "uptime": round(self.uptime, 6),
        }
        if self.rounds is not None:
            plain |= {
                "participation": round(self.rounds.participation, 6),
                "rounds_per_hour": round(self.rounds.per_hour, 3),
                "merge_seconds": round(self.rounds.merge_seconds, 3),
                "lost": round(self.lost, 9),
                "merging": round(self.merging, 6),
            }
        return plain
