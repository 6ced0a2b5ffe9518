"""`isles up`: a whole run on one machine, in one folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.extension import check_extension, extend_store
from isles.ops.options import load_config, set_option, setting_options, settings_command, shared_options
from isles.ops.run_folder import RunFolder, State, choose_address, write_whole
from isles.ops.settings import LogSettings, UpSettings, section_models
from isles.proto.agreement import Budget
from isles.proto.config import Config, RunSettings, Stated, resolve
from isles.proto.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from isles.ops.summary import Summary
    from isles.ops.supervision import End, Role

TEXT: Final = """Train on this machine: one broker, one outer, workers and an evaluator, supervised.

A process that dies is started again. Ctrl-C lets the workers hand in what they have and stops everything in order; a
second Ctrl-C stops at once. The same run folder given again resumes the run.
"""
AGREED_SECTIONS: Final = ("run", "sync", "task")
"""What a run's record holds: it is settled when the run begins."""
BUDGET_KEYS: Final = frozenset({"run.tokens", "run.rounds"})
"""The exception: a run may become longer."""
WORKER_KEY: Final = re.compile(r"^worker\.(?P<worker>[a-z0-9][a-z0-9._-]*)\.(?P<name>[a-z_-]+)=(?P<value>.*)$")


def build(name: str) -> click.Command:
    """The command."""
    run = ("task", "seed", "tokens", "rounds", "id")
    parameters: list[click.Parameter] = [
        *setting_options("up", "The run on this machine", own="up"),
        *setting_options("run", "The run", own="up", only=run),
        *setting_options("worker", "Every worker", own="up", only=("step_seconds", "device")),
        *setting_options("sync", "Synchronisation", own="up"),
        *setting_options("task", "The task gpt", own="up"),
        *shared_options(),
        set_option(),
        click.Option(["--json", "is_json"], is_flag=True, help="Print only the summary, as JSON, at the end."),
    ]
    return settings_command(name, TEXT, parameters, _up, example="up.run_dir")


def _up(*, stated: Sequence[Stated], config_file: Path | None, assignments: Sequence[str], is_json: bool) -> int:
    own_words = [text for text in assignments if not WORKER_KEY.match(text)]
    asked = load_config(section_models(), file=config_file, stated=stated, assignments=own_words)
    run_dir = asked.section("up", UpSettings).run_dir
    with RunFolder(run_dir) as folder:
        state = folder.read_state()
        config = _merge(folder, asked)
        single = _single_workers(config, {**state.worker_settings, **_read_single(assignments)})
        summary = folder.read_summary()
        if summary is not None and summary.get("status") == "finished" and not _is_longer(folder, config):
            return _show_finished(folder, summary, _budget(config), is_json=is_json)
        state = replace(state, num_starts=state.num_starts + 1, worker_settings=single)
        return _run(folder, state, config, is_json=is_json)


# --------------------------------------------------------------------------------------------------------- the settings


def _merge(folder: RunFolder, asked: Config) -> Config:
    """What was asked for on top of what the folder's run has. Raises ConfigError if that would be another run."""
    if not folder.config.exists():
        return asked
    models = section_models(has_own_task=_task_of(folder) != "gpt")
    kept = resolve(models, file=folder.config)
    for key, one in asked.stated.items():
        section, _, name = key.partition(".")
        if section not in AGREED_SECTIONS or key in BUDGET_KEYS:
            continue
        old = kept.sections[section].model_dump(mode="json").get(name)
        new = asked.sections[section].model_dump(mode="json").get(name)
        if old != new:
            raise ConfigError(
                f"{one.source}: {key} is {old!r} in the run of {folder.path} and cannot become {new!r} there: leave it "
                "out to resume that run, or start another one with another --run-dir"
            )
    if BUDGET_KEYS & asked.stated.keys():
        check_extension(_budget(kept), _budget(asked), folder.path)
    return resolve(models, earlier=kept.stated.values(), flags=asked.stated.values())


def _is_longer(folder: RunFolder, config: Config) -> bool:
    """Whether the budget was raised since the run finished."""
    kept = resolve(section_models(has_own_task=True), known=["run"], file=folder.config)
    return _budget(config) != _budget(kept)


def _budget(config: Config) -> Budget:
    return config.section("run", RunSettings).budget


def _task_of(folder: RunFolder) -> str:
    models = section_models(has_own_task=True)
    return resolve(models, known=["run"], file=folder.config).section("run", RunSettings).task


def _read_single(assignments: Sequence[str]) -> dict[str, str]:
    """`--set worker.us-1.step_seconds=2` as "us-1.step_seconds" -> "2"."""
    found = [match for text in assignments if (match := WORKER_KEY.match(text))]
    return {f"{match['worker']}.{match['name'].replace('-', '_')}": match["value"].strip() for match in found}


def _single_workers(config: Config, single: Mapping[str, str]) -> dict[str, str]:
    """The settings of single workers, checked. Raises ConfigError."""
    workers = config.section("up", UpSettings).worker_ids
    models = {"worker": section_models()["worker"]}
    for key, value in single.items():
        worker, _, name = key.rpartition(".")
        source = f"--set worker.{key}={value}"
        if worker not in workers:
            raise ConfigError(f"{source}: there is no worker {worker}; this run has {', '.join(workers)}")
        resolve(models, flags=[Stated(f"worker.{name}", value, source)])
    return dict(single)


