"""Checkpoints, what is kept because of them, and the ways to the head."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers import retained
from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.agreement import RunRecord
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    AskHistory,
    AskStatus,
    AskVersion,
    Checkpoint,
    Commit,
    Committed,
    Contribution,
    Done,
    Error,
    Fenced,
    History,
    Init,
    Initialised,
    Lease,
    Leased,
    List,
    Listing,
    Message,
    Offer,
    Status,
    Stored,
    Upload,
    VersionInfo,
    VersionReply,
)

Make = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Merge = Callable[..., object]
MakeCommit = Callable[..., Commit]
MakeCheckpoint = Callable[..., Message]


Advance = Callable[[int, int], None]


def way(worker: Member, base: int | None) -> tuple[int | None, int]:
    """Where the way from `base` to the head begins, and how many updates it has."""
    reply = worker.ask(AskVersion(fragment=0, base_version=base))
    assert isinstance(reply, VersionReply)
    begin = base if reply.snapshot is None else reply.snapshot.version
    assert reply.head.version == (begin or 0) + len(reply.updates)
    return begin, len(reply.updates)


def kept(stage: Stage, num: int) -> list[int]:
    """Versions whose updates are in the store."""
    stage.advance(stage.settings.flush_seconds)
    return [number for number in range(1, num + 1) if blob_of(update(number)).digest in stage.blobs.blobs]


def update(number: int) -> bytes:
    return f"update {number} ".encode()


def parameters(number: int) -> bytes:
    return f"parameters of version {number} ".encode()


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_what_a_new_outer_begins_with(
    stage: Stage, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 3)
    before = outer.ask(List(fragment=0))
    assert isinstance(before, Listing)
    assert before.checkpoint is not None
    assert (before.checkpoint.version, before.head.version) == (0, 3)
    assert isinstance(checkpoint(outer, 2), Done)
    assert stage.events()[-1] == "version.checkpointed"
    after = outer.ask(List(fragment=0))
    assert isinstance(after, Listing)
    assert after.checkpoint is not None
    assert after.checkpoint.version == 2
    assert after.checkpoint.parameters == blob_of(parameters(2))
    assert after.checkpoint.momentum == blob_of(b"momentum of " + parameters(2))
    assert (after.checkpoint.remainder, after.checkpoint.recipe) == (None, None)
    assert after.checkpoint.optimizer_sha256 == "3" * 64
    assert outer.fetch(blob_of(parameters(2))) == parameters(2)


def test_a_repeated_checkpoint_changes_nothing(
    stage: Stage, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 1)
    assert isinstance(checkpoint(outer, 1), Done)
    said = len(stage.logs)
    assert isinstance(checkpoint(outer, 1), Done)
    assert isinstance(checkpoint(outer, 1, state=b"the same values in other bytes"), Done)
    assert len(stage.logs) == said
    info = stage.index.version(0, 1)
    assert info is not None
    assert info.parameters == blob_of(parameters(1))


def test_a_checkpoint_of_an_old_epoch_is_fenced(
    stage: Stage, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 1)
    second = stage.member("outer", "outer-2")
    second.join()
    stage.advance(stage.settings.outer_lease_seconds)
    second.ask(Lease(fragments=(0, 1)))
    answer = checkpoint(outer, 1)
    assert isinstance(answer, Fenced)
    assert answer.epoch == 2
    assert isinstance(checkpoint(second, 1, epoch=2), Done)


def test_a_checkpoint_of_what_is_not_there_is_refused(
    outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 1)
    for version, word in ((2, "no version 2, only 1"), (1, "not in the store")):
        unknown = Checkpoint(fragment=0, epoch=1, version=version, parameters=blob_of(b"never sent"))
        answer = outer.ask(unknown)
        assert isinstance(answer, Error)
        assert answer.code == "not-found"
        assert word in answer.text
    longer = blob_of(update(1)).model_copy(update={"size_bytes": 10_000})
    answer = outer.ask(Checkpoint(fragment=0, epoch=1, version=1, parameters=longer))
    assert isinstance(answer, Error)
    assert "not 10000" in answer.text
    unleased = outer.ask(Checkpoint(fragment=0, epoch=9, version=1, parameters=blob_of(update(1))))
    assert isinstance(unleased, Error)
    assert unleased.code == "broken-rule"


def test_a_checkpoint_of_a_version_that_was_let_go_is_refused(
    outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 5)
    checkpoint(outer, 2)
    answer = checkpoint(outer, 1)
    assert isinstance(answer, Error)
    assert "a later checkpoint covers it" in answer.text


def test_a_checkpoint_survives_a_restart(
    stage: Stage, outer: Member, worker: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 2)
    checkpoint(outer, 1)
    stage.restart()
    worker.join()
    assert way(worker, None) == (1, 1)


def test_commits_wait_for_a_checkpoint_before_nobody_could_join_any_more(
    outer: Member,
    advance: Advance,
    offered: Make,
    merge: Merge,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retained, "UPDATES_MAX", 2)
    advance(0, 2)
    contribution = offered(2)
    answer = merge(outer, [contribution], base=2)
    assert isinstance(answer, Error)
    assert "CHECKPOINT one first" in answer.text
    checkpoint(outer, 1)
    assert isinstance(merge(outer, [contribution], base=2), Committed)


# ---------------------------------------------------------------------------------------------------------- retention


def test_everything_is_kept_until_a_checkpoint_covers_it_and_so_many_versions_more(
    stage: Stage, worker: Member, outer: Member, advance: Advance, checkpoint: MakeCheckpoint, payload: Payload
) -> None:
    advance(0, 5)
    assert kept(stage, 5) == [1, 2, 3, 4, 5], "no checkpoint but version 0"
    checkpoint(outer, 4)
    assert kept(stage, 5) == [1, 2, 3, 4, 5], "version 4 is not versions_kept = 3 old"
    advance(5, 7)
    assert kept(stage, 7) == [4, 5, 6, 7]
    consumed = [number for number in range(7) if blob_of(payload(worker, number)).digest in stage.blobs.blobs]
    assert consumed == [3, 4, 5, 6], "the contributions in them, too"
    advance(7, 9)
    assert kept(stage, 9) == [4, 5, 6, 7, 8, 9], "there is no later checkpoint"
    checkpoint(outer, 6)
    assert kept(stage, 9) == [6, 7, 8, 9]
    assert blob_of(parameters(4)).digest not in stage.blobs.blobs
    assert blob_of(parameters(6)).digest in stage.blobs.blobs


def test_version_0_keeps_its_parameters_and_every_version_its_row(
    outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 6)
    checkpoint(outer, 3)
    answer = outer.ask(AskHistory(fragment=0))
    assert isinstance(answer, History)
    assert [info.version for info in answer.versions] == list(range(7))
    assert all(info.recipe is not None and info.recipe.ingredients for info in answer.versions[1:])
    assert [info.update is not None for info in answer.versions] == [False] * 3 + [True] * 4
    assert [info.parameters is not None for info in answer.versions] == [True, False, False, True] + [False] * 3


def test_what_only_a_damaged_checkpoint_covers_is_kept(
    stage: Stage, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 4)
    checkpoint(outer, 2)
    stage.blobs.blobs[blob_of(parameters(2)).digest] = b"rotten"
    assert isinstance(outer.fetch(blob_of(parameters(2))), Error)
    advance(4, 6)
    assert kept(stage, 6) == [1, 2, 3, 4, 5, 6]
    listing = outer.ask(List(fragment=0))
    assert isinstance(listing, Listing)
    assert listing.checkpoint is not None
    assert listing.checkpoint.version == 0
    assert isinstance(checkpoint(outer, 2, state=b"made again"), Done)
    assert kept(stage, 6) == [2, 3, 4, 5, 6]
    assert blob_of(parameters(2)).digest not in stage.blobs.blobs


def test_the_origin_stands_in_for_no_damaged_checkpoint_once_what_follows_it_was_let_go(
    stage: Stage, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    """An outer that began there would miss a payload that nobody has damaged, and blame that."""
    advance(0, 4)
    checkpoint(outer, 2)
    advance(4, 6)
    assert kept(stage, 6) == [2, 3, 4, 5, 6]
    stage.blobs.blobs[blob_of(parameters(2)).digest] = b"rotten"
    assert isinstance(outer.fetch(blob_of(parameters(2))), Error)
    listing = outer.ask(List(fragment=0))
    assert isinstance(listing, Listing)
    assert listing.checkpoint is not None
    assert listing.checkpoint.version == 2


def test_blobs_are_given_up_only_by_an_instruction_after_their_last_reference(
    stage: Stage, outer: Member, advance: Advance
) -> None:
    outer.send(Upload(blob=blob_of(b"spare")), b"spare")
    advance(0, 1)
    stage.advance(stage.settings.flush_seconds)
    assert blob_of(b"spare").digest in stage.blobs.blobs, "a message may still refer to it"
    stage.advance(stage.settings.unused_blob_seconds)
    assert blob_of(b"spare").digest not in stage.blobs.blobs
    assert blob_of(update(1)).digest in stage.blobs.blobs


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_clock_that_somebody_sets_gives_up_no_blob_that_a_commit_is_about_to_name(
    stage: Stage, outer: Member, jump: float
) -> None:
    outer.send(Upload(blob=blob_of(b"spare")), b"spare")
    stage.unix_at_zero += jump
    stage.advance(stage.settings.flush_seconds)
    stage.advance(stage.settings.unused_blob_seconds - 1 - stage.settings.flush_seconds)
    assert blob_of(b"spare").digest in stage.blobs.blobs
    outer.join()
    assert isinstance(outer.ask(Upload(blob=blob_of(b"spare"))), Stored)
    stage.advance(stage.settings.unused_blob_seconds - 1)
    assert blob_of(b"spare").digest in stage.blobs.blobs, "whoever asked again is about to name it"
    stage.advance(stage.settings.unused_blob_seconds)
    assert blob_of(b"spare").digest not in stage.blobs.blobs


def test_a_blob_that_is_here_is_not_sent_twice(outer: Member) -> None:
    assert isinstance(outer.send(Upload(blob=blob_of(b"once")), b"once"), Stored)
    assert isinstance(outer.ask(Upload(blob=blob_of(b"once"))), Stored)


# ---------------------------------------------------------------------------------------------------- ways to the head


def test_updates_lead_to_the_head_while_they_are_fewer_bytes(worker: Member, advance: Advance) -> None:
    advance(0, 3)
    reply = worker.ask(AskVersion(fragment=0, base_version=1))
    assert isinstance(reply, VersionReply)
    assert reply.snapshot is None
    assert reply.updates == (blob_of(update(2)), blob_of(update(3)))
    assert worker.fetch(reply.updates[1]) == update(3)


def test_a_joiner_begins_at_the_newest_checkpoint_and_follows_the_updates_from_there(
    worker: Member, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 2)
    assert way(worker, None) == (0, 2)
    for version in (1, 2):
        checkpoint(outer, version)
    advance(2, 5)
    assert way(worker, None) == (2, 3)
    checkpoint(outer, 5)
    reply = worker.ask(AskVersion(fragment=0))
    assert isinstance(reply, VersionReply)
    assert reply.snapshot is not None
    assert (reply.snapshot.version, reply.snapshot.parameters, reply.updates) == (5, blob_of(parameters(5)), ())


def test_whoever_is_behind_what_is_kept_begins_at_a_checkpoint(
    worker: Member, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 7)
    checkpoint(outer, 3, state=b"large parameters " * 50)
    assert way(worker, 1) == (3, 4)
    assert way(worker, 2) == (2, 5)


def test_a_chain_that_is_more_bytes_than_the_parameters_gives_way_to_them(
    worker: Member, outer: Member, offered: Make, commit_of: MakeCommit, checkpoint: MakeCheckpoint
) -> None:
    data = b"an update as large as the parameters" * 100
    outer.send(Upload(blob=blob_of(data)), data)
    assert isinstance(outer.ask(commit_of([offered(0)], update=data)), Committed)
    assert way(worker, 0) == (0, 1)
    checkpoint(outer, 1)
    assert way(worker, 0) == (1, 0)


def test_whoever_has_the_head_gets_only_the_row(worker: Member, offered: Make) -> None:
    contribution = offered(0)
    reply = worker.ask(AskVersion(fragment=0, base_version=0))
    assert isinstance(reply, VersionReply)
    assert (reply.snapshot, reply.updates) == (None, ())
    assert reply.row is not None
    assert reply.row.id == contribution.id


def test_a_base_that_the_store_never_had_is_refused(worker: Member) -> None:
    answer = worker.ask(AskVersion(fragment=0, base_version=7))
    assert isinstance(answer, Error)
    assert "replaced by an older one" in answer.text


def test_a_damaged_update_is_gone_around_and_mended_by_sending_it_again(
    stage: Stage, worker: Member, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 2)
    checkpoint(outer, 2)
    damaged = blob_of(update(2))
    stage.blobs.blobs[damaged.digest] = b"rotten!!!"
    assert isinstance(worker.fetch(damaged), Error)
    assert way(worker, 1) == (2, 0)
    assert isinstance(outer.send(Upload(blob=damaged), update(2)), Stored)
    assert way(worker, 1) == (1, 1)
    assert worker.fetch(damaged) == update(2)


def test_a_damaged_checkpoint_is_gone_around_by_an_older_one(
    stage: Stage, worker: Member, outer: Member, advance: Advance, checkpoint: MakeCheckpoint
) -> None:
    advance(0, 3)
    checkpoint(outer, 2)
    stage.blobs.blobs[blob_of(parameters(2)).digest] = b"rotten"
    assert isinstance(worker.fetch(blob_of(parameters(2))), Error)
    assert way(worker, None) == (0, 3)


def test_with_no_undamaged_way_the_asker_is_told_so(stage: Stage, worker: Member, advance: Advance) -> None:
    advance(0, 2)
    stage.blobs.blobs[blob_of(update(2)).digest] = b"rotten"
    assert isinstance(worker.fetch(blob_of(update(2))), Error)
    answer = worker.ask(AskVersion(fragment=0))
    assert isinstance(answer, Error)
    assert "no undamaged way" in answer.text
    assert way(worker, 2) == (2, 0)


# ------------------------------------------------------------------------------------------------------------- buffers


def test_a_fragment_of_buffers_is_merged_like_the_others_and_takes_part_in_no_mean(
    empty_stage: Stage, record: RunRecord, contribute: Make, payload: Payload, commit_of: MakeCommit
) -> None:
    specs = [*Manifest.from_text(record.manifest).tensors, TensorSpec("c", (2,), "float32", "buffer_average")]
    manifest = Manifest.build(specs, {}, 2)
    changes = {"manifest_digest": manifest.digest, "manifest": manifest.to_text()}
    worker, outer = empty_stage.member("worker", "us-1"), empty_stage.member("outer", "outer-1")
    for member in (worker, outer):
        member.join()
    worker.send(Upload(blob=blob_of(b"zero")), b"zero")
    first = VersionInfo(fragment=0, version=0, parameters_sha256="0" * 64, parameters=blob_of(b"zero"))
    infos = tuple(first.model_copy(update={"fragment": fragment}) for fragment in range(3))
    with_buffers = record.model_copy(update=changes)
    assert isinstance(worker.ask(Init(run_record=with_buffers, versions=infos[:2])), Error)
    assert isinstance(worker.ask(Init(run_record=with_buffers, versions=infos)), Initialised)
    leased = outer.ask(Lease(fragments=(0, 1, 2, 3)))
    assert isinstance(leased, Leased)
    assert set(leased.epochs) == {0, 1, 2}
    outer.send(Upload(blob=blob_of(b"update")), b"update")
    for fragment in (0, 2):
        contribution = contribute(worker, 0, fragment=fragment)
        worker.send(Offer(contribution=contribution), payload(worker, 0))
        commit = commit_of([contribution], fragment=fragment, commit_id=f"{fragment:016x}")
        assert isinstance(outer.ask(commit), Committed)
    status = empty_stage.member("operator", "me").ask(AskStatus())
    assert isinstance(status, Status)
    assert [info.version for info in status.fragments] == [1, 0, 1]
    assert (status.totals.tokens_merged, status.progress) == (50.0, 0.05), "the mean over fragments 0 and 1"
