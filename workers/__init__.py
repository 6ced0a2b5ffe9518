"""Learners: the `Learner` for one's own training loop, the built-in trainer, models and data.

The names here are loaded when they are first used, so that the pure parts of this package load no tensor library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isles.workers.learner import Learner

__all__ = ["Learner"]


def __getattr__(name: str) -> Any:
    if name == "Learner":
        from isles.workers.learner import Learner

        return Learner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
