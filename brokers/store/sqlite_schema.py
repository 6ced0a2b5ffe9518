"""The tables of the index in SQLite, and how values stand in their columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack

from isles.brokers.store.index import DamagedEntryError
from isles.proto.messages import BlobRef, Part, VersionInfo

FORMAT: Final = 3
"""Of the tables; raised by every change that an older broker could not read."""

MIGRATED_FORMATS: Final = frozenset({2})
"""Older ones that lack nothing but columns: these are added when such an index is opened."""

ADDED_COLUMNS: Final[dict[str, dict[str, str]]] = {
    "learners": {
        "key_name": "TEXT NOT NULL DEFAULT ''",
        "rejoin_sha256": "TEXT NOT NULL DEFAULT ''",
        "has_rejoin": "INTEGER NOT NULL DEFAULT 0",
        "num_rejected": "INTEGER NOT NULL DEFAULT 0",
        "rejected_reason": "TEXT NOT NULL DEFAULT ''",
        "quarantined_until_unix": "REAL NOT NULL DEFAULT 0",
        "rejected_incarnation": "TEXT NOT NULL DEFAULT ''",
        "rejected_number": "INTEGER NOT NULL DEFAULT 0",
    }
}
"""Table -> columns that it did not always have -> their types."""

BLOBS: Final = ("update", "parameters", "momentum", "remainder")
"""Of a version; gone once it is no longer retained."""

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS incarnations (
    role TEXT NOT NULL, name TEXT NOT NULL, incarnation TEXT NOT NULL, is_current INTEGER NOT NULL,
    PRIMARY KEY (role, name, incarnation)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rows (
    learner TEXT NOT NULL, fragment INTEGER NOT NULL, contribution BLOB NOT NULL, state TEXT NOT NULL,
    settled_in INTEGER, reason TEXT NOT NULL, PRIMARY KEY (learner, fragment));
CREATE INDEX IF NOT EXISTS rows_by_state ON rows (fragment, state);
CREATE TABLE IF NOT EXISTS accepted (
    learner TEXT NOT NULL, fragment INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (learner, fragment)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS answered (
    learner TEXT NOT NULL, fragment INTEGER NOT NULL, incarnation TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (learner, fragment)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, commit_id TEXT UNIQUE, is_retained INTEGER NOT NULL,
    is_checkpoint INTEGER NOT NULL, tokens INTEGER NOT NULL, num_participants INTEGER NOT NULL, fraction REAL NOT NULL,
    staleness INTEGER NOT NULL, update_digest TEXT, update_bytes INTEGER NOT NULL, info BLOB NOT NULL,
    ingredients BLOB NOT NULL, PRIMARY KEY (fragment, version));
CREATE INDEX IF NOT EXISTS versions_retained ON versions (fragment, version) WHERE is_retained = 1;
CREATE INDEX IF NOT EXISTS checkpoints ON versions (fragment, version) WHERE is_checkpoint = 1;
CREATE INDEX IF NOT EXISTS versions_summed
    ON versions (version, num_participants, fraction, staleness, tokens, update_bytes);
CREATE TABLE IF NOT EXISTS blobs (
    digest TEXT PRIMARY KEY, size_bytes INTEGER NOT NULL, stored_unix REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refs (digest TEXT NOT NULL, owner TEXT NOT NULL, PRIMARY KEY (digest, owner)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS refs_by_owner ON refs (owner);
CREATE TABLE IF NOT EXISTS leases (
    fragment INTEGER PRIMARY KEY, holder TEXT NOT NULL, incarnation TEXT NOT NULL, epoch INTEGER NOT NULL,
    is_released INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS learners (
    learner TEXT PRIMARY KEY, region TEXT NOT NULL, incarnation TEXT NOT NULL, is_live INTEGER NOT NULL,
    last_seen_unix REAL NOT NULL, tokens_per_second REAL NOT NULL, step_seconds REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS work (
    learner TEXT NOT NULL, incarnation TEXT NOT NULL, tokens INTEGER NOT NULL, steps INTEGER NOT NULL,
    PRIMARY KEY (learner, incarnation)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (shard INTEGER PRIMARY KEY, cursor INTEGER NOT NULL, holder TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS shards_by_holder ON shards (holder, cursor);
CREATE TABLE IF NOT EXISTS reports (seq INTEGER PRIMARY KEY, info BLOB NOT NULL);
"""

REFS_KEPT: Final = 4096
"""Names of blobs with their sizes that are kept once they were checked, in some 2 MB: everybody asks for those of the
newest versions, and to check one takes half as long as to find it."""

UNREADABLE: Final = (msgpack.UnpackException, LookupError, RecursionError, TypeError, ValueError)
"""What reading bytes that are not those that were written can raise."""

_P = TypeVar("_P", bound=Part)


def connect(path: Path | str) -> sqlite3.Connection:
    """The file at `path`, in autocommit mode; what is committed is on the disk."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("PRAGMA temp_store=MEMORY")
    return database


def statements_of_missing_columns(database: sqlite3.Connection) -> list[str]:
    """What brings the tables of an older format, whose columns `database` has, to ours."""
    statements = []
    for table, columns in ADDED_COLUMNS.items():
        found = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        statements += [
            f"ALTER TABLE {table} ADD COLUMN {name} {kind}" for name, kind in columns.items() if name not in found
        ]
    return statements


@lru_cache(REFS_KEPT)
def blob_ref(digest: str, size_bytes: int) -> BlobRef:
    """The blob of two columns."""
    return BlobRef(digest=digest, size_bytes=size_bytes)


def encode(part: Part) -> bytes:
    """The bytes of a value."""
    packed: bytes = msgpack.packb(part.model_dump(mode="python", exclude_defaults=True))
    return packed


def unpack(data: bytes) -> Any:
    """What was packed; not yet checked."""
    return msgpack.unpackb(data, use_list=False, strict_map_key=False)


def decode(cls: type[_P], data: bytes, what: str) -> _P:
    """The value of some bytes of ours; `what` names their entry. Raises DamagedEntryError."""
    with _entry(what):
        return cls.model_validate(unpack(data), strict=True)


def encode_version(info: VersionInfo) -> tuple[bytes, bytes]:
    """A version without the ingredients of its recipe, and these: most readers need only the first."""
    fields = info.model_dump(mode="python", exclude_defaults=True)
    ingredients = fields["recipe"].pop("ingredients") if info.recipe is not None else ()
    return msgpack.packb(fields), msgpack.packb(ingredients)


def decode_version(info: bytes, fragment: int, version: int, ingredients: bytes) -> VersionInfo:
    """A version with the ingredients that are given. Raises DamagedEntryError if it is not the one of its entry."""
    with _entry(f"version {version} of fragment {fragment}"):
        fields = unpack(info)
        if "recipe" in fields:
            fields["recipe"]["ingredients"] = unpack(ingredients)
        found = VersionInfo.model_validate(fields, strict=True)
        if (found.fragment, found.version) != (fragment, version):
            raise ValueError("another version stands there")
        return found


@contextmanager
def _entry(what: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise DamagedEntryError(
            f"the entry of {what} in the index of the store is damaged ({type(error).__name__}): stop the broker and "
            "restore the store folder from a copy"
        ) from error
