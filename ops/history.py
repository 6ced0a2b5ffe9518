"""`isles history`: the versions of a run, what each was made from, and what was rejected."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.options import Number, Patience
from isles.ops.reach import Reach, key_option
from isles.ops.wording import amount, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from isles.ops.tape import Tape
    from isles.proto.agreement import RunRecord
    from isles.proto.messages import Recipe, VersionInfo

LAST_SHOWN: Final = 10
PAGE_VERSIONS: Final = 64
REJECTIONS_SHOWN: Final = 10
TIMEOUT_SECONDS: Final = 30.0

TEXT: Final = """List the versions of a run: what each was made from, and how long that took.

RUN is a folder of `isles up`, or the store folder of a broker; it may be running or not. Of every fragment the newest
versions are shown, and what was rejected. `waited` is the time from the first contribution to the merge, `stale` how
many versions old a contribution's base was, on average. Of a version marked `tape` everything is kept that it takes to
recompute it (`isles replay`), of one marked `checkpoint` the whole state.
"""


def tape_options(command: click.Command) -> click.Command:
    """RUN, --broker, --key and --timeout, which every command that reads a tape has."""
    parameters: list[click.Parameter] = [
        click.Argument(["run"], required=False, type=click.Path(path_type=Path), metavar="[RUN]"),
        click.Option(
            ["--broker"], metavar="ADDRESS", help="Ask the broker at this address instead of naming a folder."
        ),
        key_option(),
        click.Option(
            ["--timeout"],
            default=TIMEOUT_SECONDS,
            type=Patience(),
            show_default=True,
            metavar="SECONDS",
            help="How long to wait for an answer of a broker.",
        ),
    ]
    command.params = [*parameters, *command.params]
    return command


def tape_reach(broker: str | None, key: Path | None) -> Reach | None:
    """The broker that was named instead of a folder."""
    return None if broker is None else Reach(broker, key)


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name, help=TEXT)
    @click.option("--fragment", type=Number(0), default=None, metavar="N", help="Only this fragment.")
    @click.option(
        "--last",
        type=Number(1),
        default=None,
        metavar="N",
        help=f"Only the newest N versions of each fragment.  [default: {LAST_SHOWN}; with --json all]",
    )
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of tables.")
    def history(
        run: Path | None,
        broker: str | None,
        key: Path | None,
        timeout: float,
        fragment: int | None,
        last: int | None,
        is_json: bool,
    ) -> int:
        from isles.ops.rejections import find_rejections
        from isles.ops.tape import open_tape

        with open_tape(run, tape_reach(broker, key), timeout) as tape:
            shown = chosen_fragments(tape, fragment)
            versions = {one: newest(tape, one, last if last or is_json else LAST_SHOWN) for one in shown}
            num_rejected, rejections = tape.num_rejected, find_rejections(tape, run)
        described = {one: [describe(tape.record, info) for info in infos] for one, infos in versions.items()}
        found = as_json(tape.record, described, num_rejected, rejections)
        if is_json:
            click.echo(json.dumps(found, indent=2))
        else:
            from isles.ops.wording import make_console

            console = make_console()
            for part in render(found, tape.place):
                console.print(part)
        return 0

    return tape_options(history)


def chosen_fragments(tape: Tape, fragment: int | None) -> list[int]:
    """All fragments of the run, or the one that was asked for. Raises UsageError if there is no such fragment."""
    known = [head.fragment for head in tape.heads()]
    if fragment is not None and fragment not in known:
        raise click.UsageError(f"there is no fragment {fragment}: the run {tape.record.run} has 0..{len(known) - 1}")
    return known if fragment is None else [fragment]


def newest(tape: Tape, fragment: int, num_max: int | None) -> list[VersionInfo]:
    """The newest versions of a fragment, oldest first; None = all."""
    head = next(head.version for head in tape.heads() if head.fragment == fragment)
    first = 0 if num_max is None else max(0, head - num_max + 1)
    return list(deque(pages(tape, fragment, first), num_max))


def pages(tape: Tape, fragment: int, first: int) -> Iterator[VersionInfo]:
    """All versions of a fragment from `first` on."""
    while page := tape.versions(fragment, first, PAGE_VERSIONS):
        yield from page
        first += len(page)


def describe(record: RunRecord, info: VersionInfo) -> dict[str, Any]:
    """One version as plain values; times in seconds."""
    recipe = info.recipe
    ingredients = recipe.ingredients if recipe is not None else ()
    behind = [max(0, info.version - 1 - one.base_version) for one in ingredients]
    return {
        "fragment": info.fragment,
        "version": info.version,
        "committed_unix": info.committed_unix,
        "participants": [one.id.learner for one in ingredients],
        "clipped": {one.id.learner: one.clip for one in ingredients if one.clip < 1},
        "tokens": sum(one.tokens for one in ingredients),
        "tokens_total": info.tokens_total,
        "fraction": None if recipe is None else recipe.fraction,
        "waited_seconds": None if recipe is None else recipe.waited_seconds,
        "grace_seconds": None if recipe is None else recipe.grace_seconds,
        "staleness": sum(behind) / len(behind) if behind else None,
        "is_checkpoint": info.parameters is not None,
        "is_on_tape": info.update is not None or info.version == 0,
        "settings_epoch": None if recipe is None else record.settings_epoch_of(recipe.settings_digest),
        "merge_rule": None if recipe is None else recipe.merge_rule,
        "learning_rate": None if recipe is None else _outer_rate(record, recipe),
        "epoch": info.epoch,
        "parameters_sha256": info.parameters_sha256,
        "optimizer_sha256": info.optimizer_sha256,
    }


def _outer_rate(record: RunRecord, recipe: Recipe) -> float | None:
    """The outer learning rate of a version's step; a recipe leaves out the constant one of its settings."""
    if recipe.learning_rate is not None:
        return recipe.learning_rate
    sync = record.sync_of(recipe.settings_digest)
    return None if sync is None else sync.outer_learning_rate


