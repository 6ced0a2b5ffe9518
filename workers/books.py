"""What a learner keeps of a fragment besides its values, and what the store's row tells about it. Pure.

Ids are compared for equality, never by their numbers: two branches of one learner may both have drawn a number 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from isles.proto.ids import ContributionId
from isles.proto.messages import Row
from isles.workers.orders import PayloadFailed, VersionArrived


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """The one contribution of a fragment whose fate is unknown."""

    id: ContributionId
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    has_payload: bool = True
    """Whether its payload is in the account, and is to be subtracted when it is merged. Not so after a restart that
    found it pending, or a reset that kept it open."""
    taken_at: int = 0
    """The learner's step number when it was taken."""


@dataclass(slots=True)
class FragmentBooks:
    """What a learner keeps of one fragment, without the values; all of it goes into a checkpoint."""

    fragment: int
    base: int | None = None
    """The last version applied; None = none yet, the next one that arrives is taken as it is."""
    tokens_total: int = 0
    """Tokens of all learners in the base version."""
    open: OpenContribution | None = None
    last: ContributionId | None = None
    """Newest own contribution known to be in the store when `open` is none."""
    hold: int = 0
    """Contribute only from a base at least this new."""
    tokens: int = 0
    """Of the unmerged work, as are steps and seconds."""
    steps: int = 0
    seconds: float = 0.0
    clock: int = 0
    """Inner steps since the last contribution."""


@dataclass(slots=True)
class PendingFacts:
    """Facts about a fragment that wait for the next boundary; a crash may lose them, the store says them again."""

    arrived: VersionArrived | None = None
    rejection: str | None = None
    failure: PayloadFailed | None = None
    spoiled: str | None = None
    cue: int | None = None
    is_zero: bool = False
    """U was encoded to zeros, and nothing has changed since."""


def is_merged(row: Row | None, open_one: OpenContribution | None, version: int) -> bool:
    """Whether `version` contains the open contribution."""
    return (
        row is not None
        and open_one is not None
        and row.id == open_one.id
        and row.state == "merged"
        and row.settled_in is not None
        and row.settled_in <= version
    )


def is_rejected(row: Row | None, open_one: OpenContribution | None) -> bool:
    """Whether the open contribution failed the screen."""
    return row is not None and open_one is not None and row.id == open_one.id and row.state == "rejected"


def compare_at_restart(books: FragmentBooks, row: Row | None) -> Literal["go on", "drop open", "start over"]:
    """What a checkpoint's books are worth against the store's row.

    The row is the open contribution: it was accepted, a version will settle it. The row is the last one known (or there
    never was one): the open one was never accepted and now never can be; its work is still in the account. Any other
    row: the store is ahead, and all unmerged work of the checkpoint may already be in it.
    """
    if books.base is None:
        return "start over"
    row_id = None if row is None else row.id
    if books.open is not None and row_id == books.open.id:
        return "go on"
    return "drop open" if row_id == books.last else "start over"


def is_pending(row: Row | None, version: int) -> bool:
    """Whether the row's contribution will be in some version after `version`."""
    if row is None or row.state == "rejected":
        return False
    return row.state == "pending" or row.settled_in is None or row.settled_in > version


def first_clock(fragment: int, num_fragments: int, interval_steps: int) -> int:
    """Where a fragment's clock starts, so that the fragments come due evenly spread over one sync interval."""
    return interval_steps - ceil((fragment + 1) * interval_steps / num_fragments)
