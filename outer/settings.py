"""What an outer can be told: the section `outer` of every source of settings.

How it merges is not here: that is agreed for the whole run and stands in the run record.
"""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isles.proto.agreement import Positive
from isles.proto.ids import NAME_LENGTH_MAX, Name, is_name
from isles.proto.messages import LEARNERS_MAX
from isles.proto.timeouts import faults, times_of
from isles.proto.transport.address import BrokerAddress

CHECKPOINT_VERSIONS_MAX: Final = 2048
"""Half of the 4096 updates that lead from a checkpoint to the head at most: a broker takes no commit beyond them."""


class OuterSettings(BaseModel):
    """One outer: where its broker is, and how patient it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    broker: BrokerAddress = Field(
        default="tcp://127.0.0.1:7700",
        description="address of the broker: tcp://HOST:PORT, which stands for three ports",
    )
    id: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] = Field(
        default="",
        description="name of this outer; empty = the host's name with a random ending, so that two never meet. One "
        "that has a name replaces an earlier one of the same name at once",
    )
    run: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] = Field(
        default="", description="name of the run to merge; empty = whichever the broker serves"
    )
    region: Name = Field(default="local", description="name of the place, for status")
    require_learners: Annotated[int, Field(ge=0, le=LEARNERS_MAX)] = Field(
        default=0,
        description="with fewer live learners than this nothing is merged, for experiments that must not shrink; 0 = "
        "rounds go on with whoever is there",
    )
    list_seconds: Positive = Field(
        default=2.0, description="longest time between two looks at a fragment's contributions, in seconds"
    )
    record_seconds: Positive = Field(
        default=30.0,
        description="longest time between two questions whether the run has been started, in seconds; the broker "
        "announces it as well, so they matter only when that is lost",
    )
    join_timeout_seconds: Positive = Field(
        default=120.0, description="seconds to wait for the broker at the beginning before giving up"
    )
    lost_seconds: Positive = Field(
        default=10.0, description="a broker that is silent for this long, in seconds, is reported as lost"
    )
    stop_seconds: Positive = Field(
        default=10.0, description="seconds that merges and checkpoints under way may take once it was told to stop"
    )
    checkpoint_versions: Annotated[int, Field(ge=1, le=CHECKPOINT_VERSIONS_MAX)] = Field(
        default=16,
        description="versions of a fragment after which its whole state is stored again; until then a new outer "
        "computes them anew, and the store keeps the payloads that they were made from",
    )
    checkpoint_bytes: Annotated[int, Field(ge=0)] = Field(
        default=1 << 30,
        description="bytes of payloads of a fragment after which its whole state is stored again, where that is sooner "
        "than checkpoint_versions; never before they are as many as the state itself has",
    )
    state_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=4 << 30,
        description="memory for the states of all fragments, 12 bytes a parameter; those beyond it are kept on disk",
    )
    payload_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=512 << 20,
        description="memory for contributions that wait for their merge; those beyond it are fetched a second time",
    )
    scratch_dir: Annotated[str, Field(max_length=4096)] = Field(
        default="",
        description="folder for the states that are not kept in memory; empty = the system's one for temporary files, "
        "which should not be in memory itself",
    )

    @field_validator("id", "run")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name and not is_name(name):
            raise ValueError(
                f"{name!r} is no name: up to {NAME_LENGTH_MAX} lower-case letters, digits, dots, dashes and "
                "underscores, beginning and ending without a mark"
            )
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := faults(times_of("outer", self)):
            raise ValueError(wrong[0])
        return self

    def named(self, host: str, token: str) -> Self:
        """These settings with a name: without one, a new one that tells the machine and ends with a random token."""
        return self if self.id else self.model_copy(update={"id": default_name(host, token)})


def default_name(host: str, incarnation: str) -> str:
    """`outer-HOST-abcdef`, whatever marks the host's name has."""
    ending = incarnation[:6]
    short = host.split(".", maxsplit=1)[0].lower()[: NAME_LENGTH_MAX - len("outer--") - len(ending)]
    name = f"outer-{short}-{ending}"
    return name if is_name(name) else f"outer-{ending}"
