"""What a learner has done since its process began, as it tells others now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from isles.proto.errors import UsageError
from isles.proto.messages import SHARDS_MAX, Progress

STEP_SECONDS_SHARE: Final = 0.1
"""Weight of the newest inner step in the moving average that PROGRESS reports."""


@dataclass
class Counters:
    """Those of one incarnation."""

    tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    """Moving average of what an inner step takes, in seconds."""

    def count(self, tokens: int, seconds: float) -> None:
        """An inner step was taken."""
        self.tokens += tokens
        self.steps += 1
        self.step_seconds += (1.0 if self.steps == 1 else STEP_SECONDS_SHARE) * (seconds - self.step_seconds)

    def progress(self, *, is_draining: bool) -> Progress:
        """What the broker is told."""
        return Progress(
            steps=self.steps,
            tokens=self.tokens,
            step_seconds=max(0.0, self.step_seconds),
            is_draining=is_draining,
        )


def check_step(tokens: object, cursor: Mapping[int, int]) -> None:
    """What goes out with a contribution hours later is refused here, where its cause is still on the stack.

    Raises UsageError for numbers that cannot be right.
    """
    is_right = isinstance(tokens, int) and tokens >= 0
    if not is_right or not all(0 <= shard < SHARDS_MAX and taken >= 0 for shard, taken in cursor.items()):
        raise UsageError(
            f"step(tokens={tokens!r}, cursor={cursor!r}): tokens is a count, and a cursor has shards "
            f"0..{SHARDS_MAX - 1} with the number of items taken from each"
        )
