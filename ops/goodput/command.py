"""`isles simulate goodput`: what share of a fleet's time is spent training, before the machines are rented."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.goodput.published import CHIPS, LEARNERS
from isles.ops.goodput.scenario import CHIPS_MAX, LEARNERS_MAX, Scenario, System
from isles.ops.options import SettingOption, settings_command
from isles.proto.config import Stated, resolve
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from isles.ops.goodput.outcome import Outcome

SECTION: Final = "goodput"
"""What its settings are called in sentences; they stand in no file."""
SYSTEMS: Final[tuple[System, ...]] = ("data-parallel", "elastic", "decoupled")
UNITS: Final = {"": 1, "k": 1_000, "m": 1_000_000}
EVENTS_CHIPS_MAX: Final = 200_000
"""Of a fleet that is simulated event by event: a month of it has 16,000 failures, and a round each second."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "The fleet": (
        "days", "seed", "chip_failure_years", "failure_shape", "slice_chips", "return_minutes", "return_distribution",
        "places", "speed_spread", "step_jitter",
    ),
    "What a failure costs": (
        "restart_seconds", "scale_down_seconds", "scale_up_seconds", "return_wait_seconds", "learner_failure_days",
        "learner_outage_seconds", "checkpoint_seconds",
    ),
    "The rounds": (
        "step_seconds", "interval_steps", "num_fragments", "quorum", "overlap_steps", "grace_share",
        "grace_min_seconds", "grace_max_seconds", "has_cues", "message_seconds", "transfer_seconds", "sync_seconds",
        "learner_lease_seconds",
    ),
    "Broker and outer": (
        "broker_failure_days", "broker_outage_seconds", "outer_failure_days", "outer_outage_seconds",
    ),
}  # fmt: skip
"""Heading -> settings of `Scenario`; chips and learners are lists here."""

TEXT: Final = """Simulate how much of its time a fleet trains while its chips fail.

Three systems under the same failures: data parallel training that restarts after each one, elastic data parallel
training that goes on without the chips that are away, and decoupled learners, each of them an elastic group that
nobody waits for. Without options it makes the published table of Decoupled DiLoCo: five fleets of chips that fail
once a year.

With --rounds it also says how the learners' work is merged: how many of them a round takes, how many rounds there are
in an hour, after how long work is merged. --vary does that for several values of one setting.
"""


def build(name: str) -> click.Command:
    """The command."""
    options: list[click.Parameter] = [
        SettingOption(f"{SECTION}.{field}", Scenario, f"--{field.replace('_', '-')}", heading)
        for heading, fields in GROUPS.items()
        for field in fields
    ]
    return settings_command(name, TEXT, [*_own_options(), *options], _run, example="")


def _own_options() -> list[click.Parameter]:
    systems = click.Choice(SYSTEMS)
    return [
        click.Option(
            ["--chips"], type=Counts("chips", CHIPS_MAX), metavar="N,N",
            help="Fleets, as in 150k,2.4M.  [default: 150k,300k,600k,1.2M,2.4M]",
        ),
        click.Option(
            ["--learners"], type=Counts("learners", LEARNERS_MAX), metavar="N,N",
            help="How many learners share the chips of a decoupled run.  [default: 2,4,8,16]",
        ),
        click.Option(["--system", "systems"], type=systems, multiple=True, help="Only this one; repeat it."),
        click.Option(["--rounds", "has_rounds"], is_flag=True, help="Also say how the learners' work is merged."),
        click.Option(
            ["--vary"], metavar="SETTING=X,X", help="Values of one setting, such as quorum=1,4,8; implies --rounds."
        ),
        click.Option(
            ["--events", "is_by_events"], is_flag=True,
            help="Go through a small fleet event by event: slower by far, and what the rest is checked against.",
        ),
        click.Option(["--compare", "is_compared"], is_flag=True, help="Show the published figures beside."),
        click.Option(["--json", "is_json"], is_flag=True, help="Print a list of JSON objects instead of a table."),
        click.Option(
            ["--plot"], type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="Also draw it: a file that ends with .png or .svg.",
        ),
    ]  # fmt: skip


class Counts(click.ParamType[tuple[int, ...]]):
    """Whole numbers with a comma between them; `k` and `M` stand for thousands and millions."""

    name = "counts"

    def __init__(self, noun: str, count_max: int) -> None:
        self._noun = noun
        self._count_max = count_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        counts = [self._count(part) for part in str(value).split(",")]
        if any(count is None for count in counts):
            self.fail(
                f"{value!r:.80} is no list of {self._noun}: write 150k,2.4M or 8,16, up to {self._count_max:,}",
                param,
                ctx,
            )
        return tuple(dict.fromkeys(count for count in counts if count is not None))

    def _count(self, text: str) -> int | None:
        match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kM]?)\s*", text)
        if match is None:
            return None
        count = float(match[1]) * UNITS[match[2].lower()]
        return int(count) if count == int(count) and 1 <= count <= self._count_max else None


