"""How long a round waits for more learners once it has its quorum. Pure.

The window is what a synchronisation may take without anybody noticing, less what it takes anyway. The three times are
moving averages and travel in each version's recipe, so an outer that starts anew goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from isles.proto.agreement import SyncSettings
from isles.proto.messages import Averages, LearnerInfo

AVERAGE_SHARE: Final = 0.2
"""Weight of the newest value: a lasting change is followed within some ten rounds, noise is evened out."""

OUTLIER_FACTOR: Final = 4.0
"""One value counts for at most so many times the average: a broker that was away for a minute says nothing about how
long the next synchronisation takes."""


def updated(
    averages: Averages,
    *,
    step_seconds: float = 0.0,
    quorum_seconds: float | None = None,
    sync_seconds: float | None = None,
) -> Averages:
    """The averages with one more value of each time that was measured; a step of 0 s is no measurement."""
    return Averages(
        step_seconds=_moved(averages.step_seconds, step_seconds or None),
        quorum_seconds=_moved(averages.quorum_seconds, quorum_seconds),
        sync_seconds=_moved(averages.sync_seconds, sync_seconds),
    )


def grace_seconds(averages: Averages, sync: SyncSettings) -> float:
    """clamp(gamma * slack, minimum, maximum), slack = tau * step_time - (quorum_time + sync_time)."""
    slack = sync.overlap_steps * averages.step_seconds - (averages.quorum_seconds + averages.sync_seconds)
    return min(sync.grace_max_seconds, max(sync.grace_min_seconds, sync.grace_share * slack))


def typical_step_seconds(learners: Sequence[LearnerInfo]) -> float:
    """The median step time of the live learners, in seconds; 0 if none is known. One straggler does not move it."""
    times = sorted(info.step_seconds for info in learners if info.is_live and info.step_seconds > 0)
    if not times:
        return 0.0
    middle = len(times) // 2
    return times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2


def _moved(average: float, value: float | None) -> float:
    if value is None:
        return average
    # An average of exactly 0 has seen nothing yet.
    return value if average == 0 else average + AVERAGE_SHARE * (min(value, OUTLIER_FACTOR * average) - average)
