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

DIGITS: Final = np.array([0, 1, 0, 2, 3], np.uint8)
"""[level + 2] place of a level in RUN_LEVELS."""


class RunWriter:
    """Turns consecutive levels into runs; a run may go on from one chunk to the next."""

    def __init__(self) -> None:
        self._open_zeros = 0
        """Zeros since the last level that was written."""

    def write(self, levels: npt.NDArray[np.int8]) -> Bytes:
        """The runs that end in `levels` ([n] int8, n >= 1)."""
        places = np.flatnonzero(levels)
        if not places.size:
            self._open_zeros += levels.size
            return np.empty(0, np.uint8)
        zeros = np.diff(places, prepend=-1 - self._open_zeros) - 1
        self._open_zeros = levels.size - 1 - int(places[-1])
        digits = DIGITS[levels[places] + np.int8(2)]
        if int(zeros.max()) < RUN_ZEROS_MAX:
            return digits + np.left_shift(zeros.astype(np.uint8), 2)
        num_empty, rest = np.divmod(zeros, RUN_ZEROS_MAX)
        runs = np.full(zeros.size + int(num_empty.sum()), EMPTY_RUN, np.uint8)
        runs[np.cumsum(num_empty + 1) - 1] = digits + np.left_shift(rest.astype(np.uint8), 2)
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
