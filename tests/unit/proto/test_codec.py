"""What a value becomes on its way through a codec, whichever implementation does it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isles.proto import codec
from isles.proto.codec import torch_codec
from isles.proto.codec.reference import CHUNK_VALUES
from isles.proto.codec.scales import STEP_MAGNITUDE_MAX
from isles.proto.codec.table import STEP_BLOCK_VALUES
from isles.proto.errors import ConfigError, NonFiniteError, RangeError

Vector = npt.NDArray[np.float32]
LEVELS = {"int8": 127, "int4": 7}
EXACT = ["fp32"]
STEPS = ["step0.5", "step1", "step1.19", "step1.2", "step1.59", "step1.6", "step2.5"]
"""Each layout of the family, at its ends."""
LOSSY = ["bf16", "int8", "int4", *STEPS]
NAMES = [*codec.CODEC_NAMES, *STEPS]
EDGE_SIZES = [1, 2, 127, 128, 129, CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1]
EDGE_SIZES += [n + border for n in (STEP_BLOCK_VALUES, 64 * STEP_BLOCK_VALUES) for border in (-1, 0, 1)]

codec_names = st.sampled_from(NAMES)
block_names = st.sampled_from(sorted(LEVELS))
largest = STEP_MAGNITUDE_MAX
vectors = hnp.arrays(
    np.float32, st.integers(1, 400), elements=st.floats(-largest, largest, width=32), fill=st.just(np.float32(0.0))
)


@st.composite
def delta_like(draw: st.DrawFn) -> Vector:
    """Gaussian blocks whose scales spread over many binades, as those of a real fragment do."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 1000))
    sigma = np.exp2(rng.uniform(-draw(st.integers(0, 40)), 0, size) + draw(st.integers(-100, 100)))
    return (rng.standard_normal(size) * sigma).astype(np.float32)


def reference_round_trip(name: str, values: Vector) -> npt.NDArray[np.float64]:
    """The absolute-maximum rule in float64 with unrounded scales."""
    result = np.zeros(values.size)
    for start in range(0, values.size, codec.BLOCK_VALUES):
        block = values[start : start + codec.BLOCK_VALUES].astype(np.float64)
        scale = np.abs(block).max() / LEVELS[name]
        if scale:
            result[start : start + block.size] = np.sign(block) * np.ceil(np.abs(block / scale) - 0.5) * scale
    return result


def blocks_of(values: Vector) -> list[Vector]:
    return [values[start : start + codec.BLOCK_VALUES] for start in range(0, values.size, codec.BLOCK_VALUES)]


def bits(values: Vector) -> bytes:
    return values.tobytes()


@given(values=st.one_of(vectors, delta_like()))
def test_fp32_returns_every_value_bit_for_bit(values: Vector) -> None:
    assert bits(codec.decode(codec.encode("fp32", values), num_values=values.size)) == bits(values)


@given(values=st.one_of(vectors, delta_like()))
def test_bf16_returns_the_nearest_of_its_values(values: Vector) -> None:
    decoded = codec.decode(codec.encode("bf16", values), num_values=values.size)
    spacing = np.exp2(np.floor(np.log2(np.maximum(np.abs(values.astype(np.float64)), 2.0**-126))) - 7)
    assert (np.abs(decoded.astype(np.float64) - values) <= spacing / 2).all()


@given(name=block_names, values=st.one_of(vectors, delta_like()))
def test_a_block_codec_errs_by_half_a_quantum_or_sends_a_tiny_block_as_zeros(name: str, values: Vector) -> None:
    decoded = codec.decode(codec.encode(name, values), num_values=values.size)
    peak = float(np.abs(values).max())
    for before, after in zip(blocks_of(values), blocks_of(decoded), strict=True):
        magnitude = float(np.abs(before).max())
        error = np.abs(after.astype(np.float64) - before).max()
        if after.any():
            # A scale rounded to a half is off by a factor of at most 1 + 2^-11, a single division by 1 + 2^-24.
            assert error <= magnitude / LEVELS[name] / 2 * (1 + 2**-10)
        else:
            assert magnitude <= max(peak * 2.0**-28, 2.0**-125 * LEVELS[name])


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_a_block_codec_agrees_with_the_float64_rule(name: str) -> None:
    values = (np.random.default_rng(3).standard_normal(5000) * 1e-3).astype(np.float32)
    decoded = codec.decode(codec.encode(name, values), num_values=values.size)
    expected = reference_round_trip(name, values)
    quantum = np.abs(values).max() / LEVELS[name]
    # Rounding the scale moves a level's value by 2^-11 of it, and a value near a half by a whole level: rarely.
    moved = np.abs(decoded - expected) > np.abs(expected) * 2.0**-10
    assert moved.mean() < 0.03
    assert np.abs(decoded - expected).max() <= quantum * 1.1


