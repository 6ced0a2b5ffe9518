"""The codecs in numpy: what every other implementation must equal, bit for bit.

Work goes chunk by chunk through small scratch arrays, which stay in the processor's cache; whole-vector temporaries
would cost several times the run time and a copy of the model.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from isles.proto.codec.chunks import Bytes, Vector, rows, spans
from isles.proto.codec.frame import Buffer, Encoded, PayloadHeader, pack, refusal, unpack
from isles.proto.codec.scales import check_magnitudes, choose_scales, read_scales
from isles.proto.codec.steps import decode_steps, encode_steps
from isles.proto.codec.table import (
    BLOCK_VALUES,
    SCALE_BYTES,
    VALUE_BYTES,
    BlockCodec,
    PlaneCodec,
    StepCodec,
    codec_named,
)

CHUNK_BLOCKS: Final = 512
"""Blocks handled at a time: 256 KiB of values, so that values and scratch fit a second-level cache."""

CHUNK_VALUES: Final = CHUNK_BLOCKS * BLOCK_VALUES


class Decoded(NamedTuple):
    """What a payload decodes to."""

    values: Vector
    """[num_values]"""
    scales: Vector | None
    """[blocks] what the levels of each block were multiplied by, for a step codec: it tells the energy of the block
    before it was quantised."""


def encode(name: str, values: Vector) -> bytes:
    """The payload of `values` ([n] float32, n >= 1) in codec `name`; equal values give equal bytes.

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large for the codec, ConfigError for
    an unknown codec, TypeError or ValueError for anything but a vector of singles.
    """
    return encode_with_stats(name, values).payload


def encode_with_stats(name: str, values: Vector) -> Encoded:
    """Like `encode`, and says whether the payload decodes to zeros only."""
    codec = codec_named(name)
    vector = _checked(values)
    if isinstance(codec, StepCodec):
        return encode_steps(codec, vector)
    if isinstance(codec, BlockCodec):
        return _encode_blocks(codec, vector)
    return _encode_planes(codec, vector)


def decode(payload: Buffer, *, num_values: int, out: Vector | None = None, allow_nonfinite: bool = False) -> Vector:
    """The values ([num_values] float32) of a payload that came from a peer, in `out` or in a new array.

    Only codecs that can carry NaN and infinity (fp32, bf16) are affected by `allow_nonfinite`; without it such values
    are refused. Raises PayloadError for whatever is wrong with the payload, before any of it is used; what `out` holds
    is undefined then. Raises ValueError for an `out` that is no contiguous vector of as many singles.
    """
    return decode_with_scales(payload, num_values=num_values, out=out, allow_nonfinite=allow_nonfinite).values


def decode_with_scales(
    payload: Buffer, *, num_values: int, out: Vector | None = None, allow_nonfinite: bool = False
) -> Decoded:
    """Like `decode`, and gives the scales of a step codec's blocks."""
    header, raw = unpack(payload, num_values=num_values)
    if out is None:
        out = np.empty(num_values, np.float32)
    elif out.dtype != np.float32 or out.shape != (num_values,) or not out.flags.c_contiguous:
        raise ValueError(f"out must be a contiguous float32 vector of {num_values} values")
    codec = codec_named(header.codec)
    scales = None
    if isinstance(codec, StepCodec):
        scales = decode_steps(codec, header, raw, out=out)
    elif isinstance(codec, BlockCodec):
        _decode_blocks(codec, header, raw, out)
    else:
        _decode_planes(codec, raw, allow_nonfinite, out)
    return Decoded(out, scales)


def is_zero_magnitude(codec: PlaneCodec, magnitude: float) -> bool:
    """Whether `codec` rounds values up to `magnitude` to zero."""
    bits = int(np.float32(abs(magnitude)).view(np.uint32))
    return (bits + codec.rounding) >> (8 * codec.first_byte) == 0


def _encode_planes(codec: PlaneCodec, vector: Vector) -> Encoded:
    magnitudes = np.array(
        [_magnitude(vector[first:last]) for first, last in spans(vector.size, CHUNK_VALUES)], np.float32
    )
    check_magnitudes(codec, magnitudes, span=CHUNK_VALUES)
    raw = np.empty((codec.planes, vector.size), np.uint8)
    for first, last in spans(vector.size, CHUNK_VALUES):
        bits = vector[first:last].view(np.uint32) + np.uint32(codec.rounding)
        octets = bits.view(np.uint8).reshape(-1, VALUE_BYTES)
        for plane in range(codec.planes):
            raw[plane, first:last] = octets[:, codec.first_byte + plane]
    payload = pack(codec, num_values=vector.size, scale_exponent=0, raw=raw.reshape(-1).data)
    return Encoded(payload, is_zero_magnitude(codec, float(magnitudes.max())))


