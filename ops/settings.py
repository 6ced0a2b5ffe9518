"""The sections of the operator's tools, and where the sections of all others are to be found."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isles.proto.agreement import NotNegative
from isles.proto.config import FreeSettings
from isles.proto.ids import is_name

WORKERS_MAX: Final = 256
"""Processes that one machine is asked to start; above it, somebody mistyped."""

OUTERS_MAX: Final = 16
"""Of one run on one machine: one merges, more than a few wait for nothing."""

SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("isles.proto.config", "RunSettings"),
    "sync": ("isles.proto.agreement", "SyncSettings"),
    "task": ("isles.workers.task", "TaskSettings"),
    "worker": ("isles.workers.settings", "WorkerSettings"),
    "evaluator": ("isles.workers.settings", "EvaluatorSettings"),
    "outer": ("isles.outer.settings", "OuterSettings"),
    "broker": ("isles.brokers.settings", "BrokerSettings"),
    "operator": ("isles.ops.settings", "OperatorSettings"),
    "up": ("isles.ops.settings", "UpSettings"),
    "log": ("isles.ops.settings", "LogSettings"),
}
"""Every section and the model that its component owns; none of these modules needs a tensor library."""


class LogSettings(BaseModel):
    """What a process says, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least important events that are logged"
    )
    file: Path | None = Field(
        default=None, description="append JSON lines to this file instead of logging to standard error"
    )


class OperatorSettings(BaseModel):
    """Every command that asks a broker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Path | None = Field(
        default=None, description="key file of an operator, made by `isles keys`; a broker without keys wants none"
    )


class UpSettings(BaseModel):
    """A run on one machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: Path = Field(
        default=Path("runs/demo"), description="folder of the run: settings, logs, store, parameters, summary"
    )
    workers: Annotated[str, Field(max_length=4096)] = Field(
        default="us=2,eu=2", description="regions and how many workers each has, as region=count,region=count"
    )
    outers: Annotated[int, Field(ge=1, le=OUTERS_MAX)] = Field(
        default=1, description="outers: one merges, the others stand by and take over within its lease"
    )
    stall_seconds: NotNegative = Field(
        default=900.0,
        description="end the run when no round was committed for this many seconds, or when nobody began it in a third "
        "of them; 0 = never",
    )
    drain_seconds: NotNegative = Field(
        default=60.0, description="seconds that each process gets to hand in and stop before it is killed"
    )
    relays: bool = Field(
        default=False,
        description="whether each region has a relay, through which its workers reach the broker; needs the extra "
        "`relay`",
    )
    has_evaluator: bool = Field(default=True, description="whether an evaluator validates the global parameters")

    @model_validator(mode="after")
    def _check(self) -> Self:
        parse_workers(self.workers)
        if twice := set(self.relay_names.values()) & self.worker_ids.keys():
            raise ValueError(
                f"up.workers = {self.workers!r:.200}: {min(twice)} would be both a worker and a relay; give that "
                "region another name, or leave relays out"
            )
        return self

    @property
    def outer_names(self) -> tuple[str, ...]:
        """The outers in order: outer, outer-2."""
        return ("outer", *(f"outer-{number}" for number in range(2, self.outers + 1)))

    @property
    def relay_names(self) -> dict[str, str]:
        """Region -> relay, in order: us -> relay-us; none in a run without relays."""
        regions = dict.fromkeys(self.worker_ids.values()) if self.relays else {}
        return {region: f"relay-{region}" for region in regions}

    @property
    def regions(self) -> dict[str, str]:
        """Process -> region, of whatever belongs to one: workers, then relays."""
        return {**self.worker_ids, **{relay: region for region, relay in self.relay_names.items()}}

    @property
    def worker_ids(self) -> dict[str, str]:
        """Worker id -> region, in order: us-0, us-1, eu-0."""
        return {f"{region}-{n}": region for region, count in parse_workers(self.workers).items() for n in range(count)}


def parse_workers(text: str) -> dict[str, int]:
    """Region -> number of workers. Raises ValueError that says how to write it."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\d{1,6})\s*", part)
        if match is None or not is_name(match[1]) or len(match[1]) > 48:
            raise ValueError(
                f"up.workers = {text!r:.200}: write it as region=count,region=count, for example us=2,eu=2"
            )
        if match[1] in counts:
            raise ValueError(f"up.workers = {text!r:.200} names the region {match[1]} twice: add the counts up")
        counts[match[1]] = int(match[2])
    if not 1 <= sum(counts.values()) <= WORKERS_MAX:
        raise ValueError(f"up.workers = {text!r:.200}: one machine takes from 1 to {WORKERS_MAX} workers in all")
    return {region: count for region, count in counts.items() if count}


def section_models(*, has_own_task: bool = False) -> dict[str, type[BaseModel]]:
    """All sections. The section `task` of a task of one's own takes any key, which that task checks."""
    models: dict[str, type[BaseModel]] = {}
    for name, (module, cls) in SECTIONS.items():
        is_free = name == "task" and has_own_task
        models[name] = FreeSettings if is_free else getattr(importlib.import_module(module), cls)
    return models
