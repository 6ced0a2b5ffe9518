"""`isles status`: what a broker knows of its run, as tables or as JSON. Exit code 0 exactly if it answered."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.concerns import concern_lines
from isles.ops.options import Patience
from isles.ops.reach import find_reach, key_option
from isles.ops.wording import amount, bytes_text, counted, percent, rate, seconds_text
from isles.proto.transport.address import DEFAULT_BROKER

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from isles.proto.messages import Status

FIGURES_SHOWN: Final = 5


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name)
    @click.option("--broker", default=None, metavar="ADDRESS", help=f"Whom to ask.  [default: {DEFAULT_BROKER}]")
    @click.option(
        "--run-dir",
        default=None,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Ask the broker of the `isles up` that is running in this folder.",
    )
    @click.option(
        "--timeout", default=5.0, type=Patience(), show_default=True, metavar="SECONDS", help="How long to wait."
    )
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of tables.")
    def status(broker: str | None, key: Path | None, run_dir: Path | None, timeout: float, is_json: bool) -> int:
        """Show what a broker knows of its run.

        What it warns of, learners by region with when they were last seen, relays, fragments with their versions,
        leases, pending contributions, totals, and the newest figures. Ends with 0 if the broker answered within the
        timeout, else with 5.
        """
        from isles.ops.watch import watch

        reach = find_reach(broker, key, run_dir)
        seen = watch(reach, wants_newest=True)
        try:
            answer = seen.wait(timeout, address=reach.address)
        finally:
            seen.close()
        if is_json:
            click.echo(json.dumps(as_json(answer, time.time()), indent=2))
        else:
            from isles.ops.wording import make_console

            console = make_console()
            for part in render(answer, time.time(), reach.address):
                console.print(part)
        return 0

    status.params.insert(1, key_option())
    return status


def as_json(status: Status, unix: float) -> dict[str, Any]:
    """The status as plain values; ages in seconds, learners grouped by region."""
    regions: dict[str, list[dict[str, Any]]] = {}
    for learner in status.learners:
        entry = learner.model_dump(mode="json", exclude={"region"})
        entry["last_seen_seconds"] = round(max(0.0, unix - learner.last_seen_unix), 3)
        regions.setdefault(learner.region, []).append(entry)
    fragments = [
        {
            "fragment": fragment.fragment,
            "version": fragment.version,
            "tokens_total": fragment.tokens_total,
            "num_participants": fragment.num_participants,
            "epoch": fragment.epoch,
            "committed_unix": fragment.committed_unix,
            "parameters_sha256": fragment.parameters_sha256,
            "num_pending": status.num_pending.get(fragment.fragment, 0),
        }
        for fragment in status.fragments
    ]
    return {
        "run": status.run,
        "progress": status.progress,
        "num_parameters": status.num_parameters,
        "settings_epoch": status.settings_epoch,
        "broker_incarnation": status.broker_incarnation,
        "uptime_seconds": status.uptime_seconds,
        "regions": regions,
        "relays": [
            {
                "relay": one.relay,
                "is_live": one.is_live,
                "last_seen_seconds": round(max(0.0, unix - one.last_seen_unix), 3),
                **one.facts.model_dump(mode="json"),
            }
            for one in status.relays
        ],
        "fragments": fragments,
        "leases": [lease.model_dump(mode="json") for lease in status.leases],
        "reports": [report.model_dump(mode="json") for report in status.reports],
        "totals": status.totals.model_dump(mode="json"),
        "warnings": [warning.model_dump(mode="json") for warning in status.warnings],
        "num_required": status.num_required,
        "store": None if status.store is None else status.store.model_dump(mode="json"),
        "version": status.version,
    }


def render(status: Status, unix: float, address: str) -> list[RenderableType]:
    """The status as a person reads it."""
    from rich.text import Text

    if not status.run:
        return [Text(f"The broker at {address} has no run yet: the first worker starts one.")]
    totals = status.totals
    live = sum(learner.is_live for learner in status.learners)
    head = Text()
    head.append(f"run {status.run}", style="bold")
    head.append(f" at {address}\n")
    head.append(
        f"{percent(status.progress)} done: {amount(totals.tokens_merged)} of {amount(totals.tokens_produced)} tokens "
        f"merged in {counted(totals.rounds_committed, 'round')}\n"
        f"{live} of {counted(len(status.learners), 'learner')} live, {amount(status.num_parameters)} parameters, "
        f"broker up for {seconds_text(status.uptime_seconds)}\n"
        f"{_settings_line(status.settings_epoch)}"
        f"{counted(totals.merged, 'contribution')} merged, {sum(status.num_pending.values())} pending, "
        f"{totals.rejected} rejected, {totals.expired} expired\n"
        f"{bytes_text(totals.bytes_up)} up, {bytes_text(totals.bytes_down)} down"
    )
    concerns = [Text(line, style="yellow") for line in concern_lines(status)]
    relays = [_relay_table(status, unix)] if status.relays else []
    tables = [_learner_table(status, unix), *relays, _fragment_table(status, unix)]
    return [head, *concerns, *tables, *_figures(status, unix)]


def _settings_line(epoch: int) -> str:
    times = "once" if epoch == 1 else f"{epoch} times"
    return f"settings were changed {times}; `isles history` says how\n" if epoch else ""


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _learner_table(status: Status, unix: float) -> Table:
    table = _table(("region", "learner", "state"), ("steps", "tokens", "tokens/s", "s/step", "shards", "last seen"))
    for learner in sorted(status.learners, key=lambda one: (one.region, one.learner)):
        table.add_row(
            learner.region,
            learner.learner,
            "[green]live[/]" if learner.is_live else "[dim]gone[/]",
            amount(learner.steps),
            amount(learner.tokens),
            rate(learner.tokens_per_second),
            f"{learner.step_seconds:.3g}",
            str(learner.num_shards),
            seconds_text(max(0.0, unix - learner.last_seen_unix)),
        )
    return table


def _relay_table(status: Status, unix: float) -> Table:
    table = _table(("region", "relay", "state"), ("clients", "link", "waiting", "cache", "last seen"))
    for one in status.relays:
        facts = one.facts
        table.add_row(
            facts.region,
            one.relay,
            "[green]live[/]" if one.is_live else "[dim]gone[/]",
            amount(facts.num_clients),
            f"{1000 * facts.round_trip_seconds:.0f} ms" if facts.round_trip_seconds else "",
            f"{amount(facts.num_waiting)}, {bytes_text(facts.waiting_bytes)}" if facts.num_waiting else "0",
            bytes_text(facts.cache_bytes),
            seconds_text(max(0.0, unix - one.last_seen_unix)),
        )
    return table


def _fragment_table(status: Status, unix: float) -> Table:
    holders = {lease.fragment: lease for lease in status.leases}
    table = _table(("fragment",), ("version", "tokens", "merged", "pending", "committed"))
    table.add_column("outer", no_wrap=True)
    table.add_column("epoch", justify="right")
    for fragment in status.fragments:
        lease = holders.get(fragment.fragment)
        is_held = lease is not None and lease.expires_seconds >= 0
        table.add_row(
            str(fragment.fragment),
            str(fragment.version),
            amount(fragment.tokens_total),
            str(fragment.num_participants),
            str(status.num_pending.get(fragment.fragment, 0)),
            seconds_text(max(0.0, unix - fragment.committed_unix)) if fragment.committed_unix else "",
            "" if lease is None else lease.holder if is_held else f"[dim]{lease.holder}, expired[/]",
            "" if lease is None else str(lease.epoch),
        )
    return table


def _figures(status: Status, unix: float) -> list[RenderableType]:
    from rich.text import Text

    lines: list[RenderableType] = []
    for report in sorted(status.reports, key=lambda one: one.seq)[-FIGURES_SHOWN:]:
        age = seconds_text(max(0.0, unix - report.unix))
        lines.append(
            Text(f"{report.name} {report.value:.4f} at {amount(report.tokens)} tokens, by {report.reporter}, {age} ago")
        )
    return lines
