"""The closed table of codecs: which exist, their ids on the wire, and how many bytes their raw form takes.

A payload names its codec by number, and a number that is not in this table is refused: nothing that a peer sends can
choose code by name. Ids and names never change meaning; a new layout of an old codec gets a new version.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from isles.proto.codec_names import STEP_HUNDREDTHS_MAX, STEP_HUNDREDTHS_MIN, canonical_name, step_hundredths, step_name
from isles.proto.errors import ConfigError

BLOCK_VALUES: Final = 128
"""Values that share one scale: 16 bits of scale cost 0.125 bits a value, and one outlier spoils only 127 others."""

SCALE_BYTES: Final = 2
"""A scale is an IEEE 754 half."""

VALUE_BYTES: Final = 4
"""Values are IEEE 754 singles before encoding and after decoding."""

STEP_CODEC_ID: Final = 5
STEP_CODEC_VERSION: Final = 1

STEP_BLOCK_VALUES: Final = 960
"""Values that share one scale in a step codec: a multiple of the 2 or 3 codes that a byte may hold. A scale takes
about 4 bits after compression: 0.004 bits a value."""

STEP_SCALE_BITS: Final = 4
"""Kept bits of a scale's mantissa, so that it is within 1/32 of what was measured. A step that is off by so little
costs nothing in rate against error; 10 bits would take three times as many bytes."""


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

    def is_raw_size(self, num_values: int, raw_bytes: int) -> bool:
        """Whether the uncompressed form of `num_values` values may have that size."""
        return raw_bytes == self.raw_bytes(num_values)


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
        return _single(1.0 / self.level_max)

    def num_blocks(self, num_values: int) -> int:
        """Blocks that hold `num_values` values."""
        return -(-num_values // BLOCK_VALUES)

    def raw_bytes(self, num_values: int) -> int:
        """Size of the uncompressed form of `num_values` values, in bytes."""
        return self.num_blocks(num_values) * (SCALE_BYTES + self.block_bytes)

    def is_raw_size(self, num_values: int, raw_bytes: int) -> bool:
        """Whether the uncompressed form of `num_values` values may have that size."""
        return raw_bytes == self.raw_bytes(num_values)


@dataclass(frozen=True, slots=True)
class StepCodec:
    """Uniform levels, one step apart, times one scale for each block of `STEP_BLOCK_VALUES` values.

    The scale of a block, which is also its step, is S standard deviations (about zero) of its values. So the rate is
    what the entropy of the levels makes it, not a number of bits chosen in advance.

    Raw form: the lower bytes of all blocks' half-precision scales, the upper bytes, then the levels. As many as the 256
    values of a byte allow are coded jointly in one byte, in one of two ways:

    packed  A byte holds `codes_per_byte` = n levels, each plus `level_max`, as digits of a number to the base `base`,
            the first one lowest. Byte j of a block of B values holds those of its values j, j + B/n, j + 2B/n ...; the
            last block is padded with zeros.
    runs    A byte holds a run of zero levels and the level that ends it: 4 z + k for z <= 62 zeros and the level
            (-2, -1, 1, 2)[k], or 252 for 63 zeros and no level. Zeros after the last other level are left out, so the
            size depends on the values.
    """

    hundredths: int
    """100 S; the payload header's codec parameter."""
    name: str = field(init=False)
    level_max: int = field(init=False)
    codes_per_byte: int = field(init=False)
    """Of the packed form; 0 for runs."""
    lift: float = field(init=False)
    """A single: what is added to a ratio before it is cut to a whole number; 1/2 would round to the nearest."""

    def __post_init__(self) -> None:
        level_max, codes_per_byte = next(
            (level_max, codes) for limit, level_max, codes in STEP_LAYOUTS if self.hundredths < limit
        )
        object.__setattr__(self, "name", step_name(self.hundredths))
        object.__setattr__(self, "level_max", level_max)
        object.__setattr__(self, "codes_per_byte", codes_per_byte)
        object.__setattr__(self, "lift", _single((500 - self.hundredths) / 1000))

    @property
    def codec_id(self) -> int:
        """Of the family on the wire."""
        return STEP_CODEC_ID

    @property
    def version(self) -> int:
        """Of the family's layout."""
        return STEP_CODEC_VERSION

    @property
    def step(self) -> float:
        """S: the distance of two levels, in standard deviations of a block."""
        return self.hundredths / 100

    @property
    def has_runs(self) -> bool:
        """Whether levels are coded as runs; else they are packed."""
        return self.codes_per_byte == 0

    @property
    def base(self) -> int:
        """Number of levels."""
        return 2 * self.level_max + 1

    @property
    def alphabet(self) -> int:
        """Number of bytes that stand for something: 225, 125 or 253. The others are never sent."""
        return RUN_ALPHABET if self.has_runs else int(self.base**self.codes_per_byte)

    @property
    def block_bytes(self) -> int:
        """Bytes of the levels of one block, in the packed form."""
        return STEP_BLOCK_VALUES // self.codes_per_byte

    def num_blocks(self, num_values: int) -> int:
        """Blocks that hold `num_values` values."""
        return -(-num_values // STEP_BLOCK_VALUES)

    def scale_bytes(self, num_values: int) -> int:
        """Bytes of the scales of `num_values` values, which come first."""
        return SCALE_BYTES * self.num_blocks(num_values)

    def raw_bytes(self, num_values: int) -> int:
        """Size of the uncompressed form of `num_values` values, in bytes; the largest one if it has runs."""
        levels = num_values if self.has_runs else self.num_blocks(num_values) * self.block_bytes
        return self.scale_bytes(num_values) + levels

    def is_raw_size(self, num_values: int, raw_bytes: int) -> bool:
        """Whether the uncompressed form of `num_values` values may have that size."""
        least = self.scale_bytes(num_values) if self.has_runs else self.raw_bytes(num_values)
        return least <= raw_bytes <= self.raw_bytes(num_values)


STEP_LAYOUTS: Final = ((120, 7, 2), (160, 2, 3), (STEP_HUNDREDTHS_MAX + 1, 2, 0))
"""Below these 100 S: largest level, and levels in a byte. The levels reach 3 standard deviations and more: 7.5 steps of
0.5, 2.5 steps of 1.2. Beyond, a value is cut to the largest level; what is cut off stays in the account.

The larger S, the more packed bytes would stand for zeros only. zstd finds matches among those, which do harm and cannot
be switched off; and at last such a byte has less to say than the one bit that it costs. Runs have neither fault."""

RUN_LEVELS: Final = (-2, -1, 1, 2)
RUN_ZEROS_MAX: Final = 63
"""Zeros of a run that no level ends."""
RUN_ALPHABET: Final = len(RUN_LEVELS) * RUN_ZEROS_MAX + 1

Codec = PlaneCodec | BlockCodec | StepCodec

_ALL: Final[tuple[PlaneCodec | BlockCodec, ...]] = (
    PlaneCodec(name="fp32", codec_id=1, version=1, planes=4, rounding=0),
    PlaneCodec(name="bf16", codec_id=2, version=1, planes=2, rounding=0x7FFF),
    BlockCodec(name="int8", codec_id=3, version=1, level_max=127, codes_per_byte=1),
    BlockCodec(name="int4", codec_id=4, version=1, level_max=7, codes_per_byte=2),
)

CODECS_BY_ID: Final[Mapping[int, PlaneCodec | BlockCodec]] = MappingProxyType({codec.codec_id: codec for codec in _ALL})
CODECS_BY_NAME: Final[Mapping[str, PlaneCodec | BlockCodec]] = MappingProxyType({codec.name: codec for codec in _ALL})
CODEC_NAMES: Final = tuple(CODECS_BY_NAME)
"""Of the codecs outside the family of step codecs."""


def codec_named(name: str) -> Codec:
    """Looks a codec up by the name that settings use; raises ConfigError for a name that no codec has."""
    try:
        known = canonical_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    hundredths = step_hundredths(known)
    return CODECS_BY_NAME[known] if hundredths is None else step_codec(hundredths)


@lru_cache(maxsize=STEP_HUNDREDTHS_MAX - STEP_HUNDREDTHS_MIN + 1)
def step_codec(hundredths: int) -> StepCodec:
    """The step codec of S = `hundredths` / 100, which must lie within the family's limits."""
    if not STEP_HUNDREDTHS_MIN <= hundredths <= STEP_HUNDREDTHS_MAX:
        raise ValueError(f"no step codec has 100 S = {hundredths}")
    return StepCodec(hundredths)


def _single(number: float) -> float:
    """The nearest single."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded)
