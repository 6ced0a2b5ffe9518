"""The goodput of several systems as a figure: over the chips of a fleet, or over a setting that was varied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.published import published
from isles.ops.goodput.report import Varied, chips_text, system_text
from isles.ops.plotting import COLOURS, GREY, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_GAP = 3.6
"""Points of goodput between two names at the right end, so that none covers another."""


def draw(path: Path, varied: Varied, setting: str, *, is_compared: bool) -> None:
    """Writes the figure. Raises UsageError if the file cannot be written."""
    if setting:
        _draw_setting(path, varied, setting)
    else:
        _draw_fleets(path, [one for _, one in varied], is_compared=is_compared)


def _draw_fleets(path: Path, outcomes: Sequence[Outcome], *, is_compared: bool) -> None:
    figure, (axes,) = new_figure(1)
    rows: dict[str, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.chips):
        rows.setdefault(system_text(one), []).append(one)
    ends: list[tuple[float, str, str]] = []
    for (name, row), colour in zip(rows.items(), _colours(rows), strict=True):
        style = "-" if row[0].system == "decoupled" else "--"
        axes.plot([one.chips for one in row], [100 * one.goodput for one in row], style, color=colour, marker="o", ms=4)
        ends.append((100 * row[-1].goodput, name, colour))
        known = [(one.chips, share) for one in row if is_compared and (share := published(one)) is not None]
        axes.scatter(
            [chips for chips, _ in known], [share for _, share in known], 36, color=colour, marker="x", zorder=3
        )
    sizes = sorted({one.chips for one in outcomes})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [chips_text(chips) for chips in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 102)
    axes.set_xlabel("chips of the fleet")
    axes.set_ylabel("goodput, % of the fleet's time")
    axes.set_title("Share of a fleet's time that is spent training", loc="left", fontweight="bold")
    _name_lines(axes, ends)
    if is_compared:
        axes.annotate("× published", (0.02, 0.03), xycoords="axes fraction", color=GREY)
    save(figure, path)


def _colours(rows: dict[str, list[Outcome]]) -> list[str]:
    """Grey tones for what is not decoupled, so that the learners stand out."""
    decoupled = iter(COLOURS * (1 + len(rows) // len(COLOURS)))
    plain = {"data-parallel": "#999999", "elastic": "#444444"}
    return [plain.get(row[0].system) or next(decoupled) for row in rows.values()]


def _name_lines(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """The name of each line at its right end, moved apart where two ends meet."""
    at = float("inf")
    for height, name, colour in sorted(ends, reverse=True):
        at = min(height, at - LABEL_GAP)
        axes.annotate(
            name, (1.01, at), xycoords=("axes fraction", "data"), color=colour, va="center", annotation_clip=False
        )


def _draw_setting(path: Path, varied: Varied, setting: str) -> None:
    figure, (left, right) = new_figure(2, width=9.6, height=4.0)
    values = list(dict.fromkeys(value for value, _ in varied))
    rows: dict[str, list[tuple[int, Outcome]]] = {}
    for value, one in varied:
        rows.setdefault(f"{system_text(one)}, {chips_text(one.chips)}", []).append((values.index(value), one))
    for (name, row), colour in zip(rows.items(), COLOURS * len(rows), strict=False):
        places = [place for place, _ in row]
        left.plot(places, [100 * one.goodput for _, one in row], "-", color=colour, marker="o", ms=4, label=name)
        shares = [one.rounds.participation if one.rounds is not None else 0.0 for _, one in row]
        right.plot(places, [100 * share for share in shares], "-", color=colour, marker="o", ms=4, label=name)
    for axes, title in ((left, "Goodput"), (right, "Participation")):
        axes.set_xticks(range(len(values)), values)
        axes.set_xlabel(setting.replace("_", " "))
        axes.set_ylim(0, 102)
        axes.set_title(title, loc="left", fontweight="bold")
    left.set_ylabel("% of the fleet's time")
    right.set_ylabel("% of the learners that a round merges")
    left.legend(frameon=False, loc="lower left")
    save(figure, path)
