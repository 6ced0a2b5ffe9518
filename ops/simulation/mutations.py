"""Rules that are taken away, one at a time: a world in which nothing goes wrong then looks at nothing.

Each mutation replaces a few functions of the real system by ones without a rule. `without` does so for a while.
"""

# Stand-ins take what the real functions take, and use little of it; some rules are in private functions.
# ruff: noqa: ARG001, ARG005, SLF001

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from isles.brokers import retained, versions
from isles.brokers.downloads import Download as Sending
from isles.brokers.downloads import Downloads
from isles.brokers.leases import Leases
from isles.brokers.store.blobs import FolderBlobs
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.ops.simulation.disk import SimulatedFiles
from isles.outer import quorum, services
from isles.proto.transfers import Download as Receiving
from isles.proto.transfers import Upload
from isles.workers import session
from isles.workers.session import Session

Patch = Callable[[object, str, Any], None]
"""Replaces an attribute."""


def without_leases(patch: Patch) -> None:
    """Every outer may merge every fragment at any time. No mutation: commits are safe all the same."""
    patch(Leases, "grant", lambda self, fragments, *args: (dict.fromkeys(fragments, 1), False))
    patch(Leases, "epoch", lambda *args: 1)


def _without_the_fence(patch: Patch) -> None:
    patch(retained, "is_retired", lambda *args: False)


def _comparing_numbers_at_restart(patch: Patch) -> None:
    def compare(books: Any, row: Any) -> str:
        if books.base is None:
            return "start over"
        number = None if row is None else row.id.number
        if books.open is not None and number == books.open.id.number:
            return "go on"
        return "drop open" if number == (None if books.last is None else books.last.number) else "start over"

    patch(session, "compare_at_restart", compare)


def _without_comparing_ids_at_restart(patch: Patch) -> None:
    def compare(books: Any, row: Any) -> str:
        return "start over" if books.base is None else "go on"

    patch(session, "compare_at_restart", compare)


def _forgetting_rows_that_are_settled(patch: Patch) -> None:
    original = retained.is_answered

    def is_answered(index: Any, contribution_id: Any) -> bool:
        row = index.row(contribution_id.learner, contribution_id.fragment)
        return row is not None and row.state == "pending" and original(index, contribution_id)

    patch(retained, "is_answered", is_answered)


def _without_the_row_in_the_version_reply(patch: Patch) -> None:
    original = versions.version_reply

    def version_reply(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).model_copy(update={"row": None})

    patch(versions, "version_reply", version_reply)


def _without_the_states_in_commit(patch: Patch) -> None:
    without_leases(patch)
    patch(retained, "row_fault", lambda *args: None)


def _without_settle(patch: Patch) -> None:
    patch(retained, "settle", lambda index, message: [])


def _without_reset(patch: Patch) -> None:
    patch(Session, "_reset", lambda *args: [])


def _waiting_for_more_learners_than_live(patch: Patch) -> None:
    patch(quorum, "num_needed", lambda wanted, num_able: max(1, wanted))


def _superseding_an_open_contribution(patch: Patch) -> None:
    original = Session._is_able

    def is_able(self: Session, books: Any) -> bool:
        open_one, books.open = books.open, None
        able = original(self, books)
        books.open = open_one
        return able

    patch(Session, "_is_able", is_able)


def _subtracting_before_the_version_is_applied(patch: Patch) -> None:
    def is_merged(row: Any, open_one: Any, version: int) -> bool:
        return row is not None and open_one and row.id == open_one.id

    patch(session, "is_merged", is_merged)


def _letting_payloads_go_before_a_checkpoint_covers_them(patch: Patch) -> None:
    def keep_from(*args: Any, versions_kept: int, **kwargs: Any) -> int:
        return max(0, int(args[2]) - versions_kept)

    patch(versions, "keep_from", keep_from)


def _letting_payloads_go_as_they_are_merged(patch: Patch) -> None:
    patch(SqliteIndex, "move_references", lambda self, owner, new_owner: self.drop_references(owner))


