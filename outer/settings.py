"""What an outer can be told: the section `outer` of every source of settings.

How it merges is not here: that is agreed for the whole run and stands in the run record.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isles.proto.agreement import Positive
from isles.proto.ids import NAME_LENGTH_MAX, Name, is_name
from isles.proto.transport.address import BrokerAddress


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
    list_seconds: Positive = Field(
        default=2.0, description="longest time between two looks at a fragment's contributions, in seconds"
    )
    record_seconds: Positive = Field(
        default=5.0, description="time between two questions whether the run has been started, in seconds"
    )
    join_timeout_seconds: Positive = Field(
        default=120.0, description="seconds to wait for the broker at the beginning before giving up"
    )
    lost_seconds: Positive = Field(
        default=10.0, description="a broker that is silent for this long, in seconds, is reported as lost"
    )
    stop_seconds: Positive = Field(
        default=10.0, description="seconds that merges under way may take once it was told to stop"
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
        if self.lost_seconds <= self.list_seconds:
            raise ValueError(
                f"outer.lost_seconds = {self.lost_seconds:g} is not above outer.list_seconds = {self.list_seconds:g}, "
                "so a broker that answers every question could count as lost: raise the first or lower the second"
            )
        return self
