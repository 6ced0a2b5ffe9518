"""One start of a run on one machine: its processes from their command lines to the summary."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from isles.ops.changes import Changes, words
from isles.ops.children import child_environment
from isles.ops.display import View, make_display
from isles.ops.outcome import RunFailedError, tell, write_summary
from isles.ops.reach import Reach
from isles.ops.run_folder import RunFolder, State, write_whole
from isles.ops.run_keys import make_run_keys
from isles.ops.run_relays import write_relay_settings
from isles.ops.settings import LogSettings, UpSettings
from isles.ops.supervision import End, Role, Supervision
from isles.ops.supervisor import Signals, Supervisor
from isles.ops.up import all_times
from isles.ops.watch import StatusWatch, watch
from isles.ops.wording import make_console
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import SystemClock
from isles.proto.config import Config, RunSettings, flag_name
from isles.proto.key_files import client_file
from isles.proto.logs import Logger, make_logger
from isles.proto.timeouts import check_times
from isles.proto.transport.address import Address

if TYPE_CHECKING:
    from isles.ops.chaos.plan import Plan
    from isles.ops.chaos.under_up import Disturbance

EXIT_BROKEN: Final = 1
"""After a run with faults that did not keep its promises."""


@dataclass(frozen=True)
class Start:
    """One start of a run whose folder is locked and whose settings are settled; `run` does it all."""

    folder: RunFolder
    state: State
    config: Config
    record: RunRecord | None
    """With the changes; None in a run that has not begun."""
    changes: Changes
    plan: Plan | None
    """Of faults."""
    is_json: bool

    def run(self) -> int:
        """Runs to the end and returns the exit code. Raises RunFailedError with the reason for which the run failed."""
        logger = self._begin()
        settings = self.config.section("up", UpSettings)
        names = settings.relay_names
        relays = {worker: names[region] for worker, region in settings.worker_ids.items() if region in names}
        operator = make_run_keys(self.folder.keys, settings.worker_ids, relays)
        seen = watch(Reach(self.state.address, operator))
        with Signals() as signals:
            try:
                end, culprit, disturbance = self._supervise(seen, logger, signals)
            finally:
                seen.close()
            text = self._sum_up(end, culprit, seen, logger)
            is_kept = disturbance is None or disturbance.conclude(is_silent=self.is_json)
        if end.status == "failed":
            raise RunFailedError(text)
        return end.exit_code if is_kept else EXIT_BROKEN

    @property
    def _budget(self) -> Budget:
        return self.config.section("run", RunSettings).budget

    @property
    def _task(self) -> str:
        return self.config.section("run", RunSettings).task

    def _begin(self) -> Logger:
        """Writes down what the run is now, and says so in its log."""
        folder, config = self.folder, self.config
        folder.write_state(self.state)
        write_whole(folder.config, config.to_toml())
        write_relay_settings(folder, self.state, config)
        folder.summary.unlink(missing_ok=True)
        level = config.section("log", LogSettings).level
        logger = make_logger("up", folder.path.name, file=folder.log("up"), level=level)
        logger.info("process.started", version=version("isles"), settings=config.sections["up"].model_dump(mode="json"))
        check_times(all_times(config), logger)
        if self.record is not None and self.changes:
            logger.info("run.changed", settings_epoch=len(self.record.past_sync), changes=self.changes)
        return logger

    def _supervise(self, seen: StatusWatch, logger: Logger, signals: Signals) -> tuple[End, str, Disturbance | None]:
        """Runs all processes to the end: how the run ended, the child to blame if it failed, what disturbed it."""
        settings, clock = self.config.section("up", UpSettings), SystemClock()
        children = commands(self.folder, self.config, self.state)
        supervision = Supervision.of(
            [(name, role) for name, (role, _) in children.items()],
            drain_seconds=settings.drain_seconds,
            stall_seconds=settings.stall_seconds,
        )
        lines = {name: line for name, (_, line) in children.items()}
        disturbance = self._disturb(lines, supervision)
        supervisor = Supervisor(
            supervision,
            lines,
            child_environment(len(settings.worker_ids)),
            folder=self.folder,
            state=self.state,
            watch=seen,
            view=self._view(supervision, clock.now()),
            display=make_display(make_console(), is_silent=self.is_json),
            logger=logger,
            clock=clock,
            signals=signals,
            faults=disturbance,
        )
        with disturbance or nullcontext():
            end = supervisor.run()
        return end, supervision.culprit, disturbance

    def _view(self, supervision: Supervision, now: float) -> View:
        view = View(
            run_dir=self.folder.path,
            budget=self._budget,
            children=supervision.children,
            regions=self.config.section("up", UpSettings).regions,
            started_at=now,
            task=self._task,
            restarts_before=sum(self.state.restarts.values()),
        )
        if self.changes:
            view.note(now, f"changed: {words(self.changes)}")
        return view

    def _disturb(self, lines: dict[str, list[str]], supervision: Supervision) -> Disturbance | None:
        """What carries out a plan of faults while the run is under way."""
        if self.plan is None:
            return None
        from isles.ops.chaos.under_up import Disturbance

        return Disturbance(
            self.plan,
            self.folder,
            regions=self.config.section("up", UpSettings).worker_ids,
            broker=Address.parse(self.state.address),
            commands=lines,
            is_ending=lambda: supervision.status is not None,
        )

    def _sum_up(self, end: End, culprit: str, seen: StatusWatch, logger: Logger) -> str:
        """Writes and tells what came of the run; returns why it ended."""
        summary = write_summary(
            self.folder,
            end,
            seen.status,
            seen.reports,
            wall_seconds=self.state.wall_seconds,
            starts=self.state.num_starts,
            restarts=self.state.restarts,
            culprit=culprit,
            task=self._task,
            num_fragments=self.config.section("sync", SyncSettings).num_fragments,
        )
        logger.info("run.finished", status=summary.status, summary=summary.model_dump(mode="json"))
        self.folder.tidy()
        if self.is_json:
            click.echo(summary.model_dump_json(indent=2))
        else:
            tell(self.folder, summary, self._budget)
        return summary.text


def commands(folder: RunFolder, config: Config, state: State) -> dict[str, tuple[Role, list[str]]]:
    """Child -> role and command line, in the order in which they start."""
    settings = config.section("up", UpSettings)

    def command(role: str, name: str, *own: str, config: Path = folder.config) -> list[str]:
        return [role, *own, "--config", str(config), "--log-file", str(folder.log(name)), "--exit-with-parent"]

    children: dict[str, tuple[Role, list[str]]] = {
        "broker": ("broker", command("broker", "broker")),
    }
    for name in settings.relay_names.values():
        children[name] = ("relay", command("broker", name, config=folder.relay_config(name)))
    children["outer"] = ("outer", command("outer", "outer"))
    for name in settings.outer_names[1:]:
        children[name] = ("outer", command("outer", name, "--id", name))
    if settings.has_evaluator:
        children["evaluator"] = ("evaluator", command("evaluate", "evaluator"))
    for worker, region in settings.worker_ids.items():
        own = ["--id", worker, "--region", region, "--key", str(client_file(folder.keys, worker))]
        if region in settings.relay_names:
            own += ["--relay", state.relays[settings.relay_names[region]]]
        for key, value in state.worker_settings.items():
            if key.rpartition(".")[0] == worker:
                own += [flag_name(f"worker.{key.rpartition('.')[2]}", "worker"), value]
        children[worker] = ("worker", command("worker", worker, *own))
    return children
