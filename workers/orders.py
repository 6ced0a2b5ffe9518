"""What a learner's session is told and what it orders: the two vocabularies of `isles.workers.session`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from isles.proto.ids import ContributionId
from isles.proto.messages import Accepted, Expired, Fenced, Head, Merged, Rejected, Row

# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StepTaken:
    """One inner step is done; the live parameters contain its work."""

    tokens: int
    seconds: float
    cursor: Mapping[int, int] = field(default_factory=dict)
    """Data shard -> items taken from it, for shards whose position changed."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The live parameters may be changed now, without a further inner step; for waits and drains."""


@dataclass(frozen=True, slots=True)
class Cued:
    """A round of `fragment` on head `version` is open."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class PaceTold:
    """How long one inner step takes a typical learner of the run, and this one, in seconds; 0 = not known."""

    typical_seconds: float
    own_seconds: float


@dataclass(frozen=True, slots=True)
class VersionArrived:
    """The values of a version are here, with the learner's own row, both from one VERSION reply."""

    fragment: int
    version: int
    row: Row | None
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class PayloadEncoded:
    """What TakeAccount asked for is encoded; all zeros are never offered."""

    id: ContributionId
    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class PayloadFailed:
    """What TakeAccount asked for cannot be encoded; it was never offered."""

    id: ContributionId
    reason: str
    is_not_finite: bool


@dataclass(frozen=True, slots=True)
class FragmentSpoiled:
    """NaN or infinity stands in the live parameters of this fragment."""

    fragment: int
    reason: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The state of the store at the beginning of this incarnation, read in one transaction."""

    heads: Sequence[Head]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Hand in everything at the coming boundaries.

    With `is_exact` also what no token stands for: quantisation errors, until they encode to zeros.
    """

    is_exact: bool = False


Answer = Accepted | Expired | Merged | Rejected | Fenced
Event = (
    StepTaken
    | Boundary
    | Cued
    | PaceTold
    | VersionArrived
    | PayloadEncoded
    | PayloadFailed
    | FragmentSpoiled
    | Welcomed
    | DrainRequested
    | Answer
)

# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class TakeAccount:
    """Copy U of the fragment now; encode it; tell PayloadEncoded; offer it until answered, always the same bytes."""

    fragment: int
    id: ContributionId
    base_version: int
    tokens: int
    steps: int
    seconds: float
    cursor: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ApplyVersion:
    """Apply this version by the account's rule; `subtract` is the own contribution that is in it, if any."""

    fragment: int
    version: int
    subtract: ContributionId | None


@dataclass(frozen=True, slots=True)
class Reset:
    """Live parameters and anchor become `version` (None: the version held), residual zero."""

    fragment: int
    version: int | None
    is_not_finite: bool = False
    """Also forget the inner optimizer's state of the fragment."""


@dataclass(frozen=True, slots=True)
class AskVersion:
    """Ask the broker for the way from `base_version` (None: nothing is held) to the head."""

    fragment: int
    base_version: int | None


@dataclass(frozen=True, slots=True)
class ForgetPayload:
    """This contribution is closed: stop offering it and drop its bytes."""

    id: ContributionId


@dataclass(frozen=True, slots=True)
class Await:
    """Take no inner step before something arrived for this fragment; then Boundary."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Log:
    """Say this; event and fields are of `isles.proto.events`."""

    level: Literal["debug", "info", "warning"]
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""

    is_fenced: bool
    text: str


Instruction = TakeAccount | ApplyVersion | Reset | AskVersion | ForgetPayload | Await | Log | Stop


def log_reset(learner: str, fragment: int, tokens: int, reason: str) -> Log:
    """Work was discarded; that is never silent."""
    return Log(
        "warning", "learner.reset", {"learner": learner, "fragment": fragment, "reason": reason, "tokens": tokens}
    )


def log_merged(merged: ContributionId, version: int) -> Log:
    """An own contribution is in the version that is held now."""
    fields = {"learner": merged.learner, "fragment": merged.fragment, "number": merged.number, "version": version}
    return Log("debug", "contribution.merged", fields)


def log_applied(learner: str, fragment: int, version: int, base_version: int | None) -> Log:
    """A newer version is held now."""
    fields = {"learner": learner, "fragment": fragment, "version": version, "base_version": base_version}
    return Log("debug", "version.applied", fields)


def stop_before_older_store(learner: str, fragment: int, version: int, head: int) -> Stop:
    """A checkpoint that is ahead of the store belongs to another one."""
    text = (
        f"learner {learner} has version {version} of fragment {fragment} in its checkpoint, but the broker's newest is "
        f"{head}: its store is older than this run or another one's; give this worker an empty checkpoint folder, or "
        "the broker the right store"
    )
    return Stop(is_fenced=False, text=text)
