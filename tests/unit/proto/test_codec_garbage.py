"""Whatever a stranger sends instead of a payload: refused with PayloadError, by both implementations."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from isles.proto import codec
from isles.proto.codec import torch_codec
from isles.proto.codec.frame import HEADER_BYTES
from isles.proto.errors import PayloadError

NUM_VALUES = 300
VALUES = (np.random.default_rng(7).standard_normal(NUM_VALUES) * 1e-3).astype(np.float32)
PARAMETERS = {"step1": 100, "step1.5": 150, "step2.5": 250}
PAYLOADS = {name: codec.encode(name, VALUES) for name in (*codec.CODEC_NAMES, *PARAMETERS)}
IDS = {"fp32": 1, "bf16": 2, "int8": 3, "int4": 4} | dict.fromkeys(PARAMETERS, 5)
FIELDS = struct.Struct("<4sBBBBHhQQ")

codec_names = st.sampled_from(sorted(PAYLOADS))


def decode_both(payload: bytes, *, num_values: int = NUM_VALUES) -> np.ndarray[Any, Any] | None:
    """What both make of it, or None if both refuse it; any other outcome fails."""
    results: list[np.ndarray[Any, Any] | None] = []
    decoders: list[Callable[[], Any]] = [
        lambda: codec.decode(payload, num_values=num_values),
        lambda: torch_codec.decode(payload, num_values=num_values).numpy(),
    ]
    for decoder in decoders:
        try:
            results.append(decoder())
        except PayloadError:
            results.append(None)
    first, second = results
    assert (first is None) == (second is None)
    assert first is None or second is None or first.tobytes() == second.tobytes()
    return first


def forged(name: str = "int4", *, raw: bytes | None = None, frame: bytes | None = None, **fields: Any) -> bytes:
    """A payload with a correct header checksum over whatever fields are asked for."""
    header = codec.inspect(PAYLOADS[name])
    values = {
        "magic": b"ISLD",
        "format_version": 1,
        "codec_id": IDS[name],
        "codec_version": 1,
        "reserved": 0,
        "parameter": PARAMETERS.get(name, 0),
        "exponent": header.scale_exponent,
        "num_values": NUM_VALUES,
        "raw_bytes": header.raw_bytes,
    }
    packed = FIELDS.pack(*(values | fields).values())
    if frame is None:
        frame = compress(raw) if raw is not None else PAYLOADS[name][HEADER_BYTES:]
    return packed + struct.pack("<I", zlib.crc32(packed)) + frame


def compress(raw: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **options}).compress(raw)


def raw_of(name: str) -> bytearray:
    return bytearray(zstandard.ZstdDecompressor().decompress(PAYLOADS[name][HEADER_BYTES:]))


def assert_refused(payload: bytes, match: str, **decode_options: Any) -> None:
    with pytest.raises(PayloadError, match=match):
        codec.decode(payload, num_values=NUM_VALUES, **decode_options)
    with pytest.raises(PayloadError, match=match):
        torch_codec.decode(payload, num_values=NUM_VALUES, **decode_options)


def test_a_forged_payload_without_a_lie_is_accepted() -> None:
    for name, payload in PAYLOADS.items():
        assert forged(name) == payload
        assert decode_both(forged(name, raw=bytes(raw_of(name)))) is not None


@given(payload=st.binary(max_size=200))
def test_random_bytes_are_refused(payload: bytes) -> None:
    assert decode_both(payload) is None
    assert decode_both(b"ISLD" + payload) is None


@given(name=codec_names, frame=st.binary(max_size=200))
def test_random_bytes_behind_a_correct_header_are_refused(name: str, frame: bytes) -> None:
    assert decode_both(forged(name, frame=frame)) is None
    assert decode_both(forged(name, frame=b"\x28\xb5\x2f\xfd" + frame)) is None


@given(name=codec_names, data=st.data())
def test_random_raw_bytes_in_a_correct_frame_give_finite_values_or_are_refused(name: str, data: st.DataObject) -> None:
    size = codec.inspect(PAYLOADS[name]).raw_bytes
    decoded = decode_both(forged(name, raw=data.draw(st.binary(min_size=size, max_size=size))))
    assert decoded is None or np.isfinite(decoded).all()


@given(name=codec_names, data=st.data())
def test_a_flipped_bit_never_changes_a_value_unnoticed(name: str, data: st.DataObject) -> None:
    payload = bytearray(PAYLOADS[name])
    position = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[position // 8] ^= 1 << position % 8
    decoded = decode_both(bytes(payload))
    # A flip in the frame's window size, for one, has no effect on the content.
    assert decoded is None or decoded.tobytes() == codec.decode(PAYLOADS[name], num_values=NUM_VALUES).tobytes()


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_flipped_bit_of_the_header_is_noticed(name: str) -> None:
    for position in range(HEADER_BYTES * 8):
        payload = bytearray(PAYLOADS[name])
        payload[position // 8] ^= 1 << position % 8
        with pytest.raises(PayloadError):
            codec.inspect(bytes(payload))


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_cut_anywhere_or_followed_by_anything_is_refused(name: str) -> None:
    payload = PAYLOADS[name]
    for end in range(len(payload)):
        assert decode_both(payload[:end]) is None
    for tail in (b"\0", payload[HEADER_BYTES:], compress(b""), b"\x50\x2a\x4d\x18\x00\x00\x00\x00"):
        assert decode_both(payload + tail) is None


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"magic": b"ISLE"}, "begin"),
        ({"format_version": 2}, "format version"),
        ({"codec_id": 0}, "codec id 0"),
        ({"codec_id": 255}, "codec id 255"),
        ({"codec_id": 3}, "raw bytes"),
        ({"codec_version": 2}, "version 2 of codec int4"),
        ({"reserved": 1}, "parameter"),
        ({"parameter": 1}, "parameter"),
        ({"exponent": 113}, "exponent"),
        ({"exponent": -113}, "exponent"),
        ({"exponent": 112}, "single precision"),
        ({"codec_id": 5, "parameter": 49}, "parameter 49 is outside 50..250"),
        ({"codec_id": 5, "parameter": 251}, "parameter 251 is outside"),
        ({"codec_id": 5, "parameter": 0}, "parameter 0 is outside"),
        ({"codec_id": 5, "parameter": 150, "codec_version": 2}, "version 2 of codec step<S>"),
        ({"codec_id": 5, "parameter": 150, "reserved": 1}, "reserved"),
        ({"num_values": 0}, "no values"),
        ({"num_values": NUM_VALUES + 1}, "were expected"),
        ({"num_values": 2**64 - 1}, "raw bytes"),
        ({"raw_bytes": 2**64 - 1}, "raw bytes"),
        ({"num_values": 2**50, "raw_bytes": 2**43 * 66}, "its frame states"),
    ],
)
def test_a_lying_header_is_refused_by_the_name_of_the_lie(fields: dict[str, Any], match: str) -> None:
    assert_refused(forged("int4", **fields), match)


def test_the_number_of_values_must_be_the_expected_one() -> None:
    with pytest.raises(PayloadError, match="299 were expected"):
        codec.decode(PAYLOADS["fp32"], num_values=299)


def test_a_codec_without_scales_takes_no_exponent() -> None:
    assert_refused(forged("fp32", exponent=1), "exponent")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"write_content_size": False}, "content size"),
        ({"write_checksum": False}, "no checksum"),
        ({"format": zstandard.FORMAT_ZSTD1_MAGICLESS}, "no zstd frame"),
    ],
)
def test_a_frame_without_size_checksum_or_magic_is_refused(options: dict[str, Any], match: str) -> None:
    if "format" in options:
        options = {
            "compression_params": zstandard.ZstdCompressionParameters(format=options["format"]),
        }
        frame = zstandard.ZstdCompressor(**options).compress(bytes(raw_of("int4")))
    else:
        frame = compress(bytes(raw_of("int4")), **options)
    assert_refused(forged("int4", frame=frame), match)


def test_a_frame_with_another_size_than_the_codec_needs_is_refused() -> None:
    assert_refused(forged("int4", raw=bytes(raw_of("int4")) + b"\0"), "its frame states")
    assert_refused(forged("int4", raw=b""), "its frame states")


def test_a_bomb_is_refused_before_anything_is_allocated_for_it() -> None:
    assert_refused(forged("int4", raw=bytes(1 << 20)), "its frame states")


def test_a_frame_whose_stated_size_is_a_lie_is_refused() -> None:
    frame = bytearray(compress(bytes(1 << 20)))
    stated = struct.unpack_from("<I", frame, 6 if frame[4] & 0x20 == 0 else 5)[0]
    assert stated == 1 << 20
    struct.pack_into("<I", frame, 6 if frame[4] & 0x20 == 0 else 5, codec.inspect(PAYLOADS["int4"]).raw_bytes)
    assert_refused(forged("int4", frame=bytes(frame)), "does not decompress")


def test_a_window_beyond_the_limit_is_refused() -> None:
    raw = raw_of("fp32")
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_checksum=True, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    # Flushed block by block, so that the frame keeps its window instead of being a single segment.
    frame = bytearray(compressor.compress(bytes(raw)))
    assert frame[4] & 0x20
    content_size = bytes(frame[5:7])
    descriptor = (frame[4] & ~0x20) & 0xFF
    window = bytes([(28 - 10) << 3])
    assert_refused(
        forged("fp32", frame=bytes(frame[:4]) + bytes([descriptor]) + window + content_size + bytes(frame[7:])),
        "window",
    )


def test_a_payload_padded_with_empty_blocks_is_refused() -> None:
    frame = PAYLOADS["int4"][HEADER_BYTES:]
    assert_refused(forged("int4", frame=frame + bytes(10_000)), "more than")


@pytest.mark.parametrize(
    ("bits", "match"),
    [(0x7C00, "not finite"), (0x7E00, "not finite"), (0xFC00, "not finite"), (0x8000, "negative"), (0xC000, "negative"),
     (0x0001, "subnormal"), (0x03FF, "subnormal")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_scale_that_no_encoder_writes_is_refused(name: str, bits: int, match: str) -> None:
    raw = raw_of(name)
    struct.pack_into("<H", raw, 2, bits)
    assert_refused(forged(name, raw=bytes(raw)), f"block 1 .*{match}")


@pytest.mark.parametrize(("name", "code"), [("int8", 0xFF), ("int4", 0xF0), ("int4", 0x0F)])
def test_a_code_that_stands_for_no_level_is_refused(name: str, code: int) -> None:
    raw = raw_of(name)
    raw[-100] = code
    assert_refused(forged(name, raw=bytes(raw)), "no level")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_unless_asked_for(name: str, poison: float) -> None:
    planes = 4 if name == "fp32" else 2
    octets = np.frombuffer(np.array([poison], np.float32).tobytes(), np.uint8)[4 - planes :]
    raw = np.frombuffer(bytes(raw_of(name)), np.uint8).reshape(planes, NUM_VALUES).copy()
    raw[:, 123] = octets
    payload = forged(name, raw=raw.tobytes())
    assert_refused(payload, "NaN or infinity")
    for decoded in (
        codec.decode(payload, num_values=NUM_VALUES, allow_nonfinite=True),
        torch_codec.decode(payload, num_values=NUM_VALUES, allow_nonfinite=True).numpy(),
    ):
        assert np.flatnonzero(~np.isfinite(decoded)).tolist() == [123]


def test_any_buffer_of_the_same_bytes_decodes_alike() -> None:
    payload = PAYLOADS["int8"]
    expected = codec.decode(payload, num_values=NUM_VALUES).tobytes()
    doubled = bytes(byte for byte in payload for _ in range(2))
    for buffer in (bytearray(payload), memoryview(payload), memoryview(doubled)[::2]):
        assert codec.decode(buffer, num_values=NUM_VALUES).tobytes() == expected
        assert torch_codec.decode(buffer, num_values=NUM_VALUES).numpy().tobytes() == expected


STEP_BLOCKS = 1
"""NUM_VALUES are fewer than a block's."""


