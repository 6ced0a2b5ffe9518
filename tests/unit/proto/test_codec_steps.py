"""The step codecs: what their levels and scales are, and what comes of values that no Gaussian gives."""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isles.proto import codec
from isles.proto.codec import steps, torch_steps
from isles.proto.codec.frame import unpack
from isles.proto.codec.runs import RunWriter, read_runs
from isles.proto.codec.scales import choose_step_scales
from isles.proto.codec.table import STEP_BLOCK_VALUES, StepCodec, step_codec

Vector = npt.NDArray[np.float32]

HUNDREDTHS = (50, 75, 100, 119, 120, 150, 159, 160, 200, 225, 250)
RATE_OVER_ENTROPY_MAX = 1.04
SIZES = [1, 2, 959, 960, 961, 64 * STEP_BLOCK_VALUES, 70_000]


def gaussian(size: int, seed: int = 0, scale: float = 1e-3) -> Vector:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def decoded(name: str, values: Vector) -> codec.Decoded:
    return codec.decode_with_scales(codec.encode(name, values), num_values=values.size)


def levels_of(one: codec.Decoded) -> npt.NDArray[np.int64]:
    assert one.scales is not None
    units = np.where(one.scales > 0, one.scales, np.inf)
    return np.rint(one.values / np.repeat(units, STEP_BLOCK_VALUES)[: one.values.size]).astype(np.int64)


def entropy_bits(levels: npt.NDArray[np.int64]) -> float:
    shares = np.unique(levels, return_counts=True)[1] / levels.size
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
def test_a_million_gaussian_values_take_hardly_more_than_the_entropy_of_their_levels(hundredths: int) -> None:
    values = gaussian(1 << 20)
    payload = codec.encode(step_codec(hundredths).name, values)
    levels = levels_of(codec.decode_with_scales(payload, num_values=values.size))
    assert len(payload) * 8 / values.size <= RATE_OVER_ENTROPY_MAX * entropy_bits(levels)


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
def test_a_step_is_so_many_standard_deviations_of_its_block(hundredths: int) -> None:
    values = gaussian(8 * STEP_BLOCK_VALUES) * np.repeat(np.logspace(0, 7, 8, dtype=np.float32), STEP_BLOCK_VALUES)
    scales = decoded(step_codec(hundredths).name, values).scales
    deviations = np.sqrt(np.square(values.reshape(8, -1), dtype=np.float64).mean(axis=1))
    assert scales == pytest.approx(deviations * hundredths / 100, rel=1 / 31)


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
def test_a_value_gets_its_level_by_the_rule(hundredths: int) -> None:
    one = step_codec(hundredths)
    values = gaussian(50_000)
    found = decoded(one.name, values)
    assert found.scales is not None
    ratios = values / np.repeat(found.scales, STEP_BLOCK_VALUES)[: values.size].astype(np.float64)
    wanted = np.sign(ratios) * np.minimum(np.trunc(np.abs(ratios) + one.lift), one.level_max)
    is_near = np.abs(np.abs(ratios) + one.lift - np.rint(np.abs(ratios) + one.lift)) < 1e-5
    assert (levels_of(found) == wanted)[~is_near].all()
    assert is_near.mean() < 0.001


def test_the_bin_of_zero_grows_with_the_step_and_halves_always_go_toward_zero() -> None:
    lifts = [step_codec(hundredths).lift for hundredths in range(50, 251)]
    assert lifts == sorted(lifts, reverse=True)
    assert lifts[0] == pytest.approx(0.45)
    assert lifts[-1] == pytest.approx(0.25)


