"""A run as it can be read afterwards, or while it goes on: its record, its versions and its blobs.

A stopped run is read from its store, under the store's own lock, without changing anything in it. Of one that is
running the broker is asked; what its index has at one moment is read from a copy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Protocol, TypeVar

from isles.brokers.retained import REJECTED_COUNTER, run_record
from isles.brokers.store.blobs import MissingBlobError
from isles.brokers.store.index import DamagedEntryError
from isles.brokers.store.store import BLOBS_NAME, INDEX_NAME, Store
from isles.ops.reach import Reach, key_in
from isles.ops.run_folder import RunFolder
from isles.proto.agreement import RunRecord
from isles.proto.client import as_error
from isles.proto.connection import Connection
from isles.proto.errors import PayloadError, StoreError, StoreLockedError, UsageError
from isles.proto.messages import (
    AskHeads,
    AskHistory,
    AskStatus,
    BlobRef,
    Head,
    Heads,
    History,
    Message,
    Row,
    Status,
    VersionInfo,
)

PAGE_VERSIONS_MAX: Final = 256
"""Versions that one question may ask for."""
PAGE_BYTES_MAX: Final = 4 << 20
"""Of the entries that are read from a store at a time: recipes of large fleets are long."""
UNREADABLE: Final = (sqlite3.Error, DamagedEntryError, ValueError)
"""What an entry of the index that was damaged makes its readers raise."""
NO_RUN: Final = "has no run yet: the first worker starts one"

_Reply = TypeVar("_Reply", bound=Message)
_Result = TypeVar("_Result")


class Tape(Protocol):
    """What can be read of a run."""

    @property
    def place(self) -> str:
        """Where it is read from, for messages."""

    @property
    def record(self) -> RunRecord:
        """What the run's processes agree on."""

    @property
    def num_rejected(self) -> int:
        """Contributions rejected since the run began."""

    def heads(self) -> tuple[Head, ...]:
        """The newest version of every fragment."""

    def rejected_rows(self) -> list[Row]:
        """Of learners and fragments whose last contribution was rejected, as far as that can be read."""

    def rows(self) -> list[Row] | None:
        """The rows of all learners and fragments; None where they cannot be read."""

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        """Contiguous versions from `first` on. Raises PayloadError for an entry that is damaged."""

    def read(self, blob: BlobRef, *, bytes_max: int) -> bytes | bytearray:
        """A blob that has its digest. Raises PayloadError if it is missing or damaged."""


class StoreTape:
    """A stopped run. Belongs to one thread, and holds the store's lock until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreLockedError if a broker is running on the store, StoreError or UsageError if it has no run."""
        self.place = str(folder)
        self._store = Store.open(folder)
        try:
            record = self._entry("the run record", lambda: run_record(self._store.index))
            if record is None:
                raise UsageError(f"the store {folder} {NO_RUN}")
        except BaseException:
            self.close()
            raise
        self.record = record

    @property
    def num_rejected(self) -> int:
        return self._store.index.counter(REJECTED_COUNTER)

    def heads(self) -> tuple[Head, ...]:
        infos = self._entry("the newest versions", self._store.index.heads)
        return tuple(
            Head(fragment=info.fragment, version=info.version, tokens_total=info.tokens_total) for info in infos
        )

    def rejected_rows(self) -> list[Row]:
        return [row for row in self.rows() if row.state == "rejected"]

    def rows(self) -> list[Row]:
        index = self._store.index
        return [row.shown() for learner in index.learners() for row in index.rows_of(learner.learner)]

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        index = self._store.index
        try:
            return index.versions(fragment, first, num_max, PAGE_BYTES_MAX)
        except UNREADABLE:
            found: list[VersionInfo] = []
        # One by one, so that those before the damaged one can be had, and it is named.
        for version in range(first, first + num_max):
            try:
                page = index.versions(fragment, version, 1, PAGE_BYTES_MAX)
            except UNREADABLE as error:
                if found:
                    return found
                raise PayloadError(
                    f"the entry of version {version} of fragment {fragment} in the index of {self.place} is damaged "
                    f"({type(error).__name__})"
                ) from error
            if not page or page[0].version != version:
                break
            found += page
        return found

    def read(self, blob: BlobRef, *, bytes_max: int) -> bytes:
        stored = self._store.index.blob(blob.digest)
        if stored is None:
            raise PayloadError(f"blob {blob.digest[:12]} is not in the store {self.place}")
        if stored.size_bytes > bytes_max:
            raise PayloadError(f"blob {blob.digest[:12]} has {stored.size_bytes} bytes, at most {bytes_max} are right")
        try:
            return self._store.blobs.read(stored, 0, stored.size_bytes)
        except MissingBlobError as error:
            raise PayloadError(f"blob {blob.digest[:12]} is missing in {Path(self.place, BLOBS_NAME)}") from error

    def close(self) -> None:
        """Gives the store back; idempotent."""
        self._store.close()

    def _entry(self, what: str, read: Callable[[], _Result]) -> _Result:
        try:
            return read()
        except UNREADABLE as error:
            raise PayloadError(
                f"{what} in the index of {self.place} cannot be read ({type(error).__name__}): restore the store from "
                "a copy; nothing in it was changed"
            ) from error


