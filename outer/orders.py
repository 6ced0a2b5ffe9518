"""What a round is told and what it orders: the two vocabularies of `isles.outer.rounds`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isles.proto import messages
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    BlobRef,
    Committed,
    Contribution,
    Fenced,
    Listing,
    Recipe,
    Rejection,
    Settled,
    Stale,
    VersionInfo,
)

# ---------------------------------------------------------------------------------------------------- values in both


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides a merge but the numbers: which contributions, how heavy, on which version."""

    fragment: int
    epoch: int
    head: VersionInfo
    """The version that the outer step starts from."""
    contributions: tuple[Contribution, ...]
    """In sorted id order, the same as the ingredients of the recipe."""
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class NewBlobs:
    """A new version: its update, stored at the broker and waiting for the commit, and the digests of its state."""

    parameters_sha256: str
    optimizer_sha256: str
    update: BlobRef


def commit_message(plan: Plan, blobs: NewBlobs, commit_id: str) -> messages.Commit:
    """What an outer says to make a plan's version the head."""
    return messages.Commit(
        commit_id=commit_id,
        fragment=plan.fragment,
        epoch=plan.epoch,
        base_version=plan.head.version,
        parameters_sha256=blobs.parameters_sha256,
        optimizer_sha256=blobs.optimizer_sha256,
        update=blobs.update,
        recipe=plan.recipe,
    )


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The fragment is ours; the same epoch again renews it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The fragment is somebody else's."""


@dataclass(frozen=True, slots=True)
class Rejoined:
    """There is a new session; what the broker says now may be older than what it said before."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """Something may have changed."""

    version: int | None = None
    """The head, if that is what has changed."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The answer to List."""

    listing: Listing


@dataclass(frozen=True, slots=True)
class PayloadScreened:
    """The verdict on one contribution: passed if there is no reason."""

    id: ContributionId
    reason: str = ""
    kind: str = ""
    """The reason in one word, as in a Rejection."""
    norm: float | None = None
    """L2 norm of the delta, counters left out, if it passed; None = not measured, and not judged."""
    sketch: bytes = b""
    """Of the direction of the delta, as in `isles.outer.sketch`; empty = not judged."""


@dataclass(frozen=True, slots=True)
class ScreenPutOff:
    """One contribution could not be screened now; it is asked for again after the next look at the store."""

    id: ContributionId


@dataclass(frozen=True, slots=True)
class Merged:
    """The answer to Merge: the numbers are done and stored."""

    plan: Plan
    blobs: NewBlobs


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The answer to Merge: there is no new version, and whose fault it is, if it is a contribution's."""

    plan: Plan
    reason: str
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class AskFailed:
    """List, Settle or Commit got an answer that it should not get."""

    ask: Literal["list", "settle", "commit"]
    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Time has passed, perhaps up to the moment of SetTimer."""


Event = (
    LeaseGranted | LeaseLost | Rejoined | Hinted | Listed | PayloadScreened | ScreenPutOff | Merged
    | MergeFailed | AskFailed | TimerFired | Committed | Stale | Fenced | Settled
)  # fmt: skip
"""What a round is told; the last four are the broker's answers as they come."""

# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class List:
    """Ask for the head, the pending rows and the learners."""


@dataclass(frozen=True, slots=True)
class FetchPayloads:
    """Bring and screen these; a PayloadScreened or ScreenPutOff is due for each."""

    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class ForgetPayloads:
    """These will not be merged by us; verdicts on them are no longer awaited."""

    ids: tuple[ContributionId, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Ask for these to be rejected."""

    epoch: int
    rejections: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class Merge:
    """Do the arithmetic and store the result."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Commit:
    """Ask for the new version, under a commit id of its own that repetitions share."""

    plan: Plan
    blobs: NewBlobs


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Say TimerFired at this moment; replaces the earlier one."""

    at: float


@dataclass(frozen=True, slots=True)
class Log:
    """Write one log line."""

    level: Literal["debug", "info", "warning"]
    event: str
    fields: Mapping[str, Any]


Instruction = List | FetchPayloads | ForgetPayloads | Settle | Merge | Commit | SetTimer | Log
