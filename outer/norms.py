"""Whether the norms that a contribution carries can be those of what its payload was encoded from.

The carried norms decide how far `rda` moves a tensor, and nothing else about them can be checked by the outer: what was
quantised away is gone. But a codec's error has a bound. By the triangle inequality the norm before quantisation lies
within the norm of the error of the decoded one, so a learner can lie by no more than its codec's rounding. The scales
of a step codec say more than that, see `isles.outer.energies`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from isles.outer.accumulators import l2_norm
from isles.outer.energies import energy_bounds
from isles.proto.codec import Decoded
from isles.proto.codec.scales import FLUSHED_SHARE
from isles.proto.codec.table import BLOCK_VALUES, BlockCodec, Codec, PlaneCodec, StepCodec
from isles.proto.manifest import TensorSlice

Vector = npt.NDArray[np.float32]

ERROR_FACTOR: Final = 1.01
"""How much larger than its bound an error may seem: levels and scales are singles, the bound is computed exactly."""

NORM_ROUNDING: Final = 1e-6
"""Relative difference that two ways of summing squares may make."""

KEPT_BITS_OF_BF16: Final = 8
"""Of a significand: rounding moves a value by at most 2^-9 of its magnitude, or 2^-8 of the decoded one."""

SMALLEST: Final = 2.0**-120
"""More than any codec loses of a value in absolute terms, where it reaches the end of the single-precision range."""

BLOCKS_AT_ONCE: Final = 512


def wrong_norm(norms: Sequence[float], decoded: Decoded, codec: Codec, slices: Sequence[TensorSlice]) -> str:
    """What is wrong with the first norm that cannot be true, as half a sentence; "" if all can.

    `norms` [tensors] are those before quantisation, `decoded` is what the payload decodes to.
    """
    for one, norm, (low, high) in zip(slices, norms, _norm_bounds(decoded, codec, slices), strict=True):
        if not low * (1 - NORM_ROUNDING) <= norm <= high * (1 + NORM_ROUNDING):
            found = l2_norm(decoded.values[one.start : one.stop])
            return (
                f"the norm of tensor {one.name} is said to be {norm:.6g}, but its payload decodes to one of "
                f"{found:.6g}, which codec {codec.name} makes of norms between {low:.6g} and {high:.6g}"
            )
    return ""


def _norm_bounds(decoded: Decoded, codec: Codec, slices: Sequence[TensorSlice]) -> list[tuple[float, float]]:
    """The smallest and the largest norm that each tensor can have had before it was encoded."""
    if isinstance(codec, StepCodec):
        assert decoded.scales is not None
        lows, highs = energy_bounds(decoded.values, decoded.scales, codec, slices)
        return list(zip(np.sqrt(lows).tolist(), np.sqrt(highs).tolist(), strict=True))
    found = [l2_norm(decoded.values[one.start : one.stop]) for one in slices]
    bounds = _error_bounds(decoded.values, codec, slices)
    return [
        (norm - ERROR_FACTOR * bound, norm + ERROR_FACTOR * bound) for norm, bound in zip(found, bounds, strict=True)
    ]


def _error_bounds(vector: Vector, codec: PlaneCodec | BlockCodec, slices: Sequence[TensorSlice]) -> list[float]:
    """The largest norm that the codec's error can have in each tensor.

    A plane codec rounds each value by a share of its own magnitude. A block codec rounds each value to the nearest of
    levels that are one scale apart, so by half the scale s of its block. s is known from the decoded values: the
    largest one of a block has the highest level. With n values of a tensor in block b: error^2 <= sum over b of
    n (s_b / 2)^2. That is 0.81 of the norm for int4 and 0.04 for int8 where a tensor fills its blocks, but has no
    relation to the norm of a small tensor that shares a block with large values.
    """
    sizes = [one.stop - one.start for one in slices]
    floors = [SMALLEST * math.sqrt(size) for size in sizes]
    if not isinstance(codec, BlockCodec):
        share = 2.0**-KEPT_BITS_OF_BF16 if codec.planes < 4 else 0.0
        norms = [l2_norm(vector[one.start : one.stop]) for one in slices]
        return [share * norm + floor for norm, floor in zip(norms, floors, strict=True)]
    peaks = _block_peaks(vector)
    errors = np.where(peaks > 0, peaks / (2 * codec.level_max), FLUSHED_SHARE * peaks.max(initial=0.0))
    squares = errors**2
    return [
        math.sqrt(float((squares[first:last] * counts).sum())) + floor
        for (first, last, counts), floor in zip(map(_blocks_of, slices), floors, strict=True)
    ]


def _block_peaks(vector: Vector) -> npt.NDArray[np.float64]:
    """The largest magnitude of each block of a codec, [blocks]."""
    num_blocks = -(-vector.size // BLOCK_VALUES)
    peaks = np.zeros(num_blocks)
    step = BLOCKS_AT_ONCE * BLOCK_VALUES
    for start in range(0, vector.size, step):
        magnitudes = np.abs(vector[start : start + step])
        magnitudes.resize(-(-magnitudes.size // BLOCK_VALUES), BLOCK_VALUES)  # the last block is filled up with zeros
        first = start // BLOCK_VALUES
        peaks[first : first + len(magnitudes)] = magnitudes.max(axis=1)
    return peaks


def _blocks_of(one: TensorSlice) -> tuple[int, int, npt.NDArray[np.int64]]:
    """The blocks first..last-1 that a tensor touches, and how many of its values lie in each."""
    first, last = one.start // BLOCK_VALUES, -(-one.stop // BLOCK_VALUES)
    edges = np.clip(np.arange(first, last + 1) * BLOCK_VALUES, one.start, one.stop)
    return first, last, np.diff(edges)
