"""How much of each tensor there can have been before a step codec quantised it, from what its payload decodes to.

The energy of a vector is the sum of its squares. A block codec's error is all that is known of what was lost; a step
codec says more, since the scale s of a block tells the root of its mean square r. `choose_step_scales` rounds to s what
it wants, w = s (1 +- e) with e = 1/32. A block of n values, the peak P among them, largest level L, is one of these:

    regular   w = S r:                   E = n (w/S)^2
    outlier   w = P / (2 L) > S r:       E < n (w/S)^2; P has the level +-L, so there is such a level
    flat      w = P / 2.5, P < S r:      E > n (2.5 w/S)^2; P has the level +-2, and no level is beyond it

A level l alone says that (|l| - lift) s <= |x| < (|l| + 1 - lift) s; of zero, that |x| < (1 - lift) s; of +-L, that
|x| <= 2 L w, and <= 2.5 w in a flat block. So E lies between the sums of these squares, too; for an outlier, with
(2 L w)^2 for one of the +-L; and where the upper sum is below n (2.5 w/S)^2, the block is not flat. A tensor's part of
a block has at least and at most the sums over its own values, and at least and at most what the rest of the block
leaves of E. A scale of zero says that w was below 2^-28 of the largest one: then |x| <= 2 L w, and r <= w/S or 2.5 w.

So the norm of a tensor that fills its blocks can hardly be overstated: by e, unless most levels are large, as in a flat
block. It can be understated where levels +-L make believe that there was an outlier, by up to a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from isles.proto.codec.scales import FLUSHED_SHARE, STEP_FLAT_LEVEL
from isles.proto.codec.table import STEP_BLOCK_VALUES, STEP_SCALE_BITS, StepCodec
from isles.proto.manifest import TensorSlice

Vector = npt.NDArray[np.float32]
Energies = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

SLACK: Final = 1e-4
"""Relative: what adding up singles, and multiplying by the reciprocal of a scale, may be off."""

ROUNDING: Final = 2.0 ** -(STEP_SCALE_BITS + 1) + SLACK
"""e: how far a scale may be from what was wanted."""

SMALLEST: Final = 2.0**-125
"""More than the scale of any block that is sent as zeros because it is below the normal singles."""

BLOCKS_AT_ONCE: Final = 64


class _Levels(NamedTuple):
    """Of the magnitudes of the levels of each piece of a vector: sums, and how many there are of some."""

    sums: Energies
    squares: Energies
    num_not_zero: Energies
    num_top: Energies
    highest: Energies


def energy_bounds(
    vector: Vector, scales: Vector, codec: StepCodec, slices: Sequence[TensorSlice]
) -> tuple[Energies, Energies]:
    """The least and the greatest energy [tensors] of each tensor before `vector` [n] was encoded.

    `scales` [blocks] are the payload's. The tensors lie one behind the other and cover the vector.
    """
    block_starts = np.arange(0, vector.size, STEP_BLOCK_VALUES)
    tensor_starts = np.array([one.start for one in slices])
    starts = np.unique(np.concatenate((block_starts, tensor_starts)))  # of pieces: each in one block and one tensor
    sizes = np.diff(starts, append=vector.size)
    blocks = starts // STEP_BLOCK_VALUES
    levels = _levels(vector, scales, codec, starts, blocks)
    least, greatest, flat = _by_levels(codec, levels, sizes, scales[blocks], _lost(scales))
    sums = [_sums(blocks, one) for one in (least, greatest, flat)]
    highest = np.maximum.reduceat(levels.highest, np.searchsorted(blocks, np.arange(scales.size)))
    lows, highs = _of_blocks(codec, scales, np.diff(block_starts, append=vector.size), highest, *sums)
    piece_lows = np.maximum(least, lows[blocks] - (sums[1][blocks] - greatest))
    piece_highs = np.minimum(greatest, highs[blocks] - (sums[0][blocks] - least))
    tensors = np.searchsorted(tensor_starts, starts, side="right") - 1
    return _sums(tensors, piece_lows), _sums(tensors, piece_highs)


def _levels(vector: Vector, scales: Vector, codec: StepCodec, starts: Indices, blocks: Indices) -> _Levels:
    """Of pieces that begin at `starts` [pieces] and lie in `blocks` [pieces]."""
    found = _Levels(*np.zeros((5, starts.size)))
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    for first in range(0, scales.size, BLOCKS_AT_ONCE):
        last = min(first + BLOCKS_AT_ONCE, scales.size)
        begin, end = first * STEP_BLOCK_VALUES, min(last * STEP_BLOCK_VALUES, vector.size)
        magnitudes = np.abs(vector[begin:end])
        magnitudes *= np.repeat(factors[first:last], STEP_BLOCK_VALUES)[: end - begin]
        np.rint(magnitudes, out=magnitudes)
        here = slice(*np.searchsorted(blocks, (first, last)))
        edges = starts[here] - begin
        found.sums[here] = np.add.reduceat(magnitudes, edges)
        found.highest[here] = np.maximum.reduceat(magnitudes, edges)
        found.squares[here] = np.add.reduceat(magnitudes * magnitudes, edges)
        if codec.level_max > 2:
            found.num_top[here] = np.add.reduceat((magnitudes == codec.level_max).astype(np.float32), edges)
            found.num_not_zero[here] = np.add.reduceat((magnitudes > 0).astype(np.float32), edges)
    if codec.level_max == 2:  # a ones and b twos: a + 2 b and a + 4 b tell both
        found.num_top[:] = (found.squares - found.sums) / 2
        found.num_not_zero[:] = found.sums - found.num_top
    return found


def _by_levels(
    codec: StepCodec, levels: _Levels, sizes: Indices, scales: Vector, lost: float
) -> tuple[Energies, Energies, Energies]:
    """Of pieces of `sizes` values, in blocks of these `scales`: the least and the greatest energy [pieces] by the
    levels alone, and the greatest in a flat block.
    """
    lift, top = codec.lift, codec.level_max
    squares = np.square(scales.astype(np.float64))
    least = levels.squares - 2 * lift * levels.sums + lift**2 * levels.num_not_zero
    wide = levels.squares + 2 * (1 - lift) * levels.sums + (1 - lift) ** 2 * sizes
    greatest = wide + levels.num_top * ((2 * top * (1 + ROUNDING)) ** 2 - (top + 1 - lift) ** 2)
    num_two = np.maximum(levels.squares - levels.sums, 0) / 2  # where no level is beyond 2
    flat = wide + num_two * ((STEP_FLAT_LEVEL * (1 + ROUNDING)) ** 2 - (3 - lift) ** 2)
    greatest = np.where(scales > 0, greatest * squares * (1 + SLACK), sizes * (2 * top * lost) ** 2)
    return least * squares * (1 - SLACK), greatest, flat * squares * (1 + SLACK)


def _of_blocks(
    codec: StepCodec,
    scales: Vector,
    sizes: Indices,
    highest: Energies,
    least: Energies,
    greatest: Energies,
    flat: Energies,
) -> tuple[Energies, Energies]:
    """The least and the greatest energy of whole blocks of `sizes` values; everything is [blocks].

    `least`, `greatest` and `flat` are those by the levels alone, `highest` is the largest magnitude of the levels.
    """
    squares = np.square(scales.astype(np.float64))
    regular = sizes * squares / codec.step**2
    lows, highs = regular * (1 - ROUNDING) ** 2, regular * (1 + ROUNDING) ** 2
    top = codec.level_max
    with_outlier = least + squares * ((2 * top * (1 - ROUNDING)) ** 2 - (top - codec.lift) ** 2)
    can_be_flat = (highest == 2) & (flat >= lows * STEP_FLAT_LEVEL**2) & (codec.step >= 1)
    lows = np.where(highest == top, np.minimum(lows, with_outlier), lows)
    highs = np.where(can_be_flat, flat, highs)
    is_zero = scales == 0
    most_lost = sizes * np.square(_lost(scales) * (STEP_FLAT_LEVEL if codec.step >= 1 else 1 / codec.step))
    lows = np.where(is_zero, 0.0, np.maximum(lows, least))
    return lows, np.where(is_zero, most_lost, np.minimum(highs, greatest))


def _lost(scales: Vector) -> float:
    """More than w of any block whose scale was made 0."""
    return (FLUSHED_SHARE * float(scales.max()) + SMALLEST) * (1 + ROUNDING)


def _sums(groups: Indices, values: Energies) -> Energies:
    """The sums of `values` by group; groups are numbered from 0 and none is empty."""
    return np.bincount(groups, weights=values).astype(np.float64, copy=False)
