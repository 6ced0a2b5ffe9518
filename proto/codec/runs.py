"""Levels of which most are zero, as bytes: a run of zeros and the level that ends it. See `StepCodec`."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

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
        strides = np.empty_like(places)
        strides[0] = places[0] + 1 + self._open_zeros
        np.subtract(places[1:], places[:-1], out=strides[1:])
        self._open_zeros = digits.size - 1 - int(places[-1])
        ends = digits[places]
        ends -= ends > ZERO_DIGIT  # now the level's place in RUN_LEVELS
        if int(strides.max()) <= RUN_ZEROS_MAX:
            return _runs(strides, ends)
        longs = np.flatnonzero(strides > RUN_ZEROS_MAX)
        num_empty, zeros = np.divmod(strides[longs] - 1, RUN_ZEROS_MAX)
        strides[longs] = zeros + 1
        return np.insert(_runs(strides, ends), np.repeat(longs, num_empty), EMPTY_RUN)


def _runs(strides: npt.NDArray[np.intp], ends: Bytes) -> Bytes:
    """The bytes of runs of `strides` values, at most RUN_ZEROS_MAX, and the places in RUN_LEVELS of what ends them."""
    runs = strides.astype(np.uint8)
    runs -= 1
    runs <<= 2
    runs += ends
    return runs


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