def _leaving_an_old_checkpoint_before_there_is_a_later_one(patch: Patch) -> None:
    original = versions.let_go

    def let_go(index: Any, fragment: int, head: int, **kwargs: Any) -> None:
        original(index, fragment, head, **kwargs)
        first = versions.keep_from(index, fragment, head, **kwargs)
        if first:
            index.drop_references(versions._state_owner(fragment, first))

    patch(versions, "let_go", let_go)


def _without_the_fsync(patch: Patch) -> None:
    patch(SimulatedFiles, "sync", lambda self, file: None)


def _without_the_fsync_of_the_folder(patch: Patch) -> None:
    patch(SimulatedFiles, "sync_folder", lambda self, folder: None)


def _without_digests(patch: Patch) -> None:
    patch(FolderBlobs, "_check", lambda *args: None)
    patch(Receiving, "has_digest", lambda self: True)


def _waiting_for_payloads_that_are_gone(patch: Patch) -> None:
    patch(services, "LOST_CODES", frozenset())


def _without_credit_of_uploads(patch: Patch) -> None:
    original = Upload.next_chunks

    def next_chunks(self: Upload) -> Any:
        self.credit_chunks = 1 << 20
        return original(self)

    patch(Upload, "next_chunks", next_chunks)


def _without_credit_of_downloads(patch: Patch) -> None:
    original = Downloads._read_on

    def read_on(self: Downloads, download: Sending) -> Any:
        download.window_bytes = 1 << 20
        return original(self, download)

    patch(Downloads, "_read_on", read_on)


MUTATIONS: Final[dict[str, Callable[[Patch], None]]] = {
    "fence": _without_the_fence,
    "ids-at-restart": _comparing_numbers_at_restart,
    "comparison-at-restart": _without_comparing_ids_at_restart,
    "permanent-row": _forgetting_rows_that_are_settled,
    "row-in-version": _without_the_row_in_the_version_reply,
    "states-in-commit": _without_the_states_in_commit,
    "settle": _without_settle,
    "reset": _without_reset,
    "live-quorum": _waiting_for_more_learners_than_live,
    "one-open": _superseding_an_open_contribution,
    "subtract-when-applied": _subtracting_before_the_version_is_applied,
    "payloads-till-checkpoint": _letting_payloads_go_before_a_checkpoint_covers_them,
    "payloads-of-versions": _letting_payloads_go_as_they_are_merged,
    "checkpoint-till-later": _leaving_an_old_checkpoint_before_there_is_a_later_one,
    "fsync": _without_the_fsync,
    "folder-fsync": _without_the_fsync_of_the_folder,
    "digests": _without_digests,
    "lost-payloads": _waiting_for_payloads_that_are_gone,
    "upload-credit": _without_credit_of_uploads,
    "download-credit": _without_credit_of_downloads,
}
"""The rule that is missing -> how to do without it."""

OF_DISK_AND_LINKS: Final = frozenset(
    {"fsync", "folder-fsync", "digests", "lost-payloads", "upload-credit", "download-credit"}
)
"""Rules that only a world with a disk and with pieces of payloads can miss."""


def _places(target: object, name: str) -> list[object]:
    """Where the code looks an attribute up: in its owner, and in every module that has imported it by its name."""
    original = getattr(target, name)
    modules = [module for key, module in sys.modules.items() if key.startswith("isles.") and module is not target]
    is_shared = isinstance(target, ModuleType)
    return [target, *(one for one in modules if is_shared and vars(one).get(name) is original)]


@contextmanager
def without(rule: str) -> Iterator[None]:
    """Does without a rule of `MUTATIONS` for a while."""
    replaced: list[tuple[object, str, Any]] = []

    def patch(target: object, name: str, value: Any) -> None:
        for place in _places(target, name):
            replaced.append((place, name, getattr(place, name)))
            setattr(place, name, value)

    try:
        MUTATIONS[rule](patch)
        yield
    finally:
        for target, name, value in reversed(replaced):
            setattr(target, name, value)
