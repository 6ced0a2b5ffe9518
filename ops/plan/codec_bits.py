"""How many bits a value takes on the wire, codec by codec, as measured. Pure.

Gaussian values of one scale through each codec and zstd, headers and scales included. Deltas are like that: a demo with
`int4` sent 3.53 bits a value up and 3.54 down. Values whose scale varies within a block take fewer; `--bits-up` and
`--bits-down` of `isles plan` take what `isles status` shows of a run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from isles.proto.codec_names import step_hundredths

MEASURED_BITS: Final[dict[str, float]] = {"fp32": 27.1, "bf16": 11.0, "int8": 7.67, "int4": 3.55}
"""Codec -> bits per value."""

STEP_BITS: Final[tuple[tuple[int, float], ...]] = (
    (50, 3.07), (75, 2.46), (100, 2.04), (125, 1.65), (150, 1.35), (175, 1.08), (200, 0.82), (250, 0.40),
)  # fmt: skip
"""100 S -> bits per value of `step<S>`; between two of them it is a line."""


def bits_of(codec: str) -> float:
    """Bits per value of a codec that exists."""
    hundredths = step_hundredths(codec)
    if hundredths is None:
        return MEASURED_BITS[codec]
    for (low, more), (high, fewer) in pairwise(STEP_BITS):
        if hundredths <= high:
            return more + (fewer - more) * (hundredths - low) / (high - low)
    return STEP_BITS[-1][1]
