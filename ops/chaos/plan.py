"""What goes wrong, when, and to whom: the plan of a chaos run, written by hand or drawn. Pure.

A plan is a TOML file with one table `[[fault]]` for each fault: `at` says when, in seconds after the first committed
round (or after the start of `isles chaos`), `kind` what, `process`, `role` or `region` to whom, `seconds` how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isles.proto.errors import ConfigError, shown
from isles.proto.ids import NAME_LENGTH_MAX, is_name

Kind = Literal[
    "kill", "kill-all", "freeze", "delay", "rate", "blackhole", "refuse", "reset", "cut", "disk-full", "corrupt"
]
Role = Literal["broker", "outer", "evaluator", "worker"]

KINDS: Final[dict[Kind, str]] = {
    "kill": "SIGKILL for one process",
    "kill-all": "SIGKILL for all processes of the run at once",
    "freeze": "SIGSTOP for one process, SIGCONT after `seconds`",
    "delay": "every byte between a worker and its broker is late by `delay_seconds`, both ways, for `seconds`",
    "rate": "a worker's connections carry at most `bytes_per_second` each way for `seconds`",
    "blackhole": "a worker's connections stand but carry nothing for `seconds`",
    "refuse": "a worker's connections are cut, and new ones refused for `seconds`",
    "reset": "a worker's connections are reset, once",
    "cut": "nothing passes between one region and the broker for `seconds`",
    "disk-full": "the broker finds too little room on its disk for `seconds`",
    "corrupt": "one bit of a stored payload is flipped",
}
"""Each kind of fault in a sentence."""

NETWORK_KINDS: Final = frozenset[Kind]({"delay", "rate", "blackhole", "refuse", "reset", "cut"})
"""They take place in a proxy between workers and broker."""
MOMENTARY_KINDS: Final = frozenset[Kind]({"kill", "kill-all", "reset", "corrupt"})
"""They are over as soon as they have happened."""
WIDE_KINDS: Final = frozenset[Kind]({"kill-all", "disk-full", "corrupt"})
"""They concern the whole run, so that nobody is named."""

FAULTS_MAX: Final = 100_000
"""A fault a second for a day is more than anybody reads."""
SECONDS_MAX: Final = 86_400.0
RANDOM_SECONDS: Final = 15.0
"""How long a drawn freeze lasts: above the lease of a learner (10 s) and of an outer (3 s)."""
RANDOM_KINDS: Final[tuple[Kind, ...]] = ("kill", "freeze")
"""What is drawn for a run that is under way, where nothing else is said: it needs no links and no disk of its own."""
RANDOM_KINDS_WITH_LINKS: Final[tuple[Kind, ...]] = (
    "kill", "kill", "kill", "kill", "freeze", "freeze", "freeze", "delay", "rate", "blackhole", "refuse", "reset", "cut"
)  # fmt: skip
"""What `isles up` draws where nothing else is said: whatever costs time and nothing else, and processes die most often.

The others are for who asks for them: kill-all and disk-full hit everybody at once, and what corrupt hits may be what
the run cannot do without (docs/concepts/failures.md).
"""
RANDOM_ROLES: Final[tuple[Role, ...]] = ("worker", "worker", "worker", "outer", "broker", "evaluator")
"""Whom a drawn fault hits: workers as often as all others together, as there are more of them."""
DELAY_SECONDS: Final = 0.2
"""From one side of the earth to the other and back."""
BYTES_PER_SECOND: Final = 64 << 10
"""A bad line: 64 KiB/s."""

_T = TypeVar("_T")
_Seconds = Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]
_NAME = Annotated[str, Field(max_length=NAME_LENGTH_MAX)]


class Chance(Protocol):
    """Where chance comes from: `random.Random` with a seed."""

    def choice(self, options: Sequence[_T], /) -> _T: ...
    def uniform(self, low: float, high: float, /) -> float: ...


class Fault(BaseModel):
    """One entry of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: _Seconds = Field(description="seconds after the beginning at which it happens")
    kind: Kind = Field(description="what happens")
    process: _NAME = Field(default="", description="name of the process it happens to, such as us-0")
    role: Role | None = Field(
        default=None, description="instead of a name: some process of this role; of the outers, the one that merges"
    )
    region: _NAME = Field(default="", description="for cut, the region; for other network faults, all its workers")
    seconds: _Seconds = Field(default=RANDOM_SECONDS, description="how long it lasts, in seconds")
    delay_seconds: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = Field(
        default=DELAY_SECONDS, description="for delay: how late each byte is, in seconds, each way"
    )
    bytes_per_second: Annotated[int, Field(ge=1, le=1 << 40)] = Field(
        default=BYTES_PER_SECOND, description="for rate: bytes per second of one connection, each way"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = [name for name in ("process", "role", "region") if getattr(self, name)]
        if self.kind in WIDE_KINDS and named:
            raise ValueError(f"{self.kind} concerns the whole run: leave {named[0]} out")
        if len(named) > 1:
            raise ValueError(f"it names both a {named[0]} and a {named[1]}: give one of them")
        if self.kind == "cut" and not self.region:
            raise ValueError('cut takes a region: region = "us"')
        if self.region and self.kind not in NETWORK_KINDS:
            raise ValueError(f"{self.kind} happens to one process: give process or role instead of region")
        if self.kind in NETWORK_KINDS and self.role not in (None, "worker"):
            raise ValueError(f"{self.kind} takes place between workers and broker: role can only be worker")
        for name in (self.process, self.region):
            if name and not is_name(name):
                raise ValueError(f"{name!r} is no name of a process or a region")
        stated = self.model_fields_set
        if "seconds" in stated and self.kind in MOMENTARY_KINDS:
            raise ValueError(f"{self.kind} is over at once: leave seconds out")
        for setting, kind in (("delay_seconds", "delay"), ("bytes_per_second", "rate")):
            if setting in stated and self.kind != kind:
                raise ValueError(f"{setting} belongs to the kind {kind}, not to {self.kind}")
        return self

    @property
    def ends_at(self) -> float:
        """When it is over, in seconds after the beginning."""
        return self.at if self.kind in MOMENTARY_KINDS else self.at + self.seconds

    @property
    def sentence(self) -> str:
        """What happens to whom, in words."""
        whom = self.process or (f"a process of the role {self.role}" if self.role else "")
        whom = whom or (f"region {self.region}" if self.region else "")
        whom = whom or ("the run" if self.kind in WIDE_KINDS else "some process")
        lasting = "" if self.kind in MOMENTARY_KINDS else f" for {self.seconds:g} s"
        return f"{self.at:g} s: {self.kind} {whom}{lasting}"


class Plan(BaseModel):
    """All faults of a chaos run, and the seed of what they leave to chance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="decides which process is meant where several could be"
    )
    fault: Annotated[tuple[Fault, ...], Field(max_length=FAULTS_MAX)] = Field(
        default=(), description="the faults, in any order"
    )

    @property
    def has_network_faults(self) -> bool:
        """Whether it takes proxies between workers and broker."""
        return any(fault.kind in NETWORK_KINDS for fault in self.fault)

    @property
    def ends_at(self) -> float:
        """When the last fault is over, in seconds after the beginning."""
        return max((fault.ends_at for fault in self.fault), default=0.0)


class RandomPlan(BaseModel):
    """What a drawn plan is made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    every_seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)] = 10.0
    for_seconds: Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)] = 120.0
    kinds: tuple[Kind, ...] = RANDOM_KINDS
    processes: tuple[_NAME, ...] = ()
    """To whom it may happen; empty = to anybody."""
    workers: tuple[_NAME, ...] = ()
    """Those of them that are workers: faults of the network happen to no others."""
    roles: tuple[Role, ...] = RANDOM_ROLES
    """Whom it may happen to where nobody is named."""
    regions: tuple[_NAME, ...] = ()
    """Which may be cut off; a cut is not drawn without one."""
    seconds: _Seconds = RANDOM_SECONDS


