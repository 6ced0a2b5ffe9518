"""Which contributions of a run were rejected, and why: from the broker's log, or from what the store still has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from isles.ops.tape import Tape

EVENT: Final = "contribution.rejected"
FIELDS: Final = ("learner", "fragment", "number", "reason")


def find_rejections(tape: Tape, run: Path | None) -> list[dict[str, Any]]:
    """Learner, fragment, number and reason of each rejected contribution that is known of, in order.

    The broker of a run folder logs every one. Without its log the store of a stopped run has the last one of each
    learner and fragment, if none was accepted after it; a running broker tells only their number.
    """
    logged = _from_log(run / "logs" / "broker.jsonl") if run is not None else []
    rows = tape.rejected_rows()
    if len(logged) >= len(rows):
        return logged
    return [
        {"learner": row.id.learner, "fragment": row.id.fragment, "number": row.id.number, "reason": row.reason}
        for row in rows
    ]


def _from_log(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [entry for line in file if EVENT in line and (entry := _read(line)) is not None]
    except OSError:
        return []


def _read(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("event") != EVENT or not set(FIELDS) <= entry.keys():
        return None
    return {name: entry[name] for name in FIELDS}
