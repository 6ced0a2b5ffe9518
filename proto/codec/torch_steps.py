"""The step codecs in torch: quantised and packed on the device where the values live.

Given the same scales, levels equal those of `isles.proto.codec.steps`, and decoded values equal them bit for bit: both
do one correctly rounded operation after the other. The scales may differ where two ways of adding up squares straddle
the border between two rounded ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from isles.proto.codec import steps
from isles.proto.codec.chunks import Bytes, Vector, spans
from isles.proto.codec.frame import Encoded, PayloadHeader, pack
from isles.proto.codec.runs import EMPTY_RUN, LEVELS, STRIDES, check_end, check_runs
from isles.proto.codec.scales import check_magnitudes, choose_step_scales, read_step_scales, store_step_scales
from isles.proto.codec.table import RUN_ZEROS_MAX, STEP_BLOCK_VALUES, StepCodec
from isles.proto.codec.torch_chunks import rows

CHUNK_BLOCKS: Final = 1 << 12
"""Blocks handled at a time: 15 MiB of values, large enough to hide the launch of a kernel."""

CHUNK_RUNS: Final = 1 << 20
"""Runs decoded at a time: their places take 8 MiB."""


def encode_steps(codec: StepCodec, vector: torch.Tensor) -> Encoded:
    """The payload of `vector` ([n] float32, n >= 1, contiguous, any device).

    Raises NonFiniteError if a value is NaN or infinite, RangeError if one is too large.
    """
    if vector.device.type == "cpu":
        return steps.encode_steps(codec, vector.numpy())
    return encode_on_device(codec, vector)


def decode_steps(codec: StepCodec, header: PayloadHeader, raw: bytes, *, out: torch.Tensor) -> None:
    """Decodes into `out` ([num_values] float32, contiguous, any device).

    Raises PayloadError for a scale or a byte of codes that no encoder writes; what `out` holds is undefined then.
    """
    if out.device.type == "cpu":
        steps.decode_steps(codec, header, raw, out=out.numpy())
    else:
        decode_on_device(codec, header, raw, out=out)


def encode_on_device(codec: StepCodec, vector: torch.Tensor) -> Encoded:
    """As `encode_steps`, by torch alone."""
    num_values = vector.numel()
    peaks, energies = measure(vector)
    check_magnitudes(codec, peaks, span=STEP_BLOCK_VALUES)
    scales = choose_step_scales(codec, peaks, energies, num_values)
    exponent, stored = store_step_scales(scales)
    is_zero = ~stored.any(axis=0)
    scales[is_zero] = 0
    levels = quantise_vector(codec, vector, scales)
    payload = pack(codec, num_values=num_values, scale_exponent=exponent, raw=steps.joined(stored, levels))
    return Encoded(payload, bool(is_zero.all()))


def quantise_vector(codec: StepCodec, vector: torch.Tensor, scales: Vector) -> list[Bytes]:
    """The bytes of a vector's levels, in pieces, given its scales [blocks]."""
    factors = torch.from_numpy(steps.reciprocals(scales)).to(vector.device).unsqueeze(1)
    writer = RunWriter()
    pieces = []
    for first, last in spans(len(scales), CHUNK_BLOCKS):
        levels = quantise(codec, rows(vector, first, last, STEP_BLOCK_VALUES), factors[first:last])
        packed = writer.write(levels.view(-1)) if codec.has_runs else pack_levels(codec, levels)
        pieces.append(packed.cpu().numpy())
    return pieces


def decode_on_device(codec: StepCodec, header: PayloadHeader, raw: bytes, *, out: torch.Tensor) -> None:
    """As `decode_steps`, by torch alone."""
    scales = torch.from_numpy(read_step_scales(codec, header, raw)).to(out.device)
    if codec.has_runs:
        runs = np.frombuffer(raw, np.uint8, offset=codec.scale_bytes(out.numel()))
        check_runs(runs)
        _read_runs(runs, scales, out)
        return
    packed = steps.read_packed(codec, header, raw)
    tables = torch.from_numpy(steps.level_tables(codec).copy()).to(out.device)
    for first, last in spans(len(packed), CHUNK_BLOCKS):
        index = torch.from_numpy(packed[first:last].copy()).to(out.device).long()
        levels = tables[:, index]  # [codes_per_byte, blocks, block_bytes]
        levels *= scales[first:last, None]
        part = out[first * STEP_BLOCK_VALUES : last * STEP_BLOCK_VALUES]
        part.copy_(levels.transpose(0, 1).reshape(-1)[: part.numel()])