@dataclass(frozen=True)
class Wanted:
    """What was asked on the command line."""

    chips: tuple[int, ...]
    learners: tuple[int, ...]
    systems: tuple[System, ...]
    has_rounds: bool
    setting: str
    """The one that is varied; empty = none is."""
    values: tuple[str, ...]

    def runs(self) -> Iterator[tuple[str, System, int, int]]:
        """Value of the varied setting, system, learners, chips: what is simulated, in this order."""
        for value in self.values:
            for chips in self.chips:
                for system in self.systems:
                    for count in self.learners if system == "decoupled" else (1,):
                        yield value, system, count, chips


def _run(  # a parameter for each option
    stated: Sequence[Stated],
    chips: tuple[int, ...] | None,
    learners: tuple[int, ...] | None,
    systems: tuple[System, ...],
    has_rounds: bool,
    vary: str | None,
    is_by_events: bool,
    is_compared: bool,
    is_json: bool,
    plot: Path | None,
) -> int:
    from isles.ops.goodput import report
    from isles.ops.libraries import require

    require("numpy")
    if plot is not None:
        from isles.ops.plotting import check_plot

        check_plot(plot)
    setting, values = _varied(vary)
    wanted = Wanted(
        chips or ((CHIPS[3],) if setting else CHIPS),
        learners or ((8,) if setting else LEARNERS),
        systems or (("decoupled",) if setting else SYSTEMS),
        has_rounds or bool(setting),
        setting,
        values,
    )
    varied = list(_outcomes(wanted, stated, is_by_events=is_by_events))
    if is_json:
        click.echo(report.as_json(varied, setting))
    else:
        _print(varied, wanted, is_compared=is_compared)
    if plot is not None:
        from isles.ops.goodput.plot import draw

        draw(plot, varied, setting, is_compared=is_compared)
    return 0


def _varied(text: str | None) -> tuple[str, tuple[str, ...]]:
    """The setting and its values. Raises UsageError for one that does not exist."""
    if text is None:
        return "", ("",)
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    known = [field for fields in GROUPS.values() for field in fields]
    if not equals or name not in known or not all(part.strip() for part in values.split(",")):
        raise UsageError(f"--vary {text:.80}: write it as quorum=1,4,8; the settings are {', '.join(known)}")
    return name, tuple(part.strip() for part in values.split(","))


def _outcomes(wanted: Wanted, stated: Sequence[Stated], *, is_by_events: bool) -> Iterator[tuple[str, Outcome]]:
    """Value and outcome of each run, one after the other; systems on one fleet meet the same trace."""
    from isles.ops.goodput.fast import simulate
    from isles.ops.goodput.trace import Trace, draw
    from isles.ops.goodput.world import World

    runs = list(wanted.runs())
    if is_by_events and max(wanted.chips) > EVENTS_CHIPS_MAX:
        raise UsageError(
            f"--events goes through every event of a fleet of at most {EVENTS_CHIPS_MAX:,} chips: leave it out for more"
        )
    scenarios = [_scenario(stated, wanted.setting, *run) for run in runs]  # says what is wrong before it begins
    drawn: tuple[Scenario, Trace] | None = None
    with _progress(len(runs)) as advance:
        for (value, system, _, _), scenario in zip(runs, scenarios, strict=True):
            if drawn is None or drawn[0] != _fleet(scenario):
                try:
                    drawn = _fleet(scenario), draw(scenario)
                except ValueError as error:
                    raise UsageError(str(error)) from error
            if is_by_events:
                yield value, World(scenario, drawn[1], system).run()
            else:
                yield value, simulate(scenario, drawn[1], system, has_rounds=wanted.has_rounds)
            advance()


def _fleet(scenario: Scenario) -> Scenario:
    """What two scenarios with the same trace have in common: all but the learners, unless these die as a whole."""
    return scenario if scenario.learner_failure_days else scenario.model_copy(update={"learners": 1})


def _scenario(
    stated: Sequence[Stated], setting: str, value: str, system: System, learners: int, chips: int
) -> Scenario:
    given = [*stated]
    if setting:
        given.append(Stated(f"{SECTION}.{setting}", value, f"--vary {setting}={value}"))
    given += [
        Stated(f"{SECTION}.chips", str(chips), "--chips"),
        Stated(f"{SECTION}.learners", str(learners), "--learners"),
    ]
    scenario = resolve({SECTION: Scenario}, flags=given).section(SECTION, Scenario)
    if scenario.learners > scenario.chips:
        raise UsageError(f"{learners} learners cannot share {chips} chips: take fewer --learners or more --chips")
    return scenario.for_system(system)


def _print(varied: Sequence[tuple[str, Outcome]], wanted: Wanted, *, is_compared: bool) -> None:
    from isles.ops.goodput import report
    from isles.ops.wording import make_console

    console = make_console()
    outcomes = [one for _, one in varied]
    if wanted.has_rounds:
        console.print(report.rounds_table(varied, wanted.setting))
    else:
        console.print(report.goodput_table(outcomes, is_compared=is_compared))
    if is_compared:
        console.print(report.comparison_text(outcomes), soft_wrap=True)


@contextmanager
def _progress(count: int) -> Iterator[Callable[[], None]]:
    """A line that moves, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count)
        yield lambda: progress.advance(task)
