"""Nested transactions over one SQLite connection.

One begins when something is written, and not before: most of what a broker is told changes nothing. What is read
earlier is consistent anyway, since nobody else writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


class Transactions:
    """How deep the caller is in transactions, and how many of these SQLite knows of."""

    def __init__(self, database: sqlite3.Connection) -> None:
        """`database` is in autocommit mode and has no other user."""
        self.depth = 0
        self._database = database
        self._num_begun = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """All or nothing; nested ones roll back alone."""
        self.depth += 1
        try:
            yield
        except BaseException:
            self.depth -= 1
            self._roll_back()
            raise
        self.depth -= 1
        if self._num_begun > self.depth:
            self._num_begun = self.depth
            self._database.execute("COMMIT" if self.depth == 0 else f"RELEASE {_name(self.depth)}")

    def begin(self) -> None:
        """Comes before each write: begins whatever the caller is in and SQLite does not know of yet."""
        for level in range(self._num_begun, self.depth):
            self._database.execute("BEGIN" if level == 0 else f"SAVEPOINT {_name(level)}")
            self._num_begun = level + 1

    def _roll_back(self) -> None:
        if self._num_begun <= self.depth:
            return
        self._num_begun = self.depth
        if not self._database.in_transaction:
            return  # SQLite has rolled back by itself, as it does when the disk is full
        if self.depth == 0:
            self._database.execute("ROLLBACK")
        else:
            self._database.execute(f"ROLLBACK TO {_name(self.depth)}")
            self._database.execute(f"RELEASE {_name(self.depth)}")


def _name(level: int) -> str:
    return f"level_{level}"
