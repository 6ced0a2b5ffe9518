"""Figures that commands draw into a file: PNG or SVG, by matplotlib, which only the extra `plot` brings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES: Final = (".png", ".svg")
DOTS_PER_INCH: Final = 160
"""Of a PNG: 1,280 points on the 8 inches of a figure, sharp on a page and still a small file."""

COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which also people tell apart who do not see all colours."""
GREY: Final = "#666666"

STYLE: Final[Any] = {
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#333333",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "svg.fonttype": "none",
    "svg.hashsalt": "isles",
}
"""Letters of an SVG stay letters, and the same figure makes the same file."""


def check_plot(path: Path) -> None:
    """Whether a figure can be drawn there, before anything is computed. Raises UsageError that says what to do."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: a figure is drawn as PNG or SVG, so name a file that ends with .png or .svg")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed here: install isles with its extra, as in "
            "`pip install 'isles[plot]'`, or leave --plot out"
        )


def new_figure(num_axes: int, *, width: float = 8.0, height: float = 4.8) -> tuple[Figure, list[Axes]]:
    """An empty figure with axes side by side, sizes in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, num_axes, squeeze=False)
    return figure, list(axes[0])


def save(figure: Figure, path: Path) -> None:
    """Writes the figure. Raises UsageError if the file cannot be written."""
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
    try:
        with mpl.rc_context(STYLE):
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata=metadata)
    except OSError as error:
        raise UsageError(f"the figure {path} cannot be written: {error.strerror or error}") from error
