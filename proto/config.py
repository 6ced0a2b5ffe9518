"""Settings in layers: defaults, then a TOML file, then ISLES_* variables, then flags; the later one wins.

A section is a frozen model owned by the component that it configures; this file knows none of them but `run`. Every
way of setting a value ends in the same validation, every unknown key is refused, and it is remembered which settings
somebody gave on purpose: those must equal the run's, the others may be adopted from it.

    TOML      [worker]  step_seconds = 0.1
    variable  ISLES_WORKER__STEP_SECONDS=0.1
    flag      --step-seconds 0.1, or --worker.step-seconds 0.1 where `worker` is not the command's own section
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isles.proto.agreement import BUDGET_MAX, Budget
from isles.proto.errors import ConfigError, shown
from isles.proto.ids import Name

VARIABLE_PREFIX: Final = "ISLES_"
FORMER_SETTINGS: Final = frozenset({"broker.expose_without_keys"})
"""Settings that files of earlier releases name and that mean nothing: a run folder with one of them goes on."""
CONFIG_BYTES_MAX: Final = 1 << 20
"""Longest settings file: all settings with comments are under 20 KB; more is some other file."""
TOML_FAULTS: Final = (ValueError, RecursionError)
"""What reading text that is no TOML raises: also for numbers of thousands of digits, and for thousands of brackets."""
HUGE: Final = 2**53
"""A bound from here on says what a field of the wire holds, which is of no use to a person."""
DEFAULT_RUN: Final = "main"
"""Name of a run to which nobody gave one."""
DEFAULT_TOKENS: Final = 1_600_000
"""Budget of a run to which nobody gave one."""

_Section = TypeVar("_Section", bound=BaseModel)


class RunSettings(BaseModel):
    """Which run this is, what it trains and when it is finished; used by whoever starts the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Name = Field(default=DEFAULT_RUN, description="name of the run: a process of another run is refused")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=1, description="of the initial parameters and of the order of the data"
    )
    task: Annotated[str, Field(min_length=1, max_length=256)] = Field(
        default="gpt", description="what is trained: gpt, or module:function of one's own"
    )
    tokens: Annotated[int, Field(ge=1, le=BUDGET_MAX)] | None = Field(
        default=None,
        description=f"budget in merged tokens; {DEFAULT_TOKENS} if neither this nor rounds is given",
    )
    rounds: Annotated[int, Field(ge=1, le=BUDGET_MAX)] | None = Field(
        default=None, description="budget in committed rounds, summed over the fragments, instead of tokens"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tokens is not None and self.rounds is not None:
            raise ValueError("run.tokens and run.rounds are two budgets for one run: give only one of them")
        return self

    @property
    def budget(self) -> Budget:
        """What the run record says about its end."""
        if self.rounds is not None:
            return Budget(rounds=self.rounds)
        return Budget(tokens=self.tokens or DEFAULT_TOKENS)


class FreeSettings(BaseModel):
    """The section `task` of a task of one's own: any key, checked by the task itself."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True, slots=True)
class Stated:
    """One value that somebody gave, and how a message calls the place where they did."""

    key: str
    """Dotted: section.name."""
    value: Any
    source: str
    is_text: bool = True
    """Variables and flags are text that is still to be parsed; a TOML value has its type already."""


@dataclass(frozen=True)
class Config:
    """The resolved sections of one process."""

    sections: Mapping[str, BaseModel]
    stated: Mapping[str, Stated]
    """What was given on purpose, by dotted key; of several sources the one that won."""

    def section(self, name: str, model: type[_Section]) -> _Section:
        """The settings of one section. Raises KeyError for a section that was not among the models."""
        settings = self.sections[name]
        assert isinstance(settings, model), name
        return settings

    def stated_in(self, name: str) -> dict[str, Any]:
        """The settings of one section that were given on purpose, without its name, parsed."""
        dumped = self.sections[name].model_dump(mode="json")
        return {key: value for key, value in dumped.items() if f"{name}.{key}" in self.stated}

    def to_toml(self) -> str:
        """Everything as a settings file that gives the same configuration, each setting explained."""
        return "\n".join(_section_lines(name, settings) for name, settings in self.sections.items())


def resolve(
    models: Mapping[str, type[BaseModel]],
    *,
    known: Iterable[str] = (),
    earlier: Iterable[Stated] = (),
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[Stated] = (),
) -> Config:
    """The configuration out of all sources.

    `models` are all sections that exist, so that a misspelt key is found wherever it stands; only those in `known`
    (all if empty) are built and validated. `earlier` is a layer below the file. Raises ConfigError, whose one sentence
    names the source, the key, what is wrong and what is allowed.
    """
    given = [
        *earlier,
        *(_from_file(file, models) if file is not None else ()),
        *_from_environment(environment or {}, models),
        *flags,
    ]
    stated: dict[str, Stated] = {}
    for one in given:
        _check_key(one, models)
        stated[one.key] = one
    wanted = set(known) or set(models)
    sections = {name: _build(name, model, stated) for name, model in models.items() if name in wanted}
    return Config(sections, {key: one for key, one in stated.items() if key.partition(".")[0] in wanted})


def from_assignment(text: str, flag: str = "--set") -> Stated:
    """Reads `section.key=value`, dashes allowed in the key. Raises ConfigError for any other form."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or "." not in key:
        raise ConfigError(f"{flag} {text}: write it as section.key=value, for example sync.interval_steps=24")
    return Stated(key.replace("-", "_"), value.strip(), f"{flag} {text}")


def variable_name(key: str) -> str:
    """The environment variable of a dotted key."""
    return VARIABLE_PREFIX + key.replace(".", "__").upper()


def flag_name(key: str, own_section: str) -> str:
    """The flag of a dotted key: short in the command's own section."""
    section, _, name = key.partition(".")
    return f"--{name if section == own_section else key}".replace("_", "-")


def property_schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    """The JSON schema of one setting, `null` left out; for texts about what it may be."""
    schema: dict[str, Any] = _properties(model).get(name, {})
    choices = [choice for choice in schema.get("anyOf", []) if choice.get("type") != "null"]
    return choices[0] if len(choices) == 1 else schema


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schemas of all settings of a model: made once, since a help text asks for each of them several times."""
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def allowed_values(model: type[BaseModel], name: str) -> str:
    """What a setting may be, in words: `a whole number from 1 to 4096`."""
    schema = property_schema(model, name)
    if families := [choice for choice in schema.get("anyOf", []) if "title" in choice]:  # names, and families of names
        names = [str(value) for choice in schema["anyOf"] for value in choice.get("enum", [])]
        return "one of " + ", ".join(names) + "".join(f", or {choice['description']}" for choice in families)
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(schema)
    if kind == "boolean":
        return "true or false"
    if schema.get("format") in ("path", "directory-path", "file-path"):
        return "a path"
    if kind == "string" and schema.get("pattern", "").startswith("^[a-z0-9]"):
        return "up to 64 lower-case letters, digits, dots, dashes and underscores, beginning and ending without a mark"
    if kind == "string" and schema.get("pattern", "").startswith("^tcp://"):
        return "tcp:// and a host, without a port"
    return "a text" if kind == "string" else "a value of its kind"


def _range(schema: Mapping[str, Any]) -> str:
    parts = []
    schema = {key: bound for key, bound in schema.items() if not isinstance(bound, int) or bound < HUGE}
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    if "minimum" in schema:
        parts.append(f"of at least {schema['minimum']}")
    if "exclusiveMinimum" in schema:
        parts.append(f"above {schema['exclusiveMinimum']}")
    if "maximum" in schema:
        parts.append(f"of at most {schema['maximum']}")
    if "exclusiveMaximum" in schema:
        parts.append(f"below {schema['exclusiveMaximum']}")
    return " " + " and ".join(parts) if parts else ""


# --------------------------------------------------------------------------------------------------------- the sources


def _from_file(path: Path, models: Mapping[str, type[BaseModel]]) -> list[Stated]:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error.strerror or error}") from error
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path} is no settings file: it is longer than {CONFIG_BYTES_MAX} bytes")
    try:
        tree = tomllib.loads(data.decode())
    except TOML_FAULTS as error:
        raise ConfigError(f"{path} is no TOML file: {str(error).rstrip('.')}") from error
    stated = []
    for section, table in tree.items():
        if section not in models:
            hint = _did_you_mean(section, models, f"the sections are {', '.join(models)}")
            raise ConfigError(f"{path}: there is no section [{section}]; {hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a section: write [{section}] and its settings below it")
        given = [Stated(f"{section}.{name}", value, str(path), is_text=False) for name, value in table.items()]
        stated += [one for one in given if one.key not in FORMER_SETTINGS]
    return stated


def _from_environment(environment: Mapping[str, str], models: Mapping[str, type[BaseModel]]) -> list[Stated]:
    stated = []
    for variable in sorted(environment):
        if not variable.startswith(VARIABLE_PREFIX):
            continue
        section, separator, name = variable.removeprefix(VARIABLE_PREFIX).lower().partition("__")
        model = models.get(section)
        if not separator or model is None or not _takes(model, name):
            variables = [variable_name(f"{s}.{n}") for s, m in models.items() for n in m.model_fields]
            hint = _did_you_mean(variable, variables, "they are named ISLES_<SECTION>__<KEY>, as `--help` lists them")
            raise ConfigError(f"the variable {variable} sets nothing that exists: {hint}")
        stated.append(Stated(f"{section}.{name}", environment[variable], f"the variable {variable}"))
    return stated


def _takes(model: type[BaseModel], name: str) -> bool:
    return name in model.model_fields or model.model_config.get("extra") == "allow"


def _check_key(one: Stated, models: Mapping[str, type[BaseModel]]) -> None:
    section, _, name = one.key.partition(".")
    model = models.get(section)
    if model is None:
        hint = _did_you_mean(section, models, f"the sections are {', '.join(models)}")
        raise ConfigError(f"{one.source}: there is no section {section}; {hint}")
    if not _takes(model, name):
        hint = _did_you_mean(name, model.model_fields, f"{section} has {', '.join(model.model_fields)}")
        raise ConfigError(f"{one.source}: there is no setting {one.key}; {hint}")


def _did_you_mean(text: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(text, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else otherwise


# ------------------------------------------------------------------------------------------------------ the validation


def _build(name: str, model: type[BaseModel], stated: Mapping[str, Stated]) -> BaseModel:
    mine = {key.partition(".")[2]: one for key, one in stated.items() if key.partition(".")[0] == name}
    for field, one in mine.items():
        _check_type(one, model, field)
    is_free = model.model_config.get("extra") == "allow"
    values = {field: _scalar(one) if is_free else one.value for field, one in mine.items()}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise ConfigError(_sentence(name, model, fault["loc"], fault["msg"], mine)) from error


def _scalar(one: Stated) -> Any:
    """A value for which there is no model: read as TOML reads it, else as text."""
    if not one.is_text:
        return one.value
    try:
        value = tomllib.loads(f"value = {one.value}")["value"]
    except TOML_FAULTS:
        return one.value
    return value if isinstance(value, bool | int | float | str) else one.value


def _check_type(one: Stated, model: type[BaseModel], field: str) -> None:
    """TOML has types of its own: `steps = true` and `steps = "8"` are mistakes, whatever could be made of them."""
    if one.is_text:
        return
    kind = property_schema(model, field).get("type")
    value = one.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_right = {
        "integer": is_number,
        "number": is_number,
        "boolean": isinstance(value, bool),
        "string": isinstance(value, str),
    }
    if not is_right.get(str(kind), True):
        raise ConfigError(f"{one.source}: {one.key} = {shown(value)} must be {allowed_values(model, field)}")


def _sentence(
    name: str, model: type[BaseModel], location: tuple[int | str, ...], text: str, mine: Mapping[str, Stated]
) -> str:
    text = text.removeprefix("Value error, ")
    if not location:
        # Of the whole section: blame what the text names, not whatever else was set in it.
        named = [one for field, one in mine.items() if re.search(rf"\b{re.escape(field)}\b", text)]
        sources = list(dict.fromkeys(one.source for one in named))
        return f"{text} (from {', '.join(sources)})" if sources else text
    field = str(location[0])
    one = mine.get(field)
    if one is None:
        return f"{name}.{field}: {text[:1].lower()}{text[1:]}; it must be {allowed_values(model, field)}"
    given = shown(one.value)
    if "finite" in text:
        return f"{one.source}: {one.key} = {given} must be finite"
    if text.startswith(("Input should", "String should", "Input must")) or "unable to parse" in text:
        return f"{one.source}: {one.key} = {given} must be {allowed_values(model, field)}"
    return f"{one.source}: {one.key} = {given}: {text}"


# ------------------------------------------------------------------------------------------------------------- writing


def _section_lines(name: str, settings: BaseModel) -> str:
    fields = type(settings).model_fields
    lines = [f"[{name}]"]
    for key, value in settings.model_dump(mode="json").items():
        text = fields[key].description if key in fields else None
        if value is None:
            lines.append(f"# {key} is not set" + (f": {text}" if text else ""))
            continue
        lines += [f"# {text}"] if text else []
        lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A JSON-like value as TOML writes it. Raises TypeError for what settings cannot hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"a setting cannot be a {type(value).__name__}")
