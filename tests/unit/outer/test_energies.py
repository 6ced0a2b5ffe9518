"""How much of a tensor there can have been before a step codec quantised it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.energies import energy_bounds
from isles.proto.codec import decode_with_scales, encode
from isles.proto.codec.table import STEP_BLOCK_VALUES, StepCodec, step_codec
from isles.proto.manifest import TensorSlice

Vector = npt.NDArray[np.float32]
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]

KINDS: dict[str, Draw] = {
    "gaussian": lambda random, size: random.standard_normal(size),
    "cauchy": lambda random, size: random.standard_cauchy(size).clip(-1e9, 1e9),
    "laplace": lambda random, size: random.laplace(size=size),
    "uniform": lambda random, size: random.uniform(-1, 1, size),
    "sparse": lambda random, size: random.standard_normal(size) * (random.random(size) < 0.02),
    "constant": lambda random, size: np.full(size, random.uniform(0.1, 3)),
    "signs": lambda random, size: random.choice((-1.0, 1.0), size),
    "zeros": lambda random, size: np.zeros(size),
    "one spike": lambda random, size: np.where(np.arange(size) == size // 2, random.uniform(1, 1e4), 0.0),
    "a spike in noise": lambda random, size: (
        random.standard_normal(size) + np.where(np.arange(size) == size // 2, random.uniform(1, 1e4), 0.0)
    ),
}


def slices_of(sizes: list[int]) -> tuple[TensorSlice, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(
        TensorSlice(f"t{place}", end - size, end, (size,))
        for place, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def bounds_of(vector: Vector, codec: StepCodec, slices: tuple[TensorSlice, ...]) -> list[tuple[float, float, float]]:
    """Of each tensor the smallest norm that it can have had, its norm, and the largest."""
    decoded = decode_with_scales(encode(codec.name, vector), num_values=vector.size)
    assert decoded.scales is not None
    lows, highs = energy_bounds(decoded.values, decoded.scales, codec, slices)
    norms = [math.sqrt(np.square(vector[one.start : one.stop], dtype=np.float64).sum()) for one in slices]
    return list(zip(np.sqrt(lows), norms, np.sqrt(highs), strict=True))


@given(data=st.data(), seed=st.integers(0, 2**32), hundredths=st.integers(50, 250))
def test_the_true_norm_of_every_tensor_lies_within_its_bounds(data: st.DataObject, seed: int, hundredths: int) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 39, 700, 960, 1000, 3000]), min_size=1, max_size=6))
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=len(sizes), max_size=len(sizes)))
    scales = [0.0, 2.0**-140, 1e-30, 1e-9, 1e-4, 1.0, 1e6, 1e25]
    random = np.random.default_rng(seed)
    parts = [
        KINDS[kind](random, size) * data.draw(st.sampled_from(scales)) for kind, size in zip(kinds, sizes, strict=True)
    ]
    vector = np.concatenate(parts).astype(np.float32)
    for low, norm, high in bounds_of(vector, step_codec(hundredths), slices_of(sizes)):
        assert low * (1 - 1e-6) <= norm <= high * (1 + 1e-6)


@pytest.mark.parametrize("hundredths", [50, 100, 119, 120, 150, 159, 160, 200, 250])
def test_the_norm_of_a_large_gaussian_tensor_cannot_be_overstated_by_more_than_a_scale_is_rounded(
    hundredths: int,
) -> None:
    vector = np.random.default_rng(1).standard_normal(50 * STEP_BLOCK_VALUES).astype(np.float32)
    ((low, norm, high),) = bounds_of(vector, step_codec(hundredths), slices_of([vector.size]))
    assert high < norm * 1.05
    assert low > norm * 0.6


def test_where_no_level_is_the_largest_the_norm_is_known() -> None:
    vector = np.random.default_rng(1).uniform(-1.5, 1.5, 50 * STEP_BLOCK_VALUES).astype(np.float32)
    ((low, norm, high),) = bounds_of(vector, step_codec(100), slices_of([vector.size]))
    assert norm * 0.95 < low <= norm <= high < norm * 1.05


@pytest.mark.parametrize("hundredths", [120, 200, 250])
def test_a_claim_to_have_been_flat_needs_levels_that_are(hundredths: int) -> None:
    """One value that stands out a little does not make believe that those sent as zeros were almost as large."""
    vector = np.random.default_rng(1).standard_normal(20 * STEP_BLOCK_VALUES).astype(np.float32)
    vector[::STEP_BLOCK_VALUES] = 2 * hundredths / 100
    ((_, norm, high),) = bounds_of(vector, step_codec(hundredths), slices_of([vector.size]))
    assert high < norm * 1.05


def test_a_small_tensor_beside_large_values_may_have_vanished_but_not_been_large() -> None:
    vector = np.full(2 * STEP_BLOCK_VALUES, 1.0, np.float32)
    vector[:10] = 1e-3
    small, large = bounds_of(vector, step_codec(150), slices_of([10, vector.size - 10]))
    assert small[0] == 0
    assert small[2] < math.sqrt(10)
    assert large[2] < large[1] * 1.5
