"""The codecs in torch: the same payloads, quantised and packed on the device where the values live.

Payloads equal those of `isles.proto.codec.reference` byte for byte, decoded values bit for bit: scales are chosen on
the host by the same code, and everything else is one correctly rounded operation at a time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from isles.proto.codec.chunks import spans
from isles.proto.codec.frame import Buffer, Encoded, PayloadHeader, pack, refusal, unpack
from isles.proto.codec.reference import CHUNK_BLOCKS, is_zero_magnitude, read_codes
from isles.proto.codec.scales import check_magnitudes, choose_scales, read_scales
from isles.proto.codec.table import (
    BLOCK_VALUES,
    SCALE_BYTES,
    VALUE_BYTES,
    BlockCodec,
    PlaneCodec,
    StepCodec,
    codec_named,
)
from isles.proto.codec.torch_chunks import rows
from isles.proto.codec.torch_steps import decode_steps, encode_steps

DEVICE_CHUNK_BLOCKS: Final = 1 << 15
"""Blocks handled at a time on an accelerator: 16 MiB of values, large enough to hide the launch of a kernel."""

_EXACT_DTYPES: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""Types whose values are all singles."""


def encode(name: str, values: torch.Tensor) -> bytes:
    """The payload of `values` ([n], n >= 1, float32 or a type that float32 contains, any device) in codec `name`.

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large for the codec, ConfigError for
    an unknown codec, TypeError or ValueError for anything but such a vector.
    """
    return encode_with_stats(name, values).payload


@torch.no_grad()
def encode_with_stats(name: str, values: torch.Tensor) -> Encoded:
    """Like `encode`, and says whether the payload decodes to zeros only."""
    codec = codec_named(name)
    if values.dtype not in _EXACT_DTYPES:
        raise TypeError(f"values to encode must be float32, float16 or bfloat16, these are {values.dtype}")
    if values.ndim != 1 or values.numel() == 0:
        raise ValueError(f"values to encode must be a vector of at least one value, the shape is {tuple(values.shape)}")
    vector = values.detach().to(torch.float32).contiguous()
    if isinstance(codec, StepCodec):
        return encode_steps(codec, vector)
    if isinstance(codec, BlockCodec):
        return _encode_blocks(codec, vector)
    return _encode_planes(codec, vector)


@torch.no_grad()
def decode(
    payload: Buffer, *, num_values: int, out: torch.Tensor | None = None, allow_nonfinite: bool = False
) -> torch.Tensor:
    """The values ([num_values] float32) of a payload that came from a peer, in `out` or in a new tensor on the host.

    `out` is a contiguous float32 vector of `num_values` values on any device; if the payload is refused, what `out`
    holds is undefined. Raises PayloadError for whatever is wrong with the payload, ValueError for a wrong `out`.
    """
    if out is None:
        out = torch.empty(num_values, dtype=torch.float32)
    elif out.dtype != torch.float32 or out.shape != (num_values,) or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous float32 vector of {num_values} values")
    header, raw = unpack(payload, num_values=num_values)
    codec = codec_named(header.codec)
    if isinstance(codec, StepCodec):
        decode_steps(codec, header, raw, out=out)
    elif isinstance(codec, BlockCodec):
        _decode_blocks(codec, header, raw, out)
    else:
        _decode_planes(codec, raw, out, allow_nonfinite)
    return out


def _encode_planes(codec: PlaneCodec, vector: torch.Tensor) -> Encoded:
    step = _chunk_blocks(vector) * BLOCK_VALUES
    parts = list(spans(vector.numel(), step))
    magnitudes = torch.stack([_magnitude(vector[first:last]) for first, last in parts]).cpu().numpy()
    check_magnitudes(codec, magnitudes, span=step)
    raw = torch.empty((codec.planes, vector.numel()), dtype=torch.uint8)
    for first, last in parts:
        bits = vector[first:last].view(torch.int32) + codec.rounding
        octets = bits.view(torch.uint8).view(-1, VALUE_BYTES)
        raw[:, first:last] = octets[:, codec.first_byte :].t().contiguous()
    payload = pack(codec, num_values=vector.numel(), scale_exponent=0, raw=raw.view(-1).numpy().data)
    return Encoded(payload, is_zero_magnitude(codec, float(magnitudes.max())))