def draw(wanted: RandomPlan, chance: Chance) -> Plan:
    """A fault every so many seconds, not quite evenly; the same for the same seed. Raises ConfigError."""
    kinds = [kind for kind in wanted.kinds if _has_whom(kind, wanted)]
    if not kinds:
        raise ConfigError(
            "there is nothing to draw: cut needs a run with regions, what else happens to the network a worker, which "
            "must be among the processes that are named; name other kinds as well"
        )
    num_faults = int(wanted.for_seconds / wanted.every_seconds)
    if num_faults > FAULTS_MAX:
        raise ConfigError(f"that would be {num_faults} faults, at most {FAULTS_MAX} are drawn: make `every` longer")
    faults = []
    for n in range(num_faults):
        kind = chance.choice(kinds)
        at = (n + 0.5 + chance.uniform(-0.25, 0.25)) * wanted.every_seconds
        given: dict[str, Any] = {"at": round(at, 3), "kind": kind}
        if kind not in MOMENTARY_KINDS:
            given["seconds"] = wanted.seconds
        if kind == "cut":
            given["region"] = chance.choice(wanted.regions)
        elif kind not in WIDE_KINDS and wanted.processes:
            given["process"] = chance.choice(wanted.workers if kind in NETWORK_KINDS else wanted.processes)
        elif kind not in WIDE_KINDS:
            given["role"] = "worker" if kind in NETWORK_KINDS else chance.choice(wanted.roles)
        faults.append(Fault(**given))
    return Plan(seed=wanted.seed, fault=tuple(faults))


def _has_whom(kind: Kind, wanted: RandomPlan) -> bool:
    """Whether there is anybody a fault of the kind can happen to."""
    if kind in WIDE_KINDS:
        return True
    if kind == "cut":
        return bool(wanted.regions)
    if wanted.processes:
        return bool(wanted.workers) or kind not in NETWORK_KINDS
    return "worker" in wanted.roles if kind in NETWORK_KINDS else bool(wanted.roles)


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """`kill,freeze` as kinds. Raises ConfigError that lists them all."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known: dict[str, Kind] = {kind: kind for kind in KINDS}
    if not names or not set(names) <= known.keys():
        wrong = next((name for name in names if name not in known), text)
        raise ConfigError(f"{wrong!r:.80} is no kind of fault: the kinds are {', '.join(KINDS)}")
    return tuple(known[name] for name in names)


def validate(tree: dict[str, Any], source: str) -> Plan:
    """The plan in a parsed TOML file. Raises ConfigError with one sentence that names the fault and what to do."""
    try:
        return Plan.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_complaint(error)}") from error


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = list(first["loc"])
    model: type[BaseModel] = Plan
    where = ""
    if place[:1] == ["fault"] and len(place) > 1 and isinstance(place[1], int):
        where, model, place = f"fault {place[1] + 1}: ", Fault, place[2:]
    if place == ["fault"] and model is Plan:
        return "fault: each fault is a table of its own that begins with [[fault]]"
    name = ".".join(str(part) for part in place)
    text = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return f"{where}there is no setting {name}: {_listed(model.model_fields)} exist"
    if first["type"] == "missing":
        return f"{where}{name} is missing"
    if first["type"] == "literal_error" and name == "kind":
        return f"{where}kind = {shown(first['input'])} is none of {', '.join(KINDS)}"
    return where + (f"{name}: {text[:1].lower()}{text[1:]}" if name else text)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
