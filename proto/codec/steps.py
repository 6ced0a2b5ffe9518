"""The step codecs in numpy: what every other implementation must equal, bit for bit once the scales are chosen.

A value x of a block with scale s becomes the level sign(x) * trunc(|x| / s + lift), cut to the largest one, and comes
back as the level times s. With lift < 1/2 the bin of zero is wider than a step, so exact halves go toward zero. A level
is reached 0.5 + S/10 steps above the one before: of all widths of the zero bin that gives, within 2 %, the least error
at equal entropy for Gaussian values. The best widths grow from 0.54 at S = 0.5 to 0.6 at 1 and 0.75 at 2.

Two passes over the values: one measures blocks, one quantises and packs each chunk while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from isles.proto.codec.chunks import Bytes, Vector, rows, spans
from isles.proto.codec.frame import Encoded, PayloadHeader, pack, refusal
from isles.proto.codec.runs import RunWriter, read_runs
from isles.proto.codec.scales import check_magnitudes, choose_step_scales, read_step_scales, store_step_scales
from isles.proto.codec.table import STEP_BLOCK_VALUES, StepCodec

Energies = npt.NDArray[np.float64]

CHUNK_BLOCKS: Final = 128
"""Blocks handled at a time: 480 KiB of values. Fewer would fit a second-level cache better, but then the calls
themselves cost more than the memory."""

SQUARES_SAFE_MAX: Final = 2.0**50
SQUARES_SAFE_MIN: Final = 2.0**-50
"""Blocks whose largest value lies between these can be squared and summed as singles; others take double precision."""


def encode_steps(codec: StepCodec, vector: Vector) -> Encoded:
    """The payload of `vector` ([n] float32, n >= 1).

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large.
    """
    peaks, energies = measure(vector)
    check_magnitudes(codec, peaks, span=STEP_BLOCK_VALUES)
    scales = choose_step_scales(codec, peaks, energies, vector.size)
    exponent, stored = store_step_scales(scales)
    is_zero = ~stored.any(axis=0)
    scales[is_zero] = 0
    levels = quantise_vector(codec, vector, scales)
    payload = pack(codec, num_values=vector.size, scale_exponent=exponent, raw=joined(stored, levels))
    # The largest value of a block always gets a level, so only a zero scale makes a block zero.
    return Encoded(payload, bool(is_zero.all()))


def joined(stored: Bytes, levels: Sequence[Bytes]) -> memoryview:
    """The raw form of a payload: the bytes of its scales, and those of its levels in pieces."""
    return np.concatenate([one.reshape(-1) for one in (stored, *levels)]).data


def measure(vector: Vector) -> tuple[Vector, Energies]:
    """The largest absolute value of each block [blocks], NaN where there is one, and the sums of squares [blocks]."""
    blocks = -(-vector.size // STEP_BLOCK_VALUES)
    peaks, energies = np.empty(blocks, np.float32), np.empty(blocks)
    scratch = np.empty((min(blocks, CHUNK_BLOCKS), STEP_BLOCK_VALUES), np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for first, last in spans(blocks, CHUNK_BLOCKS):
            chunk = rows(vector, first, last, STEP_BLOCK_VALUES)
            peak = np.abs(chunk, out=scratch[: len(chunk)]).max(axis=1, out=peaks[first:last])
            energies[first:last] = np.einsum("ij,ij->i", chunk, chunk)
            is_unsafe = ~((peak >= SQUARES_SAFE_MIN) & (peak <= SQUARES_SAFE_MAX))
            if is_unsafe.any():  # zeros, too
                energies[first:last][is_unsafe] = np.square(chunk[is_unsafe], dtype=np.float64).sum(axis=1)
    return peaks, energies


def quantise_vector(codec: StepCodec, vector: Vector, scales: Vector) -> list[Bytes]:
    """The bytes of a vector's levels, in pieces, given its scales [blocks]."""
    factors = reciprocals(scales)[:, None]
    quantise = Quantiser(codec, min(len(scales), CHUNK_BLOCKS))
    writer = RunWriter()
    pieces = []
    for first, last in spans(len(scales), CHUNK_BLOCKS):
        digits = quantise(rows(vector, first, last, STEP_BLOCK_VALUES), factors[first:last])
        pieces.append(writer.write(digits.reshape(-1)) if codec.has_runs else pack_digits(codec, digits))
    return pieces


def decode_steps(codec: StepCodec, header: PayloadHeader, raw: bytes, *, out: Vector) -> Vector:
    """Decodes into `out` ([num_values] float32) and returns the scales [blocks] float32.

    Raises PayloadError for a scale or a byte of levels that no encoder writes; what `out` holds is undefined then.
    """
    scales = read_step_scales(codec, header, raw)
    if codec.has_runs:
        read_runs(np.frombuffer(raw, np.uint8, offset=codec.scale_bytes(out.size)), scales, out=out)
    else:
        _decode_packed(codec, read_packed(codec, header, raw), scales, out)
    return scales


