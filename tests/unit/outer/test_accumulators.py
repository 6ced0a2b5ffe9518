"""Merging: each rule against a reference in double precision, and what a sum of singles must not depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.accumulators import CHUNK_VALUES, DIRECTION_NORM_MIN, Peaks, l2_norm, start_merge
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.ids import ContributionId
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Ingredient, Recipe

Vector = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

MEAN = SyncSettings(merge_rule="mean")
RDA = SyncSettings(merge_rule="rda")
SLICES = (TensorSlice("a", 0, 6, (2, 3)), TensorSlice("b", 6, 7, ()), TensorSlice("c", 7, 20, (13,)))


def one_slice(num_values: int) -> tuple[TensorSlice, ...]:
    return (TensorSlice("only", 0, num_values, (num_values,)),)


def recipe_of(
    weights: Sequence[float],
    sync: SyncSettings = MEAN,
    *,
    norms: Sequence[Sequence[float]] | None = None,
    clips: Sequence[float] | None = None,
) -> Recipe:
    ingredients = tuple(
        Ingredient(
            id=ContributionId(f"l{index:04}", 0, "ab" * 8, 1),
            digest="0" * 64,
            base_version=0,
            tokens=1,
            steps=1,
            weight=weight,
            clip=clips[index] if clips else 1.0,
            norms=tuple(norms[index]) if norms else (),
        )
        for index, weight in enumerate(weights)
    )
    return Recipe(ingredients=ingredients, fraction=1.0, merge_rule=sync.merge_rule, settings_digest=sync.digest)


def merge(
    deltas: Sequence[Vector], recipe: Recipe, slices: Sequence[TensorSlice] | None = None, sync: SyncSettings = MEAN
) -> Vector:
    accumulator = start_merge(recipe, slices or one_slice(deltas[0].size), sync)
    for delta in deltas:
        accumulator.add(delta)
    return accumulator.result()


def random_vector(seed: int, num_values: int = 20, scale: float = 1.0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(num_values) * scale).astype(np.float32)


def norms_of(delta: Vector, slices: Sequence[TensorSlice] = SLICES) -> list[float]:
    return [float(np.linalg.norm(delta[one.start : one.stop].astype(np.float64))) for one in slices]


def rda_reference(deltas: Sequence[Vector], recipe: Recipe, slices: Sequence[TensorSlice]) -> tuple[Wide, Wide]:
    """Radial-directional averaging in double precision, tensor by tensor, and the tolerance of each value.

    The shorter the mean direction u, the more of what singles round away is in it.
    """
    weights = np.array([ingredient.weight for ingredient in recipe.ingredients])
    weights = weights if weights.sum() > 0 else np.ones(len(weights))
    merged, tolerance = np.zeros(slices[-1].stop), np.zeros(slices[-1].stop)
    for tensor, one in enumerate(slices):
        direction, radius = np.zeros(one.stop - one.start), 0.0
        for delta, ingredient, weight in zip(deltas, recipe.ingredients, weights, strict=True):
            part = delta[one.start : one.stop].astype(np.float64)
            radius += weight * ingredient.clip * ingredient.norms[tensor] / weights.sum()
            if part.any():
                direction += weight / weights.sum() * part / np.linalg.norm(part)
        length = float(np.linalg.norm(direction))
        if length > DIRECTION_NORM_MIN:
            merged[one.start : one.stop] = radius * direction / length
        tolerance[one.start : one.stop] = 3e-6 * radius / max(length, DIRECTION_NORM_MIN)
    return merged, tolerance


# ---------------------------------------------------------------------------------------------------------------- mean


def test_a_mean_covers_every_value_once_whatever_the_chunks() -> None:
    for num_values in (1, CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 3):
        ones = np.ones(num_values, np.float32)
        assert (merge([ones, ones], recipe_of([3.0, 1.0])) == 1.0).all()


def test_one_delta_alone_is_its_own_mean_to_the_bit() -> None:
    delta = random_vector(1)
    assert (merge([delta], recipe_of([1234.5])) == delta).all()


def test_deltas_that_weigh_nothing_are_merged_alike() -> None:
    deltas = [np.full(3, 1.0, np.float32), np.full(3, 3.0, np.float32)]
    assert merge(deltas, recipe_of([0.0, 0.0])).tolist() == [2.0, 2.0, 2.0]


def test_a_clip_factor_scales_its_delta() -> None:
    delta = np.full(3, 4.0, np.float32)
    assert merge([delta], recipe_of([1.0], clips=[0.5])).tolist() == [2.0, 2.0, 2.0]


@given(seed=st.integers(0, 2**32), weights=st.lists(st.floats(1e-3, 1e12), min_size=1, max_size=6))
def test_a_mean_is_what_the_reference_says(seed: int, weights: list[float]) -> None:
    deltas = [random_vector(seed + index) for index in range(len(weights))]
    wanted = sum(w * delta.astype(np.float64) for w, delta in zip(weights, deltas, strict=True)) / sum(weights)
    np.testing.assert_allclose(merge(deltas, recipe_of(weights), SLICES), wanted, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------- rda


@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.just(0.0) | st.floats(1e-3, 1e12), min_size=1, max_size=6),
    scale=st.sampled_from([1e-30, 1e-20, 1e-6, 1.0, 1e6, 1e30]),
)
def test_rda_is_what_the_reference_says(seed: int, weights: list[float], scale: float) -> None:
    random = np.random.default_rng(seed)
    deltas = [random_vector(seed + index, scale=scale) for index in range(len(weights))]
    norms = [np.array(norms_of(delta)) * random.uniform(0.8, 1.2, len(SLICES)) for delta in deltas]
    clips = random.uniform(0.1, 1.0, len(weights)).tolist()
    recipe = recipe_of(weights, RDA, norms=[one.tolist() for one in norms], clips=clips)
    merged = merge(deltas, recipe, SLICES, RDA)
    wanted, tolerance = rda_reference(deltas, recipe, SLICES)
    assert (np.abs(merged - wanted) <= tolerance).all()


def test_each_tensor_has_the_mean_of_the_carried_norms_and_not_of_the_decoded_ones() -> None:
    deltas = [random_vector(1), random_vector(2)]
    recipe = recipe_of([1.0, 3.0], RDA, norms=[(1.0, 2.0, 3.0), (5.0, 6.0, 7.0)])
    assert norms_of(merge(deltas, recipe, SLICES, RDA)) == pytest.approx([4.0, 5.0, 6.0], rel=1e-6)


def test_equal_deltas_merge_to_themselves_by_rda() -> None:
    delta = random_vector(3)
    merged = merge([delta] * 5, recipe_of([1.0, 2.0, 3.0, 4.0, 5.0], RDA, norms=[norms_of(delta)] * 5), SLICES, RDA)
    np.testing.assert_allclose(merged, delta, rtol=1e-6)


def test_directions_weigh_alike_however_long_their_deltas_are() -> None:
    deltas = [np.array([1000.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)]
    merged = merge(deltas, recipe_of([1.0, 1.0], RDA, norms=[(1000.0,), (1.0,)]), one_slice(2), RDA)
    np.testing.assert_allclose(merged, np.full(2, 500.5 / np.sqrt(2)), rtol=1e-6)


def test_a_tensor_that_nobody_has_changed_stays() -> None:
    deltas = [random_vector(1), random_vector(2)]
    for delta in deltas:
        delta[0:6] = 0
    merged = merge(deltas, recipe_of([1.0, 1.0], RDA, norms=[norms_of(one) for one in deltas]), SLICES, RDA)
    assert not merged[0:6].any()
    assert merged[6:].any()


def test_a_learner_without_change_shortens_the_mean_and_gives_no_direction() -> None:
    delta, nothing = np.array([3.0, 4.0], np.float32), np.zeros(2, np.float32)
    merged = merge([delta, nothing], recipe_of([1.0, 1.0], RDA, norms=[(5.0,), (0.0,)]), one_slice(2), RDA)
    np.testing.assert_allclose(merged, [1.5, 2.0], rtol=1e-6)


def test_directions_that_cancel_move_nothing() -> None:
    delta = random_vector(5, 1000)
    almost = -delta * np.float32(1 + DIRECTION_NORM_MIN / 100)
    slices, norms = one_slice(1000), [(100.0,), (100.0,)]
    assert not merge([delta, -delta], recipe_of([1.0, 1.0], RDA, norms=norms), slices, RDA).any()
    assert not merge([delta, almost], recipe_of([1.0, 1.0], RDA, norms=norms), slices, RDA).any()


def test_the_smallest_numbers_have_a_direction_too() -> None:
    tiny = np.full(4, np.finfo(np.float32).smallest_subnormal, np.float32)
    merged = merge([tiny], recipe_of([1.0], RDA, norms=[(1.0,)]), one_slice(4), RDA)
    np.testing.assert_allclose(merged, 0.5, rtol=1e-6)


@pytest.mark.parametrize("role", ["embedding", "buffer_average"])
def test_embeddings_and_averaged_buffers_take_the_plain_mean(role: Any) -> None:
    slices = [
        TensorSlice("t0", 0, 6, (6 - 0,), "parameter"),
        TensorSlice("t6", 6, 12, (12 - 6,), role),
        TensorSlice("t12", 12, 20, (20 - 12,), role),
    ]
    deltas = [random_vector(1), random_vector(2)]
    recipe = recipe_of([1.0, 2.0], RDA, norms=[norms_of(delta, slices) for delta in deltas])
    merged = merge(deltas, recipe, slices, RDA)
    assert merged[6:].tobytes() == merge(deltas, recipe_of([1.0, 2.0]))[6:].tobytes()
    assert norms_of(merged, slices)[0] == pytest.approx(
        sum(w * n.norms[0] for w, n in zip((1 / 3, 2 / 3), recipe.ingredients, strict=True))
    )


def test_counters_take_the_largest_advance() -> None:
    slices = [TensorSlice("t0", 0, 2, (2 - 0,), "buffer_average"), TensorSlice("t2", 2, 4, (4 - 2,), "buffer_maximum")]
    deltas = [np.array([-4.0, 0.0, -4.0, 0.0], np.float32), np.array([-8.0, 0.0, -8.0, 0.0], np.float32)]
    assert merge(deltas, recipe_of([1.0, 1.0]), slices).tolist() == [-6.0, 0.0, -8.0, 0.0]


# -------------------------------------------------------------------------------------------------------- both together

RULES = pytest.mark.parametrize("sync", [MEAN, RDA], ids=["mean", "rda"])


@RULES
def test_the_same_payloads_merge_to_the_same_bits(sync: SyncSettings) -> None:
    slices = one_slice(3 * CHUNK_VALUES + 7)
    payloads = [encode("int4", random_vector(seed, slices[0].stop, 1e-3)) for seed in range(3)]
    recipe = recipe_of([5.0, 7.0, 11.0], sync, norms=[(1.0,), (1.5,), (1.25,)])

    def again() -> bytes:
        return merge([decode(one, num_values=slices[0].stop) for one in payloads], recipe, slices, sync).tobytes()

    assert again() == again()


@RULES
def test_chunks_leave_no_trace_in_a_result(sync: SyncSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [random_vector(seed, 1000) for seed in range(3)]
    recipe = recipe_of([1.0, 2.0, 3.0], sync, norms=[(30.0,)] * 3)
    whole = merge(deltas, recipe, one_slice(1000), sync)
    monkeypatch.setattr("isles.outer.accumulators.CHUNK_VALUES", 17)
    np.testing.assert_allclose(merge(deltas, recipe, one_slice(1000), sync), whole, rtol=1e-5, atol=1e-7)


@RULES
@pytest.mark.parametrize("at_once", [2, 3, 7])
def test_it_tells_in_no_bit_how_many_deltas_were_added_at_once(sync: SyncSettings, at_once: int) -> None:
    size = 2 * CHUNK_VALUES + 1000
    slices = (
        TensorSlice("a", 0, 1000, (1000,)),
        TensorSlice("b", 1000, size - 2, (size - 1002,), "embedding"),
        TensorSlice("c", size - 2, size - 1, (1,)),
        TensorSlice("d", size - 1, size, (), "buffer_maximum"),
    )
    deltas = [random_vector(seed, size, 10.0 ** -(9 * seed)) for seed in range(6)] + [np.zeros(size, np.float32)]
    norms = [norms_of(delta, slices) for delta in deltas]
    recipe = recipe_of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], sync, norms=norms, clips=[1.0, 0.5] * 3 + [1.0])
    accumulator = start_merge(recipe, slices, sync)
    for start in range(0, len(deltas), at_once):
        accumulator.add(*deltas[start : start + at_once])
    assert accumulator.result().tobytes() == merge(deltas, recipe, slices, sync).tobytes()


@RULES
def test_a_delta_may_be_dropped_once_it_was_added(sync: SyncSettings) -> None:
    accumulator = start_merge(recipe_of([1.0] * 5, sync, norms=[(2.0,)] * 5), one_slice(4), sync)
    for _ in range(5):
        delta = np.ones(4, np.float32)
        accumulator.add(delta)
        delta[:] = np.nan
    np.testing.assert_allclose(accumulator.result(), 1.0, rtol=1e-6)
    assert accumulator.result().tobytes() == accumulator.result().tobytes()


@pytest.mark.parametrize("delta", [np.ones(3, np.float32), np.ones(4, np.float64), np.ones((2, 2), np.float32)])
def test_a_delta_of_another_form_is_refused(delta: Any) -> None:
    with pytest.raises(ValueError, match="4 float32 values"):
        start_merge(recipe_of([1.0]), one_slice(4), MEAN).add(delta)
    with pytest.raises(ValueError, match="4 float32 values"):
        start_merge(recipe_of([1.0, 1.0]), one_slice(4), MEAN).add(np.ones(4, np.float32), delta)


@pytest.mark.parametrize("num_deltas", [1, 3])
def test_deltas_and_ingredients_must_be_equally_many(num_deltas: int) -> None:
    with pytest.raises(ValueError, match="2 ingredients"):
        merge([np.ones(4, np.float32)] * num_deltas, recipe_of([1.0, 1.0]))
    with pytest.raises(ValueError, match="1 ingredients"):
        start_merge(recipe_of([1.0]), one_slice(4), MEAN).add(*[np.ones(4, np.float32)] * 2)


def test_an_ingredient_without_its_norms_is_refused() -> None:
    with pytest.raises(ValueError, match="3 norms"):
        start_merge(recipe_of([1.0, 1.0], RDA, norms=[(1.0, 1.0, 1.0), (1.0, 1.0)]), SLICES, RDA)


@given(seed=st.integers(0, 2**32), num_values=st.integers(1, 300))
def test_a_norm_is_that_of_double_precision(seed: int, num_values: int) -> None:
    vector = random_vector(seed, num_values)
    assert l2_norm(vector) == pytest.approx(float(np.linalg.norm(vector.astype(np.float64))), rel=1e-12)


def test_a_norm_neither_overflows_nor_vanishes() -> None:
    assert l2_norm(np.full(4, 3e38, np.float32)) == pytest.approx(2 * float(np.float32(3e38)))
    assert l2_norm(np.full(4, 1e-45, np.float32)) > 0


def test_a_peak_is_the_largest_magnitude_of_either_sign() -> None:
    peaks = Peaks()
    for values in ([1, -7, 2, 3], [-1, 0, 2.5, 0], [-3, -1, -2, -3]):
        peaks.add(np.array(values, np.float32))
    peaks.add(np.array([-4], np.float32), np.array([5], np.float32))
    assert peaks.found == [7.0, 2.5, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("num_values", [1, 255, 256, 257, CHUNK_VALUES + 5000])
def test_deltas_of_equal_values_have_their_direction_whatever_their_length(num_values: int) -> None:
    delta = np.full(num_values, 0.1, np.float32)
    merged = merge([delta], recipe_of([1.0], RDA, norms=[(1.0,)]), one_slice(num_values), RDA)
    np.testing.assert_allclose(merged, num_values**-0.5, rtol=1e-6)


def test_a_large_merge_holds_no_more_than_a_vector_and_its_scratch() -> None:
    def deltas() -> Iterator[Vector]:
        for seed in range(50):
            yield random_vector(seed, 100)

    accumulator = start_merge(recipe_of([1.0] * 50, RDA, norms=[(10.0,)] * 50), one_slice(100), RDA)
    for delta in deltas():
        accumulator.add(delta)
    held = [value for value in vars(accumulator).values() if isinstance(value, np.ndarray)]
    assert sum(vector.nbytes for vector in held) == 400
