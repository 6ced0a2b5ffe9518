"""What is asked of the goodput simulation: a fleet, how its chips fail, and how a run goes on without them.

Four values are fitted to the published table of Decoupled DiLoCo (arXiv 2604.21428), which states the time between
failures of a chip and not what a failure costs: `restart_seconds`, `scale_down_seconds`, `scale_up_seconds` and
`return_wait_seconds`. docs/concepts/goodput.md shows the table and what comes out. All others are assumptions with a
reason, or the settings of a run.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from isles.proto.agreement import NotNegative, Positive, Share, SyncSettings
from isles.proto.presets import QUORUM_MAX

YEAR_SECONDS: Final = 365.25 * 86_400
CHIPS_MAX: Final = 100_000_000
"""Forty times the largest fleet of the published table; a month of it has 8 million failures."""
LEARNERS_MAX: Final = 1024
"""Four times the learners that one broker was measured with."""
DAYS_MAX: Final = 3660.0
"""Ten years: longer than any machine stands."""

Returns = Literal["constant", "exponential", "lognormal"]
System = Literal["data-parallel", "elastic", "decoupled"]

SYSTEM_NAMES: Final[dict[System, str]] = {
    "data-parallel": "data parallel, not elastic",
    "elastic": "data parallel, elastic",
    "decoupled": "decoupled",
}
"""Each system as a table calls it."""

_Days = Annotated[float, Field(ge=0, le=DAYS_MAX, allow_inf_nan=False)]
_Steps = Annotated[int, Field(ge=1, le=1_000_000)]


class Scenario(BaseModel):
    """One fleet and one way to train on it. Times are in the unit that a name ends with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chips: Annotated[int, Field(ge=1, le=CHIPS_MAX)] = Field(default=1_200_000, description="chips of the fleet")
    learners: Annotated[int, Field(ge=1, le=LEARNERS_MAX)] = Field(
        default=8, description="M: learners that share the chips evenly"
    )
    days: Annotated[float, Field(gt=0, le=DAYS_MAX, allow_inf_nan=False)] = Field(
        default=30.0, description="simulated time, in days"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=1, description="of everything that is drawn")

    chip_failure_years: Positive = Field(
        default=1.0, description="mean time between two failures of one chip, in years"
    )
    failure_shape: Annotated[float, Field(ge=0.3, le=10, allow_inf_nan=False)] = Field(
        default=1.0,
        description="shape of the Weibull distribution of the time between two failures of a chip: 1 = exponential, "
        "below 1 = a chip that failed soon fails again, above 1 = chips wear out",
    )
    slice_chips: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=64, description="chips that an elastic group does without while one of them is away: a host, a rack"
    )
    return_minutes: Positive = Field(default=10.0, description="mean time until a failed chip is back, in minutes")
    return_distribution: Returns = Field(
        default="exponential",
        description="distribution of that time; lognormal = with a standard deviation of its mean",
    )

    restart_seconds: Positive = Field(
        default=75.0,
        description="fitted: how long a group that is not elastic stands still after a failure, in seconds",
    )
    scale_down_seconds: Positive = Field(
        default=20.0, description="fitted: how long an elastic group stands still to go on without a chip, in seconds"
    )
    scale_up_seconds: Positive = Field(
        default=15.0, description="fitted: how long it stands still to take back those that returned, in seconds"
    )
    return_wait_seconds: NotNegative = Field(
        default=80.0,
        description="fitted: how long a chip that is back waits for the group to stand still anyway, in seconds",
    )

    places: Annotated[int, Field(ge=1, le=LEARNERS_MAX)] = Field(
        default=8, description="parts of unequal speed of the fleet that data parallel training keeps in step"
    )
    speed_spread: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0, description="standard deviation of the speeds of places and learners, as a share of their mean"
    )
    step_jitter: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.0, description="standard deviation of one inner step of a place, as a share of its mean"
    )

    learner_failure_days: _Days = Field(
        default=0.0, description="mean time between two deaths of a whole learner, in days; 0 = never"
    )
    learner_outage_seconds: Positive = Field(
        default=300.0, description="mean time until a learner that died trains again, in seconds"
    )
    checkpoint_seconds: Positive = Field(
        default=600.0, description="time between two checkpoints of a learner, in seconds: what it comes back with"
    )

    step_seconds: Positive = Field(default=1.0, description="time of one inner step, in seconds")
    interval_steps: _Steps = Field(default=24, description="H: inner steps between two contributions to one fragment")
    num_fragments: Annotated[int, Field(ge=1, le=4096)] = Field(default=24, description="P: fragments")
    quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = Field(
        default=1, description="K: learners that a round waits for; never more than are live"
    )
    overlap_steps: NotNegative = Field(
        default=2.0, description="tau: inner steps that a synchronisation may take, which the grace window fills"
    )
    grace_share: Share = Field(default=0.9, description="gamma: share of the slack that the grace window may use")
    grace_min_seconds: NotNegative = Field(default=0.0, description="shortest grace window, in seconds")
    grace_max_seconds: NotNegative = Field(default=10.0, description="longest grace window, in seconds")
    has_cues: bool = Field(default=True, description="whether an open round cues the learners that are not in it yet")
    message_seconds: NotNegative = Field(
        default=0.05, description="time of a message without payload between a learner and the broker, in seconds"
    )
    transfer_seconds: NotNegative = Field(
        default=0.3, description="time of a contribution or a version between a learner and the broker, in seconds"
    )
    sync_seconds: NotNegative = Field(default=0.3, description="time of a merge and its commit, in seconds")
    learner_lease_seconds: Positive = Field(
        default=10.0, description="how long rounds count on a learner that stands still, in seconds"
    )

    broker_failure_days: _Days = Field(
        default=0.0, description="mean time between two deaths of the broker, in days; 0 = never"
    )
    broker_outage_seconds: Positive = Field(
        default=30.0, description="time from the death of the broker until it is back, in seconds"
    )
    outer_failure_days: _Days = Field(
        default=0.0, description="mean time between two deaths of the outer that merges, in days; 0 = never"
    )
    outer_outage_seconds: Positive = Field(
        default=3.0,
        description="time from its death until another outer merges, in seconds: the lease; how long its restart takes "
        "if there is only one",
    )

    @property
    def seconds(self) -> float:
        """The simulated time, in seconds."""
        return self.days * 86_400

    @property
    def sync(self) -> SyncSettings:
        """The settings of the run, for the functions that decide as the outer does."""
        return SyncSettings(
            interval_steps=self.interval_steps,
            num_fragments=self.num_fragments,
            quorum=self.quorum,
            overlap_steps=self.overlap_steps,
            grace_share=self.grace_share,
            grace_min_seconds=self.grace_min_seconds,
            grace_max_seconds=self.grace_max_seconds,
            has_cues=self.has_cues,
        )

    def for_system(self, system: System) -> Scenario:
        """The same fleet as one group, unless the system is decoupled."""
        return self if system == "decoupled" else self.model_copy(update={"learners": 1})
