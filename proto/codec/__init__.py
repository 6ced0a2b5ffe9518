"""Turns a flat fragment vector into the bytes that travel, and back.

`encode` and `decode` work on numpy arrays and are the reference; `isles.proto.codec.torch_codec` has the same functions
for tensors and is imported by name, so that this package needs no torch.
"""

from __future__ import annotations

from isles.proto.codec.frame import Encoded, PayloadHeader, bound_bytes, inspect
from isles.proto.codec.reference import Decoded, decode, decode_with_scales, encode, encode_with_stats
from isles.proto.codec.table import BLOCK_VALUES, CODEC_NAMES

__all__ = [
    "BLOCK_VALUES",
    "CODEC_NAMES",
    "Decoded",
    "Encoded",
    "PayloadHeader",
    "bound_bytes",
    "decode",
    "decode_with_scales",
    "encode",
    "encode_with_stats",
    "inspect",
]
