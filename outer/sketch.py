"""A short stand-in for the direction of a long delta, so that many can be compared without having them all at hand.

    sketch   S_c = sum over r of s_r x_(r L + c)       x: the delta in rows of L values, s_r: fixed random signs

An inner product of two sketches is that of the vectors, but for terms of unlike rows, which have random signs (a count
sketch: Charikar, Chen and Farach-Colton, Finding frequent items in data streams, 2002). So the cosine of vectors that
have nothing in common comes out as 0 within 1 / sqrt(L), that of opposites as -1. L is a prime, so that its rows do not
fall together with those of a weight.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from isles.outer.directions import SKETCH_VALUES

Vector = npt.NDArray[np.float32]

ROWS_AT_ONCE: Final = 128
"""So many rows fit a second-level cache."""

SIGNS_SEED: Final = 20_020_708
"""All sketches have the same signs, or they could not be compared."""


def sketch(vector: Vector) -> bytes:
    """The direction of [n] float32 as little-endian singles: SKETCH_VALUES of them, or n if that is less; length 1.

    Empty for zeros, and for what is too long to be added up. The same bits on one build, whatever the threads.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = vector.astype(np.float64) if vector.size <= SKETCH_VALUES else _signed_sums(vector)
        length = float(np.sqrt((sums * sums).sum()))
    return (sums / length).astype("<f4").tobytes() if 0 < length < np.inf else b""


def _signed_sums(vector: Vector) -> npt.NDArray[np.float64]:
    """The S_c [SKETCH_VALUES]; rows are added up in single precision, ROWS_AT_ONCE at a time."""
    sums = np.zeros(SKETCH_VALUES)
    chance = np.random.Generator(np.random.PCG64(SIGNS_SEED))
    scratch = np.empty((ROWS_AT_ONCE, SKETCH_VALUES), np.float32)
    for start in range(0, vector.size, scratch.size):
        part = vector[start : start + scratch.size]
        if part.size < scratch.size:
            part = np.concatenate([part, np.zeros(scratch.size - part.size, np.float32)])
        signs = 2 * chance.integers(0, 2, (ROWS_AT_ONCE, 1), np.int8) - 1
        np.multiply(part.reshape(scratch.shape), signs.astype(np.float32), out=scratch)
        sums += scratch.sum(axis=0)
    return sums
