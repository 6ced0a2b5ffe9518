"""LEASE, LIST, SETTLE, COMMIT, VERSION: what outers do, and what learners see of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers import retained
from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.messages import (
    AskVersion,
    Commit,
    Committed,
    Contribution,
    Error,
    Fenced,
    Lease,
    Leased,
    Leave,
    List,
    Listing,
    Offer,
    Rejection,
    Settle,
    Settled,
    Stale,
    Upload,
    VersionReply,
)

Make = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Merge = Callable[..., object]
MakeCommit = Callable[..., Commit]


def test_a_commit_makes_the_next_version_and_settles_its_rows(
    stage: Stage, worker: Member, outer: Member, offered: Make, merge: Merge
) -> None:
    contribution = offered(0)
    answer = merge(outer, [contribution])
    assert isinstance(answer, Committed)
    assert (answer.version, answer.is_repeat) == (1, False)
    reply = worker.ask(AskVersion(fragment=0, base_version=0))
    assert isinstance(reply, VersionReply)
    assert reply.head.tokens_total == 100
    assert reply.row is not None
    assert (reply.row.id, reply.row.state, reply.row.settled_in) == (contribution.id, "merged", 1)
    assert [hint.kind for hint in stage.hints[-2:]] == ["contribution", "version"]
    assert stage.events()[-1] == "round.committed"


def test_a_commit_repeated_after_a_lost_answer_is_told_that_it_holds(
    stage: Stage, outer: Member, offered: Make, commit_of: MakeCommit
) -> None:
    outer.send(Upload(blob=blob_of(b"update")), b"update")
    commit = commit_of([offered(0)])
    assert isinstance(outer.ask(commit), Committed)
    newer = stage.member("outer", "outer-2")
    newer.join()
    stage.advance(stage.settings.outer_lease_seconds)
    newer.ask(Lease(fragments=(0,)))
    again = outer.ask(commit)
    assert isinstance(again, Committed)
    assert (again.version, again.is_repeat) == (1, True)


def test_a_commit_on_an_old_head_is_stale(outer: Member, offered: Make, merge: Merge, commit_of: MakeCommit) -> None:
    merge(outer, [offered(0)])
    answer = outer.ask(commit_of([offered(1)], base=0))
    assert isinstance(answer, Stale)
    assert answer.head == 1


def test_a_commit_that_consumes_a_settled_row_is_stale(
    stage: Stage, outer: Member, offered: Make, commit_of: MakeCommit
) -> None:
    contribution = offered(0)
    rejection = Rejection(id=contribution.id, reason="not finite")
    outer.ask(Settle(fragment=0, epoch=1, rejections=(rejection,)))
    outer.send(Upload(blob=blob_of(b"update")), b"update")
    answer = outer.ask(commit_of([contribution]))
    assert isinstance(answer, Stale)
    assert "rejected" in answer.reason


def test_a_commit_whose_recipe_names_other_bytes_is_stale(outer: Member, offered: Make, commit_of: MakeCommit) -> None:
    contribution = offered(0)
    other = contribution.model_copy(update={"blob": blob_of(b"other bytes")})
    outer.send(Upload(blob=blob_of(b"update")), b"update")
    answer = outer.ask(commit_of([other]))
    assert isinstance(answer, Stale)
    assert "other bytes" in answer.reason


def test_a_recipe_that_would_fit_no_answer_is_refused(
    outer: Member, offered: Make, commit_of: MakeCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained, "RECIPE_BYTES_MAX", 399)
    answer = outer.ask(commit_of([offered(0)]))
    assert isinstance(answer, Error)
    assert answer.code == "too-large"


def test_a_commit_that_consumes_a_replaced_row_is_stale(
    outer: Member, offered: Make, merge: Merge, commit_of: MakeCommit
) -> None:
    first = offered(0)
    merge(outer, [first])
    offered(1)
    answer = outer.ask(commit_of([first], base=1))
    assert isinstance(answer, Stale)
    assert "not in the store" in answer.reason


def test_a_commit_of_an_old_epoch_is_fenced(stage: Stage, outer: Member, offered: Make, commit_of: MakeCommit) -> None:
    contribution = offered(0)
    second = stage.member("outer", "outer-2")
    second.join()
    stage.advance(stage.settings.outer_lease_seconds)
    assert second.ask(Lease(fragments=(0, 1))) == Leased(request=2, epochs={0: 2, 1: 2}, lease_seconds=3.0)
    for message in (commit_of([contribution]), Settle(fragment=0, epoch=1, rejections=())):
        answer = outer.ask(message)
        assert isinstance(answer, Fenced)
        assert answer.epoch == 2


def test_a_commit_without_a_lease_is_refused(
    stage: Stage, worker: Member, contribute: Make, payload: Payload, commit_of: MakeCommit
) -> None:
    contribution = contribute(worker, 0)
    worker.send(Offer(contribution=contribution), payload(worker, 0))
    outer = stage.member("outer", "outer-1")
    outer.join()
    for message in (commit_of([contribution], epoch=0), Settle(fragment=0, epoch=0, rejections=())):
        answer = outer.ask(message)
        assert isinstance(answer, Error)
        assert answer.code == "broken-rule"
    assert stage.index.head(0).version == 0  # type: ignore[union-attr]


def test_a_commit_whose_blobs_are_not_stored_is_refused(outer: Member, offered: Make, commit_of: MakeCommit) -> None:
    answer = outer.ask(commit_of([offered(0)], update=b"never sent"))
    assert isinstance(answer, Error)
    assert answer.code == "not-found"


def test_a_commit_of_nothing_or_of_one_learner_twice_is_refused(
    outer: Member, offered: Make, commit_of: MakeCommit
) -> None:
    contribution = offered(0)
    for contributions in ([], [contribution, contribution]):
        answer = outer.ask(commit_of(contributions))
        assert isinstance(answer, Error)
        assert answer.code == "broken-rule"


def test_a_repeated_settle_changes_nothing(stage: Stage, outer: Member, offered: Make) -> None:
    settle = Settle(fragment=0, epoch=1, rejections=(Rejection(id=offered(0).id, reason="too large"),))
    assert isinstance(outer.ask(settle), Settled)
    assert isinstance(outer.ask(settle), Settled)
    assert stage.index.counter(retained.REJECTED_COUNTER) == 1
    assert [hint.kind for hint in stage.hints].count("settled") == 1


def test_a_listing_has_everything_pending_in_sorted_order(
    stage: Stage, outer: Member, worker: Member, contribute: Make, payload: Payload
) -> None:
    names = ("eu-2", "eu-1", "us-9")
    for name in names:
        member = stage.member("worker", name)
        member.join()
        member.send(Offer(contribution=contribute(member, 0)), payload(member, 0))
    listing = outer.ask(List(fragment=0))
    assert isinstance(listing, Listing)
    assert listing.head.version == 0
    assert [contribution.id.learner for contribution in listing.pending] == sorted(names)
    assert {info.learner for info in listing.learners if info.is_live} == {*names, "us-1", "founder"}


def test_a_listing_that_would_be_too_long_has_the_oldest_bases_and_the_rest_comes_later(
    stage: Stage,
    outer: Member,
    offered: Make,
    contribute: Make,
    payload: Payload,
    merge: Merge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge(outer, [offered(0)])
    for name, base in (("eu-1", 1), ("eu-2", 0), ("us-9", 0)):
        member = stage.member("worker", name)
        member.join()
        member.send(Offer(contribution=contribute(member, 0, base=base)), payload(member, 0))
    monkeypatch.setattr(retained, "LISTING_BYTES_MAX", 2 * retained.contribution_bytes(1))
    listing = outer.ask(List(fragment=0))
    assert isinstance(listing, Listing)
    assert [one.id.learner for one in listing.pending] == ["eu-2", "us-9"]
    merge(outer, list(listing.pending), base=1)
    after = outer.ask(List(fragment=0))
    assert isinstance(after, Listing)
    assert [one.id.learner for one in after.pending] == ["eu-1"]


def test_a_lease_is_renewed_with_its_epoch_and_withheld_from_others(stage: Stage, outer: Member) -> None:
    other = stage.member("outer", "outer-2")
    other.join()
    for _ in range(5):
        stage.advance(2.0)
        mine, theirs = outer.ask(Lease(fragments=(0, 1))), other.ask(Lease(fragments=(0, 1)))
        assert isinstance(mine, Leased)
        assert isinstance(theirs, Leased)
        assert (mine.epochs, theirs.epochs) == ({0: 1, 1: 1}, {})


def test_a_lease_held_before_a_restart_continues_for_one_lease_time(stage: Stage, outer: Member) -> None:
    stage.advance(100.0)
    stage.restart()
    other = stage.member("outer", "outer-2")
    other.join()
    assert other.ask(Lease(fragments=(0,))).epochs == {}  # type: ignore[attr-defined]
    stage.advance(stage.settings.outer_lease_seconds)
    assert other.ask(Lease(fragments=(0,))).epochs == {0: 2}  # type: ignore[attr-defined]


def test_a_restarted_outer_is_another_holder(stage: Stage, outer: Member) -> None:
    again = stage.member("outer", "outer-1", "b2" * 8)
    again.join()
    assert isinstance(outer.ask(Lease(fragments=(0,))), Fenced)
    stage.advance(stage.settings.outer_lease_seconds)
    assert again.ask(Lease(fragments=(0,))).epochs == {0: 2}  # type: ignore[attr-defined]


def test_an_outer_that_leaves_frees_its_fragments_at_once(stage: Stage, outer: Member) -> None:
    outer.ask(Leave())
    stage.restart()
    other = stage.member("outer", "outer-2")
    other.join()
    assert other.ask(Lease(fragments=(0, 1))).epochs == {0: 2, 1: 2}  # type: ignore[attr-defined]


def test_fragments_that_the_run_does_not_have_are_not_leased(outer: Member) -> None:
    assert outer.ask(Lease(fragments=(1, 2, 4000))).epochs == {1: 1}  # type: ignore[attr-defined]
