"""`isles init`: starts a run from given weights, in a run folder or at a running broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from isles.ops.options import (
    HeadedOption,
    Patience,
    load_config,
    set_option,
    setting_options,
    settings_command,
    shared_options,
)
from isles.ops.reach import Reach, key_option
from isles.ops.settings import section_models
from isles.proto.config import Config, RunSettings, Stated, resolve
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from isles.proto.manifest import Manifest

TEXT: Final = """Start a run from given weights, which become version 0 of its parameters.

The file must be a safetensors file with the tensors of the task's model, by name, in its shapes and types. A file that
isles wrote says itself which settings of the task gpt it needs. With --run-dir, `isles up` then goes on with the run;
with --broker, workers find it there as if one of them had started it.
"""
HEADING: Final = "From where, to where"
TIMEOUT_SECONDS: Final = 300.0


def build(name: str) -> click.Command:
    """The command."""
    run = ("task", "seed", "tokens", "rounds", "id")
    parameters: list[click.Parameter] = [
        HeadedOption(
            ["--from", "weights"],
            heading=HEADING,
            required=True,
            type=click.Path(dir_okay=False, path_type=Path),
            metavar="FILE",
            help="The weights, as a safetensors file.",
        ),
        HeadedOption(
            ["--run-dir"],
            heading=HEADING,
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Start the run in this new folder, for `isles up`.",
        ),
        HeadedOption(
            ["--broker"],
            heading=HEADING,
            metavar="ADDRESS",
            help="Start the run at this broker, which must have none.",
        ),
        key_option(),
        HeadedOption(
            ["--timeout"],
            heading=HEADING,
            default=TIMEOUT_SECONDS,
            type=Patience(),
            show_default=True,
            metavar="SECONDS",
            help="How long each answer of the broker may take.",
        ),
        *setting_options("run", "The run", own="init", only=run),
        *setting_options("sync", "Synchronisation", own="init"),
        *setting_options("task", "The task gpt", own="init"),
        *shared_options(),
        set_option(),
    ]
    return settings_command(name, TEXT, parameters, _init, example="run.seed")


def _init(
    *,
    stated: Sequence[Stated],
    config_file: Path | None,
    assignments: Sequence[str],
    weights: Path,
    run_dir: Path | None,
    broker: str | None,
    key: Path | None,
    timeout: float,
) -> int:
    if (run_dir is None) == (broker is None):
        raise click.UsageError("give either --run-dir or --broker")
    if run_dir is not None:
        stated = [*stated, Stated("up.run_dir", str(run_dir), "the flag --run-dir")]
    asked = load_config(section_models(), file=config_file, stated=stated, assignments=assignments)
    config = _with_settings_of(weights, asked)
    if run_dir is not None:
        _init_folder(run_dir, config, weights, timeout, has_port="broker.port" in asked.stated)
    else:
        assert broker is not None
        click.echo(_sentence(config, weights, _start(Reach(broker, key), config, weights, timeout)))
    return 0


def _init_folder(run_dir: Path, config: Config, weights: Path, timeout: float, *, has_port: bool) -> None:
    from isles.ops.changes import read_record
    from isles.ops.export import broker_for_a_while
    from isles.ops.run_folder import RunFolder, State, write_whole
    from isles.ops.up import settle

    with RunFolder(run_dir) as folder:
        if read_record(folder.store) is not None:
            raise UsageError(
                f"{run_dir} has a run already: `isles up --run-dir {run_dir}` goes on with it; name another"
            )
        with broker_for_a_while(folder, timeout) as reach:
            manifest = _start(reach, config, weights, timeout)
        state = State()
        settled = settle(folder, state, config, has_port=has_port)
        folder.write_state(state)
        write_whole(folder.config, settled.to_toml())
    click.echo(_sentence(config, weights, manifest))
    click.echo(f"train it: isles up --run-dir {run_dir}")


def _start(reach: Reach, config: Config, weights: Path, timeout: float) -> Manifest:
    from isles.workers.initial import start_run

    connection = reach.connect("init")
    try:
        return start_run(config, weights, connection, address=reach.address, timeout_seconds=timeout)
    finally:
        connection.close()


def _with_settings_of(weights: Path, asked: Config) -> Config:
    """Settings of the task gpt that nobody stated, as the file says that it needs them, if isles wrote it."""
    from isles.ops.export import read_description
    from isles.workers.record import LOCAL_TASK_SETTINGS
    from isles.workers.task import BUILT_IN, TaskSettings

    try:
        description = read_description(weights)
    except UsageError:
        return asked
    needed = description["task_settings"]
    if asked.section("run", RunSettings).task != BUILT_IN or description["task"] != BUILT_IN:
        return asked
    known = TaskSettings.model_fields.keys() - LOCAL_TASK_SETTINGS
    if not isinstance(needed, dict):
        return asked
    earlier = [
        Stated(f"task.{name}", value, str(weights), is_text=False) for name, value in needed.items() if name in known
    ]
    return resolve(section_models(), earlier=earlier, flags=asked.stated.values())


def _sentence(config: Config, weights: Path, manifest: Manifest) -> str:
    from isles.ops.wording import amount, fragments_text

    run = config.section("run", RunSettings)
    num_fragments = manifest.num_parameter_fragments
    fragments = fragments_text(num_fragments, has_buffers=len(manifest.fragments) > num_fragments)
    return f"started the run {run.id} from {weights}: {amount(manifest.num_values)} parameters in {fragments}"
