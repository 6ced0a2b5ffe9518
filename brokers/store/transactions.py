"""Nested transactions over one SQLite connection.

One begins when something is written, and not before: most of what a broker is told changes nothing. What is read
earlier is consistent anyway, since nobody else writes.
"""

from __future__ import annotations

import sqlite3
from types import TracebackType


class Transactions:
    """How deep the caller is in transactions, and how many of these SQLite knows of.

    `with` one of these is all or nothing; nested ones roll back alone.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        """`database` is in autocommit mode and has no other user."""
        self.depth = 0
        self._database = database
        self._num_begun = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.depth -= 1
        if self._num_begun <= self.depth:
            return
        self._num_begun = self.depth
        if kind is not None:
            self._roll_back()
        else:
            self._database.execute("COMMIT" if self.depth == 0 else f"RELEASE {_name(self.depth)}")

    @property
    def has_begun(self) -> bool:
        """Whether something was written that is not committed yet."""
        return self._num_begun > 0

    def begin(self) -> None:
        """Comes before each write: begins whatever the caller is in and SQLite does not know of yet."""
        for level in range(self._num_begun, self.depth):
            self._database.execute("BEGIN" if level == 0 else f"SAVEPOINT {_name(level)}")
            self._num_begun = level + 1

    def _roll_back(self) -> None:
        if not self._database.in_transaction:
            return  # SQLite has rolled back by itself, as it does when the disk is full
        if self.depth == 0:
            self._database.execute("ROLLBACK")
        else:
            self._database.execute(f"ROLLBACK TO {_name(self.depth)}")
            self._database.execute(f"RELEASE {_name(self.depth)}")


def _name(level: int) -> str:
    return f"level_{level}"
