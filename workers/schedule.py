"""The inner learning rate as a function of the run's progress, and of nothing else.

Progress comes from the versions that a learner holds. So a learner that joins late, or starts again, trains at
everybody's rate, and no warm-up is ever repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter, arXiv 1608.03983)."""

    peak: float
    """Highest rate, reached at the end of the warm-up."""
    warmup_fraction: float = 0.05
    """Share of the run that the warm-up takes, in [0, 1)."""
    floor_fraction: float = 0.1
    """The last rate as a share of the peak, in [0, 1]."""
    start_fraction: float = 0.1
    """The first rate as a share of the peak, in (0, 1]: progress stays 0 until the first version, and so would zero."""

    def __post_init__(self) -> None:
        """Refuse numbers that are no schedule.

        Raises:
            ValueError: a field is outside its range.
        """
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise ValueError(f"peak = {self.peak}: a learning rate is finite and above 0")
        if not 0 <= self.warmup_fraction < 1:
            raise ValueError(f"warmup_fraction = {self.warmup_fraction}: it is at least 0 and below 1")
        if not 0 <= self.floor_fraction <= 1:
            raise ValueError(f"floor_fraction = {self.floor_fraction}: it is in [0, 1]")
        if not 0 < self.start_fraction <= 1:
            raise ValueError(f"start_fraction = {self.start_fraction}: it is above 0 and at most 1")

    def at(self, progress: float) -> float:
        """The rate at `progress` in [0, 1]; what lies outside is taken for the nearer end."""
        progress = min(1.0, max(0.0, progress))
        if progress < self.warmup_fraction:
            risen = progress / self.warmup_fraction
            return self.peak * (self.start_fraction + (1 - self.start_fraction) * risen)
        fallen = (progress - self.warmup_fraction) / (1 - self.warmup_fraction)
        cosine = 0.5 * (1 + math.cos(math.pi * fallen))
        return self.peak * (self.floor_fraction + (1 - self.floor_fraction) * cosine)
