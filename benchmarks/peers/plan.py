"""Which MLP is trained, and what one learner is to do with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Final

NUM_LAYERS: Final = 4
NUM_CLASSES: Final = 10
BATCH_SIZE: Final = 32
WIDTHS: Final = {"1.06 M": 512, "9.46 M": 1536}
"""Layer widths by the number of parameters that they make: 1,055,754 and 9,458,698."""


def num_parameters(width: int) -> int:
    """Of the MLP with layers this wide."""
    return NUM_LAYERS * (width + 1) * width + (width + 1) * NUM_CLASSES


@dataclass(frozen=True, slots=True)
class Plan:
    """What one learner is to do; travels as JSON on its command line."""

    name: str
    index: int
    """0, 1, ..: decides the data, and who offers what the others dial."""
    width: int
    record: str
    """File that gets a line for each inner step."""
    address: str = ""
    """Where the others are found."""
    seed: int = 1
    interval: int = 20
    """Inner steps between two synchronisations of the whole model: H."""
    num_steps: int = 0
    """Inner steps after which the learner ends; 0 = when it is told."""
    pace_seconds: float = 0.0
    """Shortest time of an inner step: the rest is slept, as if an accelerator were at work."""
    counts_bytes: bool = False
    options: dict[str, str] = field(default_factory=dict)
    """What only one system knows."""

    def text(self) -> str:
        return json.dumps(asdict(self))
