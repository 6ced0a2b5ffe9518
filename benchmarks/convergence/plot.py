"""Loss against bits, as a picture: what a codec saves, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.convergence.results import Row

COLOURS: Final = {"rda": "#2a6fb0", "mean": "#a8561c"}
INK: Final = "#24292f"
PALE: Final = "#737d88"
BAND: Final = "#2f7d4f"
TOLERANCE_PERCENT: Final = 0.5
"""What a default codec may cost."""
TICKS: Final = (0.5, 1, 2, 4, 8, 16, 32)
RIGHT: Final = {"xytext": (7, 4), "ha": "left"}
LEFT: Final = {"xytext": (-7, -11), "ha": "right"}
"""Where a label stands from its point, in typographic points; to the left where another one is above it."""
NEAR: Final = 1.1
"""Ratio of bits below which two labels would overlap."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG file with one panel a merge rule. Raises SystemExit if the library for it is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise SystemExit("--plot draws with matplotlib, which is not installed: pip install 'isles[bench]'") from None
    mpl.use("svg")
    from matplotlib import pyplot as plt

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "isles",
        "font.family": "sans-serif",
        "font.sans-serif": ["system-ui", "Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 10.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": PALE,
        "xtick.color": PALE,
        "ytick.color": PALE,
    }
    with mpl.rc_context(settings):
        figure, panels = plt.subplots(len(COLOURS), figsize=(8.4, 6.4), sharex=True, sharey=True, layout="constrained")
        for axes, (rule, colour) in zip(panels, COLOURS.items(), strict=True):
            mine = [row for row in rows if row.case.group == "codecs" and row.case.settings["merge_rule"] == rule]
            _panel(axes, sorted(_points(mine)), f"merge rule {rule}", colour)
        panels[-1].set_xlabel("bits per parameter up, as encoded")
        figure.supylabel("loss beside fp32 both ways, %", fontsize=10.5)
        figure.savefig(path, metadata={"Date": None, "Creator": "benchmarks/convergence"})
        plt.close(figure)


def _panel(axes: Any, points: Sequence[tuple[float, float, float, str]], title: str, colour: str) -> None:
    axes.set_title(title, fontsize=10.5, color=colour, loc="left")
    axes.axhspan(-TOLERANCE_PERCENT, TOLERANCE_PERCENT, color=BAND, alpha=0.10, linewidth=0)
    axes.axhline(0, color=PALE, linewidth=0.8)
    for bits, percent, error, name in points:
        axes.errorbar(
            bits, percent, yerr=error, color=colour, marker="o", markersize=5.5, elinewidth=1.1, capsize=2.5
        )  # fmt: skip
        is_below = any(other[1] > percent and 1 / NEAR < other[0] / bits < NEAR for other in points)
        place = LEFT if is_below or bits > TICKS[-2] else RIGHT
        axes.annotate(name, (bits, percent), textcoords="offset points", fontsize=8.5, color=INK, **place)
    axes.set_xscale("log", base=2)
    axes.set_xlim(TICKS[0], TICKS[-1])
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.grid(axis="both", color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _points(rows: Iterable[Row]) -> list[tuple[float, float, float, str]]:
    """Bits up, difference, standard error, label."""
    found = []
    for row in rows:
        bits, compared = row.mean("bits_up"), row.difference
        percent = 0.0 if compared is None else compared.percent
        error = 0.0 if compared is None or compared.standard_error is None else compared.standard_error
        if bits is not None and math.isfinite(percent):
            found.append((bits, percent, error, row.case.name.partition(",")[0]))
    return found
