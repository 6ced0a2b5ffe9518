"""Ratios of two things that are done in turns, by the processor time of the calling thread.

A machine that others use is slower for minutes at a time; neighbours in time suffer alike, so each pair gives a ratio
and the median of them is the figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """How fast something is, as a share of the speed of what it is compared with."""

    median: float
    least: float
    greatest: float
    seconds: float
    """Median time of one call, in seconds of the thread's processor time."""
    reference_seconds: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f}-{self.greatest:.3f})"


def speed_ratio(
    call: Callable[[], object],
    reference: Callable[[], object],
    *,
    num_pairs: int = 7,
    clock: Callable[[], float] = time.thread_time,
) -> Ratio:
    """Calls both in turns, once before the first pair to warm up; more than 1 means faster than the reference."""
    call()
    reference()
    pairs = [(_seconds(reference, clock), _seconds(call, clock)) for _ in range(num_pairs)]
    ratios = [reference_seconds / seconds for reference_seconds, seconds in pairs]
    return Ratio(
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(seconds for _, seconds in pairs),
        statistics.median(seconds for seconds, _ in pairs),
    )


def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    begun = clock()
    call()
    return clock() - begun
