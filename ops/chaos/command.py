"""`isles chaos`: makes faults happen to a run, and says what they did to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.chaos.options import random_options, read_plan
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from isles.ops.run_folder import RunFolder
    from isles.ops.settings import UpSettings

EXIT_BROKEN: Final = 1
SETTLE_SECONDS: Final = 180.0
"""After the last fault, for everybody to contribute again before everything is checked: on a crowded machine alone the
libraries of a worker take a minute."""
SETTLE_POLL_SECONDS: Final = 0.25
COMPOSE_KINDS: Final = ("kill", "kill-all", "freeze")
"""What takes nothing but signals."""

TEXT: Final = """Make faults happen to a run that is going on, then check that nothing was lost.

PLAN is a TOML file, or `random`. The run is a folder of `isles up`, or a compose project on this machine, whose
processes get their signals directly: a container that Docker is asked to kill counts as stopped by hand and stays away.
A plan names them after their services: `broker`, `worker-us`, `worker-us-2`.

Faults of the network need links between workers and broker, and come only with `isles up --chaos PLAN`. Ends with 0 if
every promise was kept, else with 1. What happened stands in `chaos.json` of the run folder, or with --json on standard
output.
"""


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name, help=TEXT)
    @click.argument("plan", metavar="PLAN")
    @click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Folder of a running `isles up`.")
    @click.option("--compose", metavar="PROJECT", help="A running compose project.")
    @click.option("--json", "is_json", is_flag=True, help="Print the report as one JSON object instead of tables.")
    def chaos(plan: str, run_dir: Path | None, compose: str | None, is_json: bool, **options: Any) -> int:
        if (run_dir is None) == (compose is None):
            raise UsageError("name either a run folder (--run-dir DIR) or a compose project (--compose PROJECT)")
        if run_dir is not None:
            return _disturb_folder(plan, run_dir, options, is_json=is_json)
        return _disturb_project(plan, compose or "", options, is_json=is_json)

    chaos.params += random_options("")
    return chaos


def _disturb_folder(plan_text: str, run_dir: Path, options: dict[str, Any], *, is_json: bool) -> int:
    from isles.ops.chaos.checker import is_kept
    from isles.ops.chaos.conclusion import conclude
    from isles.ops.chaos.logbook import LogReader
    from isles.ops.chaos.roster import roster_of
    from isles.ops.chaos.runner import Runner
    from isles.ops.chaos.targets import FolderTargets
    from isles.ops.run_folder import RunFolder
    from isles.proto.clock import SystemClock
    from isles.proto.logs import make_logger

    folder = RunFolder(run_dir)
    settings = _settings(folder)
    regions = settings.worker_ids
    plan = read_plan(plan_text, options, roster_of(settings.model_copy(update={"run_dir": run_dir})))
    if plan.has_network_faults:
        raise UsageError(
            f"{plan_text} has faults of the network: start the run with `isles up --chaos PLAN`, which puts links "
            "between workers and broker"
        )
    if not folder.is_locked():
        raise UsageError(f"no `isles up` is running in {run_dir}: start it, or use `isles up --chaos PLAN`")
    logger = make_logger("chaos", run_dir.name, file=folder.log("chaos"))
    targets = FolderTargets(folder, regions)
    runner = Runner(plan, targets, logger=logger, clock=SystemClock(), store=folder.store, tell=_tell)
    runner.run(lambda: True)
    reader = LogReader(folder.log("broker"))
    reader.read()
    settle(settled(reader.read, list(regions)), folder.is_locked)
    found, measures, findings = conclude(folder, plan, runner.records(), runner.damaged, logger, is_ended=False)
    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        from isles.ops.chaos.report import render

        _show(render(runner.records(), measures, findings))
    return 0 if is_kept(findings) else EXIT_BROKEN


def _disturb_project(plan_text: str, project: str, options: dict[str, Any], *, is_json: bool) -> int:
    from isles.ops.chaos.checker import Finding, is_kept
    from isles.ops.chaos.compose import Project, as_of_a_run
    from isles.ops.chaos.measures import measure
    from isles.ops.chaos.report import as_json, render
    from isles.ops.chaos.roster import roster_of_project
    from isles.ops.chaos.runner import Runner
    from isles.proto.clock import SystemClock
    from isles.proto.logs import SilentLogger

    found = Project(project)
    before = found.find()
    plan = read_plan(plan_text, options, roster_of_project(project, found.find_all()))
    if plan.has_network_faults:
        raise UsageError(f"{plan_text} has faults of the network: they come only with `isles up --chaos PLAN`")
    if unfit := next((fault.kind for fault in plan.fault if fault.kind not in COMPOSE_KINDS), None):
        raise UsageError(
            f"{plan_text} has the kind {unfit}, and the store of a compose project is in a container: its kinds are "
            f"{', '.join(COMPOSE_KINDS)}"
        )
    runner = Runner(plan, found, logger=SilentLogger(), clock=SystemClock(), tell=_tell)
    runner.run(lambda: True)
    ended_unix, workers = time.time(), [one.name for one in before if one.role == "worker"]
    is_settled = settled(lambda: as_of_a_run(found.logs()).get("broker", []), workers, ended_unix)
    if not settle(is_settled, found.has_workers):
        _tell(f"not everybody has contributed again within {SETTLE_SECONDS:g} s: the run may be at its end")
    records = runner.records()
    measures = measure(as_of_a_run(found.logs()), records)
    try:
        findings = found.check()
    except UsageError as error:
        findings = [Finding("what `isles check` checks", "unknown", str(error))]
    if is_json:
        asked = plan.model_dump(mode="json", exclude_defaults=True)
        click.echo(json.dumps(as_json(asked, records, measures, findings, []), indent=2))
    else:
        _show(render(records, measures, findings))
    return 0 if is_kept(findings) else EXIT_BROKEN


def _settings(folder: RunFolder) -> UpSettings:
    from isles.ops.settings import UpSettings, section_models
    from isles.proto.config import resolve

    if not folder.config.exists():
        raise UsageError(f"{folder.path} is no folder of `isles up`: it has no {folder.config.name}")
    models = section_models(has_own_task=True)
    return resolve(models, known=["up"], file=folder.config).section("up", UpSettings)


def settled(
    read: Callable[[], Sequence[Mapping[str, Any]]], workers: Sequence[str], since_unix: float = 0.0
) -> Callable[[], bool]:
    """Says whether every worker has had a contribution accepted, and a round was committed, by lines of the broker.

    Those before `since_unix` are left out, where lines have a time as `unix`.
    """
    missing = {*workers, ""}

    def look() -> bool:
        for line in read():
            if since_unix and line["unix"] < since_unix:
                continue
            if line["event"] == "contribution.accepted":
                missing.discard(str(line.get("learner")))
            elif line["event"] == "round.committed":
                missing.discard("")
        return not missing

    return look


def settle(is_settled: Callable[[], bool], is_running: Callable[[], bool]) -> bool:
    """Waits until everybody is back, the run has ended, or it takes too long; whether everybody is back."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not is_settled():
        if time.monotonic() >= deadline or not is_running():
            return False
        time.sleep(SETTLE_POLL_SECONDS)
    return True


def _tell(text: str) -> None:
    """A line while it happens; the report alone goes to standard output."""
    click.echo(f"{time.strftime('%H:%M:%S')}  {text}", err=True)


def _show(parts: list[Any]) -> None:
    from isles.ops.wording import make_console

    console = make_console()
    for part in parts:
        console.print(part)
