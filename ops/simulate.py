"""`isles simulate`: simulated worlds.

`faults` makes run after run, to which everything happens that may happen, each replayed by its seed; `goodput` has a
room of its own, `isles.ops.goodput`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.goodput import command as goodput
from isles.ops.options import Number

if TYPE_CHECKING:
    from isles.ops.simulation.fault_world import Report

SEEDS: Final = 1000
JOBS: Final = 2
GIT_SECONDS_MAX: Final = 5.0
FAILURES_SHOWN: Final = 10
"""Seeds of which the command says what went wrong; of more only their number."""
LINE_SECONDS: Final = 10.0
"""Between two lines that say how far it is, in a file: for the default number of seeds a few dozen."""

TEXT: Final = """Simulate runs in which anything may vanish, and check that nothing is lost.

Each seed is one run of 8 learners in 3 regions, 2 outers and a broker: their real state machines, store and protocol,
around a network, disks and clocks that are simulated. Messages are lost, doubled, overtaken, late; links are cut, one
way or both; processes are killed, frozen, replaced; the broker's machine loses its power while it writes. After each
step the books are compared with the laws that must hold; at the end all faults heal, and the run must go on and drain.

A seed that fails is printed with the command that replays it: the same code makes the same history of the same seed.
Exits with 1 if any seed fails.
"""


def build(name: str) -> click.Command:
    """The command."""
    group = click.Group(name, help="Try the state machines, and plan a fleet, in simulated worlds.")
    group.add_command(_faults_command())
    group.add_command(goodput.build("goodput"))
    return group


def _faults_command() -> click.Command:
    def _run(**options: Any) -> int:
        return run(Options(**options))

    return click.Command(
        "faults",
        short_help="Simulate runs in which anything may vanish.",
        callback=_run,
        help=TEXT,
        params=[
            click.Option(
                ["--seeds"],
                type=Number(1),
                default=SEEDS,
                show_default=True,
                metavar="N",
                help="How many seeds to run.",
            ),
            click.Option(
                ["--first"],
                type=Number(0),
                default=0,
                show_default=True,
                metavar="N",
                help="The first of them.",
            ),
            click.Option(["--seed"], type=Number(0), metavar="N", help="Run only this one."),
            click.Option(
                ["--jobs"],
                type=Number(1),
                default=JOBS,
                show_default=True,
                metavar="N",
                help="Processes that run seeds at the same time.",
            ),
            click.Option(
                ["--without"],
                metavar="RULE",
                default="",
                help="Do without one rule of the system, to see that it is needed; an unknown one lists them all.",
            ),
            click.Option(["--trace"], is_flag=True, help="Print the history of the one seed, a line per event."),
            click.Option(["--json"], is_flag=True, help="Print a line of JSON per seed."),
        ],
    )


@dataclass(frozen=True)
class Options:
    """Of the command."""

    seeds: int = SEEDS
    first: int = 0
    seed: int | None = None
    jobs: int = 1
    without: str = ""
    trace: bool = False
    json: bool = False


@dataclass
class _Tally:
    """What was seen so far."""

    num_seeds: int = 0
    num_versions: int = 0
    num_faults: int = 0
    num_deliveries: int = 0
    failures: list[Report] = field(default_factory=list)

    def add(self, report: Report) -> None:
        self.num_seeds += 1
        self.num_versions += report.num_versions
        self.num_faults += report.num_faults
        self.num_deliveries += report.num_deliveries
        if report.fault:
            self.failures.append(report)

    def words(self, seconds: float) -> str:
        return (
            f"{self.num_seeds:,} seeds in {seconds:.1f} s: {self.num_versions:,} versions, {self.num_faults:,} faults, "
            f"{self.num_deliveries:,} deliveries; {len(self.failures)} failed"
        )


def run(options: Options) -> int:
    """Runs the seeds; 0 if nothing was wrong with any of them."""
    from isles.ops.simulation.mutations import MUTATIONS

    if options.without and options.without not in MUTATIONS:
        raise click.BadParameter(f"no such rule; there are {', '.join(MUTATIONS)}", param_hint="--without")
    if options.trace:
        if options.seed is None:
            raise click.UsageError("--trace prints the history of one run: name its --seed")
        return _trace(options)
    return _explore(options)


def _trace(options: Options) -> int:
    from contextlib import nullcontext

    from isles.ops.simulation.fault_world import FaultWorld
    from isles.ops.simulation.mutations import without

    assert options.seed is not None
    with without(options.without) if options.without else nullcontext():
        world = FaultWorld(options.seed, note=click.echo)
        click.echo(str(world.drawn))
        report = world.run()
    _print_report(report, options)
    return int(bool(report.fault))


def _explore(options: Options) -> int:
    from isles.ops.simulation.exploration import explore

    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    tally, began = _Tally(), time.monotonic()
    num_jobs = min(options.jobs, len(seeds))
    with _progress(len(seeds), began, is_shown=not options.json) as advance:
        for report in explore(seeds, num_jobs=num_jobs, missing_rule=options.without):
            tally.add(report)
            if options.json:
                click.echo(json.dumps(asdict(report)))
            elif report.fault and len(tally.failures) <= FAILURES_SHOWN:
                _print_report(report, options)
            advance(tally)
    if not options.json:
        if options.seed is not None and not tally.failures:
            _print_report(report, options)
        click.echo(tally.words(time.monotonic() - began))
    return int(bool(tally.failures))


def _print_report(report: Report, options: Options) -> None:
    done = (
        f"{report.num_versions} versions, {report.num_faults} faults, {report.num_deliveries} deliveries in "
        f"{report.simulated_seconds:.0f} simulated seconds; history {report.digest[:16]}"
    )
    if not report.fault:
        click.echo(f"seed {report.seed}: {done}")
        return
    rule = f" --without {options.without}" if options.without else ""
    click.echo(f"seed {report.seed} of {code_version()} fails after {done}:")
    click.echo(f"  {report.fault}")
    click.echo(f"  replay it with: isles simulate faults --seed {report.seed}{rule} --trace")


def code_version() -> str:
    """Which isles this is, down to the commit if it runs from a checkout."""
    text = f"isles {version('isles')}"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS_MAX, check=True)
        text += f" ({found.stdout.strip()})"
    return text


@contextmanager
def _progress(num_seeds: int, began: float, *, is_shown: bool) -> Iterator[Callable[[_Tally], None]]:
    """A line that moves on a terminal, and one after the other in a file."""
    advances: list[Callable[[_Tally], None]] = []
    with ExitStack() as stack:
        if is_shown and sys.stderr.isatty():
            advances.append(stack.enter_context(_bar(num_seeds)))
        if is_shown and not sys.stdout.isatty():
            advances.append(_lines(began))

        def advance(tally: _Tally) -> None:
            for one in advances:
                one(tally)

        yield advance


def _lines(began: float) -> Callable[[_Tally], None]:
    said_at = began

    def advance(tally: _Tally) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now >= said_at + LINE_SECONDS:
            said_at = now
            click.echo(f"so far {tally.words(now - began)}")

    return advance


@contextmanager
def _bar(num_seeds: int) -> Iterator[Callable[[_Tally], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_seeds, failed=0)
        yield lambda tally: progress.update(task, completed=tally.num_seeds, failed=len(tally.failures))