def _decode_planes(codec: PlaneCodec, raw: bytes, allow_nonfinite: bool, vector: Vector) -> None:
    planes = np.frombuffer(raw, np.uint8).reshape(codec.planes, vector.size)
    vector.fill(0)
    octets = vector.view(np.uint8).reshape(-1, VALUE_BYTES)
    for first, last in spans(vector.size, CHUNK_VALUES):
        for plane in range(codec.planes):
            octets[first:last, codec.first_byte + plane] = planes[plane, first:last]
        if not allow_nonfinite and not np.isfinite(_magnitude(vector[first:last])):
            raise refusal(f"NaN or infinity within its values {first} to {last - 1}")


def _encode_blocks(codec: BlockCodec, vector: Vector) -> Encoded:
    blocks = codec.num_blocks(vector.size)
    magnitudes = np.empty(blocks, np.float32)
    scratch = np.empty((2, min(blocks, CHUNK_BLOCKS), BLOCK_VALUES), np.float32)
    for first, last in spans(blocks, CHUNK_BLOCKS):
        absolute = np.abs(rows(vector, first, last, BLOCK_VALUES), out=scratch[0, : last - first])
        np.max(absolute, axis=1, out=magnitudes[first:last])
    check_magnitudes(codec, magnitudes, span=BLOCK_VALUES)

    scales = choose_scales(codec, magnitudes)
    raw = np.empty(codec.raw_bytes(vector.size), np.uint8)
    raw[: blocks * SCALE_BYTES] = scales.stored.view(np.uint8)
    codes = raw[blocks * SCALE_BYTES :].reshape(blocks, codec.block_bytes)
    for first, last in spans(blocks, CHUNK_BLOCKS):
        ratio, level = scratch[:, : last - first]
        np.divide(rows(vector, first, last, BLOCK_VALUES), scales.divisors[first:last, None], out=ratio)
        _round_half_to_zero(ratio, out=level)
        # A scale rounded down to a half leaves a ratio of at most level_max * (1 + 2^-11): no level exceeds the range.
        level += codec.level_max
        _pack_codes(codec, level.astype(np.uint8), out=codes[first:last])
    payload = pack(codec, num_values=vector.size, scale_exponent=scales.exponent, raw=raw.data)
    # The largest value of a block always gets the level level_max, so only a zero scale makes a block zero.
    return Encoded(payload, not scales.stored.any())


def _decode_blocks(codec: BlockCodec, header: PayloadHeader, raw: bytes, vector: Vector) -> None:
    factors = read_scales(codec, header, raw)
    codes = read_codes(codec, header, raw)
    scratch = np.empty((min(len(codes), CHUNK_BLOCKS), BLOCK_VALUES), np.float32)
    for first, last in spans(len(codes), CHUNK_BLOCKS):
        level = scratch[: last - first]
        _unpack_codes(codec, codes[first:last], out=level)
        level -= codec.level_max
        level *= factors[first:last, None]
        part = vector[first * BLOCK_VALUES : last * BLOCK_VALUES]
        part[:] = level.reshape(-1)[: part.size]


def read_codes(codec: BlockCodec, header: PayloadHeader, raw: bytes) -> Bytes:
    """The packed codes [blocks, block_bytes] uint8 of a payload's raw form, read-only.

    Raises PayloadError for a code that stands for no level.
    """
    blocks = codec.num_blocks(header.num_values)
    codes = np.frombuffer(raw, np.uint8, offset=blocks * SCALE_BYTES).reshape(blocks, codec.block_bytes)
    code_max = 2 * codec.level_max
    for first, last in spans(blocks, CHUNK_BLOCKS):
        chunk = codes[first:last]
        largest = chunk.max() if codec.codes_per_byte == 1 else max((chunk & 15).max(), (chunk >> 4).max())
        if largest > code_max:
            raise refusal(f"code {largest} within blocks {first} to {last - 1} stands for no level of {codec.name}")
    return codes


def _pack_codes(codec: BlockCodec, codes: Bytes, *, out: Bytes) -> None:
    if codec.codes_per_byte == 1:
        out[:] = codes
    else:
        half = codec.block_bytes
        np.left_shift(codes[:, half:], 4, out=out)
        out |= codes[:, :half]


def _unpack_codes(codec: BlockCodec, codes: Bytes, *, out: Vector) -> None:
    if codec.codes_per_byte == 1:
        out[:] = codes
    else:
        half = codec.block_bytes
        out[:, :half] = codes & 15
        out[:, half:] = codes >> 4


def _round_half_to_zero(ratio: Vector, *, out: Vector) -> None:
    """sign(r) * ceil(|r| - 1/2): the nearest integer, exact halves toward zero, so that rounding never adds work."""
    np.abs(ratio, out=out)
    out -= np.float32(0.5)
    np.ceil(out, out=out)
    np.copysign(out, ratio, out=out)


def _magnitude(part: Vector) -> np.float32:
    """Largest absolute value, NaN if there is one."""
    largest: np.float32 = np.maximum(part.max(), -part.min())
    return largest


def _checked(values: Vector) -> Vector:
    if values.dtype != np.float32:
        raise TypeError(f"values to encode must be float32, these are {values.dtype}")
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"values to encode must be a vector of at least one value, the shape is {values.shape}")
    return np.ascontiguousarray(values)