@given(name=codec_names, values=st.one_of(vectors, delta_like()))
def test_both_implementations_write_the_same_bytes_and_read_the_same_bits(name: str, values: Vector) -> None:
    payload = codec.encode_with_stats(name, values)
    assert torch_codec.encode_with_stats(name, torch.from_numpy(values)) == payload
    decoded = codec.decode(payload.payload, num_values=values.size)
    assert bits(torch_codec.decode(payload.payload, num_values=values.size).numpy()) == bits(decoded)
    assert payload.is_zero == (not decoded.any())


@pytest.mark.parametrize("size", EDGE_SIZES)
@pytest.mark.parametrize("name", codec.CODEC_NAMES)
def test_every_value_is_covered_at_block_and_chunk_borders(name: str, size: int) -> None:
    values = np.arange(1, size + 1, dtype=np.float32) % 97 + 1
    payload = codec.encode(name, values)
    assert torch_codec.encode(name, torch.from_numpy(values)) == payload
    decoded = codec.decode(payload, num_values=size)
    assert (np.abs(decoded - values) <= 97 / 14 * 1.001).all()
    assert bits(torch_codec.decode(payload, num_values=size).numpy()) == bits(decoded)


@given(name=st.sampled_from(codec.CODEC_NAMES), values=st.one_of(vectors, delta_like()))
def test_encoding_what_was_decoded_changes_nothing(name: str, values: Vector) -> None:
    payload = codec.encode(name, values)
    decoded = codec.decode(payload, num_values=values.size)
    again = codec.decode(codec.encode(name, decoded), num_values=values.size)
    assert np.array_equal(again, decoded)


@given(name=codec_names, values=vectors)
def test_equal_values_give_equal_bytes_within_the_bound(name: str, values: Vector) -> None:
    payload = codec.encode(name, values)
    assert codec.encode(name, values.copy()) == payload
    assert len(payload) <= codec.bound_bytes(name, values.size)


@pytest.mark.parametrize("name", NAMES)
def test_incompressible_values_stay_within_the_bound(name: str) -> None:
    noise = np.random.default_rng(5).integers(0, 2**32, 300_000, dtype=np.uint32)
    values = (noise & 0xBFFFFFFF).astype(np.uint32).view(np.float32)
    values = np.nan_to_num(values, nan=1.0, posinf=1.0, neginf=-1.0)
    assert len(codec.encode(name, values)) <= codec.bound_bytes(name, values.size)


@pytest.mark.parametrize("name", codec.CODEC_NAMES)
def test_a_payload_tells_what_it_is(name: str) -> None:
    payload = codec.encode(name, np.ones(1000, np.float32))
    header = codec.inspect(payload)
    assert (header.codec, header.codec_version, header.num_values) == (name, 1, 1000)
    assert header.encoded_bytes == len(payload)
    assert header.raw_bytes == {"fp32": 4000, "bf16": 2000, "int8": 8 * 130, "int4": 8 * 66}[name]


@pytest.mark.parametrize(("name", "divisor"), [("int8", 127), ("int4", 7)])
def test_exact_halves_go_toward_zero_in_block_codecs(name: str, divisor: int) -> None:
    values = np.array(
        [divisor, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, np.nextafter(np.float32(2.5), np.float32(3))], np.float32
    )
    decoded = codec.decode(codec.encode(name, values), num_values=values.size)
    assert decoded.tolist() == [divisor, 0, 0, 1, -1, 2, -2, 3]


def test_exact_halves_go_toward_zero_in_bf16() -> None:
    half = 2.0**-8
    values = np.array([1 + half, -1 - half, 1 + 3 * half, 1 + half + 2.0**-20], np.float32)
    decoded = codec.decode(codec.encode("bf16", values), num_values=values.size)
    assert decoded.tolist() == [1.0, -1.0, 1 + 2 * half, 1 + 2 * half]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1e-6, 1.0, 1e6, 1e30])
@pytest.mark.parametrize("name", sorted(LEVELS))
def test_precision_does_not_depend_on_the_size_of_the_delta(name: str, magnitude: float) -> None:
    values = (np.random.default_rng(1).standard_normal(256) * magnitude).astype(np.float32)
    decoded = codec.decode(codec.encode(name, values), num_values=values.size)
    error = np.sqrt(np.mean((decoded.astype(np.float64) - values) ** 2)) / magnitude
    assert error < {"int8": 0.008, "int4": 0.14}[name]


def test_a_block_of_zeros_beside_others_stays_zero() -> None:
    values = np.zeros(3 * codec.BLOCK_VALUES, np.float32)
    values[codec.BLOCK_VALUES : 2 * codec.BLOCK_VALUES] = 7.0
    encoded = codec.encode_with_stats("int4", values)
    assert not encoded.is_zero
    assert np.array_equal(codec.decode(encoded.payload, num_values=values.size), values)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_of_either_sign_are_known_to_be_zero(name: str) -> None:
    values = np.array([0.0, -0.0] * 100, np.float32)
    assert codec.encode_with_stats(name, values).is_zero
    assert torch_codec.encode_with_stats(name, torch.from_numpy(values)).is_zero


