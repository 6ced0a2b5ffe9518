"""What the index keeps: dumb tables with small readers and writers. The rules stand in the cores that use them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from isles.proto.errors import StoreError
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Contribution, ReportInfo, Row, RowState, VersionInfo


class DamagedEntryError(StoreError):
    """An entry of the index is not what was written there; the text names it. Others can still be read."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """The permanent entry of one (learner, fragment)."""

    contribution: Contribution
    state: RowState = "pending"
    settled_in: int | None = None
    reason: str = ""

    @property
    def id(self) -> ContributionId:
        return self.contribution.id

    def shown(self) -> Row:
        """The row as its learner sees it."""
        return Row(
            id=self.contribution.id,
            state=self.state,
            settled_in=self.settled_in,
            reason=self.reason,
            cursor=self.contribution.cursor,
            tokens=self.contribution.tokens,
        )


@dataclass(frozen=True, slots=True)
class StoredLease:
    """Who merges a fragment; when it expires is known to the running broker alone."""

    holder: str
    incarnation: str
    epoch: int
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class StoredLearner:
    """What is known of a learner; `tokens` and `steps` are its counters over all its incarnations."""

    learner: str
    region: str
    incarnation: str
    is_live: bool
    last_seen_unix: float
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    key_name: str = ""
    """Of the keys that first used it, and to which it belongs; empty = no key has."""
    rejoin_sha256: str = ""
    """Of the token that takes its id again; empty = its id was not given by a broker."""
    has_rejoin: bool = False
    """Whether it is known to have that token."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a learner's latest contributions were worth."""

    num_rejected: int = 0
    """How many in a row."""
    reason: str = ""
    """Of the last rejection."""
    until_unix: float = 0.0
    """When its quarantine ends, in seconds since 1970; 0 = it never was in one, or was pardoned."""
    incarnation: str = ""
    """Of the last contribution that counted as rejected."""
    number: int = 0
    """The highest one that this incarnation had handed in by then."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """The figures of one committed version that totals are made of."""

    commit_id: str
    tokens: int
    num_participants: int
    fraction: float
    staleness: int
    """Summed over the participants, in versions."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over all committed versions but the first ones."""

    rounds: int
    participants: int
    fraction: float
    staleness: int
    tokens: int
    update_bytes: int


