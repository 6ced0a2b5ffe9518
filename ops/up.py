"""`isles up`: a whole run on one machine, in one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.brokers.settings import BrokerSettings
from isles.ops.changes import Changes, changed, check_budget, differences, read_record, stated_by, words, write_record
from isles.ops.chaos.options import chaos_option, random_options, read_plan
from isles.ops.chaos.plan import RANDOM_KINDS_WITH_LINKS
from isles.ops.chaos.roster import roster_of
from isles.ops.options import load_config, set_option, setting_options, settings_command, shared_options
from isles.ops.reach import OPERATOR_NAME
from isles.ops.run_folder import RunFolder, State, choose_address
from isles.ops.run_relays import check_relays, choose_relay_addresses
from isles.ops.settings import UpSettings, section_models
from isles.outer.settings import OuterSettings
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.config import Config, RunSettings, Stated, resolve
from isles.proto.errors import ConfigError
from isles.proto.key_files import client_file
from isles.proto.timeouts import check_times, times_of
from isles.proto.transport.address import Address
from isles.workers.finding import check_task
from isles.workers.settings import WorkerSettings

if TYPE_CHECKING:
    pass

TEXT: Final = """Train on this machine: one broker, one outer, workers and an evaluator, supervised.

A process that dies is started again. Ctrl-C lets the workers hand in what they have and stops everything in order; a
second Ctrl-C stops at once. The same run folder given again resumes the run: with other workers, regions or devices, a
larger budget, or other settings of the synchronisation, if you say so.
"""
AGREED_SECTIONS: Final = ("run", "task")
"""What is settled for good when a run begins."""
SECTIONS_WITH_TIMES: Final = frozenset({"broker", "evaluator", "outer", "sync", "up", "worker"})
"""Those whose settings wait for one another; a task of one's own may name anything as it likes."""
BUDGET_KEYS: Final = frozenset({"run.tokens", "run.rounds"})
"""The exception: a run may become longer."""
VERSIONS_KEPT_MAX: Final = 100_000
"""As many as `broker.versions_kept` may be: no run on one machine has more."""
CHAOS_STATED: Final = (
    Stated("log.level", "debug", "the flag --chaos"),
    Stated("worker.log_every_seconds", "1", "the flag --chaos"),
)
"""What it takes to check and to measure a run with faults, unless something else is stated."""
ANY_HOST: Final = frozenset({"0.0.0.0", "[::]", "*"})
"""To be listened on, not to be dialled."""
WORKER_KEY: Final = re.compile(r"^worker\.(?P<worker>[a-z0-9][a-z0-9._-]*)\.(?P<name>[a-z_-]+)=(?P<value>.*)$")


def build(name: str) -> click.Command:
    """The command."""
    run = ("task", "seed", "tokens", "rounds", "id")
    parameters: list[click.Parameter] = [
        *setting_options("up", "The run on this machine", own="up"),
        *setting_options("run", "The run", own="up", only=run),
        *setting_options(
            "worker", "Every worker", own="up", only=("step_seconds", "device"), flags={"worker.device": "--device"}
        ),
        *setting_options("outer", "The outer", own="up", only=("require_learners",)),
        *setting_options("sync", "Synchronisation", own="up"),
        *setting_options("task", "The task gpt", own="up"),
        *shared_options(),
        set_option(),
        click.Option(
            ["--keep-tape", "keeps_tape"],
            is_flag=True,
            help="Keep all contributions and updates, so that `isles replay` can recompute the whole run; the store "
            "then grows with it.",
        ),
        click.Option(["--json", "is_json"], is_flag=True, help="Print only the summary, as JSON, at the end."),
        chaos_option(),
        *random_options("chaos-", RANDOM_KINDS_WITH_LINKS),
    ]
    return settings_command(name, TEXT, parameters, _up, example="up.run_dir")


def _up(
    *,
    stated: Sequence[Stated],
    config_file: Path | None,
    assignments: Sequence[str],
    keeps_tape: bool,
    is_json: bool,
    chaos: str | None,
    **chaos_options: Any,
) -> int:
    own_words = [text for text in assignments if not WORKER_KEY.match(text)]
    if keeps_tape:
        stated = [*stated, Stated("broker.versions_kept", str(VERSIONS_KEPT_MAX), "the flag --keep-tape")]
    asked = load_config(section_models(), file=config_file, stated=stated, assignments=own_words)
    check_task(asked.section("run", RunSettings).task)
    if chaos is not None:
        more = [one for one in CHAOS_STATED if one.key not in asked.stated]
        asked = load_config(section_models(), file=config_file, stated=[*stated, *more], assignments=own_words)
    run_dir = asked.section("up", UpSettings).run_dir
    with RunFolder(run_dir) as folder:
        state = folder.read_state()
        record = read_record(folder.store)
        config = _merge(folder, asked, record)
        check_relays(config.section("up", UpSettings), has_faults=chaos is not None)
        roster = roster_of(config.section("up", UpSettings))
        plan = None if chaos is None else read_plan(chaos, chaos_options, roster, RANDOM_KINDS_WITH_LINKS)
        single = {**state.worker_settings, **_single_workers(config, _read_single(assignments))}
        new = None if record is None else changed(record, config.section("sync", SyncSettings), _budget(config))
        changes = {} if record is None or new is None else differences(record, new)
        summary = folder.read_summary()
        if summary is not None and summary.get("status") == "finished" and not BUDGET_KEYS & changes.keys():
            return _tell_finished(folder, summary, config, changes, is_json=is_json)
        check_task(config.section("run", RunSettings).task)
        check_times(all_times(config))
        folder.check_room(config.section("broker", BrokerSettings).disk_free_bytes_min)
        state = replace(state, num_starts=state.num_starts + 1, worker_settings=single)
        config = settle(folder, state, config, has_port="broker.port" in asked.stated)
        if new is not None and changes:
            write_record(folder.store, new)
        from isles.ops.start import Start

        return Start(folder, state, config, new, changes, plan, is_json=is_json).run()


