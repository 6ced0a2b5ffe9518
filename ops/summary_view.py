"""What came of a run, as a person reads it at its end."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from isles.ops.summary import RelayLink, Summary
from isles.ops.wording import amount, bytes_text, fragments_text, loss_unit, percent, seconds_text, sparkline

SPARK_WIDTH: Final = 24

HEADLINES: Final = {"finished": "Finished", "interrupted": "Interrupted", "failed": "Failed"}
STYLES: Final = {"finished": "bold green", "interrupted": "bold yellow", "failed": "bold red"}


def render_summary(summary: Summary) -> RenderableType:
    """What came of a run."""
    head = Text.assemble(
        (HEADLINES[summary.status], STYLES[summary.status]),
        f" after {seconds_text(summary.wall_seconds)}",
        f" in {summary.starts} starts" if summary.starts > 1 else "",
        f": {summary.text}." if summary.text else ".",
    )
    if not summary.num_parameters:
        return Group(Text(), head, Text())
    return Group(Text(), head, Text(), _summary_grid(summary), Text())


def _summary_grid(summary: Summary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    if summary.val_loss_last is not None:
        first = "unknown" if summary.val_loss_first is None else f"{summary.val_loss_first:.3f}"
        loss = Text.assemble(f"{first} → ", (f"{summary.val_loss_last:.3f}", "bold"), f"{loss_unit(summary.task)}  ")
        loss.append(sparkline([loss.value for loss in summary.losses], SPARK_WIDTH), style="cyan")
        grid.add_row("  validation loss", loss)
    share = summary.tokens_merged / summary.tokens_produced if summary.tokens_produced else 0.0
    grid.add_row(
        "  tokens",
        f"{amount(summary.tokens_merged)} merged of {amount(summary.tokens_produced)} produced ({percent(share)})",
    )
    grid.add_row(
        "  rounds",
        f"{summary.rounds_committed} of {summary.participation_mean:.1f} contributions, "
        f"fraction {summary.fraction_mean:.2f}, staleness {summary.staleness_mean:.2f}",
    )
    fates = summary.contributions
    grid.add_row("  contributions", f"{fates.merged} merged, {fates.rejected} rejected, {fates.expired} expired")
    grid.add_row(
        "  wire",
        f"{summary.bits_per_parameter_up:.2f} bits per parameter up, {summary.bits_per_parameter_down:.2f} down",
    )
    grid.add_row(
        "  bytes",
        f"{bytes_text(summary.bytes_up)} up, {bytes_text(summary.bytes_down)} down",
    )
    if summary.relays:
        grid.add_row("  relays", "\n".join(_link(relay) for relay in summary.relays))
    fragments = fragments_text(summary.num_fragments, has_buffers=summary.has_buffers)
    grid.add_row("  model", f"{amount(summary.num_parameters)} parameters in {fragments}")
    grid.add_row("  restarts", _restarts(summary))
    return grid


def _restarts(summary: Summary) -> str:
    if not summary.restarts:
        return "none"
    named = ", ".join(f"{name} {count}" for name, count in summary.restarts_by_process.items())
    return f"{summary.restarts} ({named})"


def _link(relay: RelayLink) -> str:
    waiting = f", {relay.num_waiting} not handed over" if relay.num_waiting else ""
    return f"{relay.relay} carried {bytes_text(relay.bytes_up)} up, {bytes_text(relay.bytes_down)} down{waiting}"