def as_json(
    record: RunRecord,
    versions: Mapping[int, list[dict[str, Any]]],
    num_rejected: int,
    rejections: list[dict[str, Any]],
) -> dict[str, Any]:
    """Everything that is shown, as plain values."""
    return {
        "run": record.run,
        "settings": [sync.model_dump(mode="json") for sync in record.every_sync],
        "fragments": [{"fragment": fragment, "versions": infos} for fragment, infos in versions.items()],
        "num_rejected": num_rejected,
        "rejections": rejections,
    }


# ---------------------------------------------------------------------------------------------------- as a person reads


def render(found: Mapping[str, Any], place: str) -> list[RenderableType]:
    """The tables, for a terminal of any width from 80 columns on."""
    from rich.text import Text

    parts: list[RenderableType] = [Text.assemble((f"run {found['run']}", "bold"), f" at {place}")]
    times = [_local(one["committed_unix"]) for fragment in found["fragments"] for one in fragment["versions"]]
    known = [time for time in times if time is not None]
    parts += [Text(line) for line in time_lines(known)]
    has_days = len({time.date() for time in known}) > 1
    has_changed = len(found["settings"]) > 1
    parts += [Text(line) for line in settings_lines(found["settings"])]
    for fragment in found["fragments"]:
        versions = fragment["versions"]
        parts += [
            Text(),
            Text(f"fragment {fragment['fragment']}", style="bold"),
            _table(versions, has_changed, has_days),
        ]
    parts += [Text(line) for line in clip_lines(found["fragments"])]
    parts += [Text(line) for line in rejection_lines(found["num_rejected"], found["rejections"])]
    return parts


def time_lines(times: Sequence[datetime]) -> Iterator[str]:
    """In which zone the times are told, and of which day; the days stand in the tables if there are several."""
    if not times:
        return
    zones = " and ".join(sorted({time.tzname() or "" for time in times}))
    days = sorted({time.date() for time in times})
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    yield f"{when}, times in {zones}"


def settings_lines(settings: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each change of the settings."""
    for epoch, (old, new) in enumerate(pairwise(settings), start=1):
        changes = [f"{name} {old.get(name)} -> {value}" for name, value in new.items() if old.get(name) != value]
        yield f"settings epoch {epoch}: {', '.join(changes)}"


def _table(versions: Iterable[dict[str, Any]], has_changed: bool, has_days: bool) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, expand=True)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("participants", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("tokens", "fraction", "waited", "grace", "stale"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kept", no_wrap=True)
    shown_epoch: int | None = None
    shown_day: date | None = None
    for one in versions:
        time = _local(one["committed_unix"])
        if has_days and time is not None and time.date() != shown_day:
            shown_day = time.date()
            table.add_row("", "", f"[cyan]{shown_day}[/]")
        epoch = one["settings_epoch"]
        if has_changed and epoch is not None and epoch != shown_epoch:
            shown_epoch = epoch
            table.add_row("", "", f"[yellow]settings {epoch}[/]")
        table.add_row(*_cells(one))
    return table


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    kept = "[green]checkpoint[/]" if one["is_checkpoint"] else "tape" if one["is_on_tape"] else ""
    time = _local(one["committed_unix"])
    clock = "" if time is None else f"{time:%H:%M:%S}"
    if one["fraction"] is None:
        return (str(one["version"]), clock, "[dim]beginning[/]", "", "", "", "", "", kept)
    return (
        str(one["version"]),
        clock,
        _names(one["participants"]),
        amount(one["tokens"]),
        f"{one['fraction']:.2f}",
        seconds_text(one["waited_seconds"]),
        seconds_text(one["grace_seconds"]),
        f"{one['staleness']:.1f}",
        kept,
    )


def _names(learners: list[str]) -> str:
    names = " ".join(learners)
    return names if len(learners) == 1 else f"{len(learners)}: {names}"


def _local(unix: float) -> datetime | None:
    """In the zone of whoever reads it; None if the time is not known."""
    return datetime.fromtimestamp(unix, UTC).astimezone() if unix else None


def clip_lines(fragments: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Whose contributions to the versions that are shown were merged scaled down, and how often."""
    clipped = Counter(
        learner for fragment in fragments for version in fragment["versions"] for learner in version["clipped"]
    )
    if clipped:
        yield ""
        times = ", ".join(f"{learner} {count}" for learner, count in sorted(clipped.items()))
        yield f"Merged scaled down, as they went much farther than usual, contributions of: {times}"


def rejection_lines(num_rejected: int, rejections: list[dict[str, Any]]) -> Iterator[str]:
    """What was rejected, and what is no longer known of it."""
    yield ""
    if not num_rejected:
        yield "No contribution was rejected."
        return
    shown = rejections[-REJECTIONS_SHOWN:]
    what = "contribution was" if num_rejected == 1 else "contributions were"
    if len(shown) == num_rejected:
        yield f"{num_rejected} {what} rejected:"
    elif shown:
        yield f"{num_rejected} {what} rejected; the last ones that are known:"
    else:
        yield f"{num_rejected} {what} rejected; the broker only counts them, its log has the reasons."
    for one in shown:
        yield f"  {one['learner']}, fragment {one['fragment']}, number {one['number']}: {one['reason']}"
