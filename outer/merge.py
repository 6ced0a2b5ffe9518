"""How the deltas of a round become one outer gradient: float32 in sorted id order, one delta in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from isles.outer.weights import shares
from isles.proto.agreement import SyncSettings
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Recipe

Vector = npt.NDArray[np.float32]

CHUNK_VALUES: Final = 1 << 16
"""Values handled at a time: 256 KiB of singles and their scratch fit a second-level cache."""


class Accumulator(Protocol):
    """Deltas that come one after the other and become one outer gradient.

    Memory does not grow with their number. The order of `add` is the order of the sums, so equal orders give equal
    bits.
    """

    def add(self, delta: Vector) -> None:
        """Takes the delta ([n] float32) of the next ingredient.

        Raises ValueError for a delta of another length or type, or one more than the recipe has ingredients.
        """

    def result(self) -> Vector:
        """The outer gradient [n] float32; not finite where the sums went beyond single precision.

        Raises ValueError if deltas are missing.
        """


def start_merge(recipe: Recipe, slices: Sequence[TensorSlice], sync: SyncSettings) -> Accumulator:
    """Begins the merge of a recipe's ingredients by its rule; `slices` are those of the fragment."""
    parts = shares([ingredient.weight for ingredient in recipe.ingredients])
    factors = [share * ingredient.clip for share, ingredient in zip(parts, recipe.ingredients, strict=True)]
    return _RULES[sync.merge_rule](factors, slices[-1].stop)


class WeightedMean:
    """D = sum of w_m c_m delta_m / sum of w_m, with weight w and clip factor c."""

    def __init__(self, factors: Sequence[float], num_values: int) -> None:
        """`factors`, one for each delta, are w_m c_m / sum of w_m."""
        self._factors = list(factors)
        self._num_added = 0
        self._sum: Vector = np.zeros(num_values, np.float32)

    def add(self, delta: Vector) -> None:
        """As `Accumulator` says."""
        if delta.shape != self._sum.shape or delta.dtype != np.float32:
            raise ValueError(
                f"a delta of {self._sum.size} float32 values was expected, not {delta.dtype} of shape {delta.shape}"
            )
        if self._num_added == len(self._factors):
            raise ValueError(f"the recipe has {len(self._factors)} ingredients, and here is one more delta")
        factor = np.float32(self._factors[self._num_added])
        self._num_added += 1
        scratch = np.empty(min(CHUNK_VALUES, delta.size), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the result looks for what is not finite
            for start in range(0, delta.size, CHUNK_VALUES):
                part = delta[start : start + CHUNK_VALUES]
                self._sum[start : start + CHUNK_VALUES] += np.multiply(part, factor, out=scratch[: part.size])

    def result(self) -> Vector:
        """As `Accumulator` says."""
        if self._num_added != len(self._factors):
            raise ValueError(f"the recipe has {len(self._factors)} ingredients, but {self._num_added} deltas came")
        return self._sum


_RULES: Final = {"mean": WeightedMean}
