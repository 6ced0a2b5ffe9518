"""Libraries that only a machine that trains has: they come with the extra `train`, and a broker needs none of them."""

from __future__ import annotations

from typing import Final

from isles.proto.errors import UsageError

TRAINING_LIBRARIES: Final = frozenset({"numpy", "safetensors", "torch", "zstandard"})


def missing_library(error: BaseException) -> UsageError | None:
    """The sentence about an import that failed because the extra is not installed; None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in TRAINING_LIBRARIES:
        return None
    return UsageError(
        f"this command needs {name}, which is not installed here: install isles with its extra, as in "
        "`pip install 'isles[train]'`, or run it where that is"
    )
