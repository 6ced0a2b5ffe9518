"""The closed table of codecs: which exist, their ids on the wire, and how many bytes their raw form takes.

A payload names its codec by number, and a number that is not in this table is refused: nothing that a peer sends can
choose code by name. Ids and names never change meaning; a new layout of an old codec gets a new version.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from isles.proto.errors import ConfigError

BLOCK_VALUES: Final = 128
"""Values that share one scale: 16 bits of scale cost 0.125 bits a value, and one outlier spoils only 127 others."""

SCALE_BYTES: Final = 2
"""A scale is an IEEE 754 half."""

VALUE_BYTES: Final = 4
"""Values are IEEE 754 singles before encoding and after decoding."""


@dataclass(frozen=True, slots=True)
class PlaneCodec:
    """Keeps the upper bytes of every single, stored as byte planes: all lowest kept bytes first, all highest last.

    Sign and exponent bytes of a delta are alike and compress well; beside mantissa bytes they would not.
    """

    name: str
    codec_id: int
    version: int
    planes: int
    """Bytes kept of each value, counted from the most significant one."""
    rounding: int
    """What is added to a value's bits before its lower bytes are dropped; one below half, so halves go to zero."""

    @property
    def first_byte(self) -> int:
        """Position of the lowest kept byte in the little-endian value."""
        return VALUE_BYTES - self.planes

    def raw_bytes(self, num_values: int) -> int:
        """Size of the uncompressed form of `num_values` values, in bytes."""
        return self.planes * num_values


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Uniform levels `-level_max..level_max` times one scale for each block of `BLOCK_VALUES` values.

    Raw form: the half-precision scales of all blocks, then the codes. A code is the level plus `level_max`, so never
    negative. With two codes in a byte, value i of a block is the low half of byte i and value i + 64 the high one.
    The last block is padded with zeros.
    """

    name: str
    codec_id: int
    version: int
    level_max: int
    codes_per_byte: int

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of one block."""
        return BLOCK_VALUES // self.codes_per_byte

    @property
    def level_reciprocal(self) -> float:
        """1 / `level_max`, rounded to single precision: multiplying by it is the same operation on every device."""
        (rounded,) = struct.unpack("<f", struct.pack("<f", 1.0 / self.level_max))
        return float(rounded)

    def num_blocks(self, num_values: int) -> int:
        """Blocks that hold `num_values` values."""
        return -(-num_values // BLOCK_VALUES)

    def raw_bytes(self, num_values: int) -> int:
        """Size of the uncompressed form of `num_values` values, in bytes."""
        return self.num_blocks(num_values) * (SCALE_BYTES + self.block_bytes)


Codec = PlaneCodec | BlockCodec

_ALL: Final[tuple[Codec, ...]] = (
    PlaneCodec(name="fp32", codec_id=1, version=1, planes=4, rounding=0),
    PlaneCodec(name="bf16", codec_id=2, version=1, planes=2, rounding=0x7FFF),
    BlockCodec(name="int8", codec_id=3, version=1, level_max=127, codes_per_byte=1),
    BlockCodec(name="int4", codec_id=4, version=1, level_max=7, codes_per_byte=2),
)

CODECS_BY_ID: Final[Mapping[int, Codec]] = MappingProxyType({codec.codec_id: codec for codec in _ALL})
CODECS_BY_NAME: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})
CODEC_NAMES: Final = tuple(CODECS_BY_NAME)


def codec_named(name: str) -> Codec:
    """Looks a codec up by the name that settings use; raises ConfigError for a name that no codec has."""
    codec = CODECS_BY_NAME.get(name)
    if codec is None:
        raise ConfigError(f"there is no codec {name!r}; set one of {', '.join(CODEC_NAMES)}")
    return codec