def test_a_value_that_a_codec_rounds_to_zero_is_known_to_be_zero() -> None:
    tiny = np.array([2.0**-149], np.float32)
    assert {name: codec.encode_with_stats(name, tiny).is_zero for name in NAMES} == {
        "fp32": False,
        **dict.fromkeys(LOSSY, True),
    }


@pytest.fixture(params=["numpy", "torch"])
def encode(request: pytest.FixtureRequest) -> Callable[[str, Vector], bytes]:
    if request.param == "numpy":
        return codec.encode
    return lambda name, values: torch_codec.encode(name, torch.from_numpy(values))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_a_local_delta_that_is_not_finite_is_the_senders_fault(
    encode: Callable[[str, Vector], bytes], name: str, poison: float
) -> None:
    values = np.zeros(1000, np.float32)
    values[300] = poison
    with pytest.raises(NonFiniteError, match=r"local delta .* values (256 to 383|0 to)"):
        encode(name, values)


@pytest.mark.parametrize("name", LOSSY)
def test_a_value_beyond_a_lossy_codec_is_refused_with_the_remedy(
    encode: Callable[[str, Vector], bytes], name: str
) -> None:
    with pytest.raises(RangeError, match="use codec fp32"):
        encode(name, np.array([3e38], np.float32))


def test_fp32_takes_the_largest_single(encode: Callable[[str, Vector], bytes]) -> None:
    values = np.array([np.finfo(np.float32).max], np.float32)
    assert codec.decode(encode("fp32", values), num_values=1) == values


def test_an_unknown_codec_is_a_matter_of_configuration(encode: Callable[[str, Vector], bytes]) -> None:
    with pytest.raises(ConfigError, match="set one of fp32, bf16, int8, int4"):
        encode("int3", np.ones(1, np.float32))
    with pytest.raises(ConfigError):
        codec.bound_bytes("isles.proto.codec", 1)


def test_only_vectors_of_values_are_encoded(encode: Callable[[str, Vector], bytes]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        encode("fp32", np.empty(0, np.float32))
    with pytest.raises(ValueError, match="vector"):
        encode("fp32", np.ones((2, 2), np.float32))
    with pytest.raises(TypeError, match="float32"):
        encode("fp32", np.ones(2, np.float64))


def test_narrower_floats_and_strided_views_are_encoded_as_the_singles_they_are() -> None:
    values = torch.arange(40, dtype=torch.bfloat16, requires_grad=True)[::2]
    expected = codec.encode("int8", np.arange(0, 40, 2, dtype=np.float32))
    assert torch_codec.encode("int8", values) == expected
    assert codec.encode("int8", np.arange(40, dtype=np.float32)[::2]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_decoding_fills_the_array_it_is_given_whatever_it_held(name: str) -> None:
    values = np.linspace(-1, 1, 3000, dtype=np.float32)
    payload = codec.encode(name, values)
    out = np.full(3000, np.nan, np.float32)
    assert codec.decode(payload, num_values=3000, out=out) is out
    assert bits(out) == bits(codec.decode(payload, num_values=3000))


@pytest.mark.parametrize("out", [np.empty(4, "f4"), np.empty(3, "f8"), np.empty(6, "f4")[::2], np.empty((1, 3), "f4")])
def test_decoding_into_a_wrong_array_is_refused(out: Vector) -> None:
    with pytest.raises(ValueError, match="vector of 3 values"):
        codec.decode(codec.encode("fp32", np.ones(3, np.float32)), num_values=3, out=out)


def test_decoding_fills_the_tensor_it_is_given() -> None:
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    out = torch.full((300,), 7.0)
    assert torch_codec.decode(codec.encode("fp32", values), num_values=300, out=out) is out
    assert bits(out.numpy()) == bits(values)


@pytest.mark.parametrize(
    "out", [torch.empty(4), torch.empty(3, dtype=torch.float64), torch.empty(6)[::2], torch.empty(1, 3)]
)
def test_decoding_into_a_wrong_tensor_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="vector of 3 values"):
        torch_codec.decode(codec.encode("fp32", np.ones(3, np.float32)), num_values=3, out=out)


def test_a_decoded_array_belongs_to_its_caller() -> None:
    for name in codec.CODEC_NAMES:
        decoded = codec.decode(codec.encode(name, np.full(3, 127 * 7, np.float32)), num_values=3)
        decoded += 1
        assert decoded.tolist() == pytest.approx([890.0] * 3, rel=0.01)


@pytest.mark.parametrize(("name", "bits_max"), [("fp32", 27.6), ("bf16", 11.6), ("int8", 7.8), ("int4", 3.6)])
def test_gaussian_values_take_about_their_entropy(name: str, bits_max: float) -> None:
    values = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    assert len(codec.encode(name, values)) * 8 / values.size < bits_max


def test_the_package_does_without_torch() -> None:
    check = "import sys, isles.proto.codec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
