"""Values whose every unit can be traced: what learners train in the simulated world instead of tensors.

A value is a pair of integers. `x` goes through both codecs, with all their rounding. `lanes` counts how often each data
item of each learner is in there, and goes through neither codec, so it says exactly which pieces of work a version
contains. All the counts are the digits of one integer, so that whole values are added and compared at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self

from isles.proto.errors import PayloadError
from isles.proto.messages import BlobRef

Lane = int
"""One data item of one learner: the place of its digit."""

LEARNERS_MAX: Final = 8
"""Learners of one world; more would share lanes."""
DIGIT_BITS: Final = 4
"""Of a count: it may be -1 to 1 where all is well, and a few more before one runs into the next."""
_ONES: Final = int("1" * 16_384, 16)
"""Every lane once, of as many lanes as any world has."""

UP_QUANTUM: Final = 4
"""Step of the upload codec, coarse enough that most contributions leave a residual."""
DOWN_QUANTUM: Final = 3
"""Step of the downlink codec; prime to the other, so that remainders are of every size."""
REFS_KEPT: Final = 256
"""Values whose digests are remembered: each version's is asked for by everybody who makes it or applies it."""


def lane_of(index: int, item: int) -> Lane:
    """The lane of a learner's data item."""
    return item * LEARNERS_MAX + index


def once(lane: Lane) -> int:
    """Lanes of which this one is counted once, and no other."""
    return 1 << (DIGIT_BITS * lane)


def counted(lanes: int) -> list[Lane]:
    """The lanes that are not 0, in order; for lanes that have all one sign."""
    if not lanes:
        return []
    first = ((lanes & -lanes).bit_length() - 1) // DIGIT_BITS
    digits = f"{abs(lanes) >> DIGIT_BITS * first:x}"
    return [lane for lane, digit in enumerate(reversed(digits), first) if digit != "0"]


def num_counted(lanes: int) -> int:
    """How many lanes are 1; for lanes that are 0 or 1."""
    return lanes.bit_count()


def is_once_each(lanes: int) -> bool:
    """Whether every lane is 0 or 1."""
    return lanes >= 0 and lanes & _ONES == lanes


def missing(wanted: int, lanes: int) -> list[Lane]:
    """The wanted lanes that are 0; for lanes that are 0 or 1."""
    return counted(wanted & ~lanes)


@dataclass(frozen=True, slots=True)
class Pair:
    """An exact vector for `isles.workers.account`."""

    x: int
    lanes: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.x + other.x, self.lanes + other.lanes)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.x - other.x, self.lanes - other.lanes)

    def __mul__(self, factor: float) -> Self:
        """Rounds down to integers: whatever a blend rounds away, its residual must pick up.

        The digits of the product are not products of digits; but that of live parameters nobody asks.
        """
        above, below = factor.as_integer_ratio()
        return type(self)(self.x * above // below, self.lanes * above // below)

    @property
    def is_zero(self) -> bool:
        return self.x == 0 and self.lanes == 0

    def quantised(self, quantum: int) -> Self:
        """`x` rounded to the nearest multiple of the quantum, exact halves toward zero; lanes as they are."""
        magnitude, half = divmod(abs(self.x), quantum)
        magnitude += 2 * half > quantum
        return type(self)((magnitude if self.x >= 0 else -magnitude) * quantum, self.lanes)

    def encode(self) -> bytes:
        """Bytes of this value; equal values give equal bytes, and those of recent work only are short."""
        zeros = max(0, (self.lanes & -self.lanes).bit_length() - 1) // DIGIT_BITS
        return f"{self.x} {zeros} {self.lanes >> DIGIT_BITS * zeros:x}".encode()

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Self:
        """Raises PayloadError for bytes that no value gave."""
        try:
            x, zeros, lanes = bytes(payload).split(b" ")
            return cls(int(x), int(lanes, 16) << DIGIT_BITS * int(zeros))
        except ValueError as error:
            raise PayloadError(f"no simulated value: {error}") from error


ZERO: Final = Pair(0)


@lru_cache(REFS_KEPT)
def ref_of(value: Pair) -> BlobRef:
    """The blob of a value's bytes."""
    payload = value.encode()
    return BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