@pytest.mark.parametrize(("name", "byte"), [("step1", 225), ("step1", 255), ("step1.5", 125), ("step2.5", 253)])
def test_a_byte_that_stands_for_no_levels_is_refused(name: str, byte: int) -> None:
    raw = raw_of(name)
    raw[-5] = byte
    assert_refused(forged(name, raw=bytes(raw)), f"byte {byte} .*stands for no")


@pytest.mark.parametrize(
    ("bits", "match"),
    [(0x7C00, "not finite"), (0xFC00, "not finite"), (0x8000, "negative"), (0xC000, "negative"), (0x0040, "subnormal"),
     (0x4001, "more precise"), (0x4020, "more precise"), (0x0001, "more precise")],
)  # fmt: skip
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_scale_that_no_step_encoder_writes_is_refused(name: str, bits: int, match: str) -> None:
    raw = raw_of(name)
    raw[0], raw[STEP_BLOCKS] = bits & 0xFF, bits >> 8
    assert_refused(forged(name, raw=bytes(raw)), f"block 0 .*{match}")


def test_a_scale_beyond_single_precision_is_refused_in_a_step_codec() -> None:
    assert_refused(forged("step1", exponent=112), "single precision")


@pytest.mark.parametrize(
    ("runs", "match"),
    [
        (bytes([4 * 62 + 3] * 5), "go on to value 314, beyond its 300"),
        (bytes([3, 252]), "last run has no level"),
        (bytes([252] * 4 + [4 * 48]), "go on to value 300"),
    ],
)
def test_runs_that_no_encoder_writes_are_refused(runs: bytes, match: str) -> None:
    raw = bytes(raw_of("step2.5")[: 2 * STEP_BLOCKS]) + runs
    assert_refused(forged("step2.5", raw=raw, raw_bytes=len(raw)), match)


def test_runs_may_end_with_the_last_value_or_long_before() -> None:
    scales = bytes(raw_of("step2.5")[: 2 * STEP_BLOCKS])
    for runs, places in ((bytes([252] * 4 + [4 * 47]), [299]), (bytes([2]), [0]), (b"", [])):
        decoded = decode_both(forged("step2.5", raw=scales + runs, raw_bytes=len(scales + runs)))
        assert decoded is not None
        assert np.flatnonzero(decoded).tolist() == places


def test_more_runs_than_values_are_refused_before_they_are_unpacked() -> None:
    raw = bytes(raw_of("step2.5")[: 2 * STEP_BLOCKS]) + bytes(NUM_VALUES + 1)
    assert_refused(forged("step2.5", raw=raw, raw_bytes=len(raw)), "raw bytes")
