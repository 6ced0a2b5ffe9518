"""The scales of block and step codecs: chosen from what was measured when encoding, checked before decoding.

Both implementations use this file on the host: there is one scale for a block, and deciding here makes their payloads
equal to the byte. A stored scale is a half; all scales of a payload are multiplied by two to the payload's
scale exponent, which puts the largest of them near the top of the halves' range. So a payload reaches 29 binades
below its largest scale whatever the size of the deltas; halves alone would lose precision below 6e-5, where
deltas live.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from isles.proto.codec.chunks import Vector
from isles.proto.codec.frame import SCALE_EXPONENT_MIN, PayloadHeader, refusal
from isles.proto.codec.table import SCALE_BYTES, STEP_BLOCK_VALUES, STEP_SCALE_BITS, BlockCodec, Codec, StepCodec
from isles.proto.errors import NonFiniteError, RangeError

MAGNITUDE_MAX: Final = 2.0**127
"""Largest magnitude that lossy codecs take, half of the largest single: rounded up, it must still be finite."""

STEP_MAGNITUDE_MAX: Final = 2.0**124
"""Largest magnitude that step codecs take: a scale may be as large, and 7 times it must be finite."""

STEP_FLAT_LEVEL: Final = 2.5
"""In steps, the largest value of a block without any that stands out: it gets the level 2, which every layout has, and
a claim that a block was flat is at odds with levels that are mostly zero."""

FLUSHED_SHARE: Final = 2.0**-28
"""A scale that is below this share of its payload's largest is sent as 0."""

_SCALE_BINADE: Final = 15
"""The largest stored scale lies in [2^14, 2^15]: below the largest half (65504) even after rounding up."""

_SINGLE_NORMAL_MIN: Final = 2.0**-126
_HALF_NORMAL_MIN: Final = 2.0**-14
_HALF_NORMAL_MIN_BITS: Final = 0x0400
_HALF_INFINITY_BITS: Final = 0x7C00
_SINGLE_MAX: Final = float(np.finfo(np.float32).max)


class BlockScales(NamedTuple):
    """Scales of the blocks of one payload."""

    exponent: int
    stored: npt.NDArray[np.float16]
    """[blocks] as they are sent; 0 for a block that decodes to zeros."""
    divisors: npt.NDArray[np.float32]
    """[blocks] what a value is divided by to get its level; infinity where the stored scale is 0."""


def check_magnitudes(codec: Codec, magnitudes: npt.NDArray[np.float32], *, span: int) -> None:
    """Refuses local values that no payload can carry.

    `magnitudes` [spans] are the largest absolute values of consecutive spans of `span` values each, NaN where a span
    holds one. Raises NonFiniteError for NaN and infinity, RangeError for what `codec` cannot represent.
    """
    bad = ~np.isfinite(magnitudes)
    if bad.any():
        start = int(bad.argmax()) * span
        raise NonFiniteError(
            f"the local delta is not finite: NaN or infinity within its values {start} to {start + span - 1}; nothing "
            "was encoded, the fault is in this process (its loss, learning rate or data), not in a peer"
        )
    peak = float(magnitudes.max())
    limit = STEP_MAGNITUDE_MAX if isinstance(codec, StepCodec) else MAGNITUDE_MAX
    if codec.name != "fp32" and peak > limit:
        raise RangeError(
            f"the local delta reaches {peak:.3g}, codec {codec.name} represents at most {limit:.3g}; "
            "nothing was encoded, lower the learning rate or use codec fp32"
        )


def choose_scales(codec: BlockCodec, magnitudes: npt.NDArray[np.float32]) -> BlockScales:
    """Scales for blocks whose largest absolute values are `magnitudes` [blocks], finite and at most MAGNITUDE_MAX.

    scale = magnitude / level_max (absolute-maximum quantisation), rounded to a half. A scale below the normal halves,
    that is under 2^-28 of the payload's largest, becomes 0: such a block decodes to zeros, and its error is at most
    its own magnitude.
    """
    scales = magnitudes * np.float32(codec.level_reciprocal)
    exponent, stored = _halves(scales)
    divisors = stored.astype(np.float32) * np.float32(2.0**exponent)
    divisors[stored == 0] = np.inf
    return BlockScales(exponent, stored, divisors)


def read_scales(codec: BlockCodec, header: PayloadHeader, raw: bytes) -> npt.NDArray[np.float32]:
    """The factors [blocks] that levels are multiplied by, from the raw form of a payload.

    Raises PayloadError for a scale that is not finite, negative, or too small to have been sent.
    """
    blocks = codec.num_blocks(header.num_values)
    return _factors(np.frombuffer(raw, dtype="<u2", count=blocks), header.scale_exponent, codec.level_max)


