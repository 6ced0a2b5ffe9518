"""How the torch implementations walk over a vector, as `isles.proto.codec.chunks` does."""

from __future__ import annotations

import torch


def rows(vector: torch.Tensor, first: int, last: int, block_values: int) -> torch.Tensor:
    """Blocks `first` to `last` as [blocks, block_values]: a view, or a copy padded with zeros at the vector's end."""
    part = vector[first * block_values : last * block_values]
    missing = (last - first) * block_values - part.numel()
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.view(-1, block_values)
