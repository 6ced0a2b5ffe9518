"""What is done with the tensors of a model, in few words, for people who read logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from isles.proto.manifest import Manifest, Role

NAMES_MAX: Final = 3
"""Buffers named for each thing that is done with them; the manifest has all."""

BUFFERS: Final[Mapping[str, Role]] = {
    "averaged": "buffer_average",
    "maximum": "buffer_maximum",
    "skipped": "buffer_skip",
}
"""What is done with buffers, in the words of the log, and the role."""


def policy(manifest: Manifest) -> dict[str, Any]:
    """The fields of the log event `model.described`: counts, and the first names of the buffers."""
    names: dict[Role, list[str]] = {}
    for spec in manifest.tensors:
        names.setdefault(spec.role, []).append(spec.name)
    fields: dict[str, Any] = {
        "num_parameters": manifest.num_values,
        "num_frozen": len(names.get("frozen", ())),
        "num_tied": len(manifest.aliases),
    }
    for what, role in BUFFERS.items():
        found = names.get(role, [])
        fields[f"num_{what}"] = len(found)
        if found:
            fields[what] = ", ".join(found[:NAMES_MAX]) + (", ..." if len(found) > NAMES_MAX else "")
    return fields