class BrokerTape:
    """A run that is going on, asked of its broker. Belongs to one thread."""

    def __init__(self, connection: Connection, address: str, timeout_seconds: float) -> None:
        """Waits for the broker. Raises UnreachableError after the timeout, UsageError if it has no run yet."""
        self.place = address
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        record = connection.wait_for_welcome(timeout_seconds, address=address).welcome.run_record
        if record is None:
            raise UsageError(f"the broker at {address} {NO_RUN}")
        self.record = record

    @property
    def num_rejected(self) -> int:
        return self._ask(AskStatus(), Status).totals.rejected

    def heads(self) -> tuple[Head, ...]:
        return self._ask(AskHeads(), Heads).heads

    def rejected_rows(self) -> list[Row]:
        return []

    def rows(self) -> list[Row] | None:
        return None

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        ask = AskHistory(fragment=fragment, first=first, num_max=min(num_max, PAGE_VERSIONS_MAX))
        return self._ask(ask, History).versions

    def read(self, blob: BlobRef, *, bytes_max: int) -> bytearray:
        return self._connection.fetch_and_wait(blob, self._timeout_seconds, bytes_max=bytes_max, address=self.place)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def _ask(self, message: Message, kind: type[_Reply]) -> _Reply:
        reply = self._connection.ask_and_wait(message, self._timeout_seconds, address=self.place)
        if isinstance(reply, kind):
            return reply
        raise PayloadError(f"the broker at {self.place} cannot answer {type(message).__name__}: {as_error(reply).text}")


@contextmanager
def open_tape(run: Path | None, reach: Reach | None, timeout_seconds: float) -> Iterator[StoreTape | BrokerTape]:
    """The tape of a run folder, of a store folder, or of a broker. Exactly one is given.

    Of a folder whose broker is running, that broker is asked. Raises UsageError for a folder that has no run,
    UnreachableError if the broker does not answer in time.
    """
    if (run is None) == (reach is None):
        raise UsageError("name either a run folder or a broker (--broker ADDRESS)")
    tape = _ask_broker(reach, timeout_seconds) if reach is not None else _open_folder(run or Path(), timeout_seconds)
    try:
        yield tape
    finally:
        tape.close()


@contextmanager
def index_snapshot(run: Path) -> Iterator[StoreTape]:
    """A run as its store is at this moment, whether or not a broker goes on writing there; it has no blobs.

    The index is copied in one read transaction, which no broker waits for. Raises UsageError if there is no store, or
    if this process cannot read or copy its index.
    """
    store = store_of(run)
    with TemporaryDirectory(prefix="isles-") as folder:
        address = f"{(store / INDEX_NAME).resolve().as_uri()}?mode=ro"
        try:
            with (
                closing(sqlite3.connect(address, uri=True)) as source,
                closing(sqlite3.connect(Path(folder, INDEX_NAME))) as copy,
            ):
                source.backup(copy)
        except sqlite3.Error as error:
            raise UsageError(
                f"the index of {store} cannot be copied to {folder} ({error}): who runs its broker can, where there is "
                "room for it"
            ) from error
        tape = StoreTape(Path(folder))
        tape.place = str(store)
        try:
            yield tape
        finally:
            tape.close()


def check_index(run: Path) -> None:
    """Reads a run's whole index. Raises StoreError if it is damaged, also where nobody would come across it."""
    path = (store_of(run) / INDEX_NAME).resolve()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            found = str(database.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.OperationalError:
        return  # it cannot be opened or read: who does so next says more
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise StoreError(
            f"the index {path} is damaged ({' '.join(found.split())}): restore the store folder from a copy; nothing "
            "in it was changed"
        )


def store_of(run: Path) -> Path:
    """The store of a run folder, or of itself. Raises UsageError if there is none."""
    for folder in (run / "store", run):
        if (folder / INDEX_NAME).is_file():
            return folder
    raise UsageError(
        f"{run} is no run folder: it has no store; name the --run-dir of `isles up`, or a broker's --store"
    )


def _open_folder(run: Path, timeout_seconds: float) -> StoreTape | BrokerTape:
    store = store_of(run)
    try:
        # Under `isles up` the store is the broker's even while that is being started again: it must find it free.
        if not RunFolder(run).is_locked():
            return StoreTape(store)
    except StoreLockedError:
        pass
    try:
        address = (store / "address").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(
            f"another process is using the store {store}, and no broker has written its address there "
            f"({error.strerror}): wait for it"
        ) from error
    return _ask_broker(Reach(address, key_in(store.parent)), timeout_seconds)


def _ask_broker(reach: Reach, timeout_seconds: float) -> BrokerTape:
    connection = reach.connect()
    try:
        return BrokerTape(connection, reach.address, timeout_seconds)
    except BaseException:
        connection.close()
        raise