def all_times(config: Config) -> dict[str, float]:
    """All times in all sections, in seconds, by their dotted names."""
    return {
        name: seconds
        for section, settings in config.sections.items()
        if section in SECTIONS_WITH_TIMES
        for name, seconds in times_of(section, settings).items()
    }


def _tell_finished(
    folder: RunFolder, summary: Mapping[str, Any], config: Config, changes: Changes, *, is_json: bool
) -> int:
    from isles.ops.outcome import tell_again

    if changes:
        raise ConfigError(
            f"the run of {folder.path} has reached its budget, so nothing would come of {words(changes)}: give it a "
            "larger budget as well, with --tokens or --rounds"
        )
    return tell_again(folder, summary, _budget(config), is_json=is_json)


# --------------------------------------------------------------------------------------------------------- the settings


def _merge(folder: RunFolder, asked: Config, record: RunRecord | None) -> Config:
    """What was asked for on top of what the folder's run has. Raises ConfigError if that would be another run."""
    if not folder.config.exists() and record is None:
        return asked
    if not folder.config.exists():
        raise ConfigError(
            f"{folder.path} has a store with a run but no {folder.config.name}: put it back, or name another --run-dir"
        )
    models = section_models(has_own_task=_task_of(folder) != "gpt")
    kept = resolve(models, file=folder.config)
    for key, one in asked.stated.items():
        section, _, name = key.partition(".")
        if section not in AGREED_SECTIONS or key in BUDGET_KEYS:
            continue
        old = kept.sections[section].model_dump(mode="json").get(name)
        new = asked.sections[section].model_dump(mode="json").get(name)
        if old != new and record is None:
            # No worker got as far as to begin that run: a mistake in what it trains may still be mended.
            others = [other for name, other in kept.stated.items() if name.partition(".")[0] not in AGREED_SECTIONS]
            models = section_models(has_own_task=asked.section("run", RunSettings).task != "gpt")
            return resolve(models, earlier=others, flags=asked.stated.values())
        if old != new:
            raise ConfigError(
                f"{one.source}: {key} is {old!r} in the run of {folder.path} and cannot become {new!r} there: leave it "
                "out to resume that run, or start another one with another --run-dir"
            )
    if record is None:
        return resolve(models, earlier=kept.stated.values(), flags=asked.stated.values())
    check_budget(record, asked)
    earlier = [one for key, one in kept.stated.items() if not key.startswith("sync.") and key not in BUDGET_KEYS]
    return resolve(models, earlier=earlier, flags=[*stated_by(record, asked), *asked.stated.values()])


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
    """The settings of single workers that were given now, checked. Raises ConfigError."""
    workers = config.section("up", UpSettings).worker_ids
    models = {"worker": section_models()["worker"]}
    for key, value in single.items():
        worker, _, name = key.rpartition(".")
        source = f"--set worker.{key}={value}"
        if worker not in workers:
            raise ConfigError(f"{source}: there is no worker {worker}; this run has {', '.join(workers)}")
        resolve(models, flags=[Stated(f"worker.{name}", value, source)])
    return dict(single)


def settle(folder: RunFolder, state: State, config: Config, *, has_port: bool) -> Config:
    """The configuration with this folder's address and paths in it, so that it suits a worker started by hand as well.

    `has_port` means that somebody chose the broker's port for this very start; else the one of the last start is taken
    again, or a free one.
    """
    broker = config.section("broker", BrokerSettings)
    host = "127.0.0.1" if broker.host in ANY_HOST else broker.host
    is_fixed = has_port and broker.port
    address = Address(host, *broker.ports) if is_fixed else choose_address(state.address, host)
    state.address = str(address)
    choose_relay_addresses(state, config.section("up", UpSettings), host)
    keys = folder.keys.resolve()
    places: dict[str, dict[str, Any]] = {
        "broker": {"port": address.control_port, "store": folder.store.resolve(), "keys": keys},
        "worker": {"checkpoint_dir": folder.workers.resolve()},
        "outer": {"id": config.section("outer", OuterSettings).id or "outer"},
        "evaluator": {},
        "operator": {"key": client_file(keys, OPERATOR_NAME)},
    }
    for client in ("worker", "outer", "evaluator"):
        places[client] |= {"broker": state.address, "key": client_file(keys, client)}
    if "worker.device" in config.stated and "evaluator.device" not in config.stated:
        places["evaluator"]["device"] = config.section("worker", WorkerSettings).device
    sections = {name: section.model_copy(update=places.get(name, {})) for name, section in config.sections.items()}
    return replace(config, sections=sections)
