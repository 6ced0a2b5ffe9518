"""A crash at every point: whatever a broker was doing, its store opens again and has all that was promised.

One life of a broker is recorded: uploads, contributions, commits, checkpoints, retention, a restart with its sweep.
Then every prefix of its file operations becomes a disk, as a dead process or a power failure would leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.brokers import versions
from isles.brokers.broker import Broker
from isles.brokers.stage import blob_of
from isles.brokers.store.files import DiskFiles
from isles.brokers.store.rehearsal import (
    Committed as IndexCommitted,
)
from isles.brokers.store.rehearsal import (
    CrashedDisk,
    Deleted,
    Fate,
    FolderSynced,
    Note,
    Promised,
    RecordingFiles,
    RecordingIndex,
    Renamed,
    Synced,
    crash,
)
from isles.brokers.store.store import BLOBS_NAME, INDEX_NAME, Store
from isles.proto.errors import IslesError
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    HEADER_BYTES_MAX,
    Accepted,
    BlobRef,
    Checkpoint,
    Commit,
    Committed,
    Done,
    Hint,
    Init,
    Initialised,
    Lease,
    Settle,
    Settled,
    Stored,
    VersionReply,
)

BLOCKS = 12
FATES: tuple[Fate, ...] = ("all of it", "what was synced", 1, 2)
REJECTED = ("b", 3)
"""Learner and number of the contribution that is rejected."""
SPARE = blob_of(b"spare " * 1000)
"""Stored, and never referred to."""
Life = Callable[..., list[Note]]
Lives = Callable[[Life, bool], list[Note]]

# ------------------------------------------------------------------------------------------------------------- the law


def check(folder: Path, disk: CrashedDisk) -> None:
    """The store opens, keeps every promise, and sweeps away only what nothing refers to."""
    disk.put_into(folder / INDEX_NAME, folder / BLOBS_NAME)
    store = Store.open(folder)
    try:
        known = store.index.digests()
        store.sweep()
        left = {path.name for path in (folder / BLOBS_NAME).iterdir()}
        assert left == disk.files.keys() & known, "the sweep takes what is unknown, and only that"
        for digest in known:
            blob = store.index.blob(digest)
            assert blob is not None
            store.blobs.read(blob, 0, blob.size_bytes)
        needed = needed_by_head(store)
        assert needed <= known, "something referred to is missing"
        check_promises(store, disk.promises)
    finally:
        store.close()


def needed_by_head(store: Store) -> set[str]:
    """What a new outer, a new learner and the next round need, and the origin of the run."""
    index, blobs = store.index, set[BlobRef]()
    for fragment in (head.fragment for head in versions.heads(index)):
        blobs.update(row.contribution.blob for row in index.pending(fragment))
        head = index.head_version(fragment)
        assert head is not None
        origin, begin = index.version(fragment, 0), versions.newest_checkpoint(index, fragment, head, set())
        assert origin is not None
        assert begin is not None
        blobs.update([*versions.state_blobs(origin), *versions.state_blobs(begin)])
        later = index.versions(fragment, begin.version + 1, 256, HEADER_BYTES_MAX)
        assert [info.version for info in later] == list(range(begin.version + 1, head + 1))
        for info in later:
            assert info.update is not None
            assert info.recipe is not None
            blobs.add(info.update)
            blobs.update(BlobRef(digest=one.digest, size_bytes=one.size_bytes) for one in info.recipe.ingredients)
        way = versions.version_reply(index, fragment, None, None)
        assert isinstance(way, VersionReply)
        blobs.update(way.updates)
    return {blob.digest for blob in blobs}


def check_promises(store: Store, promises: list[Any]) -> None:
    index = store.index
    merged = {
        one.id: info.version
        for info in index.versions(0, 1, 256, HEADER_BYTES_MAX)
        for one in (info.recipe.ingredients if info.recipe else ())
    }
    unused: set[str] = set()
    for ask, answer in promises:
        match ask, answer:
            case _, Stored(digest=digest):
                unused.add(digest)
            case Init(), Initialised():
                assert index.value("run_record") is not None
                unused.clear()
            case _, Accepted(id=accepted):
                check_accepted(store, accepted, merged)
            case Commit(commit_id=commit_id), Committed(version=version):
                assert index.version_of_commit(commit_id) == (0, version)
                unused.clear()
            case Checkpoint(version=version), Done():
                head = index.head_version(0)
                assert head is not None
                assert index.checkpoints(0, head)[0].version >= version
                unused.clear()
            case _, Hint(kind="version", version=version):
                assert (index.head_version(0) or 0) >= version
            case Lease(), answer:
                granted = answer.epochs
                assert all(found.epoch >= granted[number] for number, found in index.leases().items())
            case Settle(rejections=(rejection,)), Settled():
                row = index.row(rejection.id.learner, 0)
                assert row is not None
                assert row.id != rejection.id or row.state == "rejected"
                assert rejection.id not in merged
    # What was stored is there until a message that refers to it, or so long that nobody will.
    for digest in unused - {SPARE.digest}:
        assert index.blob(digest) is not None


def check_accepted(store: Store, accepted: ContributionId, merged: dict[ContributionId, int]) -> None:
    answered = store.index.answered(accepted.learner, 0)
    assert answered is not None
    assert answered[1] >= accepted.number
    row = store.index.row(accepted.learner, 0)
    assert row is not None
    if row.id == accepted:
        assert (row.state == "merged") == (accepted in merged)
    else:
        assert accepted in merged or (accepted.learner, accepted.number) == REJECTED


# ------------------------------------------------------------------------------------------------------------ crashes


@pytest.mark.parametrize("is_disk_late", [False, True], ids=["disk at once", "disk late"])
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_crash_at_any_point_loses_nothing_that_was_promised(
    lives: Lives, record_life: Life, tmp_path: Path, block: int, is_disk_late: bool
) -> None:
    notes = lives(record_life, is_disk_late)
    seen: set[str] = set()
    for num_notes in range(block, len(notes) + 1, BLOCKS):
        for fate in FATES:
            disk = crash(notes[:num_notes], fate)
            if disk.digest not in seen:
                seen.add(disk.digest)
                try:
                    check(tmp_path / str(len(seen)), disk)
                except (AssertionError, IslesError) as error:
                    raise AssertionError(f"after {num_notes} of {len(notes)} notes, keeping {fate}: {error}") from error


def test_a_life_has_everything_that_a_crash_can_spoil(lives: Lives, record_life: Life) -> None:
    notes = lives(record_life, False)
    kinds = {type(note) for note in notes}
    assert {Synced, Renamed, FolderSynced, Deleted, IndexCommitted, Promised} <= kinds
    deleted = {note.name for note in notes if isinstance(note, Deleted)}
    again = {note.new_name for note in notes if isinstance(note, Renamed)}
    assert deleted & again, "something is sent again that had been deleted"
    assert any(name.endswith(".tmp") for name in deleted), "the sweep at start finds a partial upload"
    assert len(deleted) > 10, "retention lets payloads go"


def test_a_broker_goes_on_from_where_a_crash_has_left_it(
    lives: Lives, record_life: Life, tmp_path: Path, go_on: Callable[[Path], tuple[int, int]]
) -> None:
    notes = lives(record_life, False)
    for num_notes in range(len(notes) // 3, len(notes), len(notes) // 16):
        folder = tmp_path / str(num_notes)
        crash(notes[:num_notes], "what was synced").put_into(folder / INDEX_NAME, folder / BLOBS_NAME)
        before, after = go_on(folder)
        assert after == before + 1


# --------------------------------------------------------------------------------------------- a precaution left out


def without_syncing_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingFiles, "sync", lambda self, file: None)


def without_syncing_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingFiles, "sync_folder", DiskFiles.sync_folder)


def deleting_before_the_index_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RecordingIndex.delete_blob

    def delete_blob(self: RecordingIndex, digest: str) -> None:
        assert self._notes is not None
        self._notes.append(Deleted(digest))
        original(self, digest)

    monkeypatch.setattr(RecordingIndex, "delete_blob", delete_blob)


def answering_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(self: Broker, _: float) -> None:
        for event in self._gather(0.0):
            with self._store.index.transaction():
                for instruction in self._decide(event):
                    self._perform(instruction)

    monkeypatch.setattr(Broker, "work", work)


def letting_payloads_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "keep_from", lambda index, fragment, head, **_: max(0, head - 2))


PRECAUTIONS = [
    without_syncing_files,
    without_syncing_folders,
    deleting_before_the_index_says_so,
    answering_before_the_commit,
    letting_payloads_go_at_once,
]


def lets_go(note: Note) -> bool:
    """Whether something has just been deleted or become needless: most breaches are there, which saves looking on."""
    match note:
        case Deleted() | Promised(what=(_, Committed())):
            return True
    return False


@pytest.mark.parametrize("leave_out", PRECAUTIONS, ids=lambda leave_out: leave_out.__name__)
def test_the_law_breaks(
    leave_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, record_life: Life, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        leave_out(patch)
        notes = record_life(tmp_path / "life")

    moments = sorted(range(len(notes)), key=lambda num_notes: not lets_go(notes[num_notes - 1]))

    def find_breach() -> None:
        for num_notes in moments:
            for fate in FATES[:2]:
                check(tmp_path / f"{num_notes} {fate}", crash(notes[:num_notes], fate))

    with pytest.raises((AssertionError, IslesError)):
        find_breach()