def choose_step_scales(codec: StepCodec, peaks: Vector, energies: npt.NDArray[np.float64], num_values: int) -> Vector:
    """Scales [blocks] for the blocks that hold the last `num_values` values of a vector.

    `peaks` [blocks] are their largest absolute values, at most STEP_MAGNITUDE_MAX, `energies` [blocks] their sums of
    squares. The scale is S r, S times the root of the mean square; but where that is

        < peak / (2 level_max)   it is that: no value is cut to less than half, and an outlier is sent in a few rounds
        > peak                   it is peak / STEP_FLAT_LEVEL: where all values are alike, one step could be more than
                                 the largest of them, which would be kept back for ever

    Then it is rounded to a few bits of mantissa, and the quantiser uses what comes out. A scale below the normal
    singles becomes 0.
    """
    sizes = np.full(peaks.size, STEP_BLOCK_VALUES)
    sizes[-1] -= peaks.size * STEP_BLOCK_VALUES - num_values
    wanted = codec.step * np.sqrt(energies / sizes)
    is_flat = wanted > peaks
    np.maximum(wanted, peaks / (2.0 * codec.level_max), out=wanted)
    wanted[is_flat] = peaks[is_flat] / STEP_FLAT_LEVEL
    bits = wanted.astype(np.float32).view(np.uint32)
    dropped = 23 - STEP_SCALE_BITS
    bits += np.uint32(1 << (dropped - 1))
    bits &= np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    scales: Vector = bits.view(np.float32)
    scales[scales < _SINGLE_NORMAL_MIN] = 0
    return scales


def store_step_scales(scales: Vector) -> tuple[int, npt.NDArray[np.uint8]]:
    """The payload's scale exponent, and the bytes [2, blocks] of `scales` [blocks] as halves: lower ones, upper ones.

    A scale below the normal halves, that is under 2^-28 of the largest, is stored as 0: its block decodes to zeros.
    """
    exponent, stored = _halves(scales)
    return exponent, np.ascontiguousarray(stored.view(np.uint8).reshape(-1, SCALE_BYTES).T)


def read_step_scales(codec: StepCodec, header: PayloadHeader, raw: bytes) -> Vector:
    """The factors [blocks] that levels are multiplied by, from the raw form of a payload.

    Raises PayloadError for a scale that is not finite, negative, too small, or too precise to have been sent.
    """
    blocks = codec.num_blocks(header.num_values)
    planes = np.frombuffer(raw, np.uint8, count=blocks * SCALE_BYTES).reshape(SCALE_BYTES, blocks)
    bits = planes[0] | planes[1].astype("<u2") << 8
    _refuse_where(bits & ((1 << (10 - STEP_SCALE_BITS)) - 1) != 0, "is more precise than a step codec's")
    return _factors(bits, header.scale_exponent, codec.level_max)


def _halves(scales: Vector) -> tuple[int, npt.NDArray[np.float16]]:
    """The scale exponent of a payload's scales [blocks], and these as halves; 0 for those below the normal ones."""
    exponent = _scale_exponent(float(scales.max()))
    stored = (scales * np.float32(2.0**-exponent)).astype("<f2")
    stored[stored < _HALF_NORMAL_MIN] = 0
    return exponent, stored


def _factors(bits: npt.NDArray[np.uint16], exponent: int, level_max: int) -> Vector:
    """Scales [blocks] from the bits of their halves, checked."""
    unsigned = bits & 0x7FFF
    _refuse_where(unsigned >= _HALF_INFINITY_BITS, "is not finite")
    _refuse_where((bits != 0) & ((bits != unsigned) | (bits < _HALF_NORMAL_MIN_BITS)), "is negative or subnormal")
    factors: Vector = bits.view("<f2").astype(np.float32) * np.float32(2.0**exponent)
    if float(factors.max()) * level_max > _SINGLE_MAX:
        raise refusal("a scale times its largest level is beyond single precision")
    return factors


def _scale_exponent(scale_max: float) -> int:
    """The power of two that is factored out of the scales of a payload, whose largest is `scale_max`."""
    if scale_max == 0.0:
        return 0
    fraction, exponent = math.frexp(scale_max)
    # As a half it would round up to the next power of two. Counting it there makes the exponent of re-encoded values
    # the same as that of the values themselves.
    if fraction >= 1.0 - 2.0**-12:
        exponent += 1
    return max(exponent - _SCALE_BINADE, SCALE_EXPONENT_MIN)


def _refuse_where(bad: npt.NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise refusal(f"the scale of block {int(bad.argmax())} {what}")
