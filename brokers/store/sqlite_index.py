"""The index in SQLite: one file, WAL, `synchronous=FULL`, exactly one connection.

One thread uses it at a time; it may be opened in one thread and handed to another.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from isles.brokers.store.fullness import store_error
from isles.brokers.store.index import Commitment, Standing, StoredLearner, StoredLease, StoredRow, Sums
from isles.brokers.store.sqlite_schema import (
    BLOBS,
    FORMAT,
    MIGRATED_FORMATS,
    SCHEMA,
    blob_ref,
    connect,
    decode,
    decode_version,
    encode,
    encode_version,
    statements_of_missing_columns,
)
from isles.brokers.store.transactions import Transactions
from isles.proto.errors import StoreError
from isles.proto.messages import BlobRef, Contribution, ReportInfo, VersionInfo

IN_MEMORY: Final = ":memory:"


class SqliteIndex:
    """The tables of `Index`; `IN_MEMORY` as the path for tests and simulations."""

    def __init__(self, path: Path | str) -> None:
        """Opens or creates the file. Raises StoreError if it is no index of this format."""
        try:
            self._db = connect(path)
            self._transactions = Transactions(self._db)
            self._current: set[tuple[str, str, str]] = set()
            """Incarnations that were found to be current: asked about with every message."""
            found = self._format()
            if found == FORMAT or found in MIGRATED_FORMATS:
                self._db.executescript(SCHEMA)
                self._add_columns()
                found = FORMAT
        except sqlite3.DatabaseError as error:
            text = (
                f"the index {path} cannot be opened ({error}): if the file is damaged, restore the store folder from a "
                "copy; nothing in it was changed"
            )
            raise store_error(text, error, Path(path).parent) from error
        if found != FORMAT:
            self.close()
            raise StoreError(
                f"the index {path} has format {found}, and this build of isles knows only {FORMAT}: use the build that "
                "began its run, or begin another run in an empty folder; nothing in it was changed"
            )

    def _format(self) -> int:
        """That of the tables in the file; a new file gets ours, in one transaction with its first table."""
        with self.transaction():
            self._do("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
            if (found := self.value("format")) is None:
                self.put_value("format", found := str(FORMAT).encode())
        return int(found) if found.isdigit() else -1

    def _add_columns(self) -> None:
        """Brings the tables of an older format, and those just made, to ours: all or nothing."""
        with self.transaction():
            for statement in statements_of_missing_columns(self._db):
                self._do(statement)
            self.put_value("format", str(FORMAT).encode())

    def transaction(self) -> AbstractContextManager[None]:
        """All or nothing; nested ones roll back alone."""
        return self._transactions

    def close(self) -> None:
        self._db.close()

    def _one(self, sql: str, *arguments: Any) -> Any:
        return self._db.execute(sql, arguments).fetchone()

    def _all(self, sql: str, *arguments: Any) -> list[Any]:
        return self._db.execute(sql, arguments).fetchall()

    def _that_fit(self, bytes_max: int, sql: str, *arguments: Any) -> list[Any]:
        """The first rows, as many as have that many bytes in their blobs, but at least one."""
        rows: list[Any] = []
        for found in self._db.execute(sql, arguments):
            bytes_max -= sum(len(value) for value in found if isinstance(value, bytes))
            if rows and bytes_max < 0:
                break
            rows.append(found)
        return rows

    def _do(self, sql: str, *arguments: Any) -> None:
        self._transactions.begin()
        self._db.execute(sql, arguments)

    def _do_for_each(self, sql: str, arguments: Iterable[Sequence[Any]]) -> None:
        self._transactions.begin()
        self._db.executemany(sql, arguments)

    # ---------------------------------------------------------------------------------------------------- small values

    def value(self, key: str) -> bytes | None:
        found = self._one("SELECT value FROM meta WHERE key = ?", key)
        return None if found is None else bytes(found[0])

    def put_value(self, key: str, value: bytes) -> None:
        self._do("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def counter(self, name: str) -> int:
        found = self._one("SELECT value FROM counters WHERE name = ?", name)
        return 0 if found is None else int(found[0])

    def add_to_counter(self, name: str, amount: int) -> None:
        self._do(
            "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            name,
            amount,
        )

    # ---------------------------------------------------------------------------------------------------- incarnations

    def current_incarnation(self, role: str, name: str) -> str | None:
        sql = "SELECT incarnation FROM incarnations WHERE role = ? AND name = ? AND is_current = 1"
        found = self._one(sql, role, name)
        return None if found is None else str(found[0])

    def is_retired(self, role: str, name: str, incarnation: str) -> bool:
        who = role, name, incarnation
        if who in self._current:
            return False
        found = self._one("SELECT is_current FROM incarnations WHERE role = ? AND name = ? AND incarnation = ?", *who)
        if found is not None and found[0] and not self._transactions.has_begun:
            self._current.add(who)
        return found is not None and not found[0]

    def put_current_incarnation(self, role: str, name: str, incarnation: str) -> None:
        self._current.clear()
        self._do("UPDATE incarnations SET is_current = 0 WHERE role = ? AND name = ?", role, name)
        self._do("INSERT OR REPLACE INTO incarnations VALUES (?, ?, ?, 1)", role, name, incarnation)

    # ------------------------------------------------------------------------------------------------------------ rows

    _ROW = "SELECT contribution, state, settled_in, reason, learner, fragment FROM rows"

    @staticmethod
    def _row(found: Any) -> StoredRow:
        what = f"learner {found[4]}'s row of fragment {found[5]}"
        return StoredRow(decode(Contribution, found[0], what), *found[1:4])

    def row(self, learner: str, fragment: int) -> StoredRow | None:
        found = self._one(f"{self._ROW} WHERE learner = ? AND fragment = ?", learner, fragment)
        return None if found is None else self._row(found)

    def rows_of(self, learner: str) -> list[StoredRow]:
        return [self._row(found) for found in self._all(f"{self._ROW} WHERE learner = ? ORDER BY fragment", learner)]

    def pending(self, fragment: int) -> list[StoredRow]:
        sql = f"{self._ROW} WHERE fragment = ? AND state = 'pending' ORDER BY learner"
        return [self._row(found) for found in self._all(sql, fragment)]

    def put_row(self, row: StoredRow) -> None:
        values = row.id.learner, row.id.fragment, encode(row.contribution), row.state, row.settled_in, row.reason
        self._do("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", *values)

    def num_pending(self) -> dict[int, int]:
        return dict(self._all("SELECT fragment, COUNT(*) FROM rows WHERE state = 'pending' GROUP BY fragment"))

    def add_accepted(self, learner: str, fragment: int, tokens: int) -> None:
        sql = "INSERT INTO accepted VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens"
        self._do(sql, learner, fragment, tokens)

    def tokens_accepted(self) -> dict[str, int]:
        return dict(self._all("SELECT learner, MAX(tokens) FROM accepted GROUP BY learner"))

    def answered(self, learner: str, fragment: int) -> tuple[str, int] | None:
        found = self._one(
            "SELECT incarnation, number FROM answered WHERE learner = ? AND fragment = ?", learner, fragment
        )
        return None if found is None else (str(found[0]), int(found[1]))

    def put_answered(self, learner: str, fragment: int, incarnation: str, number: int) -> None:
        self._do("INSERT OR REPLACE INTO answered VALUES (?, ?, ?, ?)", learner, fragment, incarnation, number)

    def highest_answered(self, learner: str, incarnation: str) -> int:
        sql = "SELECT COALESCE(MAX(number), 0) FROM answered WHERE learner = ? AND incarnation = ?"
        return int(self._one(sql, learner, incarnation)[0])

    # -------------------------------------------------------------------------------------------------------- versions

    _VERSION = "SELECT info, is_retained, fragment, version FROM versions"

    @staticmethod
    def _version(found: Any, ingredients: bytes = b"\x90") -> VersionInfo:
        info = decode_version(found[0], found[2], found[3], ingredients)
        return info if found[1] else info.changed(**dict.fromkeys(BLOBS))

    def head(self, fragment: int) -> VersionInfo | None:
        found = self._one(f"{self._VERSION} WHERE fragment = ? ORDER BY version DESC LIMIT 1", fragment)
        return None if found is None else self._version(found)

    def head_version(self, fragment: int) -> int | None:
        found = self._one("SELECT MAX(version) FROM versions WHERE fragment = ?", fragment)
        return None if found[0] is None else int(found[0])

    def heads(self) -> list[VersionInfo]:
        sql = (
            "SELECT info, is_retained, fragment, version FROM versions JOIN (SELECT fragment AS f, MAX(version) AS v "
            "FROM versions GROUP BY fragment) ON fragment = f AND version = v ORDER BY fragment"
        )
        return [self._version(found) for found in self._all(sql)]

    def version(self, fragment: int, version: int) -> VersionInfo | None:
        found = self._one(f"{self._VERSION} WHERE fragment = ? AND version = ?", fragment, version)
        return None if found is None else self._version(found)

    def versions(self, fragment: int, first: int, num_max: int, bytes_max: int) -> list[VersionInfo]:
        sql = (
            "SELECT info, is_retained, fragment, version, ingredients FROM versions WHERE fragment = ? "
            "AND version >= ? ORDER BY version LIMIT ?"
        )
        rows = self._that_fit(bytes_max, sql, fragment, first, num_max)
        return [self._version(found, found[4]) for found in rows]

    def updates(self, fragment: int, first: int, last: int) -> list[BlobRef]:
        sql = (
            "SELECT update_digest, update_bytes FROM versions WHERE fragment = ? AND version BETWEEN ? AND ? "
            "AND is_retained = 1 AND update_digest IS NOT NULL ORDER BY version"
        )
        return [blob_ref(*found) for found in self._all(sql, fragment, first, last)]

    def checkpoints(self, fragment: int, last: int) -> list[VersionInfo]:
        sql = (
            f"{self._VERSION} WHERE fragment = ? AND version <= ? AND is_checkpoint = 1 AND is_retained = 1 "
            "ORDER BY version DESC"
        )
        return [self._version(found) for found in self._all(sql, fragment, last)]

    def version_of_commit(self, commit_id: str) -> tuple[int, int] | None:
        found = self._one("SELECT fragment, version FROM versions WHERE commit_id = ?", commit_id)
        return None if found is None else (int(found[0]), int(found[1]))

    def put_version(self, info: VersionInfo, commitment: Commitment) -> None:
        packed, ingredients = encode_version(info)
        self._do(
            "INSERT INTO versions VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            info.fragment,
            info.version,
            commitment.commit_id or None,
            info.parameters is not None,
            commitment.tokens,
            commitment.num_participants,
            commitment.fraction,
            commitment.staleness,
            info.update.digest if info.update else None,
            info.update.size_bytes if info.update else 0,
            packed,
            ingredients,
        )

    def put_checkpoint(self, info: VersionInfo) -> None:
        packed, _ = encode_version(info)
        sql = "UPDATE versions SET info = ?, is_checkpoint = 1 WHERE fragment = ? AND version = ?"
        self._do(sql, packed, info.fragment, info.version)

    def retained(self, fragment: int, last: int) -> list[int]:
        sql = "SELECT version FROM versions WHERE fragment = ? AND version BETWEEN 1 AND ? AND is_retained = 1"
        return [int(found[0]) for found in self._all(sql, fragment, last)]

    def put_not_retained(self, fragment: int, version: int) -> None:
        self._do("UPDATE versions SET is_retained = 0 WHERE fragment = ? AND version = ?", fragment, version)

    def sums(self) -> Sums:
        found = self._one(
            "SELECT COUNT(*), TOTAL(num_participants), TOTAL(fraction), TOTAL(staleness), TOTAL(tokens), "
            "TOTAL(update_bytes) FROM versions WHERE version > 0"
        )
        return Sums(int(found[0]), int(found[1]), float(found[2]), int(found[3]), int(found[4]), int(found[5]))

    # ----------------------------------------------------------------------------------------------------------- blobs

    def blob(self, digest: str) -> BlobRef | None:
        found = self._one("SELECT size_bytes FROM blobs WHERE digest = ?", digest)
        return None if found is None else blob_ref(digest, found[0])

    def put_blob(self, blob: BlobRef, stored_unix: float) -> None:
        self._do("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", blob.digest, blob.size_bytes, stored_unix)

    def add_reference(self, digest: str, owner: str) -> None:
        self._do("INSERT OR IGNORE INTO refs VALUES (?, ?)", digest, owner)

    def move_references(self, owner: str, new_owner: str) -> None:
        self._do("INSERT OR IGNORE INTO refs SELECT digest, ? FROM refs WHERE owner = ?", new_owner, owner)
        self._do("DELETE FROM refs WHERE owner = ?", owner)

    def drop_references(self, owner: str) -> None:
        # A blob that was in use need not wait for a message that refers to it.
        self._do("UPDATE blobs SET stored_unix = 0 WHERE digest IN (SELECT digest FROM refs WHERE owner = ?)", owner)
        self._do("DELETE FROM refs WHERE owner = ?", owner)

    def unused_blobs(self) -> list[tuple[BlobRef, bool]]:
        sql = (
            "SELECT digest, size_bytes, stored_unix = 0 FROM blobs "
            "WHERE NOT EXISTS (SELECT 1 FROM refs WHERE refs.digest = blobs.digest) ORDER BY digest"
        )
        return [(blob_ref(found[0], found[1]), bool(found[2])) for found in self._all(sql)]

    def delete_blob(self, digest: str) -> None:
        self._do("DELETE FROM blobs WHERE digest = ?", digest)

    def digests(self) -> set[str]:
        return {found[0] for found in self._all("SELECT digest FROM blobs")}

    def stored_bytes(self) -> int:
        return int(self._one("SELECT TOTAL(size_bytes) FROM blobs")[0])

    # ------------------------------------------------------------------------------------- leases, learners and shards

    def lease(self, fragment: int) -> StoredLease | None:
        found = self._one("SELECT holder, incarnation, epoch, is_released FROM leases WHERE fragment = ?", fragment)
        return None if found is None else StoredLease(found[0], found[1], found[2], bool(found[3]))

    def leases(self) -> dict[int, StoredLease]:
        sql = "SELECT fragment, holder, incarnation, epoch, is_released FROM leases ORDER BY fragment"
        return {found[0]: StoredLease(found[1], found[2], found[3], bool(found[4])) for found in self._all(sql)}

    def put_lease(self, fragment: int, lease: StoredLease) -> None:
        values = (lease.holder, lease.incarnation, lease.epoch, int(lease.is_released))
        self._do("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", fragment, *values)

    def learners(self) -> list[StoredLearner]:
        sql = (
            "SELECT learner, region, learners.incarnation, is_live, last_seen_unix, tokens_per_second, step_seconds, "
            "CAST(TOTAL(tokens) AS INTEGER), CAST(TOTAL(steps) AS INTEGER), key_name, rejoin_sha256, has_rejoin "
            "FROM learners LEFT JOIN work USING (learner) GROUP BY learner ORDER BY learner"
        )
        found = self._all(sql)
        return [
            StoredLearner(f[0], f[1], f[2], bool(f[3]), f[4], f[5], f[6], f[7], f[8], f[9], f[10], bool(f[11]))
            for f in found
        ]

    def put_learner(self, learner: StoredLearner) -> None:
        self._do(
            "INSERT INTO learners (learner, region, incarnation, is_live, last_seen_unix, tokens_per_second, "
            "step_seconds, key_name, rejoin_sha256, has_rejoin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (learner) DO UPDATE SET region = excluded.region, incarnation = excluded.incarnation, "
            "is_live = excluded.is_live, last_seen_unix = excluded.last_seen_unix, "
            "tokens_per_second = excluded.tokens_per_second, step_seconds = excluded.step_seconds, "
            "key_name = excluded.key_name, rejoin_sha256 = excluded.rejoin_sha256, has_rejoin = excluded.has_rejoin",
            learner.learner,
            learner.region,
            learner.incarnation,
            int(learner.is_live),
            learner.last_seen_unix,
            learner.tokens_per_second,
            learner.step_seconds,
            learner.key_name,
            learner.rejoin_sha256,
            int(learner.has_rejoin),
        )

    def standing(self, learner: str) -> Standing | None:
        sql = (
            "SELECT num_rejected, rejected_reason, quarantined_until_unix, rejected_incarnation, rejected_number "
            "FROM learners WHERE learner = ?"
        )
        found = self._one(sql, learner)
        return None if found is None else Standing(*found)

    def put_standing(self, learner: str, standing: Standing) -> None:
        self._do(
            "UPDATE learners SET num_rejected = ?, rejected_reason = ?, quarantined_until_unix = ?, "
            "rejected_incarnation = ?, rejected_number = ? WHERE learner = ?",
            standing.num_rejected,
            standing.reason,
            standing.until_unix,
            standing.incarnation,
            standing.number,
            learner,
        )

    def quarantined(self) -> dict[str, float]:
        return dict(self._all("SELECT learner, quarantined_until_unix FROM learners WHERE quarantined_until_unix > 0"))

    def reset_standing(self, learner: str) -> None:
        self._do("UPDATE learners SET num_rejected = 0 WHERE learner = ? AND num_rejected > 0", learner)

    def work(self, learner: str, incarnation: str) -> tuple[int, int]:
        found = self._one("SELECT tokens, steps FROM work WHERE learner = ? AND incarnation = ?", learner, incarnation)
        return (0, 0) if found is None else (int(found[0]), int(found[1]))

    def work_before(self, learner: str, incarnation: str) -> tuple[int, int]:
        found = self._one(
            "SELECT TOTAL(tokens), TOTAL(steps) FROM work WHERE learner = ? AND incarnation != ?", learner, incarnation
        )
        return int(found[0]), int(found[1])

    def put_work(self, learner: str, incarnation: str, tokens: int, steps: int) -> None:
        self._do("INSERT OR REPLACE INTO work VALUES (?, ?, ?, ?)", learner, incarnation, tokens, steps)

    def create_shards(self, num_shards: int) -> None:
        self._do_for_each("INSERT OR IGNORE INTO shards VALUES (?, 0, '')", ((n,) for n in range(num_shards)))

    def shards_of(self, learner: str) -> dict[int, int]:
        return dict(self._all("SELECT shard, cursor FROM shards WHERE holder = ? ORDER BY shard", learner))

    def free_shards(self, num_max: int, num_shards: int) -> list[int]:
        sql = "SELECT shard FROM shards WHERE holder = '' AND shard < ? ORDER BY cursor, shard LIMIT ?"
        return [int(found[0]) for found in self._all(sql, num_shards, num_max)]

    def put_shard_holder(self, shards: Iterable[int], learner: str) -> None:
        self._do_for_each("UPDATE shards SET holder = ? WHERE shard = ?", ((learner, shard) for shard in shards))

    def free_shards_of(self, learner: str) -> None:
        self._do("UPDATE shards SET holder = '' WHERE holder = ?", learner)

    def advance_shards(self, learner: str, cursor: dict[int, int]) -> None:
        self._do_for_each(
            "UPDATE shards SET cursor = MAX(cursor, ?) WHERE shard = ? AND holder = ?",
            ((position, shard, learner) for shard, position in cursor.items()),
        )

    def num_shards_of(self) -> dict[str, int]:
        return dict(self._all("SELECT holder, COUNT(*) FROM shards WHERE holder != '' GROUP BY holder"))

    # --------------------------------------------------------------------------------------------------------- reports

    def put_report(self, report: ReportInfo) -> int:
        seq = int(self._one("SELECT COALESCE(MAX(seq), 0) + 1 FROM reports")[0])
        packed = encode(report.model_copy(update={"seq": seq}))
        self._do("INSERT INTO reports VALUES (?, ?)", seq, packed)
        return len(packed)

    def reports(self, after: int, num_max: int, bytes_max: int, *, are_newest: bool = False) -> list[ReportInfo]:
        first = "SELECT info, seq FROM reports WHERE seq > ? ORDER BY seq LIMIT ?"
        newest = "SELECT info, seq FROM reports WHERE seq > ? ORDER BY seq DESC LIMIT ?"
        rows = self._that_fit(bytes_max, newest if are_newest else first, after, num_max)
        rows.sort(key=lambda found: int(found[1]))
        return [decode(ReportInfo, found[0], f"figure {found[1]}") for found in rows]