class Index(Protocol):
    """The tables. Everything is durable when the outermost `transaction` has ended."""

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing; nested ones roll back alone."""

    def close(self) -> None:
        """Gives the store back; idempotent."""

    # small values

    def value(self, key: str) -> bytes | None: ...
    def put_value(self, key: str, value: bytes) -> None: ...
    def counter(self, name: str) -> int: ...
    def add_to_counter(self, name: str, amount: int) -> None: ...

    # incarnations: one of a (role, id) is current, all others that were ever seen are retired

    def current_incarnation(self, role: str, name: str) -> str | None: ...
    def is_retired(self, role: str, name: str, incarnation: str) -> bool: ...
    def put_current_incarnation(self, role: str, name: str, incarnation: str) -> None:
        """Makes it current and retires the one that was."""

    # rows

    def row(self, learner: str, fragment: int) -> StoredRow | None: ...
    def rows_of(self, learner: str) -> list[StoredRow]: ...
    def pending(self, fragment: int) -> list[StoredRow]: ...
    def put_row(self, row: StoredRow) -> None: ...
    def num_pending(self) -> dict[int, int]: ...
    def add_accepted(self, learner: str, fragment: int, tokens: int) -> None:
        """Counts the tokens of an accepted contribution."""

    def tokens_accepted(self) -> dict[str, int]:
        """Learner -> tokens of its accepted contributions, in that fragment where they are most."""

    def answered(self, learner: str, fragment: int) -> tuple[str, int] | None:
        """Incarnation and number of the last answer."""

    def put_answered(self, learner: str, fragment: int, incarnation: str, number: int) -> None: ...
    def highest_answered(self, learner: str, incarnation: str) -> int:
        """The highest number that was answered to an incarnation; 0 if none was."""

    # versions: only `versions` reads the ingredients of a recipe, which may be long; the others leave them out

    def head(self, fragment: int) -> VersionInfo | None: ...
    def head_version(self, fragment: int) -> int | None: ...
    def heads(self) -> list[VersionInfo]:
        """The newest version of every fragment, in order."""

    def version(self, fragment: int, version: int) -> VersionInfo | None: ...
    def versions(self, fragment: int, first: int, num_max: int, bytes_max: int) -> list[VersionInfo]:
        """Some versions in order, with their ingredients: as many as take `bytes_max` when packed, at least one."""

    def updates(self, fragment: int, first: int, last: int) -> list[BlobRef]:
        """The updates to the versions first..last, in order, but for those that have been let go."""

    def checkpoints(self, fragment: int, last: int) -> list[VersionInfo]:
        """Versions up to `last` whose whole state is kept, the newest first."""

    def version_of_commit(self, commit_id: str) -> tuple[int, int] | None:
        """Fragment and version."""

    def put_version(self, info: VersionInfo, commitment: Commitment) -> None:
        """Writes a new version. It is a checkpoint if it has parameters."""

    def put_checkpoint(self, info: VersionInfo) -> None:
        """Replaces what is kept of a version, but for its ingredients: it is a checkpoint from now on."""

    def retained(self, fragment: int, last: int) -> list[int]:
        """Versions 1..last that still have their blobs."""

    def put_not_retained(self, fragment: int, version: int) -> None: ...
    def sums(self) -> Sums: ...

    # blobs and what refers to them

    def blob(self, digest: str) -> BlobRef | None: ...
    def put_blob(self, blob: BlobRef, stored_unix: float) -> None:
        """Enters a blob; one that nothing will refer to with the time 0, as if something had."""

    def add_reference(self, digest: str, owner: str) -> None: ...
    def move_references(self, owner: str, new_owner: str) -> None: ...
    def drop_references(self, owner: str) -> None: ...
    def unused_blobs(self) -> list[tuple[BlobRef, bool]]:
        """Blobs to which nothing refers, each with whether something did since it was last put."""

    def delete_blob(self, digest: str) -> None: ...
    def digests(self) -> set[str]: ...
    def stored_bytes(self) -> int: ...

    # leases, learners, shards

    def lease(self, fragment: int) -> StoredLease | None: ...
    def leases(self) -> dict[int, StoredLease]: ...
    def put_lease(self, fragment: int, lease: StoredLease) -> None: ...
    def learners(self) -> list[StoredLearner]: ...
    def put_learner(self, learner: StoredLearner) -> None: ...
    def standing(self, learner: str) -> Standing | None:
        """None = there is no such learner."""

    def put_standing(self, learner: str, standing: Standing) -> None:
        """Of a learner that there is."""

    def quarantined(self) -> dict[str, float]:
        """Learner -> when its quarantine ends or ended, in seconds since 1970."""

    def reset_standing(self, learner: str) -> None:
        """A contribution of it was merged: no rejections in a row."""

    def work_before(self, learner: str, incarnation: str) -> tuple[int, int]:
        """Tokens and steps of all other incarnations."""

    def work(self, learner: str, incarnation: str) -> tuple[int, int]: ...
    def put_work(self, learner: str, incarnation: str, tokens: int, steps: int) -> None: ...
    def create_shards(self, num_shards: int) -> None: ...
    def shards_of(self, learner: str) -> dict[int, int]: ...
    def free_shards(self, num_max: int, num_shards: int) -> list[int]:
        """Of the shards below `num_shards` that nobody holds, those with the smallest cursors."""

    def put_shard_holder(self, shards: Iterable[int], learner: str) -> None: ...
    def free_shards_of(self, learner: str) -> None: ...
    def advance_shards(self, learner: str, cursor: dict[int, int]) -> None:
        """Raises the cursors of those shards that the learner holds; never lowers one."""

    def num_shards_of(self) -> dict[str, int]: ...

    # reports

    def put_report(self, report: ReportInfo) -> int:
        """Stores it with the next sequence number; returns the bytes that it takes."""

    def reports(self, after: int, num_max: int, bytes_max: int, *, are_newest: bool = False) -> list[ReportInfo]:
        """Those after one, in order: the first ones or the newest, as many as take `bytes_max`, at least one."""
