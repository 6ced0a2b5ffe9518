"""Levels of which most are zero, as bytes: a run of zeros and the level that ends it. See `StepCodec`."""

from __future__ import annotations

from typing import Final

import numpy as np

from isles.proto.codec.chunks import Bytes, Vector, spans
from isles.proto.codec.frame import refusal
from isles.proto.codec.table import RUN_ALPHABET, RUN_LEVELS, RUN_ZEROS_MAX, STEP_BLOCK_VALUES

CHUNK_BYTES: Final = 1 << 14
"""Runs decoded at a time: places and values of so many fit a second-level cache."""

EMPTY_RUN: Final = RUN_ALPHABET - 1
"""The byte of RUN_ZEROS_MAX zeros and no level."""

STRIDES: Final = np.append(np.arange(EMPTY_RUN) // len(RUN_LEVELS) + 1, RUN_ZEROS_MAX)
"""[RUN_ALPHABET] values that each byte stands for."""

LEVELS: Final = np.append(np.tile(RUN_LEVELS, RUN_ZEROS_MAX), 0).astype(np.float32)
"""[RUN_ALPHABET] the last of them."""

ZERO_DIGIT: Final = 2


class RunWriter:
    """Turns consecutive levels into runs; a run may go on from one chunk to the next."""

    def __init__(self) -> None:
        self._open_zeros = 0
        """Zeros since the last level that was written."""

    def write(self, digits: Bytes) -> Bytes:
        """The runs that end in `digits` ([n] uint8, n >= 1), each a level + 2."""
        places = np.flatnonzero(digits != ZERO_DIGIT)  # of booleans, several times faster than of numbers
        if not places.size:
            self._open_zeros += digits.size
            return np.empty(0, np.uint8)
        zeros = np.diff(places, prepend=-1 - self._open_zeros)
        zeros -= 1
        self._open_zeros = digits.size - 1 - int(places[-1])
        ends = digits[places]
        ends -= ends > ZERO_DIGIT  # now the level's place in RUN_LEVELS
        is_long = zeros >= RUN_ZEROS_MAX
        if not is_long.any():
            return ends + np.left_shift(zeros.astype(np.uint8), 2)
        longs = np.flatnonzero(is_long)
        num_empty, zeros[longs] = np.divmod(zeros[longs], RUN_ZEROS_MAX)
        runs = ends + np.left_shift(zeros.astype(np.uint8), 2)
        return np.insert(runs, np.repeat(longs, num_empty), EMPTY_RUN)


def read_runs(runs: Bytes, scales: Vector, *, out: Vector) -> None:
    """Decodes `runs` ([n] uint8) into `out` ([num_values] float32), given the scales [blocks] float32.

    Raises PayloadError for a byte that stands for no run, and for levels beyond the last value.
    """
    check_runs(runs)
    out.fill(0)
    start = -1
    for first, last in spans(runs.size, CHUNK_BYTES):
        index = runs[first:last].astype(np.intp)
        places = np.cumsum(STRIDES[index])
        places += start
        start = int(places[-1])
        check_end(start, out.size)
        out[places] = LEVELS[index] * scales[places // STEP_BLOCK_VALUES]


def check_runs(runs: Bytes) -> None:
    """Raises PayloadError for bytes that stand for no run, or for zeros that no level follows."""
    if not runs.size:
        return
    if int(runs.max()) >= RUN_ALPHABET:
        raise refusal(f"byte {runs.max()} at place {runs.argmax()} of its levels stands for no run")
    if int(runs[-1]) == EMPTY_RUN:
        raise refusal("its last run has no level")


def check_end(last: int, num_values: int) -> None:
    """Raises PayloadError if the `last` value of some runs is none of a payload's."""
    if last >= num_values:
        raise refusal(f"its runs go on to value {last}, beyond its {num_values}")
