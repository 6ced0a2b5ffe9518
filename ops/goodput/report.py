"""What the goodput simulation found, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.published import differences, published
from isles.ops.goodput.scenario import SYSTEM_NAMES
from isles.ops.wording import amount, seconds_text

if TYPE_CHECKING:
    from rich.table import Table

Varied = Sequence[tuple[str, Outcome]]
"""Outcomes, each with the value of the setting that was varied; empty where none was."""


def as_json(varied: Varied, setting: str = "") -> str:
    """A list with one object for each outcome; the varied setting is one of its keys."""
    entries = []
    for value, outcome in varied:
        extra: dict[str, Any] = {setting: _plain(value)} if setting else {}
        entries.append({**outcome.as_json(), **extra})
    return json.dumps(entries, indent=2)


def _plain(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def chips_text(chips: int) -> str:
    """A number of chips as a heading: `150 k`, `1.2 M`."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if chips >= size:
            return f"{chips / size:.3g} {letter}"
    return str(chips)


def system_text(outcome: Outcome) -> str:
    """A system as the first column calls it."""
    return f"decoupled, M = {outcome.learners}" if outcome.system == "decoupled" else SYSTEM_NAMES[outcome.system]


def goodput_table(outcomes: Sequence[Outcome], *, is_compared: bool) -> Table:
    """A row for each system, a column for each number of chips; goodput in per cent, the published after a stroke."""
    sizes = list(dict.fromkeys(one.chips for one in outcomes))
    table = _table(["goodput %"], [chips_text(chips) for chips in sizes])
    rows: dict[str, dict[int, Outcome]] = {}
    for one in outcomes:
        rows.setdefault(system_text(one), {})[one.chips] = one
    for name, row in rows.items():
        table.add_row(name, *(_cell(row[chips], is_compared) if chips in row else "" for chips in sizes))
    return table


def _cell(outcome: Outcome, is_compared: bool) -> str:
    figure = published(outcome) if is_compared else None
    ours = f"{100 * outcome.goodput:.1f}"
    return ours if figure is None else f"{ours} [dim]| {figure}[/]"


def comparison_text(outcomes: Sequence[Outcome]) -> str:
    """How far the figures are from those that were published."""
    found = [abs(one) for one in differences(outcomes)]
    if not found:
        return "None of these was published."
    return (
        f"After the stroke: what was published. {len(found)} figures differ by {sum(found) / len(found):.1f} points on "
        f"average and by {max(found):.1f} at most."
    )


def rounds_table(varied: Varied, setting: str) -> Table:
    """A row for each outcome, with what its rounds are like."""
    left = [setting] if setting else []
    names = ["goodput %", "uptime %", "in a round %", "rounds/h", "merged in", "merging %", "lost %"]
    has_rounds = any(one.rounds is not None for _, one in varied)
    table = _table([*left, "system"], ["chips", *(names if has_rounds else names[:2])])
    for value, one in varied:
        cells = [chips_text(one.chips), f"{100 * one.goodput:.1f}", f"{100 * one.uptime:.2f}"]
        if one.rounds is not None:
            cells += [
                f"{100 * one.rounds.participation:.1f}",
                amount(one.rounds.per_hour),
                seconds_text(one.rounds.merge_seconds),
                f"{100 * one.merging:.3f}",
                f"{100 * one.lost:.3f}",
            ]
        table.add_row(*([value] if setting else []), system_text(one), *cells)
    return table


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
