"""The payload on the wire: a fixed header, then one zstd frame. Everything in it may come from a stranger.

    offset  size  field (little endian)
         0     4  magic "ISLD"
         4     1  format version, 1
         5     1  codec id
         6     1  codec version
         7     1  reserved, 0
         8     2  codec parameter: 100 S of a step codec, else 0
        10     2  scale exponent, signed: every stored scale is multiplied by two to this power
        12     8  number of values
        20     8  raw bytes: size of the frame's content
        28     4  CRC-32 of the 28 bytes above
        32        zstd frame with content size and checksum, up to the end of the payload

The header's checksum matters: with small fragments two codecs may need the same number of raw bytes, and one flipped
bit of the codec id would go unnoticed. Sizes are compared before anything is allocated for them, because the
decompressor believes whatever size a frame states.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import zstandard

from isles.proto.codec.table import (
    CODECS_BY_ID,
    STEP_CODEC_ID,
    STEP_CODEC_VERSION,
    Codec,
    PlaneCodec,
    StepCodec,
    codec_named,
    step_codec,
)
from isles.proto.codec_names import STEP_HUNDREDTHS_MAX, STEP_HUNDREDTHS_MIN
from isles.proto.errors import PayloadError

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"ISLD"
FORMAT_VERSION: Final = 1

ZSTD_LEVEL: Final = 1
"""Codes have no repetitions for a higher level to find (level 3 gained nothing and cost up to 6 times the time); a
negative level would switch off the Huffman stage, which is all that helps."""

HASH_LOG: Final = 6
"""The smallest table of past bytes, 64 entries: what zstd finds in such data saves nothing, so it shall find little."""

WINDOW_LOG: Final = 17
"""As long as the longest block, 128 KiB: a longer one keeps more of the past for nothing, a shorter one cuts blocks."""

WINDOW_BYTES_MAX: Final = 128 << 20
"""Largest window that a frame may ask the decompressor to keep; our own frames ask for at most 2 MiB."""

SCALE_EXPONENT_MIN: Final = -112
"""The smallest normal half times this power of two is the smallest normal single."""

SCALE_EXPONENT_MAX: Final = 112
"""The largest half times this power of two is still a finite single."""

_FIELDS: Final = struct.Struct("<4sBBBBHhQQ")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload and what its encoder knows about it."""

    payload: bytes
    is_zero: bool
    """Whether every value decodes to zero, so that sending the payload would tell nothing."""


@dataclass(frozen=True, slots=True)
class PayloadHeader:
    """What a payload says about itself; its consistency has been checked, its content has not."""

    codec: str
    codec_version: int
    num_values: int
    raw_bytes: int
    encoded_bytes: int
    """Size of the whole payload."""
    scale_exponent: int


def refusal(reason: str) -> PayloadError:
    """The error for a payload that a peer must not have sent, with what is wrong with it."""
    return PayloadError(
        f"a peer's payload was refused, nothing of it was used: {reason}; it was damaged or its sender is faulty"
    )


def bound_bytes(name: str, num_values: int) -> int:
    """Size of the largest legal payload of `num_values` values, in bytes: the limit for an upload.

    It is zstd's documented worst case for the raw bytes, plus the header. Raises ConfigError for an unknown codec.
    """
    return _bound(codec_named(name).raw_bytes(num_values))


def pack(codec: Codec, *, num_values: int, scale_exponent: int, raw: Buffer) -> bytes:
    """Puts the raw form of `num_values` values behind a header; equal arguments give equal bytes."""
    parameter = codec.hundredths if isinstance(codec, StepCodec) else 0
    fields = _FIELDS.pack(
        MAGIC, FORMAT_VERSION, codec.codec_id, codec.version, 0, parameter, scale_exponent, num_values, len(raw)
    )
    checksum = _CHECKSUM.pack(zlib.crc32(fields))
    if isinstance(codec, StepCodec):
        return b"".join((fields, checksum, *_compress_apart(raw, codec.scale_bytes(num_values))))
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, write_content_size=True)
    return b"".join((fields, checksum, compressor.compress(raw)))


