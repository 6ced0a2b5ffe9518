"""The outer optimizer's step as a function of the run's progress, and of nothing else. Pure.

Progress is that of the fragment's own head, so whoever merges it next, after whatever failure, takes the same step. The
rate is written into the recipe: a version is recomputed without the budget, which may have been raised since.
"""

from __future__ import annotations

import math
from typing import Final

from isles.proto.agreement import Budget, SyncSettings
from isles.proto.messages import VersionInfo

WARMUP_START_SHARE: Final = 0.1
"""The first step of a warm-up as a share of the highest: at zero the work of the first rounds would be thrown away."""

BUFFER_RATE: Final = 1.0
"""Buffers are measured, not learned: they become what the merge says, without momentum."""


def fragment_progress(head: VersionInfo, budget: Budget, num_fragments: int) -> float:
    """How far the run is by one fragment's head, in [0, 1]: its tokens, or its versions as one of `num_fragments`."""
    return budget.progress(tokens_merged=head.tokens_total, rounds_committed=head.version * num_fragments)


def outer_rate(sync: SyncSettings, progress: float) -> float | None:
    """The outer learning rate at `progress` in [0, 1]; None where it is the settings' constant one.

    It rises linearly over the warm-up share w, then falls to the final share e of the highest rate: linearly, or along
    half a cosine (Loshchilov and Hutter, arXiv 1608.03983, equation 5, one period).

        risen  = p / w                        rate = high * (s + (1 - s) * risen)       p < w, s = 0.1
        fallen = (p - w) / (1 - w)            rate = high * (e + (1 - e) * left)        left = 1 - fallen
                                                                                        or (1 + cos(pi fallen)) / 2
    """
    high, warmup, final = sync.outer_learning_rate, sync.outer_warmup_share, sync.outer_final_share
    if progress < warmup:
        return high * (WARMUP_START_SHARE + (1 - WARMUP_START_SHARE) * progress / warmup)
    if sync.outer_schedule == "constant":
        return None
    fallen = (progress - warmup) / (1 - warmup)
    left = 1 - fallen if sync.outer_schedule == "linear" else (1 + math.cos(math.pi * fallen)) / 2
    return high * (final + (1 - final) * left)
