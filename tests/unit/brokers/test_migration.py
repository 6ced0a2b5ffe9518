"""An index of an earlier format, as an earlier isles left it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from isles.brokers.store.index import Standing, StoredLearner
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.brokers.store.sqlite_schema import ADDED_COLUMNS, FORMAT

FORMAT_2 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('format', x'32');
CREATE TABLE learners (
    learner TEXT PRIMARY KEY, region TEXT NOT NULL, incarnation TEXT NOT NULL, is_live INTEGER NOT NULL,
    last_seen_unix REAL NOT NULL, tokens_per_second REAL NOT NULL, step_seconds REAL NOT NULL) WITHOUT ROWID;
INSERT INTO learners VALUES ('us-1', 'us', 'abababab', 1, 1700000000.0, 12.5, 0.25);
CREATE TABLE work (
    learner TEXT NOT NULL, incarnation TEXT NOT NULL, tokens INTEGER NOT NULL, steps INTEGER NOT NULL,
    PRIMARY KEY (learner, incarnation)) WITHOUT ROWID;
INSERT INTO work VALUES ('us-1', 'abababab', 4096, 24);
"""
"""What it had of the tables that have changed since."""

KNOWN = StoredLearner("us-1", "us", "abababab", True, 1700000000.0, 12.5, 0.25, 4096, 24)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "index.sqlite"
    database = sqlite3.connect(path)
    database.executescript(FORMAT_2)
    database.close()
    return path


def test_what_an_older_index_knew_is_kept_and_what_it_lacked_has_its_default(old: Path) -> None:
    index = SqliteIndex(old)
    assert index.learners() == [KNOWN]
    assert index.standing("us-1") == Standing()
    assert index.quarantined() == {}
    index.close()


def test_an_index_that_was_opened_once_has_the_new_format_and_opens_again(old: Path) -> None:
    for _ in range(2):
        index = SqliteIndex(old)
        with index.transaction():
            index.put_standing("us-1", Standing(3, "not finite", 1700000600.0, "abababab", 7))
        assert index.value("format") == str(FORMAT).encode()
        index.close()
    index = SqliteIndex(old)
    assert index.standing("us-1") == Standing(3, "not finite", 1700000600.0, "abababab", 7)
    index.put_learner(KNOWN)
    assert index.standing("us-1") == Standing(3, "not finite", 1700000600.0, "abababab", 7), "its counters are others"
    index.close()


def test_a_migration_that_was_interrupted_is_finished(old: Path) -> None:
    database = sqlite3.connect(old)
    name, kind = next(iter(ADDED_COLUMNS["learners"].items()))
    database.execute(f"ALTER TABLE learners ADD COLUMN {name} {kind}")
    database.commit()
    database.close()
    index = SqliteIndex(old)
    assert index.learners() == [KNOWN]
    index.close()
