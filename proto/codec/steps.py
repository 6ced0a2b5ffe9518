"""The step codecs in numpy: what every other implementation must equal, bit for bit once the scales are chosen.

A value x of a block with scale s becomes the level sign(x) * trunc(|x| / s + lift), cut to the largest one, and comes
back as the level times s. With lift < 1/2 the bin of zero is wider than a step, so exact halves go toward zero. A level
is reached 0.5 + S/10 steps above the one before: of all widths of the zero bin that gives, within 2 %, the least error
at equal entropy for Gaussian values. The best widths grow from 0.54 at S = 0.5 to 0.6 at 1 and 0.75 at 2.

One pass over the values: each chunk is measured, quantised and packed while it is in the cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from isles.proto.codec.chunks import Bytes, Vector, rows, spans
from isles.proto.codec.frame import Encoded, PayloadHeader, pack, refusal
from isles.proto.codec.runs import RunWriter, read_runs
from isles.proto.codec.scales import check_magnitudes, choose_step_scales, read_step_scales, store_step_scales
from isles.proto.codec.table import STEP_BLOCK_VALUES, StepCodec

Levels = npt.NDArray[np.int8]
Energies = npt.NDArray[np.float64]

CHUNK_BLOCKS: Final = 64
"""Blocks handled at a time: 240 KiB of values."""

SQUARES_SAFE_MAX: Final = 2.0**50
SQUARES_SAFE_MIN: Final = 2.0**-50
"""Blocks whose largest value lies between these can be squared and summed as singles; others take double precision."""


def encode_steps(codec: StepCodec, vector: Vector) -> Encoded:
    """The payload of `vector` ([n] float32, n >= 1).

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large.
    """
    scales, levels = quantise_vector(codec, vector)
    exponent, stored = store_step_scales(scales)
    is_zero = ~stored.any(axis=0)
    if scales[is_zero].any():  # rarely: the largest scale, which decides what is too small to be sent, is known last
        scales, levels = quantise_vector(codec, vector, least=scales[~is_zero].min())
    payload = pack(codec, num_values=vector.size, scale_exponent=exponent, raw=b"".join((stored, *levels)))
    # The largest value of a block always gets a level, so only a zero scale makes a block zero.
    return Encoded(payload, bool(is_zero.all()))


def quantise_vector(codec: StepCodec, vector: Vector, *, least: float = 0.0) -> tuple[Vector, list[Bytes]]:
    """The scales [blocks] of a vector, those below `least` made 0, and the bytes of its levels in pieces."""
    blocks = codec.num_blocks(vector.size)
    peaks, scales = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    scratch = Scratch(min(blocks, CHUNK_BLOCKS))
    writer = RunWriter()
    pieces = []
    for first, last in spans(blocks, CHUNK_BLOCKS):
        chunk = rows(vector, first, last, STEP_BLOCK_VALUES)
        energies = measure(chunk, scratch, out=peaks[first:last])
        if not peaks[first:last].max() <= SQUARES_SAFE_MAX:  # rarely, and NaN too
            check_magnitudes(codec, peaks[:last], span=STEP_BLOCK_VALUES)
        num_values = min(last * STEP_BLOCK_VALUES, vector.size) - first * STEP_BLOCK_VALUES
        chosen = choose_step_scales(codec, peaks[first:last], energies, num_values)
        chosen[chosen < least] = 0
        scales[first:last] = chosen
        levels = quantise(codec, chunk, chosen, scratch)
        pieces.append(writer.write(levels.reshape(-1)) if codec.has_runs else pack_levels(codec, levels))
    return scales, pieces


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


class Scratch:
    """Memory for the values of one chunk on their way; used again for the next one."""

    def __init__(self, blocks: int) -> None:
        self.singles = np.empty((2, blocks, STEP_BLOCK_VALUES), np.float32)
        self.levels = np.empty((blocks, STEP_BLOCK_VALUES), np.int8)


def measure(chunk: Vector, scratch: Scratch, *, out: Vector) -> Energies:
    """Writes the largest absolute value of each block [blocks, STEP_BLOCK_VALUES] to `out`, NaN where there is one, and
    returns the sums of squares [blocks].
    """
    np.max(np.abs(chunk, out=scratch.singles[0, : len(chunk)]), axis=1, out=out)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        energies = np.einsum("ij,ij->i", chunk, chunk).astype(np.float64)
        unsafe = ~((out >= SQUARES_SAFE_MIN) & (out <= SQUARES_SAFE_MAX)) & (out != 0)
        if unsafe.any():
            energies[unsafe] = np.square(chunk[unsafe], dtype=np.float64).sum(axis=1)
    return energies


def quantise(codec: StepCodec, chunk: Vector, scales: Vector, scratch: Scratch) -> Levels:
    """The levels [blocks, STEP_BLOCK_VALUES] int8 of a chunk, given its scales [blocks]; they lie in the scratch."""
    ratio, lift = scratch.singles[:, : len(chunk)]
    levels = scratch.levels[: len(chunk)]
    np.multiply(chunk, reciprocals(scales)[:, None], out=ratio)
    ratio += np.copysign(np.float32(codec.lift), chunk, out=lift)
    np.copyto(levels, ratio, casting="unsafe")  # cuts toward zero; no ratio exceeds 2 level_max and some rounding
    return np.clip(levels, -codec.level_max, codec.level_max, out=levels)


def reciprocals(scales: Vector) -> Vector:
    """What values are multiplied by to get their ratios [blocks]; 0 where the scale is 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


def pack_levels(codec: StepCodec, levels: Levels) -> Bytes:
    """The packed form [blocks, block_bytes] of levels [blocks, STEP_BLOCK_VALUES], which are changed."""
    levels += codec.level_max
    digits = levels.view(np.uint8).reshape(len(levels), codec.codes_per_byte, codec.block_bytes)
    packed = digits[:, -1].copy()
    for place in reversed(range(codec.codes_per_byte - 1)):
        packed *= codec.base
        packed += digits[:, place]
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
