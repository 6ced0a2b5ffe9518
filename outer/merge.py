"""How the deltas of a round become one outer gradient: float32 in sorted id order, one delta in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from isles.outer.weights import shares
from isles.proto.messages import Ingredient

Vector = npt.NDArray[np.float32]

CHUNK_VALUES: Final = 1 << 16
"""Values handled at a time: 256 KiB of singles and their scratch fit a second-level cache."""


class WeightedMean:
    """The weighted mean of vectors that come one after the other.

    Memory is two vectors however many there are. The order of `add` is the order of the sums, so equal orders give
    equal bits.
    """

    def __init__(self, num_values: int) -> None:
        self._sum: Vector = np.zeros(num_values, np.float32)

    def add(self, delta: Vector, share: float) -> None:
        """Adds `share` times a delta ([num_values] float32); the shares of a mean sum to 1.

        Raises ValueError for a vector of another length or type.
        """
        if delta.shape != self._sum.shape or delta.dtype != np.float32:
            raise ValueError(
                f"a delta of {self._sum.size} float32 values was expected, not {delta.dtype} of shape {delta.shape}"
            )
        factor = np.float32(share)
        scratch = np.empty(min(CHUNK_VALUES, delta.size), np.float32)
        for start in range(0, delta.size, CHUNK_VALUES):
            part = delta[start : start + CHUNK_VALUES]
            self._sum[start : start + CHUNK_VALUES] += np.multiply(part, factor, out=scratch[: part.size])

    def result(self) -> Vector:
        """The mean [num_values] float32; not finite where the sums went beyond single precision."""
        return self._sum


def weighted_mean(deltas: Iterable[Vector], ingredients: tuple[Ingredient, ...], num_values: int) -> Vector:
    """The outer gradient D = sum of w_m c_m delta_m / sum of w_m, with weight w and clip factor c.

    `deltas` are [num_values] float32 each, in the order of `ingredients`; they are taken one at a time. Raises
    ValueError if their number is not that of the ingredients.
    """
    mean = WeightedMean(num_values)
    parts = shares([ingredient.weight for ingredient in ingredients])
    with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the result looks for what is not finite
        for delta, ingredient, share in zip(deltas, ingredients, parts, strict=True):
            mean.add(delta, share * ingredient.clip)
    return mean.result()
