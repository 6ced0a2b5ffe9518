"""How many inner steps a learner takes between two contributions, by its speed. Pure.

Learners of unequal speed that all take H steps contribute at unequal times: a round of all waits for the slowest, and
without cues the contributions drift apart. With H in proportion to the speed all take about the same time. The
idea is that of dynamic local updates (asynchronous local SGD, arXiv 2401.09135), which measure speeds by the fastest
learner; the median is used here, so that one that is new or broken moves nobody's H.
"""

from __future__ import annotations

from typing import Final

INTERVAL_FACTOR_MAX: Final = 8
"""Most times H that a fast learner takes: its base is as many steps old when it contributes, and a step time of nearly
zero, as before the first real step, would mean no contribution at all."""


def paced_interval(interval_steps: int, *, typical_seconds: float, own_seconds: float) -> int:
    """H_m = clamp(round(H * typical / own), 1, INTERVAL_FACTOR_MAX * H), in inner steps.

    The seconds are those of one inner step, of the fleet's median learner and of this one; H if either is 0, that is
    not known yet.
    """
    if typical_seconds <= 0 or own_seconds <= 0:
        return interval_steps
    interval_max = INTERVAL_FACTOR_MAX * interval_steps
    return max(1, round(min(interval_steps * (typical_seconds / own_seconds), interval_max)))