class Quantiser:
    """Cuts values to levels, chunk by chunk, in memory of its own that stays in the cache."""

    def __init__(self, codec: StepCodec, blocks: int) -> None:
        self._codec = codec
        self._ratios, self._lifted = np.empty((2, blocks, STEP_BLOCK_VALUES), np.float32)
        self._digits, self._others = np.empty((2, blocks, STEP_BLOCK_VALUES), np.uint8)
        steps = [_least_ratio(level, codec.lift) for level in range(1, codec.level_max + 1)]
        self._borders = [-step for step in reversed(steps)], steps

    def __call__(self, chunk: Vector, factors: Vector) -> Bytes:
        """The digits (level + level_max) [blocks, STEP_BLOCK_VALUES] uint8 of a chunk, given what its blocks are
        multiplied by [blocks, 1]. They are lost with the next call.
        """
        ratios = np.multiply(chunk, factors, out=self._ratios[: len(chunk)])
        return self._compare(ratios) if self._codec.level_max <= 2 else self._cut(ratios)

    def _compare(self, ratios: Vector) -> Bytes:
        """By counting the borders below each ratio, which is cheaper than rounding if there are four of them."""
        digits, other = self._digits[: len(ratios)], self._others[: len(ratios)]
        below, above = self._borders
        np.greater(ratios, below[0], out=digits.view(np.bool_))
        for border in below[1:]:
            digits += np.greater(ratios, border, out=other.view(np.bool_)).view(np.uint8)
        for border in above:
            digits += np.greater_equal(ratios, border, out=other.view(np.bool_)).view(np.uint8)
        return digits

    def _cut(self, ratios: Vector) -> Bytes:
        """By cutting off fractions. Both signs without a branch: a positive ratio becomes 0 in `down`, a negative one 0
        in `up`. No ratio exceeds 2 level_max and some rounding.
        """
        lift, top = np.float32(self._codec.lift), self._codec.level_max
        lifted = self._lifted[: len(ratios)]
        up, down = (one[: len(ratios)].view(np.int8) for one in (self._digits, self._others))
        np.copyto(up, np.add(ratios, lift, out=lifted), casting="unsafe")
        np.copyto(down, np.subtract(ratios, lift, out=lifted), casting="unsafe")
        np.clip(up, 0, top, out=up)
        up += np.clip(down, -top, 0, out=down)
        up += top
        return up.view(np.uint8)


def _least_ratio(level: int, lift: float) -> np.float32:
    """The smallest single whose sum with `lift`, as a single, is at least `level`."""
    ratio = np.float32(level) - np.float32(lift)
    while ratio + np.float32(lift) >= level:
        ratio = np.nextafter(ratio, np.float32(0))
    while ratio + np.float32(lift) < level:
        ratio = np.nextafter(ratio, np.float32(np.inf))
    return ratio


def reciprocals(scales: Vector) -> Vector:
    """What values are multiplied by to get their ratios [blocks]; 0 where the scale is 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


def pack_digits(codec: StepCodec, digits: Bytes) -> Bytes:
    """The packed form [blocks, block_bytes] of digits [blocks, STEP_BLOCK_VALUES]."""
    columns = digits.reshape(len(digits), codec.codes_per_byte, codec.block_bytes)
    packed = columns[:, -1].copy()
    for place in reversed(range(codec.codes_per_byte - 1)):
        packed *= codec.base
        packed += columns[:, place]
    return packed


def read_packed(codec: StepCodec, header: PayloadHeader, raw: bytes) -> Bytes:
    """The packed levels [blocks, block_bytes] uint8 of a payload's raw form, read-only.

    Raises PayloadError for a byte that stands for no levels.
    """
    packed = np.frombuffer(raw, np.uint8, offset=codec.scale_bytes(header.num_values))
    if int(packed.max()) >= codec.alphabet:
        block = int(packed.argmax()) // codec.block_bytes
        raise refusal(f"byte {packed.max()} in block {block} stands for no level of {codec.name}")
    return packed.reshape(-1, codec.block_bytes)


@lru_cache(maxsize=8)
def level_tables(codec: StepCodec) -> Vector:
    """The levels [codes_per_byte, 256] float32 that each packed byte stands for, at each of its places; read-only."""
    places = np.arange(codec.codes_per_byte)[:, None]
    tables = (np.arange(256) // codec.base**places % codec.base - codec.level_max).astype(np.float32)
    tables.setflags(write=False)
    return tables


def _decode_packed(codec: StepCodec, packed: Bytes, scales: Vector, out: Vector) -> None:
    size = min(len(packed), CHUNK_BLOCKS)
    indices = np.empty((size, codec.block_bytes), np.intp)
    levels = np.empty((size, codec.block_bytes), np.float32)
    for first, last in spans(len(packed), CHUNK_BLOCKS):
        index, level = indices[: last - first], levels[: last - first]
        index[:] = packed[first:last]
        part = out[first * STEP_BLOCK_VALUES : last * STEP_BLOCK_VALUES]
        is_whole = part.size == index.shape[0] * STEP_BLOCK_VALUES
        target = part if is_whole else np.empty(len(index) * STEP_BLOCK_VALUES, np.float32)
        columns = target.reshape(len(index), codec.codes_per_byte, codec.block_bytes)
        for place, table in enumerate(level_tables(codec)):
            np.take(table, index, out=level, mode="clip")  # every index is in range, and to clip is faster than to ask
            np.multiply(level, scales[first:last, None], out=columns[:, place])
        if not is_whole:
            part[:] = target[: part.size]
