"""Which incarnation of a process is the current one, as the index remembers it."""

from __future__ import annotations

import pytest

from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex

OLD, NEW = "aa" * 8, "bb" * 8


def retired(index: SqliteIndex) -> list[str]:
    return [one for one in (OLD, NEW) if index.is_retired("worker", "l0", one)]


@pytest.fixture
def index() -> SqliteIndex:
    index = SqliteIndex(IN_MEMORY)
    index.put_current_incarnation("worker", "l0", OLD)
    return index


def test_an_incarnation_that_was_found_to_be_current_is_retired_by_the_next_one(index: SqliteIndex) -> None:
    assert retired(index) == []
    index.put_current_incarnation("worker", "l0", NEW)
    assert retired(index) == [OLD]
    assert not index.is_retired("outer", "l0", OLD)


def roll_back(index: SqliteIndex, incarnation: str) -> list[str]:
    """Who was retired within a transaction that made an incarnation the current one, and came to nothing."""
    found: list[str] = []

    def fail() -> None:
        with index.transaction():
            index.put_current_incarnation("worker", "l0", incarnation)
            found.extend(retired(index))
            raise KeyError(incarnation)

    with pytest.raises(KeyError):
        fail()
    return found


def test_nobody_is_retired_by_what_was_rolled_back(index: SqliteIndex) -> None:
    assert roll_back(index, NEW) == [OLD]
    assert retired(index) == []


def test_what_was_read_in_a_transaction_that_was_rolled_back_is_not_remembered(index: SqliteIndex) -> None:
    index.put_current_incarnation("worker", "l0", NEW)
    assert roll_back(index, OLD) == [NEW]
    assert retired(index) == [OLD]
