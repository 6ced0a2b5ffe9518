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
OFFSETS: Final = ((0, 9), (0, -15))
"""Of labels from their points, in typographic points: above, below."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG file with one panel a direction. Raises SystemExit if the library for it is not installed."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise SystemExit("--plot draws with matplotlib, which is not installed: pip install 'isles[bench]'") from None
    mpl.use("svg")
    from matplotlib import pyplot as plt

    settings = {
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
        figure, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
        _panel(axes, [row for row in rows if row.case.group == "codecs"])
        figure.savefig(path, metadata={"Date": None, "Creator": "benchmarks/convergence"})
        plt.close(figure)


def _panel(axes: Any, rows: Iterable[Row]) -> None:
    axes.axhspan(-TOLERANCE_PERCENT, TOLERANCE_PERCENT, color=BAND, alpha=0.10, linewidth=0)
    axes.axhline(0, color=PALE, linewidth=0.8)
    rows = list(rows)
    for rule, colour in COLOURS.items():
        points = sorted(_points(row for row in rows if row.case.settings["merge_rule"] == rule))
        if not points:
            continue
        bits, percents, errors, names = zip(*points, strict=True)
        axes.errorbar(
            bits, percents, yerr=errors, color=colour, marker="o", markersize=6, linewidth=1.3, elinewidth=1.0,
            capsize=2.5, label=rule,
        )  # fmt: skip
        place = OFFSETS[list(COLOURS).index(rule)]
        for x, y, name in zip(bits, percents, names, strict=True):
            axes.annotate(name, (x, y), place, textcoords="offset points", ha="center", fontsize=8.5, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.set_xlabel("bits per parameter up, as encoded")
    axes.set_ylabel("loss beside fp32 both ways, %")
    axes.grid(axis="both", color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="merge rule", loc="upper right")


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
