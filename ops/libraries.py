"""Libraries that only a machine that trains has: they come with the extra `train`, and a broker needs none of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from isles.proto.errors import UsageError

TRAINING_LIBRARIES: Final = frozenset({"numpy", "safetensors", "torch", "zstandard"})


def require(*names: str) -> None:
    """Raises UsageError if one of these libraries is not installed, without loading any."""
    for name in names:
        if find_spec(name) is None:
            raise _not_installed(name)


def missing_library(error: BaseException) -> UsageError | None:
    """The sentence about an import that failed because the extra is not installed; None for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in TRAINING_LIBRARIES:
        return None
    return _not_installed(name)


def _not_installed(name: str) -> UsageError:
    return UsageError(
        f"this command needs {name}, which is not installed here: install isles with its extra, as in "
        "`pip install 'isles[train]'`, or run it where that is"
    )
