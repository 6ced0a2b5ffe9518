"""`isles chaos`: makes faults happen to a run, and says what they did to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from isles.ops.chaos.options import random_options, read_plan
from isles.proto.errors import UsageError

EXIT_BROKEN: Final = 1
SETTLE_SECONDS: Final = 60.0
"""After the last fault, for everybody to contribute again before everything is checked."""
SETTLE_POLL_SECONDS: Final = 0.25

TEXT: Final = """Make faults happen to a run that is going on, then check that nothing was lost.

PLAN is a TOML file, or `random`. The run is a folder of `isles up`, or a compose project on this machine, whose
processes get their signals directly: a container that Docker is asked to kill counts as stopped by hand and stays away.

Faults of the network need links between workers and broker, and come only with `isles up --chaos PLAN`. Ends with 0 if
every promise was kept, else with 1. What happened stands in `chaos.json` of the run folder.
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
    from isles.ops.chaos.runner import Runner
    from isles.ops.chaos.targets import FolderTargets
    from isles.ops.run_folder import RunFolder
    from isles.proto.clock import SystemClock
    from isles.proto.logs import make_logger

    folder = RunFolder(run_dir)
    regions = _regions(folder)
    plan = read_plan(plan_text, options, sorted(set(regions.values())))
    if plan.has_network_faults:
        raise UsageError(
            f"{plan_text} has faults of the network: start the run with `isles up --chaos PLAN`, which puts links "
            "between workers and broker"
        )
    if not folder.is_locked():
        raise UsageError(f"no `isles up` is running in {run_dir}: start it, or use `isles up --chaos PLAN`")
    logger = make_logger("chaos", run_dir.name, file=folder.log("chaos"))
    runner = Runner(plan, FolderTargets(folder, regions), logger=logger, clock=SystemClock(), store=folder.store)
    runner.run(lambda: True)
    settle(settled(folder, list(regions)), folder.is_locked)
    found, measures, findings = conclude(folder, plan, runner.records(), runner.damaged, logger, is_ended=False)
    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        from isles.ops.chaos.report import render

        _show(render(runner.records(), measures, findings))
    return 0 if is_kept(findings) else EXIT_BROKEN


def _disturb_project(plan_text: str, project: str, options: dict[str, Any], *, is_json: bool) -> int:
    from isles.ops.chaos.measures import Measures
    from isles.ops.chaos.report import as_json, render
    from isles.ops.chaos.runner import Runner
    from isles.ops.chaos.targets import ComposeTargets
    from isles.proto.clock import SystemClock
    from isles.proto.logs import make_logger

    targets = ComposeTargets(project)
    plan = read_plan(plan_text, options, sorted({one.region for one in targets.find() if one.region}))
    if plan.has_network_faults:
        raise UsageError(f"{plan_text} has faults of the network: they come only with `isles up --chaos PLAN`")
    runner = Runner(plan, targets, logger=make_logger("chaos", project), clock=SystemClock())
    runner.run(lambda: True)
    if is_json:
        found = as_json(plan.model_dump(mode="json", exclude_defaults=True), runner.records(), Measures(), [], [])
        click.echo(json.dumps(found, indent=2))
    else:
        _show(render(runner.records(), Measures(), []))
        click.echo(f"check it where its store is: docker compose -p {project} exec broker isles check --broker ADDRESS")
    return 0


def _regions(folder: Any) -> dict[str, str]:
    from isles.ops.settings import UpSettings, section_models
    from isles.proto.config import resolve

    if not folder.config.exists():
        raise UsageError(f"{folder.path} is no folder of `isles up`: it has no {folder.config.name}")
    models = section_models(has_own_task=True)
    return resolve(models, known=["up"], file=folder.config).section("up", UpSettings).worker_ids


def settled(folder: Any, workers: list[str]) -> Callable[[], bool]:
    """Says whether every worker has had a contribution accepted, and a round was committed, since now."""
    from isles.ops.chaos.logbook import LogReader

    reader = LogReader(folder.log("broker"))
    reader.read()
    missing = {*workers, ""}

    def look() -> bool:
        for line in reader.read():
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


def _show(parts: list[Any]) -> None:
    from isles.ops.wording import make_console

    console = make_console()
    for part in parts:
        console.print(part)
