"""What an outer can be told: the section `outer` of every source of settings.

How it merges is not here: that is agreed for the whole run and stands in the run record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from isles.outer.conduct import USUAL, Limits
from isles.proto.agreement import NotNegative, Positive, Share
from isles.proto.ids import NAME_LENGTH_MAX, Name, is_name
from isles.proto.messages import LEARNERS_MAX
from isles.proto.timeouts import faults, times_of
from isles.proto.transport.address import DEFAULT_BROKER, BrokerAddress

CLIPS_MAX: Final = 1000
"""More in a row is no limit."""
FACTOR_MIN: Final = 2.0
"""Of norms: of two votes, one is at most twice their median, so that nobody is judged by himself alone."""

CHECKPOINT_VERSIONS_MAX: Final = 2048
"""Half of the 4096 updates that lead from a checkpoint to the head at most: a broker takes no commit beyond them."""


class OuterSettings(BaseModel):
    """One outer: where its broker is, and how patient it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    broker: BrokerAddress = Field(
        default=DEFAULT_BROKER,
        description="address of the broker: tcp://HOST:PORT, which stands for three ports",
    )
    key: Path | None = Field(
        default=None, description="key file of this process, made by `isles keys`; a broker without keys wants none"
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
        description="with fewer live learners than this nothing is merged, for runs that must not shrink; 0 = "
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
    clip_factor: NotNegative = Field(
        default=USUAL.clip_factor,
        description="times the usual norm of a fragment's deltas above which a delta is scaled down to it; 0 = never",
    )
    reject_factor: NotNegative = Field(
        default=USUAL.reject_factor,
        description="times the usual norm of a fragment's deltas above which a contribution is rejected; 0 = never",
    )
    clips_max: Annotated[int, Field(ge=0, le=CLIPS_MAX)] = Field(
        default=USUAL.clips_max,
        description="contributions of one learner to a fragment that are scaled down in a row; the next one is "
        "rejected; 0 = any number",
    )
    weight_factor: NotNegative = Field(
        default=USUAL.weight_factor,
        description="times the usual weight, and the usual rate, that any learner counts for at most; 0 = no limit",
    )
    claim_factor: NotNegative = Field(
        default=USUAL.claim_factor,
        description="times the usual rate at which all the tokens that a learner claims must have been possible, else "
        "its contribution is rejected; 0 = no limit",
    )
    opposition_max: Share = Field(
        default=USUAL.opposition_max,
        description="how far a delta may be opposed to the sum of the others of its round, as a cosine, before its "
        "contribution is rejected; 1 = no limit",
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
        if 0 < self.clip_factor < FACTOR_MIN or 0 < self.reject_factor < max(FACTOR_MIN, self.clip_factor):
            raise ValueError(
                f"outer.clip_factor = {self.clip_factor:g} and outer.reject_factor = {self.reject_factor:g}: each is "
                f"0 or at least {FACTOR_MIN:g}, and what is clipped is not rejected before, so the second is the larger"
            )
        return self

    @property
    def limits(self) -> Limits:
        """How far a contribution may go beyond what is usual."""
        return Limits(
            clip_factor=self.clip_factor,
            reject_factor=self.reject_factor,
            clips_max=self.clips_max,
            weight_factor=self.weight_factor,
            claim_factor=self.claim_factor,
            opposition_max=self.opposition_max,
        )

    def named(self, host: str, token: str) -> Self:
        """These settings with a name: without one, a new one that tells the machine and ends with a random token."""
        return self if self.id else self.model_copy(update={"id": default_name(host, token)})


def default_name(host: str, incarnation: str) -> str:
    """`outer-HOST-abcdef`, whatever marks the host's name has."""
    ending = incarnation[:6]
    short = host.split(".", maxsplit=1)[0].lower()[: NAME_LENGTH_MAX - len("outer--") - len(ending)]
    name = f"outer-{short}-{ending}"
    return name if is_name(name) else f"outer-{ending}"
