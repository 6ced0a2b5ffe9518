"""`isles replay`: recomputes the versions of a run from its tape, and says whether they come out bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.history import chosen_fragments, tape_options, tape_reach
from isles.ops.options import Number
from isles.proto.errors import RemoteDataError, StoreError, UsageError

if TYPE_CHECKING:
    from isles.ops.tape import Tape
    from isles.outer.replay import Kind, Replayed, Stretch

EXIT_CODES: Final[dict[Kind, int]] = {"differs": 1, "unreadable": StoreError.exit_code, "outrun": 8}
"""What each kind of difference ends the command with; the first one that any fragment has decides."""
SENTENCES: Final[dict[Kind, str]] = {
    "differs": "version {version} differs: {text}",
    "unreadable": "version {version} cannot be recomputed: {text}",
    "outrun": "version {version} was not reached: {text}",
}

TEXT: Final = """Recompute the versions of a run and compare them with what was committed.

RUN is a folder of `isles up`, or the store folder of a broker; it may be running or not. Every version is made again
from the oldest checkpoint that is kept: from its recipe and the contributions it names. Update, parameters, momentum
and remainder must come out bit by bit. Ends with 0 if they do. If not, the first version that does not is named, and
the exit code is 1 where it differs from what was committed, 6 where something on tape is missing or damaged, and 8
where a running broker let go of it before it was reached.

How far back this goes is decided by broker.versions_kept; `isles up --keep-tape` keeps everything. Equal bits are
promised on the build of isles, numpy and zstd that made the run.
"""


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name, help=TEXT)
    @click.option("--fragment", type=Number(0), default=None, metavar="N", help="Only this fragment.")
    @click.option("--to", type=Number(0), default=None, metavar="VERSION", help="Stop at this version.")
    @click.option("--json", "is_json", is_flag=True, help="Print one JSON object instead of sentences.")
    def replay(
        run: Path | None,
        broker: str | None,
        key: Path | None,
        timeout: float,
        fragment: int | None,
        to: int | None,
        is_json: bool,
    ) -> int:
        from isles.ops.tape import open_tape

        with open_tape(run, tape_reach(broker, key), timeout) as tape:
            results = replay_run(tape, chosen_fragments(tape, fragment), to, is_silent=is_json)
        is_equal = all(one.difference is None for one in results)
        if is_json:
            found = {"run": tape.record.run, "is_bit_equal": is_equal, "fragments": [as_json(one) for one in results]}
            click.echo(json.dumps(found, indent=2))
        else:
            for one in results:
                click.echo(sentence(one))
        return exit_code(results)

    return tape_options(replay)


def replay_run(tape: Tape, fragments: Sequence[int], to_version: int | None, *, is_silent: bool) -> list[Replayed]:
    """Recomputes what is on tape of some fragments. Raises UsageError if `to_version` is not among it."""
    from isles.outer.replay import Difference, Replay, Replayed, find_stretch

    stretches: dict[int, Stretch] = {}
    results: dict[int, Replayed] = {}
    for fragment in fragments:
        try:
            stretches[fragment] = find_stretch(tape, fragment, to_version=to_version)
        except RemoteDataError as error:
            results[fragment] = Replayed(fragment, 0, 0, Difference(0, "unreadable", str(error)))
    newest = max((stretch.last for stretch in stretches.values()), default=0)
    if to_version is not None and stretches and to_version > newest:
        raise UsageError(f"there is no version {to_version} yet: the newest is {newest}")
    with progress(sum(one.num_versions for one in stretches.values()), is_silent=is_silent) as on_version:
        replay = Replay(tape, tape.record, on_version)
        for fragment, stretch in stretches.items():
            results[fragment] = replay.run(stretch)
    return [results[fragment] for fragment in fragments]


@contextmanager
def progress(total: int, *, is_silent: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows how many versions have been recomputed, where somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if is_silent or not console.is_terminal:
        yield lambda _fragment, _version: None
        return
    columns = (TextColumn("fragment {task.fields[fragment]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replay", total=total, fragment=0)
        yield lambda fragment, _version: bar.update(task, advance=1, fragment=fragment)


def sentence(result: Replayed) -> str:
    """What came of one fragment."""
    name = f"fragment {result.fragment}"
    if result.difference is not None:
        equal = f"versions {result.first}..{result.last} are bit-equal, " if result.num_versions else ""
        difference = result.difference
        if difference.kind == "unreadable" and not difference.version:
            return f"{name}: cannot be replayed: {difference.text}"
        return f"{name}: {equal}{SENTENCES[difference.kind].format(version=difference.version, text=difference.text)}"
    if not result.num_versions:
        return f"{name}: nothing to recompute after version {result.checkpoint}"
    return f"{name}: versions {result.first}..{result.last} recomputed, bit-equal"


def exit_code(results: Sequence[Replayed]) -> int:
    """What the command ends with: 0 if all fragments came out bit-equal."""
    found = {one.difference.kind for one in results if one.difference is not None}
    return next((code for kind, code in EXIT_CODES.items() if kind in found), 0)


def as_json(result: Replayed) -> dict[str, Any]:
    """The same as plain values."""
    difference = result.difference
    return {
        "fragment": result.fragment,
        "checkpoint": result.checkpoint,
        "last": result.last,
        "num_versions": result.num_versions,
        "difference": None if difference is None else asdict(difference),
    }