def _compress_apart(raw: Buffer, scale_bytes: int) -> tuple[bytes, ...]:
    """One frame, in pieces. Scales and levels are unlike: both get blocks and Huffman tables of their own."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        ZSTD_LEVEL, hash_log=HASH_LOG, window_log=WINDOW_LOG, write_checksum=True, write_content_size=True
    )
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=len(raw))
    view = memoryview(raw)
    return (
        frame.compress(view[:scale_bytes]),
        frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK),
        frame.compress(view[scale_bytes:]),
        frame.flush(),
    )


def inspect(payload: Buffer) -> PayloadHeader:
    """Reads and checks the header of a payload and that of its frame, without decompressing.

    Raises PayloadError if the two contradict each other, the table of codecs, or the limits.
    """
    view = as_bytes_view(payload)
    if len(view) <= HEADER_BYTES:
        raise refusal(f"{len(view)} bytes are too few for a header and a frame")
    magic, format_version, codec_id, codec_version, reserved, parameter, exponent, num_values, raw_bytes = (
        _FIELDS.unpack_from(view)
    )
    if magic != MAGIC:
        raise refusal("it does not begin like a payload")
    if (zlib.crc32(view[: _FIELDS.size]),) != _CHECKSUM.unpack_from(view, _FIELDS.size):
        raise refusal("the checksum of its header is wrong")
    if format_version != FORMAT_VERSION:
        raise refusal(f"its format version is {format_version}, only {FORMAT_VERSION} is known")
    if reserved:
        raise refusal(f"its reserved byte is {reserved}, beside codec parameter {parameter}")
    codec = _codec_of(codec_id, codec_version, parameter)
    exponents = range(1) if isinstance(codec, PlaneCodec) else range(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX + 1)
    if exponent not in exponents:
        raise refusal(f"the scale exponent {exponent} is outside {exponents[0]}..{exponents[-1]}")
    if num_values == 0:
        raise refusal("it declares no values")
    if not codec.is_raw_size(num_values, raw_bytes):
        raise refusal(f"it declares {raw_bytes} raw bytes, {num_values} values of {codec.name} take other")
    if len(view) > _bound(raw_bytes):
        raise refusal(f"it has {len(view)} bytes, more than {num_values} values of {codec.name} can take")
    _check_frame(view[HEADER_BYTES:], raw_bytes)
    return PayloadHeader(codec.name, codec_version, num_values, raw_bytes, len(view), exponent)


def unpack(payload: Buffer, *, num_values: int) -> tuple[PayloadHeader, bytes]:
    """Checks everything about a payload but its content, which is returned decompressed.

    At most `raw_bytes(num_values)` bytes are allocated for the content. Raises PayloadError.
    """
    view = as_bytes_view(payload)
    header = inspect(view)
    if header.num_values != num_values:
        raise refusal(f"it holds {header.num_values} values, {num_values} were expected")
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        raw = decompressor.decompress(view[HEADER_BYTES:], read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise refusal(f"its frame does not decompress ({error})") from error
    if len(raw) != header.raw_bytes:
        raise refusal(f"its frame holds {len(raw)} bytes, {header.raw_bytes} were declared")
    return header, raw


def as_bytes_view(payload: Buffer) -> memoryview:
    """A flat view of a payload's bytes, copied only if they do not lie together in memory."""
    view = memoryview(payload)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def _codec_of(codec_id: int, codec_version: int, parameter: int) -> Codec:
    codec = CODECS_BY_ID.get(codec_id)
    if codec is None and codec_id != STEP_CODEC_ID:
        raise refusal(f"codec id {codec_id} is unknown")
    name, version = ("step<S>", STEP_CODEC_VERSION) if codec is None else (codec.name, codec.version)
    if codec_version != version:
        raise refusal(f"version {codec_version} of codec {name} is unknown, only {version} is")
    if codec is None:
        if not STEP_HUNDREDTHS_MIN <= parameter <= STEP_HUNDREDTHS_MAX:
            raise refusal(
                f"its codec parameter {parameter} is outside {STEP_HUNDREDTHS_MIN}..{STEP_HUNDREDTHS_MAX}, "
                "which is 100 S of the codecs step<S>"
            )
        return step_codec(parameter)
    if parameter:
        raise refusal(f"codec {codec.name} takes no parameter, {parameter} was given")
    return codec


def _check_frame(frame: memoryview, raw_bytes: int) -> None:
    if frame[: len(_ZSTD_MAGIC)].tobytes() != _ZSTD_MAGIC:
        raise refusal("no zstd frame follows its header")
    try:
        parameters = zstandard.get_frame_parameters(frame)
    except zstandard.ZstdError as error:
        raise refusal(f"the header of its frame is broken ({error})") from error
    if parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise refusal("its frame does not state its content size")
    if parameters.content_size != raw_bytes:
        raise refusal(f"its frame states {parameters.content_size} bytes, its header {raw_bytes}")
    if not parameters.has_checksum:
        raise refusal("its frame has no checksum")
    if parameters.dict_id:
        raise refusal("its frame needs a dictionary")
    if parameters.window_size > WINDOW_BYTES_MAX:
        raise refusal(f"its frame asks for a window of {parameters.window_size} bytes, {WINDOW_BYTES_MAX} is the limit")


def _bound(raw_bytes: int) -> int:
    small = 128 << 10
    margin = (small - raw_bytes) >> 11 if raw_bytes < small else 0
    return HEADER_BYTES + raw_bytes + (raw_bytes >> 8) + margin
