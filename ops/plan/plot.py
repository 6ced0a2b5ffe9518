"""What links carry, as a figure: every way to train beside what the links can, and what H changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isles.ops.plan.arithmetic import Load, loads, needs, others
from isles.ops.plan.settings import PlanSettings
from isles.ops.plotting import COLOURS, GREY, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FACTORS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)
"""Times the H that is planned: what the right half shows."""


def draw(path: Path, settings: PlanSettings) -> None:
    """Writes the figure. Raises UsageError if the file cannot be written."""
    figure, (left, right) = new_figure(2, width=10.5, height=4.2)
    _draw_loads(left, settings)
    _draw_intervals(right, settings)
    save(figure, path)


def _draw_loads(axes: Axes, settings: PlanSettings) -> None:
    wanted, _, published = others(settings)
    bars = [wanted, published, *loads(settings)]
    colours = ["#999999", "#999999", *[COLOURS[0]] * 2, *[COLOURS[1]] * 2]
    places = range(len(bars))[::-1]
    axes.barh(places, [load.gbit for load in bars], color=colours, height=0.62)
    for place, load in zip(places, bars, strict=True):
        axes.plot([load.capacity_gbit] * 2, [place - 0.42, place + 0.42], color="#222222", lw=1.6)
        axes.annotate(
            f"{load.gbit:.3g}", (load.gbit, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_xscale("log")
    axes.set_xlim(min(load.gbit for load in bars) / 3, 4 * max(max(load.gbit, load.capacity_gbit) for load in bars))
    axes.set_yticks(places, [_name(load) for load in bars])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("Gbit/s; the stroke is what the link carries")
    axes.set_title("Bandwidth", loc="left", fontweight="bold")


def _name(load: Load) -> str:
    return load.link if load.direction == "ring" or "published" in load.link else f"{load.link}, {load.direction}"


def _draw_intervals(axes: Axes, settings: PlanSettings) -> None:
    intervals = sorted({max(1, round(factor * settings.interval_steps)) for factor in FACTORS})
    planned = [loads(settings.model_copy(update={"interval_steps": interval})) for interval in intervals]
    sites = [max(load.utilisation for load in found[:2]) for found in planned]
    broker = [max(load.utilisation for load in found[2:]) for found in planned]
    axes.plot(intervals, [100 * share for share in sites], color=COLOURS[0], marker="o", ms=4, label="each site")
    axes.plot(intervals, [100 * share for share in broker], color=COLOURS[1], marker="o", ms=4, label="the broker")
    axes.axhline(100 * settings.utilisation_max, color=GREY, lw=1, ls="--")
    axes.annotate(
        f"wanted: at most {100 * settings.utilisation_max:.0f} %", (1.0, 100 * settings.utilisation_max),
        xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha="right", color=GREY,
    )  # fmt: skip
    enough = needs(settings).interval_steps
    if intervals[0] <= enough <= intervals[-1]:
        axes.axvline(enough, color=GREY, lw=1, ls=":")
        axes.annotate(
            f"H = {enough} is enough", (enough, 1.0), xycoords=("data", "axes fraction"), xytext=(4, -10),
            textcoords="offset points", color=GREY,
        )  # fmt: skip
    axes.set_ylim(0, None)
    axes.set_xlabel("H, inner steps between two contributions to a fragment")
    axes.set_ylabel("fuller way of the link, %")
    axes.set_title("What H changes", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
