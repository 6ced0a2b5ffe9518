"""How the numpy implementations walk over a vector: block by block, some blocks at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def rows(vector: Vector, first: int, last: int, block_values: int) -> Vector:
    """Blocks `first` to `last` as [blocks, block_values]: a view, or a copy padded with zeros at the vector's end."""
    part = vector[first * block_values : last * block_values]
    missing = (last - first) * block_values - part.size
    if missing:
        part = np.pad(part, (0, missing))
    return part.reshape(-1, block_values)


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges first..last-1 of at most `step`, which cover `size`."""
    for first in range(0, size, step):
        yield first, min(first + step, size)
