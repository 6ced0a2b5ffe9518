"""What a broker warns of, in one line for each."""

from __future__ import annotations

from typing import Final

from isles.ops.wording import counted, seconds_text
from isles.proto.messages import Status, WarningInfo

SHOWN_MAX: Final = 4
"""Lines in a display that is redrawn in place; `isles status` shows all."""


def concern_lines(status: Status, *, num_max: int | None = None) -> list[str]:
    """What is wrong with the run now, each with since when; the rounds that wait for learners come first."""
    lines = [_line(one, status) for one in status.warnings]
    live = sum(learner.is_live for learner in status.learners)
    if status.run and status.progress < 1 and live < status.num_required:
        lines.insert(0, f"learners.missing: {live} of {status.num_required} required learners are live, rounds wait")
    if num_max is not None and len(lines) > num_max:
        lines = [*lines[: num_max - 1], f"and {counted(len(lines) - num_max + 1, 'warning')} more: see `isles status`"]
    return lines


def _line(warning: WarningInfo, status: Status) -> str:
    """Its age by the broker's own clock, so that it does not matter how ours goes."""
    age = f" for {seconds_text(max(0.0, status.unix - warning.since_unix))}" if status.unix else ""
    return f"{warning.name}{' ' if warning.subject else ''}{warning.subject}{age}: {warning.text}"
