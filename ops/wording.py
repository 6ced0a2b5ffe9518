"""Numbers as a person reads them, and where they are printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from isles.workers.task import BUILT_IN

if TYPE_CHECKING:
    from rich.console import Console

BARS: Final = "▁▂▃▄▅▆▇█"
FILE_WIDTH: Final = 120
"""Columns of a table that goes into a file or a pipe."""


def make_console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for any table where there is none."""
    from rich.console import Console

    class PatientConsole(Console):
        """Goes on in silence when whoever read it has left: `isles up | head` is no reason to end a run."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    console = PatientConsole()
    return console if console.is_terminal else PatientConsole(width=FILE_WIDTH)


def amount(value: float) -> str:
    """A count: `950`, `12,345`, `1.23 M`, `4.56 G`."""
    if value < 100_000:
        return f"{value:,.0f}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f} {letter}"
    return f"{value / 1e3:.0f} k"


def counted(count: int, noun: str) -> str:
    """A number of things: `1 round`, `12,345 rounds`."""
    return f"{amount(count)} {noun}" if count == 1 else f"{amount(count)} {noun}s"


def fragments_text(count: int, *, has_buffers: bool) -> str:
    """What a model is split into: `4 fragments`, and its buffers if any are merged."""
    return counted(count, "fragment") + (" and buffers" if has_buffers else "")


def loss_unit(task: str) -> str:
    """The unit of a task's validation loss, with a space before it; a task of one's own has not said any."""
    return " nats per byte" if task == BUILT_IN else ""


def rate(value: float) -> str:
    """A rate: three digits or whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bytes_text(value: float) -> str:
    """A number of bytes, in the units that disks are sold in: `512 B`, `1.5 MB`."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def percent(share: float) -> str:
    """A share in [0, 1]; 100 % only if it is all."""
    return f"{min(share * 100, 99.9):.1f} %" if share < 1 else "100 %"


def seconds_text(seconds: float) -> str:
    """A duration: `4.2 s`, `38 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def sparkline(values: Sequence[float], width: int) -> str:
    """A line of at most `width` bars, the lowest value lowest; heights go with the square root above the lowest.

    So the end of a falling curve, which is flat against its beginning, still shows its slope.
    """
    if not values or width < 1:
        return ""
    if len(values) > width:
        step = (len(values) - 1) / max(1, width - 1)
        values = [values[round(n * step)] for n in range(width)]
    low, high = min(values), max(values)
    if high <= low:
        return BARS[0] * len(values)
    return "".join(BARS[round(((value - low) / (high - low)) ** 0.5 * (len(BARS) - 1))] for value in values)
