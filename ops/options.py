"""Options made out of settings models, so that `--help` explains every setting and no flag is written twice."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from isles.ops.settings import section_models
from isles.proto.config import (
    Config,
    RunSettings,
    Stated,
    allowed_values,
    flag_name,
    from_assignment,
    property_schema,
    resolve,
    variable_name,
)
from isles.proto.errors import ConfigError

SOURCES_TEXT: Final = (
    "Each setting can also stand in a TOML file, below [section] as `key = value`, or in a variable "
    "ISLES_<SECTION>__<KEY>, such as {example}. Flags win over variables, variables over the file."
)

NUMBER_MAX: Final = 2**53 - 1
"""Of a flag that is no setting: more than anything that is counted, and no more than any reader of it can hold."""

SHORT_FLAGS: Final = {
    "log.level": "--log-level",
    "log.file": "--log-file",
    "run.task": "--task",
    "run.seed": "--seed",
    "run.tokens": "--tokens",
    "run.rounds": "--rounds",
    "sync.preset": "--preset",
    "worker.step_seconds": "--step-seconds",
    "broker.upstream_key": "--key",
    "sync.is_deterministic": "--deterministic",
    "outer.require_learners": "--require-learners",
}
"""Settings that have one short flag in every command that takes them."""

METAVARS: Final = {"integer": "N", "number": "X", "boolean": "BOOL", "string": "TEXT", "array": "LIST"}


class SettingOption(click.Option):
    """An option that stands for one setting; its value stays text until the section is validated."""

    def __init__(self, key: str, model: type[BaseModel], flag: str, heading: str) -> None:
        section, _, name = key.partition(".")
        self.key = key
        self.flag = flag
        self.heading = heading
        schema = property_schema(model, name)
        is_switch = schema.get("type") == "boolean"
        super().__init__(
            [f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag, f"{section}__{name}"],
            default=None,
            type=None if is_switch else str,
            metavar=None if is_switch else _metavar(schema),
            help=_help_text(model, name),
        )


class HeadedOption(click.Option):
    """An option that is no setting, but stands under a heading of its own in the help."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Patience(click.ParamType[float]):
    """Seconds that a command waits: a number above 0."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not seconds > 0:
            self.fail(f"{value!r} is no number of seconds above 0", param, ctx)
        return seconds


class Number(click.ParamType[int]):
    """A whole number from `least` to `most`: what a flag that is no setting takes."""

    name = "number"

    def __init__(self, least: int, most: int = NUMBER_MAX) -> None:
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self._least - 1
        if number < self._least:
            self.fail(f"{value!r:.80} is no whole number of at least {self._least}", param, ctx)
        if number > self._most:
            self.fail(f"{value!r:.80} is more than {self._most}", param, ctx)
        return number


class SettingsCommand(click.Command):
    """A command whose options are grouped by section; `example` is a setting that files and variables also have."""

    def __init__(self, *args: Any, example: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._example = example

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "heading", "Options"), []).append(record)
        for heading in sorted(groups, key=lambda name: name == "Options"):
            with formatter.section(heading):
                formatter.write_dl(groups[heading], col_max=34)
        if self._example:
            formatter.write_paragraph()
            formatter.write_text(SOURCES_TEXT.format(example=variable_name(self._example)))


def setting_options(
    section: str, heading: str, *, own: str, only: Iterable[str] = (), flags: Mapping[str, str] | None = None
) -> list[click.Parameter]:
    """One option per setting of a section, or per setting in `only`; flat if it is the command's `own` section.

    `flags` gives single settings another flag, by dotted key.
    """
    model = section_models()[section]
    keys = {name: f"{section}.{name}" for name in only or model.model_fields}
    return [
        SettingOption(key, model, (flags or {}).get(key) or _flag(section, name, own), heading)
        for name, key in keys.items()
    ]


def shared_options() -> list[click.Parameter]:
    """What every process takes."""
    config = click.Option(
        ["--config", "config_file"],
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Read settings from this TOML file.",
    )
    return [config, *setting_options("log", "Options", own="log")]


def set_option() -> click.Option:
    """`--set section.key=value`, for whatever has no flag of its own."""
    return click.Option(
        ["--set", "assignments"],
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Any setting; repeat it.",
    )


def settings_command(
    name: str, text: str, parameters: Sequence[click.Parameter], callback: Callable[..., Any], *, example: str
) -> SettingsCommand:
    """A command whose callback gets the parameters that are no settings and `stated`, the settings that were flags."""

    def invoke(**values: Any) -> Any:
        others = {key: value for key, value in values.items() if "__" not in key}
        return callback(stated=stated_flags(click.get_current_context().command.params, values), **others)

    return SettingsCommand(name, params=list(parameters), callback=invoke, help=text, example=example)


def stated_flags(parameters: Iterable[click.Parameter], values: Mapping[str, Any]) -> list[Stated]:
    """What was given on the command line."""
    stated = []
    for parameter in parameters:
        if isinstance(parameter, SettingOption) and (value := values.get(str(parameter.name))) is not None:
            text = str(value).lower() if isinstance(value, bool) else value
            stated.append(Stated(parameter.key, text, f"the flag {parameter.flag}"))
    return stated


def load_config(
    known: Iterable[str], *, file: Path | None, stated: Sequence[Stated], assignments: Sequence[str] = ()
) -> Config:
    """The sections `known` out of file, variables and flags. Raises ConfigError.

    A file and variables may be those of all processes; a flag is meant for this one, which must have its section.
    """
    assigned = [from_assignment(text) for text in assignments]
    flags = [*stated, *assigned]
    run = resolve(
        section_models(has_own_task=True), known=["run"], file=file, environment=os.environ, flags=flags
    ).section("run", RunSettings)
    models = section_models(has_own_task=run.task != "gpt")
    config = resolve(models, known=known, file=file, environment=os.environ, flags=flags)
    for one in assigned:
        section = one.key.partition(".")[0]
        if section not in config.sections:
            raise ConfigError(
                f"{one.source}: this command takes no setting of the section {section}, only of "
                f"{', '.join(config.sections)}"
            )
    return config


def _flag(section: str, name: str, own: str) -> str:
    key = f"{section}.{name}"
    return SHORT_FLAGS.get(key) or flag_name(key, own)


def _metavar(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return "|".join(choice.get("title") or _metavar(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return "|".join(str(value) for value in schema["enum"])
    if "path" in str(schema.get("format", "")):
        return "PATH"
    return METAVARS.get(str(schema.get("type")), "VALUE")


def _help_text(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    text = (field.description or name.replace("_", " ")).rstrip(".")
    notes = []
    if field.default is not PydanticUndefined and field.default is not None:
        notes.append(f"default: {_shown(field.default)}")
    schema = property_schema(model, name)
    if schema.get("type") in ("integer", "number"):
        notes.append(allowed_values(model, name))
    elif "const" in schema:
        notes.append(f"only {schema['const']} today")
    if field.is_required():
        notes.append("required")
    text = text[:1].upper() + text[1:]
    return f"{text}.  [{'; '.join(notes)}]" if notes else f"{text}."


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return '""' if value == "" else str(value)
