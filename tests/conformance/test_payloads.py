"""Payloads that never change: what an older isles encoded must decode to the same values for ever."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.proto import codec

NUM_VALUES = 1000

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_payloads.json").read_text())
"""Codec -> a payload of the values below in hexadecimal, and the CRC-32 of what it decodes to. Only grows."""


def values() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Some numbers of either sign, and one that stands out."""
    found = ((np.arange(NUM_VALUES) * 7919) % 2003 - 1001).astype(np.float32) / np.float32(1000)
    found[70] *= 10
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_a_payload_of_long_ago_decodes_to_the_same_bits(name: str) -> None:
    payload = bytes.fromhex(GOLDEN[name]["payload"])
    assert codec.inspect(payload).codec == name
    assert zlib.crc32(codec.decode(payload, num_values=NUM_VALUES).tobytes()) == GOLDEN[name]["crc32"]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_values_still_decode_to_what_they_did(name: str) -> None:
    """The bytes may differ with the build of zstd; the values that they stand for may not."""
    decoded = codec.decode(codec.encode(name, values()), num_values=NUM_VALUES)
    assert zlib.crc32(decoded.tobytes()) == GOLDEN[name]["crc32"]
