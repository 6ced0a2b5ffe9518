"""The scales of a block codec: chosen from the largest magnitudes when encoding, checked before decoding.

Both implementations use this file on the host: there is one scale for 128 values, and deciding here makes their
payloads equal to the byte. A stored scale is a half; all scales of a payload are multiplied by two to the payload's
scale exponent, which puts the largest of them near the top of the halves' range. So a payload reaches 29 binades
below its largest scale whatever the size of the deltas; halves alone would lose precision below 6e-5, where
deltas live.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from isles.proto.codec.frame import SCALE_EXPONENT_MIN, PayloadHeader, refusal
from isles.proto.codec.table import SCALE_BYTES, BlockCodec, Codec
from isles.proto.errors import NonFiniteError, RangeError

MAGNITUDE_MAX: Final = 2.0**127
"""Largest magnitude that lossy codecs take, half of the largest single: rounded up, it must still be finite."""

_SCALE_BINADE: Final = 15
"""The largest stored scale lies in [2^14, 2^15]: below the largest half (65504) even after rounding up."""

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
    if codec.name != "fp32" and peak > MAGNITUDE_MAX:
        raise RangeError(
            f"the local delta reaches {peak:.3g}, codec {codec.name} represents at most {MAGNITUDE_MAX:.3g}; "
            "nothing was encoded, lower the learning rate or use codec fp32"
        )


def choose_scales(codec: BlockCodec, magnitudes: npt.NDArray[np.float32]) -> BlockScales:
    """Scales for blocks whose largest absolute values are `magnitudes` [blocks], finite and at most MAGNITUDE_MAX.

    scale = magnitude / level_max (absolute-maximum quantisation), rounded to a half. A scale below the normal halves,
    that is under 2^-28 of the payload's largest, becomes 0: such a block decodes to zeros, and its error is at most
    its own magnitude.
    """
    scales = magnitudes * np.float32(codec.level_reciprocal)
    exponent = _scale_exponent(float(scales.max()))
    stored = (scales * np.float32(2.0**-exponent)).astype("<f2")
    stored[stored < _HALF_NORMAL_MIN] = 0
    divisors = stored.astype(np.float32) * np.float32(2.0**exponent)
    divisors[stored == 0] = np.inf
    return BlockScales(exponent, stored, divisors)


def read_scales(codec: BlockCodec, header: PayloadHeader, raw: bytes) -> npt.NDArray[np.float32]:
    """The factors [blocks] that levels are multiplied by, from the raw form of a payload.

    Raises PayloadError for a scale that is not finite, negative, or too small to have been sent.
    """
    blocks = codec.num_blocks(header.num_values)
    bits = np.frombuffer(raw, dtype="<u2", count=blocks)
    unsigned = bits & 0x7FFF
    _refuse_where(unsigned >= _HALF_INFINITY_BITS, "is not finite")
    _refuse_where((bits != 0) & ((bits != unsigned) | (bits < _HALF_NORMAL_MIN_BITS)), "is negative or subnormal")
    stored = np.frombuffer(raw[: blocks * SCALE_BYTES], dtype="<f2")
    factors = stored.astype(np.float32) * np.float32(2.0**header.scale_exponent)
    if float(factors.max()) * codec.level_max > _SINGLE_MAX:
        raise refusal("a scale times its largest level is beyond single precision")
    return factors


def _scale_exponent(scale_max: float) -> int:
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
