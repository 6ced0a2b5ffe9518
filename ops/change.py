"""`isles change`: other settings for a run whose broker is stopped, where `isles up` does not run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from pydantic import BaseModel

from isles.ops.changes import changed, check_budget, differences, read_record, stated_by, words, write_record
from isles.ops.options import HeadedOption, load_config, set_option, setting_options, settings_command, shared_options
from isles.ops.settings import LogSettings
from isles.proto.agreement import SyncSettings
from isles.proto.config import RunSettings, Stated, from_assignment, resolve
from isles.proto.errors import ConfigError, UsageError

SECTIONS: Final = ("run", "sync", "log")
BUDGETS: Final = ("run.tokens", "run.rounds")
TEXT: Final = """Give a stopped run other settings: a larger budget, or another way to synchronise.

Stop all its processes first, and start them again afterwards: they read the settings from the broker. All settings of
the synchronisation may change but the number of fragments. The run keeps what it has: contributions that are pending
are merged, workers resume from their checkpoints, and earlier versions can still be recomputed.

A run of `isles up` needs no such command: give `isles up` the new settings.
"""


def build(name: str) -> click.Command:
    """The command."""
    parameters: list[click.Parameter] = [
        HeadedOption(
            ["--store"],
            heading="Where",
            required=True,
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="The store folder of the stopped broker.",
        ),
        *setting_options("run", "The run", own="change", only=("tokens", "rounds")),
        *setting_options("sync", "Synchronisation", own="change"),
        *shared_options(),
        set_option(),
    ]
    return settings_command(name, TEXT, parameters, _change, example="sync.interval_steps")


def _change(*, stated: Sequence[Stated], config_file: Path | None, assignments: Sequence[str], store: Path) -> int:
    asked = load_config(SECTIONS, file=config_file, stated=stated, assignments=assignments)
    _check_changeable(assignments)
    record = read_record(store)
    if record is None:
        raise UsageError(f"{store} is no store with a run: name the --store of its broker")
    check_budget(record, asked)
    models: dict[str, type[BaseModel]] = {"run": RunSettings, "sync": SyncSettings}
    own = [one for key, one in asked.stated.items() if _is_changeable(key)]
    config = resolve(models, flags=[*stated_by(record, asked), *own])
    new = changed(record, config.section("sync", SyncSettings), config.section("run", RunSettings).budget)
    changes = differences(record, new)
    if not changes:
        click.echo(f"run {record.run}: nothing to change, it has these settings already")
        return 0
    write_record(store, new)
    epoch = len(new.past_sync)
    settings = asked.section("log", LogSettings)
    if settings.file is not None:
        from isles.proto.logs import make_logger

        logger = make_logger("change", record.run, file=settings.file, level=settings.level)
        logger.info("run.changed", settings_epoch=epoch, changes=changes)
    click.echo(f"run {record.run}, settings epoch {epoch}: {words(changes)}")
    return 0


def _is_changeable(key: str) -> bool:
    return key.startswith("sync.") or key in BUDGETS


def _check_changeable(assignments: Sequence[str]) -> None:
    """Raises ConfigError for what no run can change, or what is no property of a run. Files may have it: they serve
    other commands, too.
    """
    for one in map(from_assignment, assignments):
        if not _is_changeable(one.key) and not one.key.startswith("log."):
            raise ConfigError(
                f"{one.source}: {one.key} cannot be changed: a run's budget may grow, and its [sync] settings may be "
                "others, no more"
            )
