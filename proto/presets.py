"""Named sets of synchronisation settings: the published relatives of this project's method. Pure.

A preset only gives other defaults: what somebody states wins over it, and a run's record holds the resolved values. The
interval H and the codecs belong to none, since they depend on the length of a run and on its links.

    decoupled    Decoupled DiLoCo, arXiv 2604.21428: rounds of whoever is there, as this project has tuned them
    diloco       DiLoCo, arXiv 2311.08105: the whole model at once, everybody in every round
    streaming    Streaming DiLoCo, arXiv 2501.18512: fragments in turn, everybody in every round, half the way back
    local-sgd    Local SGD, arXiv 1805.09767: the plain average of everybody
    async        asynchronous local SGD, arXiv 2401.09135: each contribution is a round of its own
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

Preset = Literal["decoupled", "diloco", "streaming", "local-sgd", "async"]

QUORUM_MAX: Final = 100_000
"""More learners than any fleet has. A round waits for at most those that are live, so this quorum means all of them."""

_EVERYBODY: Final[dict[str, Any]] = {"quorum": QUORUM_MAX, "has_cues": True, "merge_rule": "mean"}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "decoupled": {},
        "diloco": {
            **_EVERYBODY,
            "num_fragments": 1,
            "apply_rule": "rebase",
            "books": "exact",
            "outer_learning_rate": 0.7,
            "outer_momentum": 0.9,
        },
        "streaming": {
            **_EVERYBODY,
            "num_fragments": 4,
            "apply_rule": "blend",
            "blend_alpha": 0.5,
            "books": "published",
            "outer_learning_rate": 0.4,
            "outer_momentum": 0.9,
        },
        "local-sgd": {
            **_EVERYBODY,
            "num_fragments": 1,
            "apply_rule": "rebase",
            "books": "exact",
            "outer_learning_rate": 1.0,
            "outer_momentum": 0.0,
        },
        "async": {
            "num_fragments": 1,
            "quorum": 1,
            "grace_max_seconds": 0.0,
            "has_cues": False,
            "merge_rule": "mean",
            "apply_rule": "rebase",
            "books": "exact",
            "outer_learning_rate": 0.7,
            "outer_momentum": 0.9,
            "has_fractional_steps": True,
        },
    }
)
"""Preset -> the settings that it gives, by name; all others keep their own defaults."""
