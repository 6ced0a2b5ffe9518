"""What `isles plan` is told: a model, sites and the links between them, and how the run synchronises."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from isles.proto.agreement import ApplyRule, NotNegative, Positive, Share
from isles.proto.codec_names import CodecName

SITES_MAX: Final = 1024
"""Four times the learners that one broker was measured with."""
PARAMETERS_MAX: Final = 10**14
"""Ten times the largest models that anybody has spoken of."""

PUBLISHED_PARAMETERS: Final = 5_000_000_000
PUBLISHED_GBIT: Final = (198.0, 0.84)
"""Between 8 sites, data parallel and decoupled (arXiv 2604.21428): 5 B parameters, 4 bits, 24 fragments, 1 s steps."""
PUBLISHED_BITS: Final = 4 + 16 / 512
"""Fitted: 4 bits and a half-precision scale for each 512 values make 0.84 of what are 0.83 Gbit/s without scales."""

_Count = Annotated[int, Field(ge=1, le=1_000_000)]
_Bits = Annotated[float, Field(ge=0, le=64, allow_inf_nan=False)]


class PlanSettings(BaseModel):
    """A model, its sites, their links. Rates are in Gbit/s, 10^9 bits a second."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: Annotated[int, Field(ge=1, le=PARAMETERS_MAX)] = Field(
        default=PUBLISHED_PARAMETERS, description="values of the model"
    )
    sites: Annotated[int, Field(ge=1, le=SITES_MAX)] = Field(default=8, description="sites, each with one learner")
    step_seconds: Positive = Field(default=1.0, description="time of one inner step, in seconds")
    up_gbit: Positive = Field(default=2.0, description="what a site's link carries away from it, in Gbit/s")
    down_gbit: Positive = Field(default=2.0, description="what a site's link carries to it, in Gbit/s")
    broker_gbit: Positive = Field(
        default=25.0, description="what the link of the broker's machine carries each way, in Gbit/s"
    )
    round_trip_seconds: NotNegative = Field(
        default=0.1, description="time of a message from a site to the broker and back, in seconds"
    )

    interval_steps: _Count = Field(default=24, description="H: inner steps between two contributions to one fragment")
    num_fragments: _Count = Field(default=24, description="P: fragments")
    overlap_steps: NotNegative = Field(
        default=2.0, description="tau: inner steps that a synchronisation may take without anybody noticing"
    )
    codec_up: CodecName = Field(default="step1.5", description="codec of the deltas that learners send")
    codec_down: CodecName = Field(default="step1.5", description="codec of the updates that the outer publishes")
    bits_up: _Bits = Field(default=0.0, description="bits per value on the way up; 0 = as measured with that codec")
    bits_down: _Bits = Field(default=0.0, description="bits per value on the way down; 0 = as measured with that codec")
    apply_rule: ApplyRule = Field(default="rebase", description="how a learner applies a new version")
    checkpoint_versions: _Count = Field(
        default=16, description="versions of a fragment after which its whole state is stored again"
    )
    checkpoint_bytes: Annotated[int, Field(ge=0)] = Field(
        default=1 << 30, description="bytes of payloads of a fragment after which that is sooner"
    )
    state_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=4 << 30, description="memory of the outer for the states of fragments"
    )
    payload_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=512 << 20, description="memory of the outer for contributions that wait"
    )

    utilisation_max: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=0.8, description="share of a link that a run should fill at most: H is chosen for it"
    )
    days: Positive = Field(default=30.0, description="length of the run, in days")
    egress_dollars_per_gb: NotNegative = Field(
        default=0.05, description="price of what leaves a site, in dollars for 10^9 bytes"
    )

    gradient_bits: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = Field(
        default=16.0, description="bits per value that data parallel training sums up in each step"
    )
    reduce_share: Annotated[Share, Field(gt=0)] = Field(
        default=0.707,
        description="fitted: share of a step in which they travel; two thirds of it are the backward pass",
    )


Direction = Literal["up", "down", "in", "out", "ring"]
