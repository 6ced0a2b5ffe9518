"""How a plan is named on a command line, and read."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from pydantic import ValidationError

from isles.ops.chaos.plan import KINDS, RANDOM_KINDS, RANDOM_ROLES, Kind, Plan, RandomPlan, draw, parse_kinds, validate
from isles.ops.chaos.roster import Roster
from isles.proto.config import TOML_FAULTS
from isles.proto.errors import ConfigError, UsageError

PLAN_BYTES_MAX: Final = 16 << 20
"""A plan of the largest size is shorter."""
RANDOM: Final = "random"
"""Instead of a file: draw one."""
DEFAULTS: Final = RandomPlan()


class ChaosOption(click.Option):
    """Stands below a heading of its own where a command's options are grouped."""

    heading = "Faults on purpose"


def chaos_option() -> click.Option:
    """`--chaos PLAN`, for a command that runs a run."""
    text = "Make these faults happen, and check at the end that nothing was lost: a TOML file, or `random`."
    return ChaosOption(["--chaos"], metavar="PLAN", default=None, help=text)


def random_options(prefix: str, kinds: Sequence[Kind] = RANDOM_KINDS) -> list[click.Parameter]:
    """What `random` takes: `--every` and the like, with a prefix where a command has other options of those names.

    `kinds` are drawn where nothing else is said.
    """
    drawn = ",".join(dict.fromkeys(kinds))
    rows: tuple[tuple[str, type, str, str], ...] = (
        ("seed", int, "N", f"Seed of a random plan, and of what a file leaves to chance.  [default: {DEFAULTS.seed}]"),
        ("every", float, "SECONDS", f"A random fault so often.  [default: {DEFAULTS.every_seconds:g}]"),
        ("for", float, "SECONDS", f"Random faults for so long.  [default: {DEFAULTS.for_seconds:g}]"),
        (
            "kinds",
            str,
            "KIND,KIND",
            f"What is drawn: {', '.join(KINDS)}; what is named twice, twice as often.  [default: {drawn}]",
        ),
        ("processes", str, "NAME,NAME", "To whom it may happen.  [default: everybody]"),
        ("lasting", float, "SECONDS", f"How long drawn faults last.  [default: {DEFAULTS.seconds:g}]"),
    )
    return [
        ChaosOption([f"--{prefix}{name}", f"chaos_{name}"], type=kind, default=None, metavar=metavar, help=text)
        for name, kind, metavar, text in rows
    ]


def read_plan(text: str, options: Mapping[str, Any], roster: Roster, kinds: Sequence[Kind] = RANDOM_KINDS) -> Plan:
    """The plan of a file, or a drawn one; `options` are those of `random_options`, by their names, as are `kinds`.

    Raises ConfigError with one sentence for a plan that is wrong, or that names whom the run does not have, and
    UsageError for a file that cannot be read.
    """
    given = {name.removeprefix("chaos_"): value for name, value in options.items() if value is not None}
    if text != RANDOM:
        unused = sorted(given.keys() - {"seed"})
        if unused:
            raise ConfigError(f"{unused[0]} belongs to a random plan: the plan {text} says itself what happens when")
        plan = read_file(Path(text))
        roster.check(plan, text)
        return plan.model_copy(update={"seed": given["seed"]}) if "seed" in given else plan
    roles = tuple(role for role in RANDOM_ROLES if role in roster.roles)
    wanted: dict[str, Any] = {"regions": roster.regions, "kinds": tuple(kinds), "roles": roles}
    for name, key in (("seed", "seed"), ("every", "every_seconds"), ("for", "for_seconds"), ("lasting", "seconds")):
        if name in given:
            wanted[key] = given[name]
    if "kinds" in given:
        wanted["kinds"] = parse_kinds(given["kinds"])
    if "processes" in given:
        named = tuple(name.strip() for name in given["processes"].split(",") if name.strip())
        roster.check_names(named, "a random plan: processes")
        wanted |= {"processes": named, "workers": tuple(name for name in named if name in roster.workers)}
    try:
        chosen = RandomPlan(**wanted)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"a random plan: {first['loc'][0]}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error
    return draw(chosen, random.Random(chosen.seed))


def read_file(path: Path) -> Plan:
    """Raises ConfigError and UsageError as `read_plan` does."""
    try:
        with path.open("rb") as file:
            data = file.read(PLAN_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(
            f"the plan {path} cannot be read ({error.strerror or error}): name a TOML file, or {RANDOM}"
        ) from error
    if len(data) > PLAN_BYTES_MAX:
        raise ConfigError(f"{path} is no plan: it is longer than {PLAN_BYTES_MAX} bytes")
    try:
        tree = tomllib.loads(data.decode())
    except TOML_FAULTS as error:
        raise ConfigError(f"{path} is no TOML file: {str(error).rstrip('.')}") from error
    return validate(tree, str(path))
