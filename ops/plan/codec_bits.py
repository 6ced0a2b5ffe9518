"""How many bits a value takes on the wire, codec by codec, as measured. Pure.

Deltas and updates of the demo's model after zstd, scales included; docs/concepts/codec.md and docs/guides/tuning.md say
how it was measured. They depend on the values: `--bits-up` and `--bits-down` take what `isles status` shows of a run.
"""

from __future__ import annotations

from typing import Final

MEASURED_BITS: Final[dict[str, tuple[float, float]]] = {
    "fp32": (32.0, 32.0),
    "bf16": (16.0, 16.0),
    "int8": (8.125, 8.125),
    "int4": (3.5, 3.6),
}
"""Codec -> bits per value up and down. Of the first three the size before compression, which is the most it can be."""


def bits_of(codec: str, *, is_up: bool) -> float:
    """Bits per value of this codec."""
    up, down = MEASURED_BITS[codec]
    return up if is_up else down