@given(seed=st.integers(0, 2**32), hundredths=st.integers(50, 250), size=st.sampled_from(SIZES))
def test_both_implementations_give_the_same_codes_for_the_same_scales_and_the_same_values_for_them(
    seed: int, hundredths: int, size: int
) -> None:
    one = step_codec(hundredths)
    random = np.random.default_rng(seed)
    values = gaussian(size, seed) * (random.random(size) < random.random()).astype(np.float32)
    scales = choose_step_scales(one, *steps.measure(values), size)
    pieces = steps.quantise_vector(one, values, scales)
    by_torch = torch_steps.quantise_vector(one, torch.from_numpy(values), scales)
    assert b"".join(by_torch) == b"".join(pieces)
    payload = codec.encode(one.name, values)
    header, raw = unpack(payload, num_values=size)
    out = torch.full((size,), 7.0)
    torch_steps.decode_on_device(one, header, raw, out=out)
    assert out.numpy().tobytes() == codec.decode(payload, num_values=size).tobytes()


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
def test_both_implementations_write_the_same_payload_where_no_scale_is_on_a_border(hundredths: int) -> None:
    values = gaussian(50_001, 3) * np.exp2(np.arange(50_001) // 700).astype(np.float32)
    values[40_000:] = 0
    name = step_codec(hundredths).name
    assert torch_steps.encode_on_device(step_codec(hundredths), torch.from_numpy(values)) == (
        codec.encode_with_stats(name, values)
    )


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
@pytest.mark.parametrize("size", [1, 2, 100, 960, 3000])
def test_values_that_are_all_alike_are_not_kept_back(hundredths: int, size: int) -> None:
    values = np.where(np.arange(size) % 3 == 0, -0.5, 0.5).astype(np.float32)
    found = decoded(step_codec(hundredths).name, values).values
    assert np.abs(found - values).max() <= 0.5 * 0.5
    assert (np.sign(found) == np.sign(values)).all()


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
@pytest.mark.parametrize("height", [30.0, 1e3, 1e6])
def test_an_outlier_is_cut_to_half_at_most_and_the_rest_follows_when_it_is_sent(hundredths: int, height: float) -> None:
    name = step_codec(hundredths).name
    account = gaussian(2 * STEP_BLOCK_VALUES, scale=1.0)
    account[100] = height
    before = np.abs(account)
    assert decoded(name, account).values[100] >= height / 2.1
    for _ in range(40):
        account = account - decoded(name, account).values
    assert np.abs(account).max() < 0.05 * before.max()
    assert np.sqrt(np.mean(np.square(account))) < 0.5


@pytest.mark.parametrize("hundredths", HUNDREDTHS)
def test_an_account_that_gets_no_new_work_is_sent_to_its_end(hundredths: int) -> None:
    name = step_codec(hundredths).name
    account = gaussian(1500, scale=1.0)
    first = float(np.linalg.norm(account))
    for _ in range(60):
        account = account - decoded(name, account).values
    assert float(np.linalg.norm(account)) < 1e-3 * first


@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-20, 1e-9, 1.0, 1e9, 1e25, 1e36])
@pytest.mark.parametrize("hundredths", [50, 150, 250])
def test_precision_does_not_depend_on_the_size_of_the_delta(hundredths: int, magnitude: float) -> None:
    unit = gaussian(3000, scale=1.0)
    values = (unit * magnitude).astype(np.float32)
    found = decoded(step_codec(hundredths).name, values).values.astype(np.float64) / magnitude
    expected = decoded(step_codec(hundredths).name, unit).values
    assert math.sqrt(np.mean((found - unit) ** 2)) == pytest.approx(
        math.sqrt(np.mean((expected - unit) ** 2)), rel=0.05
    )


@pytest.mark.parametrize("hundredths", [100, 150, 250])
def test_a_block_too_small_beside_another_is_sent_as_zeros(hundredths: int) -> None:
    values = gaussian(4 * STEP_BLOCK_VALUES, scale=1.0)
    values[STEP_BLOCK_VALUES : 2 * STEP_BLOCK_VALUES] *= np.float32(2.0**-40)
    found = decoded(step_codec(hundredths).name, values)
    assert found.scales is not None
    assert (found.scales > 0).tolist() == [True, False, True, True]
    assert not found.values[STEP_BLOCK_VALUES : 2 * STEP_BLOCK_VALUES].any()
    assert torch_steps.encode_on_device(step_codec(hundredths), torch.from_numpy(values)).payload == (
        codec.encode(step_codec(hundredths).name, values)
    )


def test_the_padding_of_the_last_block_does_not_make_its_step_smaller() -> None:
    values = gaussian(STEP_BLOCK_VALUES + 100, scale=1.0)
    scales = decoded("step1.5", values).scales
    assert scales is not None
    assert scales[1] == pytest.approx(1.5 * np.sqrt(np.mean(np.square(values[STEP_BLOCK_VALUES:]))), rel=1 / 31)


@given(
    chunks=st.lists(
        st.lists(st.sampled_from([0, 0, 0, 0, 0, 0, -2, -1, 1, 2]), min_size=1, max_size=300).map(
            lambda levels: np.array(levels, np.int8)
        ),
        min_size=1,
        max_size=5,
    ),
    zeros=st.integers(0, 400),
)
def test_runs_give_back_the_levels_that_they_were_made_of(chunks: list[npt.NDArray[np.int8]], zeros: int) -> None:
    chunks = [chunks[0], np.zeros(zeros + 1, np.int8), *chunks[1:]]
    writer, by_torch = RunWriter(), torch_steps.RunWriter()
    runs = np.concatenate([writer.write((chunk + 2).astype(np.uint8)) for chunk in chunks])
    also = np.concatenate([by_torch.write(torch.from_numpy(chunk)).numpy() for chunk in chunks])
    levels = np.concatenate(chunks)
    out = np.full(levels.size, 7, np.float32)
    read_runs(runs, np.ones(StepCodec(200).num_blocks(levels.size), np.float32), out=out)
    assert out.tolist() == levels.tolist()
    assert also.tobytes() == runs.tobytes()


def test_the_parameter_of_a_payload_is_a_hundred_times_the_step() -> None:
    payload = codec.encode("step1.25", gaussian(10))
    assert struct.unpack_from("<H", payload, 8) == (125,)
    assert codec.inspect(payload).codec == "step1.25"
