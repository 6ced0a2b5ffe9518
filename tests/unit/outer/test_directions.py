"""Sketches keep the angles between deltas, and who is opposed to the others is told from who merely differs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.directions import COMPANY_MIN, SKETCH_VALUES, oppositions
from isles.outer.sketch import ROWS_AT_ONCE, sketch

Vector = npt.NDArray[np.float32]

LIMIT = 0.25
LONG = 3 * ROWS_AT_ONCE * SKETCH_VALUES + 77
SIZES = [1, 40, SKETCH_VALUES, SKETCH_VALUES + 1, ROWS_AT_ONCE * SKETCH_VALUES, LONG]


def noise(seed: int, size: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def cosine(first: bytes, second: bytes) -> float:
    return float(np.dot(np.frombuffer(first, "<f4").astype(float), np.frombuffer(second, "<f4").astype(float)))


def learners(num: int, size: int, agreement: float) -> dict[str, Vector]:
    """Deltas of which any two have about this cosine."""
    common = noise(0, size)
    return {
        f"h{number}": np.float32(agreement**0.5) * common + np.float32((1 - agreement) ** 0.5) * noise(number + 1, size)
        for number in range(num)
    }


def opposed(deltas: dict[str, Vector], limit: float = LIMIT) -> set[str]:
    return set(oppositions({name: sketch(delta) for name, delta in deltas.items()}, limit))


@pytest.mark.parametrize("size", SIZES)
def test_a_sketch_is_short_and_has_the_angles_of_the_vectors(size: int) -> None:
    one, other = noise(1, size), noise(2, size)
    sketches = [sketch(vector) for vector in (one, other, -one, one * np.float32(1e-30), one + other)]
    assert all(len(found) == 4 * min(size, SKETCH_VALUES) for found in sketches)
    assert cosine(sketches[0], sketches[2]) == pytest.approx(-1, abs=1e-5)
    assert cosine(sketches[0], sketches[3]) == pytest.approx(1, abs=1e-5)
    exact = float(one @ (one + other) / np.linalg.norm(one) / np.linalg.norm(one + other))
    assert cosine(sketches[0], sketches[4]) == pytest.approx(exact, abs=4 / SKETCH_VALUES**0.5)


@pytest.mark.parametrize("period", [8, 64, 509, 512, 768, 4096])
def test_a_sketch_keeps_angles_of_values_that_repeat(period: int) -> None:
    rows = -(-LONG // period)
    one, other = (np.tile(noise(seed, period), rows)[:LONG] * noise(seed + 10, LONG) for seed in (1, 2))
    assert abs(cosine(sketch(one), sketch(other))) < 6 / SKETCH_VALUES**0.5


def test_what_has_no_direction_has_no_sketch() -> None:
    assert sketch(np.zeros(LONG, np.float32)) == sketch(np.zeros(3, np.float32)) == b""
    assert sketch(np.full(LONG, 3e38, np.float32) * np.float32(-1)) in (b"", sketch(np.full(LONG, -3e38, np.float32)))


@given(st.integers(COMPANY_MIN, 9), st.floats(0.0, 1.0), st.integers(0, 8))
def test_learners_that_agree_ever_so_little_are_left_alone(num: int, agreement: float, seed: int) -> None:
    deltas = {name: delta * np.float32(seed + 1) for name, delta in learners(num, 5000, agreement).items()}
    assert opposed(deltas) == set()


@pytest.mark.parametrize("agreement", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("num", [3, 4, 7])
def test_one_that_says_the_opposite_of_many_is_told_apart_whatever_its_length(num: int, agreement: float) -> None:
    deltas = learners(num + 1, LONG, agreement)
    deltas["h0"] = deltas["h0"] * np.float32(-1e6)
    expected = {"h0"} if num * agreement > 1 or agreement >= 0.3 else set()
    assert opposed(deltas) >= expected
    assert opposed(deltas) <= {"h0"}


def test_noise_is_not_opposition() -> None:
    deltas = learners(7, LONG, 0.3) | {"random": noise(99, LONG)}
    assert opposed(deltas) == set()


@pytest.mark.parametrize("num", range(COMPANY_MIN))
def test_among_too_few_nobody_is_the_odd_one_out(num: int) -> None:
    deltas = learners(num, LONG, 0.9)
    if deltas:
        deltas["h0"] = -deltas["h0"]
    assert opposed(deltas) == set()


@given(st.lists(st.integers(0, 10**6), min_size=COMPANY_MIN, max_size=12, unique=True), st.integers(1, 60))
def test_what_chance_makes_in_small_fragments_is_not_opposition(seeds: list[int], size: int) -> None:
    deltas = {str(seed): noise(seed, size) for seed in seeds}
    assert len(opposed(deltas)) <= 1


def test_without_a_limit_nobody_is_opposed() -> None:
    deltas = learners(7, LONG, 0.9)
    deltas["h0"] = -deltas["h0"]
    assert opposed(deltas, limit=1.0) == set()