def _commands(folder: RunFolder, config: Config, state: State) -> dict[str, tuple[Role, list[str]]]:
    """Child -> role and command line, in the order in which they start."""
    settings = config.section("up", UpSettings)
    common = ["--config", str(folder.config), "--exit-with-parent"]

    def command(role: str, name: str, *arguments: str) -> list[str]:
        return [role, *arguments, *common, "--log-file", str(folder.log(name))]

    port = state.address.rpartition(":")[2].partition(",")[0]
    children: dict[str, tuple[Role, list[str]]] = {
        "broker": ("broker", command("broker", "broker", "--store", str(folder.store), "--port", port)),
        "outer": ("outer", command("outer", "outer", "--id", "outer", "--broker", state.address)),
    }
    if settings.has_evaluator:
        children["evaluator"] = ("evaluator", command("evaluate", "evaluator", "--broker", state.address))
    for worker, region in settings.worker_ids.items():
        own = [
            part
            for key, value in state.worker_settings.items()
            if key.rpartition(".")[0] == worker
            for part in (f"--{key.rpartition('.')[2]}".replace("_", "-"), value)
        ]
        place = ["--checkpoint-dir", str(folder.workers), "--broker", state.address]
        children[worker] = ("worker", command("worker", worker, "--id", worker, "--region", region, *place, *own))
    return children


# -------------------------------------------------------------------------------------------------------------- the run


def _run(folder: RunFolder, state: State, config: Config, *, is_json: bool) -> int:
    from rich.console import Console

    from isles.ops.children import child_environment
    from isles.ops.display import View, make_display
    from isles.ops.supervision import Supervision
    from isles.ops.supervisor import Supervisor
    from isles.ops.watch import watch
    from isles.proto.clock import SystemClock
    from isles.proto.logs import make_logger

    settings, clock = config.section("up", UpSettings), SystemClock()
    state.address = str(choose_address(state.address))
    folder.write_state(state)
    extend_store(folder.store, _budget(config))
    write_whole(folder.config, config.to_toml())
    folder.summary.unlink(missing_ok=True)
    children = _commands(folder, config, state)
    supervision = Supervision.of(
        [(name, role) for name, (role, _) in children.items()],
        drain_seconds=settings.drain_seconds,
        stall_seconds=settings.stall_seconds,
    )
    logger = make_logger("up", folder.path.name, file=folder.log("up"), level=config.section("log", LogSettings).level)
    logger.info("process.started", version=version("isles"), settings=settings.model_dump(mode="json"))
    console = Console()
    view = View(
        run_dir=folder.path,
        budget=_budget(config),
        children=supervision.children,
        regions=settings.worker_ids,
        started_at=clock.now(),
        restarts_before=sum(state.restarts.values()),
    )
    seen = watch(state.address)
    try:
        end = Supervisor(
            supervision,
            {name: command for name, (_, command) in children.items()},
            child_environment(len(settings.worker_ids)),
            folder=folder,
            state=state,
            watch=seen,
            view=view,
            display=make_display(console, is_silent=is_json),
            logger=logger,
            clock=clock,
        ).run()
    finally:
        seen.close()
    summary = _summarise(folder, state, end, view, culprit=supervision.culprit)
    write_whole(folder.summary, summary.model_dump_json(indent=2) + "\n")
    logger.info("run.finished", status=summary.status, summary=summary.model_dump(mode="json"))
    folder.tidy()
    _print_summary(console, folder, summary, _budget(config), is_json=is_json)
    if end.status == "failed":
        raise RunFailedError(summary.text)
    return end.exit_code


class RunFailedError(UsageError):
    """A run that cannot proceed; the text says why and where to look."""

    exit_code = 1


def _summarise(folder: RunFolder, state: State, end: End, view: Any, *, culprit: str) -> Summary:
    from isles.ops.export import read_description
    from isles.ops.summary import summarise

    text = end.text
    if culprit:
        words = folder.last_words(culprit)
        text += (f": {words}" if words else "") + f" (more in {folder.log(culprit)})"
    try:
        corpus = str(read_description(folder.model).get("corpus_sha256", ""))
    except UsageError:
        corpus = ""
    return summarise(
        view.status,
        view.reports,
        ended=end.status,
        text=text,
        wall_seconds=state.wall_seconds,
        restarts=state.restarts,
        corpus_sha256=corpus,
    )


# --------------------------------------------------------------------------------------------------------- what it says


def _print_summary(console: Console, folder: RunFolder, summary: Summary, budget: Budget, *, is_json: bool) -> None:
    if is_json:
        click.echo(summary.model_dump_json(indent=2))
        return
    from isles.ops.display import render_summary

    console.print(render_summary(summary))
    for what, command in _next_steps(folder, summary.status, budget):
        console.print(f"  [dim]{what:16}[/] {command}", soft_wrap=True, highlight=False)


def _next_steps(folder: RunFolder, status: str, budget: Budget) -> list[tuple[str, str]]:
    if status != "finished":
        return [("go on", f"isles up --run-dir {folder.path}"), ("logs", str(folder.logs))]
    longer = f"--tokens {2 * budget.tokens}" if budget.tokens else f"--rounds {2 * (budget.rounds or 1)}"
    return [
        ("parameters", str(folder.model)),
        ("try them", f'isles sample --run-dir {folder.path} --prompt "def "'),
        ("train longer", f"isles up --run-dir {folder.path} {longer}"),
        ("start over", f"isles up --run-dir {folder.path}-2, or delete {folder.path} first"),
    ]


def _show_finished(folder: RunFolder, found: dict[str, Any], budget: Budget, *, is_json: bool) -> int:
    from rich.console import Console

    from isles.ops.summary import Summary

    if is_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print_summary(Console(), folder, Summary.model_validate(found), budget, is_json=False)
    return 0
