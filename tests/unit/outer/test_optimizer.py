"""The outer step, against a reference in double precision and against torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.accumulators import CHUNK_VALUES
from isles.outer.optimizer import (
    FragmentState,
    NewVersion,
    finish_version,
    make_version,
    optimizer_digest,
    parameters_digest,
    recompute,
)
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.errors import NonFiniteError, PayloadError, RangeError
from isles.proto.ids import ContributionId
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Ingredient, Recipe

Vector = npt.NDArray[np.float32]
EXACT = SyncSettings(codec_up="fp32", codec_down="fp32", merge_rule="mean", outer_learning_rate=0.7, outer_momentum=0.9)


def recipe_of(weights: Sequence[float], fraction: float = 1.0, sync: SyncSettings = EXACT, clip: float = 1.0) -> Recipe:
    ingredients = tuple(
        Ingredient(
            id=ContributionId(f"l{index:02}", 0, "ab" * 8, 1),
            digest="0" * 64,
            base_version=0,
            tokens=1,
            steps=1,
            weight=weight,
            clip=clip,
            norms=(0.3,) if sync.merge_rule == "rda" else (),
        )
        for index, weight in enumerate(weights)
    )
    rule, digest = sync.merge_rule, sync.digest
    return Recipe(ingredients=ingredients, fraction=fraction, merge_rule=rule, settings_digest=digest)


def random_vector(seed: int, num_values: int = 1000, scale: float = 1.0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(num_values) * scale).astype(np.float32)


def slices_of(num_values: int) -> tuple[TensorSlice, ...]:
    return (TensorSlice("only", 0, num_values, (num_values,)),)


def next_version(state: FragmentState, deltas: Sequence[Vector], recipe: Recipe, sync: SyncSettings) -> NewVersion:
    return make_version(state, deltas, recipe, sync, slices_of(state.parameters.size))


def reference(state: FragmentState, deltas: list[Vector], recipe: Recipe, sync: SyncSettings) -> tuple[Any, Any]:
    """The parameters plus remainder, and the momentum, in double precision and in the order of the formulas."""
    wide = [delta.astype(np.float64) for delta in deltas]
    weights = [ingredient.weight for ingredient in recipe.ingredients]
    weights = weights if sum(weights) > 0 else [1.0] * len(weights)
    f, mu = recipe.fraction, sync.outer_momentum
    lr = sync.outer_learning_rate if recipe.learning_rate is None else recipe.learning_rate
    merged = sum(w * i.clip * d for w, i, d in zip(weights, recipe.ingredients, wide, strict=True)) / sum(weights)
    zeros = np.zeros(state.parameters.size)
    old = zeros if state.momentum is None else state.momentum.astype(np.float64)
    left = zeros if state.remainder is None else state.remainder.astype(np.float64)
    momentum = mu**f * old + f * merged
    step = lr * f * (merged + mu * momentum)
    return state.parameters.astype(np.float64) + left - step, momentum


def assert_like_reference(new: NewVersion, wanted: tuple[Any, Any], *, tolerance: float) -> None:
    assert new.state.remainder is not None
    assert new.state.momentum is not None
    exact = new.state.parameters.astype(np.float64) + new.state.remainder.astype(np.float64)
    np.testing.assert_allclose(exact, wanted[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(new.state.momentum, wanted[1], rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------- outer step


@given(
    seed=st.integers(0, 2**32),
    weights=st.lists(st.just(0.0) | st.floats(1e-3, 1e12), min_size=1, max_size=5),
    fraction=st.floats(0.01, 1.0),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    rate=st.none() | st.floats(0, 1),
)
def test_a_version_is_what_the_reference_says(
    seed: int, weights: list[float], fraction: float, momentum: float, rate: float | None
) -> None:
    sync = EXACT.model_copy(update={"outer_momentum": momentum})
    recipe = recipe_of(weights, fraction, sync).model_copy(update={"learning_rate": rate})
    deltas = [random_vector(seed + index, 50) for index in range(len(weights))]
    state = FragmentState(
        random_vector(seed + 10, 50), random_vector(seed + 11, 50), random_vector(seed + 12, 50, 1e-3)
    )
    new = next_version(state, deltas, recipe, sync)
    wanted = reference(state, deltas, recipe, sync)
    assert new.state.remainder is not None
    exact = new.state.parameters.astype(np.float64) + new.state.remainder
    np.testing.assert_allclose(exact, wanted[0], rtol=0, atol=1e-5)
    if momentum:
        np.testing.assert_allclose(new.state.momentum, wanted[1], rtol=0, atol=1e-5)
    else:
        assert new.state.momentum is None


@pytest.mark.parametrize("codec_down", ["fp32", "bf16", "int8", "int4"])
def test_what_the_update_leaves_out_stays_in_the_remainder(codec_down: str) -> None:
    sync = EXACT.model_copy(update={"codec_down": codec_down})
    state, wanted_state = FragmentState(random_vector(1)), FragmentState(random_vector(1))
    for turn in range(5):
        deltas = [random_vector(100 + turn, scale=1e-2), random_vector(200 + turn, scale=1e-2)]
        recipe = recipe_of([1.0, 2.0], 0.5, sync)
        wanted = reference(wanted_state, deltas, recipe, sync)
        new = next_version(state, deltas, recipe, sync)
        assert_like_reference(new, wanted, tolerance=1e-6)
        state, wanted_state = new.state, FragmentState(wanted[0], wanted[1])


def test_a_learner_that_adds_the_update_has_the_new_parameters_to_the_bit() -> None:
    sync = EXACT.model_copy(update={"codec_down": "int4"})
    state = FragmentState(random_vector(1))
    new = next_version(state, [random_vector(2, scale=1e-2)], recipe_of([1.0], sync=sync), sync)
    learners = state.parameters + decode(new.update, num_values=1000)
    assert learners.tobytes() == new.state.parameters.tobytes()
    assert new.parameters_sha256 == hashlib.sha256(learners.astype("<f4").tobytes()).hexdigest()


def test_steps_too_small_for_the_parameters_precision_are_not_lost() -> None:
    sync = EXACT.model_copy(update={"outer_learning_rate": 1.0, "outer_momentum": 0.0})
    state = FragmentState(np.full(4, 1.0, np.float32))
    delta = np.full(4, 1e-9, np.float32)
    for _ in range(1000):
        state = next_version(state, [delta], recipe_of([1.0], sync=sync), sync).state
    assert state.remainder is not None
    np.testing.assert_allclose(1.0 - state.parameters.astype(np.float64) - state.remainder, 1e-6, rtol=1e-3)


@pytest.mark.slow  # loads torch
def test_a_full_step_is_nesterovs_as_torch_takes_it() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.from_numpy(random_vector(1)))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    state = FragmentState(random_vector(1))
    for turn in range(6):
        delta = random_vector(50 + turn, scale=0.1)
        parameter.grad = torch.from_numpy(delta)
        optimizer.step()
        state = next_version(state, [delta], recipe_of([1.0]), EXACT).state
    np.testing.assert_allclose(state.parameters, parameter.detach().numpy(), rtol=0, atol=1e-5)


def test_a_round_of_all_and_rounds_of_one_move_the_model_alike() -> None:
    delta = random_vector(3, scale=0.1)
    whole = parts = FragmentState(random_vector(1))
    for _ in range(20):
        whole = next_version(whole, [delta], recipe_of([1.0]), EXACT).state
        for _ in range(8):
            parts = next_version(parts, [delta], recipe_of([1.0], 1 / 8), EXACT).state
    moved_whole = np.linalg.norm(whole.parameters - random_vector(1))
    moved_parts = np.linalg.norm(parts.parameters - random_vector(1))
    assert 0.9 < moved_parts / moved_whole < 1.1


def test_the_rate_of_a_recipe_replaces_that_of_the_settings() -> None:
    state, delta = FragmentState(random_vector(1)), random_vector(2)
    halved = recipe_of([1.0]).model_copy(update={"learning_rate": EXACT.outer_learning_rate / 2})
    whole, half = next_version(state, [delta], recipe_of([1.0]), EXACT), next_version(state, [delta], halved, EXACT)
    moved = (half.state.parameters - state.parameters, whole.state.parameters - state.parameters)
    np.testing.assert_allclose(moved[0], moved[1] / 2, rtol=1e-3, atol=1e-6)


def test_buffers_become_what_the_merge_says_without_momentum_and_exactly() -> None:
    sync = SyncSettings()
    slices = (TensorSlice("mean", 0, 4, (4,), "buffer_average"), TensorSlice("count", 4, 5, (), "buffer_maximum"))
    state = FragmentState(np.array([1.0, 2.0, 3.0, 4.0, 100.0], np.float32))
    deltas = [np.array([-1.0, 0.0, 1.0, 2.0, -7.0], np.float32), np.array([-3.0, 0.0, 3.0, 2.0, -9.0], np.float32)]
    recipe = recipe_of([1.0, 1.0], sync=sync).model_copy(update={"learning_rate": 1.0})
    new = make_version(state, deltas, recipe, sync, slices)
    assert new.state.parameters.tolist() == [3.0, 2.0, 1.0, 2.0, 109.0]
    assert new.state.momentum is None
    assert decode(new.update, num_values=5).tolist() == [2.0, 0.0, -2.0, -2.0, 9.0]


def test_pieces_leave_no_trace_in_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = EXACT.model_copy(update={"codec_down": "int4"})
    state = FragmentState(random_vector(1), random_vector(2), random_vector(3, scale=1e-3))
    before = [vector.tobytes() for vector in vars(state).values()]
    deltas = [random_vector(4, scale=0.01), random_vector(5, scale=0.01)]
    whole = next_version(state, deltas, recipe_of([1.0, 2.0], 0.5, sync), sync)
    for name in ("accumulators", "optimizer"):
        monkeypatch.setattr(f"isles.outer.{name}.CHUNK_VALUES", 17)
    pieces = next_version(state, deltas, recipe_of([1.0, 2.0], 0.5, sync), sync)
    assert pieces.update == whole.update
    assert (pieces.parameters_sha256, pieces.optimizer_sha256) == (whole.parameters_sha256, whole.optimizer_sha256)
    assert [vector.tobytes() for vector in vars(state).values()] == before


@pytest.mark.parametrize("num_spares", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_version_is_the_same_in_memory_that_was_used_before(num_spares: int, momentum: float) -> None:
    sync = EXACT.model_copy(update={"codec_down": "int4", "outer_momentum": momentum})
    state = FragmentState(random_vector(1), random_vector(2) if momentum else None, random_vector(3, scale=1e-3))
    recipe, gradient, slices = recipe_of([1.0], 0.5, sync), random_vector(4, scale=0.01), slices_of(1000)
    fresh = finish_version(state, gradient.copy(), recipe, sync, slices)
    spares = [np.full(1000, np.nan, np.float32) for _ in range(num_spares)]
    reused = finish_version(state, gradient.copy(), recipe, sync, slices, spares)
    assert reused.update == fresh.update
    assert (reused.parameters_sha256, reused.optimizer_sha256) == (fresh.parameters_sha256, fresh.optimizer_sha256)
    made = [vector for vector in vars(reused.state).values() if vector is not None]
    used = [spare for spare in spares if any(np.shares_memory(spare, vector) for vector in made)]
    assert len(used) == min(num_spares, 2 if momentum else 1) or not momentum
    assert all(not np.shares_memory(one, other) for one in made for other in made if one is not other)


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_a_step_that_is_not_finite_makes_no_version(value: float) -> None:
    state = FragmentState(np.zeros(4, np.float32), np.full(4, value, np.float32))
    with pytest.raises(NonFiniteError, match="not finite"):
        next_version(state, [np.full(4, value, np.float32)], recipe_of([1.0]), EXACT)


@pytest.mark.parametrize(
    ("spoiled", "what"),
    [("delta", "merged delta"), ("momentum", "momentum"), ("remainder", "step"), ("parameters", "parameters")],
)
def test_an_outer_step_that_is_not_finite_is_told_by_where_it_went_wrong(spoiled: str, what: str) -> None:
    place = CHUNK_VALUES + 2
    vectors = {
        name: np.zeros(CHUNK_VALUES + 3, np.float32) for name in ("delta", "momentum", "remainder", "parameters")
    }
    vectors[spoiled][place] = np.inf
    delta = vectors.pop("delta")
    with pytest.raises(NonFiniteError, match=f"value {place} of the {what} is (inf|nan)"):
        next_version(FragmentState(**vectors), [delta], recipe_of([1.0]), EXACT)


def test_an_update_beyond_its_codec_makes_no_version() -> None:
    sync = EXACT.model_copy(update={"codec_down": "int4", "outer_momentum": 0.0})
    with pytest.raises(RangeError):
        next_version(
            FragmentState(np.zeros(4, np.float32)), [np.full(4, 3e38, np.float32)], recipe_of([1.0], sync=sync), sync
        )


# ------------------------------------------------------------------------------------------------------------ recompute


@pytest.fixture(params=["mean", "rda"])
def history(request: pytest.FixtureRequest) -> tuple[dict[str, bytes], list[bytes], Recipe, SyncSettings, NewVersion]:
    """State and contributions as bytes of a store, and the version that an outer made of them."""
    sync = SyncSettings(codec_up="int4", codec_down="int4", merge_rule=request.param)
    state = FragmentState(random_vector(1), random_vector(2, scale=0.1), random_vector(3, scale=1e-3))
    payloads = [encode("int4", random_vector(10 + index, scale=0.01)) for index in range(3)]
    recipe = recipe_of([5.0, 7.0, 11.0], 0.6, sync)
    made = next_version(state, [decode(payload, num_values=1000) for payload in payloads], recipe, sync)
    assert state.momentum is not None
    assert state.remainder is not None
    stored = {
        "parameters": encode("fp32", state.parameters),
        "momentum": encode("fp32", state.momentum),
        "remainder": encode("fp32", state.remainder),
    }
    return stored, payloads, recipe, sync, made


def test_a_version_recomputes_to_the_bit(history: Any) -> None:
    stored, payloads, recipe, sync, made = history
    again = recompute(stored, payloads, recipe, sync, slices=slices_of(1000))
    assert again.parameters_sha256 == made.parameters_sha256 == parameters_digest(made.state.parameters)
    assert again.optimizer_sha256 == made.optimizer_sha256 == optimizer_digest(made.state)
    assert again.update == made.update
    for name in ("parameters", "momentum", "remainder"):
        assert getattr(again.state, name).tobytes() == getattr(made.state, name).tobytes()


def test_momentum_and_remainder_have_one_digest_and_zeros_have_none() -> None:
    parameters, momentum, remainder = random_vector(1), random_vector(2), random_vector(3)
    both = optimizer_digest(FragmentState(parameters, momentum, remainder))
    assert both == hashlib.sha256(momentum.astype("<f4").tobytes() + remainder.astype("<f4").tobytes()).hexdigest()
    assert optimizer_digest(FragmentState(parameters)) == hashlib.sha256(b"").hexdigest()


def test_another_order_of_contributions_is_another_version(history: Any) -> None:
    stored, payloads, recipe, sync, made = history
    again = recompute(stored, payloads[::-1], recipe, sync, slices=slices_of(1000))
    assert again.parameters_sha256 != made.parameters_sha256


def test_a_recipe_of_another_run_is_refused(history: Any) -> None:
    stored, payloads, recipe, _, _ = history
    with pytest.raises(PayloadError, match=r"other settings|merged by"):
        recompute(stored, payloads, recipe, EXACT, slices=slices_of(1000))


def test_a_version_without_its_predecessors_parameters_is_refused(history: Any) -> None:
    _, payloads, recipe, sync, _ = history
    with pytest.raises(PayloadError, match="missing"):
        recompute({}, payloads, recipe, sync, slices=slices_of(1000))
