"""What a worker and an evaluator can be told: the sections `worker` and `evaluator` of every source of settings.

Nothing here is agreed between processes: what a run's processes must have in common stands in its record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isles.proto.agreement import NotNegative, Positive
from isles.proto.ids import NAME_LENGTH_MAX, Name, is_name
from isles.proto.messages import SHARDS_MAX
from isles.proto.route import RELAY_TIMEOUT_SECONDS, Route
from isles.proto.timeouts import faults, times_of
from isles.proto.transport.address import DEFAULT_BROKER, BrokerAddress

DeviceName = Literal["auto", "cpu", "cuda", "mps"]

THREADS_MAX: Final = 1024
"""More cores than any one machine gives to one process."""

Threads = Annotated[int, Field(ge=0, le=THREADS_MAX)]


class _ClientSettings(BaseModel):
    """What every process that computes on the model and talks to a broker has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    broker: BrokerAddress = Field(
        default=DEFAULT_BROKER, description="address of the broker: tcp://HOST:PORT, which stands for three ports"
    )
    key: Path | None = Field(
        default=None, description="key file of this process, made by `isles keys`; a broker without keys wants none"
    )
    relay: BrokerAddress | None = Field(
        default=None,
        description="address of the relay of this region, which is talked to instead of the broker; if a broker is "
        "named, too, it is the way while the relay is silent",
    )
    relay_timeout_seconds: Positive = Field(
        default=RELAY_TIMEOUT_SECONDS,
        description="silence of the relay after which the broker is asked, in seconds; some heartbeats of the broker",
    )
    device: DeviceName = Field(
        default="auto", description="where the model is computed; auto takes cuda, then mps, then cpu"
    )

    @property
    def route(self) -> Route:
        """How it reaches its run. With a relay, a broker that nobody named is none."""
        broker = self.broker if self.relay is None or "broker" in self.model_fields_set else None
        return Route(broker, self.key, self.relay, self.relay_timeout_seconds)

    @property
    def address(self) -> str:
        """Whom it means to talk to, for sentences."""
        return self.route.address


class WorkerSettings(_ClientSettings):
    """One worker: which learner it runs, where, how fast, and how patient it is."""

    id: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] = Field(
        default="",
        description="name of the learner, the same after every restart; empty = with a key one that the broker gives, "
        "else the host's name, numbered from the second worker of one checkpoint folder on",
    )
    region: Name = Field(default="local", description="name of the place, for status and relays")
    threads: Threads = Field(default=0, description="threads of one tensor operation; 0 = torch decides")
    step_seconds: NotNegative = Field(
        default=0.0, description="an inner step takes at least so many seconds, waiting if need be; 0 = full speed"
    )
    num_shards: Annotated[int, Field(ge=1, le=SHARDS_MAX)] = Field(
        default=16, description="data shards that the learner reads in turn"
    )
    checkpoint_dir: Path | None = Field(
        default=Path("checkpoints"),
        description="folder below which the learner writes its checkpoint, under its own name; without one a restarted "
        "worker is a new learner",
    )
    checkpoint_seconds: Positive = Field(default=10.0, description="seconds between two checkpoints")
    join_timeout_seconds: Positive = Field(
        default=120.0, description="seconds to wait for the broker and for data before giving up"
    )
    drain_timeout_seconds: Positive = Field(
        default=30.0, description="seconds to wait, at the end, until the last work is merged"
    )
    log_every_seconds: Positive = Field(default=5.0, description="seconds between two lines about the progress")

    @field_validator("id")
    @classmethod
    def _check_id(cls, name: str) -> str:
        return _checked_name(name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_patience(self.route, self.join_timeout_seconds)
        return self


class EvaluatorSettings(_ClientSettings):
    """The evaluator: how often it validates the global parameters."""

    id: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] = Field(
        default="evaluator", description="name of this evaluator; a second one needs another"
    )
    threads: Threads = Field(default=1, description="threads of one tensor operation; 0 = torch decides")
    every_cycles: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=1, description="cycles between two evaluations: each fragment has advanced so often"
    )
    every_seconds_min: NotNegative = Field(
        default=5.0, description="seconds between the beginnings of two evaluations, at least"
    )
    quiet_seconds: Positive = Field(
        default=5.0, description="a finished run without a new version for so many seconds is evaluated once more"
    )
    niceness: Annotated[int, Field(ge=0, le=19)] = Field(
        default=5, description="how far it steps back for learners on the same machine; 0 = not at all"
    )
    join_timeout_seconds: Positive = Field(default=120.0, description="seconds to wait for the broker before giving up")
    record_timeout_seconds: Positive = Field(
        default=3600.0, description="seconds to wait for the first worker, which starts the run, before giving up"
    )
    fetch_timeout_seconds: Positive = Field(
        default=600.0, description="seconds that bringing all fragments may take before it is tried again"
    )
    final_timeout_seconds: Positive = Field(
        default=30.0, description="seconds that fetching and reporting may take once it was told to stop"
    )

    @field_validator("id")
    @classmethod
    def _check_id(cls, name: str) -> str:
        if not name:
            raise ValueError("an evaluator needs a name")
        return _checked_name(name)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := faults(times_of("evaluator", self)):
            raise ValueError(wrong[0])
        _check_patience(self.route, self.join_timeout_seconds)
        return self


def _check_patience(route: Route, join_timeout_seconds: float) -> None:
    if route.relay and route.broker and join_timeout_seconds <= route.relay_timeout_seconds:
        raise ValueError(
            f"join_timeout_seconds = {join_timeout_seconds:g} is not over relay_timeout_seconds = "
            f"{route.relay_timeout_seconds:g}, so a process whose relay is away would give up before it asks the home "
            "broker: raise the first or lower the second"
        )


def _checked_name(name: str) -> str:
    if name and not is_name(name):
        raise ValueError(
            f"{name!r} is no name: up to {NAME_LENGTH_MAX} lower-case letters, digits, dots, dashes and underscores, "
            "beginning and ending without a mark"
        )
    return name
