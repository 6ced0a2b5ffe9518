"""Values whose every unit can be traced: what learners train in the simulated world instead of tensors.

A value is a pair. `x` is an integer that goes through both codecs, with all their rounding. `lanes` has one counter per
(learner, item) and goes through neither, so it says exactly which pieces of work a version contains, and how often.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Self

from isles.proto.errors import PayloadError

Lane = tuple[str, int]
"""A learner and one of its data items."""

UP_QUANTUM: Final = 4
"""Step of the upload codec, coarse enough that most contributions leave a residual."""
DOWN_QUANTUM: Final = 3
"""Step of the downlink codec; prime to the other, so that remainders are of every size."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An exact vector for `isles.workers.account`. Lanes that are 0 are left out."""

    x: int
    lanes: dict[Lane, int]

    def __add__(self, other: Self) -> Self:
        return self._combine(other, 1)

    def __sub__(self, other: Self) -> Self:
        return self._combine(other, -1)

    def __mul__(self, factor: float) -> Self:
        """Rounds down to integers: whatever a blend rounds away, its residual must pick up."""
        lanes = {lane: int(count * factor // 1) for lane, count in self.lanes.items()}
        return type(self)(int(self.x * factor // 1), _without_zeros(lanes))

    def _combine(self, other: Self, sign: int) -> Self:
        lanes = dict(self.lanes)
        for lane, count in other.lanes.items():
            lanes[lane] = lanes.get(lane, 0) + sign * count
        return type(self)(self.x + sign * other.x, _without_zeros(lanes))

    @property
    def is_zero(self) -> bool:
        return self.x == 0 and not self.lanes

    def quantised(self, quantum: int) -> Self:
        """`x` rounded to the nearest multiple of the quantum, exact halves toward zero; lanes as they are."""
        magnitude, half = divmod(abs(self.x), quantum)
        magnitude += 2 * half > quantum
        return type(self)((magnitude if self.x >= 0 else -magnitude) * quantum, self.lanes)

    def encode(self) -> bytes:
        """Bytes of this value; equal values give equal bytes."""
        return json.dumps([self.x, sorted((*lane, count) for lane, count in self.lanes.items())]).encode()

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Self:
        """Raises PayloadError for bytes that no value gave."""
        try:
            x, lanes = json.loads(bytes(payload))
            return cls(x, {(learner, item): count for learner, item, count in lanes})
        except (ValueError, TypeError) as error:
            raise PayloadError(f"no simulated value: {error}") from error


ZERO: Final = Pair(0, {})


def _without_zeros(lanes: dict[Lane, int]) -> dict[Lane, int]:
    return {lane: count for lane, count in lanes.items() if count}