def measure(vector: torch.Tensor) -> tuple[Vector, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """The largest absolute value of each block [blocks], NaN where there is one, and the sums of squares [blocks]."""
    blocks = -(-vector.numel() // STEP_BLOCK_VALUES)
    peaks = torch.empty(blocks, dtype=torch.float32, device=vector.device)
    shares = torch.empty_like(peaks)
    for first, last in spans(blocks, CHUNK_BLOCKS):
        chunk = rows(vector, first, last, STEP_BLOCK_VALUES)
        peak = torch.amax(chunk.abs(), dim=1, out=peaks[first:last])
        relative = chunk / peak.masked_fill(peak == 0, 1).unsqueeze(1)  # whose squares are in range whatever the values
        torch.sum(relative.square_(), dim=1, out=shares[first:last])
    host_peaks = peaks.cpu().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        return host_peaks, shares.cpu().numpy() * np.square(host_peaks, dtype=np.float64)


def quantise(codec: StepCodec, chunk: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The levels [blocks, STEP_BLOCK_VALUES] int8 of a chunk, given what its blocks are multiplied by [blocks, 1]."""
    ratio = chunk * factors
    ratio += torch.full_like(chunk, codec.lift).copysign_(chunk)
    return ratio.to(torch.int8).clamp_(-codec.level_max, codec.level_max)


def pack_levels(codec: StepCodec, levels: torch.Tensor) -> torch.Tensor:
    """The packed form [blocks, block_bytes] uint8 of levels [blocks, STEP_BLOCK_VALUES]."""
    digits = (levels + codec.level_max).view(torch.uint8).view(-1, codec.codes_per_byte, codec.block_bytes)
    packed = digits[:, -1].clone()
    for place in reversed(range(codec.codes_per_byte - 1)):
        packed *= codec.base
        packed += digits[:, place]
    return packed


class RunWriter:
    """Turns consecutive levels into runs, as `isles.proto.codec.runs.RunWriter` does."""

    def __init__(self) -> None:
        self._open_zeros = 0

    def write(self, levels: torch.Tensor) -> torch.Tensor:
        """The runs that end in `levels` ([n] int8, n >= 1)."""
        places = levels.nonzero().view(-1)
        if not len(places):
            self._open_zeros += levels.numel()
            return levels.new_empty(0, dtype=torch.uint8)
        zeros = places.diff(prepend=places.new_tensor([-1 - self._open_zeros])) - 1
        self._open_zeros = levels.numel() - 1 - int(places[-1])
        ends_with = levels[places]
        digits = (ends_with + 2 - (ends_with > 0).to(torch.int8)).to(torch.uint8)
        num_empty = zeros.div(RUN_ZEROS_MAX, rounding_mode="floor")
        ends = (num_empty + 1).cumsum(0)
        runs = levels.new_full((int(ends[-1]),), EMPTY_RUN, dtype=torch.uint8)
        runs[ends - 1] = digits + 4 * (zeros % RUN_ZEROS_MAX).to(torch.uint8)
        return runs


def _read_runs(runs: Bytes, scales: torch.Tensor, out: torch.Tensor) -> None:
    strides, levels = (torch.from_numpy(table).to(out.device) for table in (STRIDES, LEVELS))
    out.zero_()
    start = -1
    for first, last in spans(runs.size, CHUNK_RUNS):
        index = torch.from_numpy(runs[first:last].copy()).to(out.device).long()
        places = strides[index].cumsum(0) + start
        start = int(places[-1])
        check_end(start, out.numel())
        out[places] = levels[index] * scales[places.div(STEP_BLOCK_VALUES, rounding_mode="floor")]