def _decode_planes(codec: PlaneCodec, raw: bytes, out: torch.Tensor, allow_nonfinite: bool) -> None:
    planes = np.frombuffer(raw, np.uint8).reshape(codec.planes, out.numel())
    step = _chunk_blocks(out) * BLOCK_VALUES
    staging = torch.empty((codec.planes, min(step, out.numel())), dtype=torch.uint8)
    out.zero_()
    octets = out.view(torch.uint8).view(-1, VALUE_BYTES)
    for first, last in spans(out.numel(), step):
        part = staging[:, : last - first]
        part.numpy()[:] = planes[:, first:last]
        octets[first:last, codec.first_byte :] = part.to(out.device).t()
        if not allow_nonfinite and not bool(torch.isfinite(_magnitude(out[first:last]))):
            raise refusal(f"NaN or infinity within its values {first} to {last - 1}")


def _encode_blocks(codec: BlockCodec, vector: torch.Tensor) -> Encoded:
    blocks, step = codec.num_blocks(vector.numel()), _chunk_blocks(vector)
    magnitudes = torch.empty(blocks, dtype=torch.float32, device=vector.device)
    scratch = torch.empty((2, min(blocks, step), BLOCK_VALUES), dtype=torch.float32, device=vector.device)
    for first, last in spans(blocks, step):
        absolute = torch.abs(rows(vector, first, last, BLOCK_VALUES), out=scratch[0, : last - first])
        torch.amax(absolute, dim=1, out=magnitudes[first:last])
    host_magnitudes = magnitudes.cpu().numpy()
    check_magnitudes(codec, host_magnitudes, span=BLOCK_VALUES)

    scales = choose_scales(codec, host_magnitudes)
    divisors = torch.from_numpy(scales.divisors).to(vector.device).unsqueeze(1)
    raw = torch.empty(codec.raw_bytes(vector.numel()), dtype=torch.uint8)
    raw.numpy()[: blocks * SCALE_BYTES] = scales.stored.view(np.uint8)
    codes = raw[blocks * SCALE_BYTES :].view(blocks, codec.block_bytes)
    for first, last in spans(blocks, step):
        ratio, level = scratch[:, : last - first]
        torch.div(rows(vector, first, last, BLOCK_VALUES), divisors[first:last], out=ratio)
        _round_half_to_zero(ratio, out=level)
        level += codec.level_max
        codes[first:last] = _pack_codes(codec, level.to(torch.uint8))
    payload = pack(codec, num_values=vector.numel(), scale_exponent=scales.exponent, raw=raw.numpy().data)
    return Encoded(payload, not scales.stored.any())


def _decode_blocks(codec: BlockCodec, header: PayloadHeader, raw: bytes, out: torch.Tensor) -> None:
    factors = torch.from_numpy(read_scales(codec, header, raw)).to(out.device).unsqueeze(1)
    codes = read_codes(codec, header, raw)
    step = _chunk_blocks(out)
    staging = torch.empty((min(len(codes), step), codec.block_bytes), dtype=torch.uint8)
    scratch = torch.empty((len(staging), BLOCK_VALUES), dtype=torch.float32, device=out.device)
    for first, last in spans(len(codes), step):
        packed, level = staging[: last - first], scratch[: last - first]
        packed.numpy()[:] = codes[first:last]
        _unpack_codes(codec, packed.to(out.device), out=level)
        level -= codec.level_max
        level *= factors[first:last]
        part = out[first * BLOCK_VALUES : last * BLOCK_VALUES]
        part.copy_(level.view(-1)[: part.numel()])


def _pack_codes(codec: BlockCodec, codes: torch.Tensor) -> torch.Tensor:
    if codec.codes_per_byte == 1:
        return codes
    half = codec.block_bytes
    return codes[:, :half] | (codes[:, half:] << 4)


def _unpack_codes(codec: BlockCodec, codes: torch.Tensor, *, out: torch.Tensor) -> None:
    if codec.codes_per_byte == 1:
        out.copy_(codes)
    else:
        half = codec.block_bytes
        out[:, :half] = codes & 15
        out[:, half:] = codes >> 4


def _round_half_to_zero(ratio: torch.Tensor, *, out: torch.Tensor) -> None:
    """sign(r) * ceil(|r| - 1/2): the nearest integer, exact halves toward zero."""
    torch.abs(ratio, out=out)
    out -= 0.5
    out.ceil_()
    out.copysign_(ratio)


def _magnitude(part: torch.Tensor) -> torch.Tensor:
    """Largest absolute value [] float32, NaN if there is one."""
    smallest, largest = torch.aminmax(part)
    return torch.maximum(largest, -smallest)


def _chunk_blocks(vector: torch.Tensor) -> int:
    return CHUNK_BLOCKS if vector.device.type == "cpu" else DEVICE_CHUNK_BLOCKS
