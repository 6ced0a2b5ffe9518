"""The published table that the simulation is compared with: Decoupled DiLoCo, arXiv 2604.21428.

Chips fail once a year on average. What a failure costs and when a chip returns is not published, which is why four
values of `isles.ops.goodput.scenario.Scenario` are fitted to these 30.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.scenario import System

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS: Final = (2, 4, 8, 16)

PUBLISHED: Final[Mapping[tuple[System, int], tuple[int, ...]]] = MappingProxyType(
    {
        ("data-parallel", 1): (72, 57, 38, 27, 18),
        ("elastic", 1): (88, 80, 69, 58, 40),
        ("decoupled", 2): (94, 88, 80, 70, 54),
        ("decoupled", 4): (96, 93, 89, 82, 73),
        ("decoupled", 8): (98, 96, 94, 88, 80),
        ("decoupled", 16): (99, 98, 96, 93, 86),
    }
)
"""System and learners -> goodput in per cent, for each of CHIPS."""


def published(outcome: Outcome) -> int | None:
    """The published goodput of this system with so many learners and chips, in per cent; None if there is none."""
    row = PUBLISHED.get((outcome.system, outcome.learners))
    return row[CHIPS.index(outcome.chips)] if row is not None and outcome.chips in CHIPS else None


def differences(outcomes: Iterable[Outcome]) -> list[float]:
    """Ours minus what was published, in points, for every outcome that has a published counterpart."""
    return [100 * one.goodput - figure for one in outcomes if (figure := published(one)) is not None]
