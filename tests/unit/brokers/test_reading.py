"""Fetching, status, reports, hints, and what garbage is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import ChunkRead, GarbageArrived, ReadFailed
from isles.proto.messages import (
    AskStatus,
    AskVersion,
    Channel,
    Chunk,
    Contribution,
    Credit,
    Done,
    Error,
    Fetch,
    Offer,
    Progress,
    Report,
    RetryAfter,
    Status,
    Upload,
    VersionReply,
)

BIG = bytes(range(256)) * 100


@pytest.fixture
def big(outer: Member) -> bytes:
    """A stored blob of seven chunks."""
    outer.send(Upload(blob=blob_of(BIG)), BIG)
    return BIG


def test_a_blob_comes_in_chunks_with_credit(worker: Member, big: bytes) -> None:
    first = worker.say(Fetch(transfer=9, digest=blob_of(big).digest), channel=Channel.BULK)
    assert [send.message for send in first] == [Chunk(transfer=9, offset=0), Chunk(transfer=9, offset=4096)]
    [third] = worker.say(Credit(transfer=9, offset=4096), channel=Channel.BULK)
    assert third.message == Chunk(transfer=9, offset=8192)
    assert worker.fetch(blob_of(big)) == big


def test_credit_that_repeats_or_runs_ahead_brings_nothing(worker: Member, big: bytes) -> None:
    worker.say(Fetch(transfer=9, digest=blob_of(big).digest), channel=Channel.BULK)
    for offset in (0, 8193, 10**9):
        assert worker.say(Credit(transfer=9, offset=offset), channel=Channel.BULK) == []


def test_a_fetch_resumes_and_one_number_is_one_transfer(stage: Stage, worker: Member, big: bytes) -> None:
    digest = blob_of(big).digest
    worker.say(Fetch(transfer=9, digest=digest), channel=Channel.BULK)
    resumed = worker.say(Fetch(transfer=9, digest=digest, offset=20_480), channel=Channel.BULK)
    assert [send.message for send in resumed] == [Chunk(transfer=9, offset=20_480), Chunk(transfer=9, offset=24_576)]
    assert b"".join(bytes(send.payload or b"") for send in resumed) == big[20_480:]
    assert stage.hear(ChunkRead(1, 0, b"stale")) == [], "reads for the first one are nobody's"


def test_what_is_not_there_is_said(worker: Member, big: bytes) -> None:
    answer = worker.fetch(blob_of(b"unknown"))
    assert isinstance(answer, Error)
    assert answer.code == "not-found"
    [beyond] = worker.say(Fetch(transfer=3, digest=blob_of(big).digest, offset=len(big) + 1), channel=Channel.BULK)
    assert isinstance(beyond.message, Error)


def test_a_corrupt_blob_is_reported_and_nothing_else_is_touched(stage: Stage, worker: Member, big: bytes) -> None:
    before = dict(stage.blobs.blobs)
    digest = blob_of(big).digest
    stage.blobs.blobs[digest] = b"\x01" + big[1:]
    answer = worker.fetch(blob_of(big))
    assert isinstance(answer, Error)
    assert answer.code == "damaged"
    assert stage.events()[-1] == "blob.corrupt"
    assert stage.blobs.blobs.keys() == before.keys()
    assert stage.hear(ReadFailed(1, "damaged", "again")) == []


def test_a_fetch_that_begins_anew_has_the_blob_checked(stage: Stage, worker: Member, big: bytes) -> None:
    """Whoever begins anew found that the bytes do not have their digest."""
    stage.is_disk_slow = True
    fetch = Fetch(transfer=9, digest=blob_of(big).digest)
    worker.say(fetch, channel=Channel.BULK)
    assert [order.is_doubted for order in stage.waiting] == [False, False]
    worker.say(fetch, channel=Channel.BULK)
    assert [order.is_doubted for order in stage.waiting[2:]] == [True, False]
    worker.say(fetch.model_copy(update={"offset": 4096}), channel=Channel.BULK)
    assert [order.is_doubted for order in stage.waiting[4:]] == [False, False]


def test_fetches_of_one_client_are_bounded(stage: Stage, worker: Member, big: bytes) -> None:
    most = stage.settings.downloads_per_client_max
    fetches = [Fetch(transfer=number, digest=blob_of(big).digest) for number in range(1, most + 2)]
    answers = [worker.say(fetch, channel=Channel.BULK) for fetch in fetches]
    assert isinstance(answers[-1][0].message, RetryAfter)
    stage.advance(stage.settings.upload_idle_seconds + 1)
    worker.join()
    assert worker.fetch(blob_of(big)) == big


def test_status_needs_no_session_and_no_run(empty_stage: Stage) -> None:
    answer = empty_stage.member("operator", "me").ask(AskStatus())
    assert isinstance(answer, Status)
    assert (answer.run, answer.progress, answer.fragments) == ("", 0.0, ())


def test_status_tells_what_the_run_has_done(
    stage: Stage,
    worker: Member,
    outer: Member,
    contribute: Callable[..., Contribution],
    payload: Callable[[Member, int], bytes],
    merge: Callable[..., object],
) -> None:
    worker.ask(Progress(tokens=250, steps=20, step_seconds=0.1))
    first, second = contribute(worker, 0), contribute(worker, 1, base=0, tokens=60)
    worker.send(Offer(contribution=first), payload(worker, 0))
    merge(outer, [first])
    worker.send(Offer(contribution=second), payload(worker, 1))
    merge(outer, [second], base=1)
    reply = worker.ask(AskVersion(fragment=0))
    assert isinstance(reply, VersionReply)
    assert reply.snapshot is not None
    assert reply.snapshot.parameters is not None
    snapshot = worker.fetch(reply.snapshot.parameters)
    stage.advance(stage.settings.flush_seconds)
    status = stage.member("operator", "me").ask(AskStatus())
    assert isinstance(status, Status)
    totals = status.totals
    assert (status.run, status.num_parameters) == ("trial", 7)
    assert (totals.rounds_committed, totals.merged, totals.rejected, totals.expired) == (2, 2, 0, 0)
    assert totals.tokens_merged == 80.0, "the mean over two fragments"
    assert status.progress == 0.08
    assert totals.tokens_produced == 250
    assert (totals.participation_mean, totals.fraction_mean, totals.staleness_mean) == (1.0, 0.5, 0.5)
    assert totals.bytes_up == len(payload(worker, 0)) + len(payload(worker, 1))
    assert totals.bytes_down == len(snapshot)  # type: ignore[arg-type]
    assert totals.update_bytes == len(b"update 1 ") + len(b"update 2 ")
    assert [info.version for info in status.fragments] == [2, 0]
    assert [lease.epoch for lease in status.leases] == [1, 1]
    assert status.num_pending == {}


def test_reports_are_kept_in_order_and_read_from_where_one_was(stage: Stage) -> None:
    evaluator = stage.member("evaluator", "eval")
    evaluator.join()
    for value in (5.5, 4.5, 3.5):
        assert isinstance(evaluator.ask(Report(name="val_loss", value=value, versions={0: 1}, tokens=7.0)), Done)
    assert [hint.kind for hint in stage.hints[-3:]] == ["report"] * 3
    status = stage.member("operator", "me").ask(AskStatus(reports_after=1))
    assert isinstance(status, Status)
    assert [(report.seq, report.value, report.reporter) for report in status.reports] == [
        (2, 4.5, "eval"),
        (3, 3.5, "eval"),
    ]


def test_of_more_reports_than_fit_the_oldest_or_the_newest_are_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, operator = stage.member("evaluator", "eval"), stage.member("operator", "me")
    evaluator.join()
    for value in range(7):
        evaluator.ask(Report(name="val_loss", value=value, versions={0: 1}, tokens=7.0))

    def told(**ask: Any) -> list[int]:
        status = operator.ask(AskStatus(**ask))
        assert isinstance(status, Status)
        return [report.seq for report in status.reports]

    monkeypatch.setattr("isles.brokers.status.REPORTS_MAX", 3)
    assert told() == [1, 2, 3]
    assert told(wants_newest=True) == [5, 6, 7]
    assert told(reports_after=6, wants_newest=True) == [7]
    assert told(reports_after=7, wants_newest=True) == []
    monkeypatch.setattr("isles.brokers.status.REPORTS_BYTES_MAX", 1)
    assert told() == [1]
    assert told(wants_newest=True) == [7]


def test_silence_is_filled_with_beats_and_every_hint_has_the_next_number(stage: Stage) -> None:
    for _ in range(40):
        stage.advance(0.25)
    assert [hint.kind for hint in stage.hints[-5:]] == ["beat"] * 5
    assert [hint.seq for hint in stage.hints] == list(range(1, len(stage.hints) + 1))
    assert len({hint.broker_incarnation for hint in stage.hints}) == 1


def test_garbage_is_answered_and_named_in_the_log(stage: Stage) -> None:
    stage.hear(GarbageArrived(Channel.BULK, b"somebody", "a header of 3 bytes is no msgpack"))
    answer = stage.sent[-1]
    assert (answer.channel, answer.connection) == (Channel.BULK, b"somebody")
    assert isinstance(answer.message, Error)
    assert answer.message.code == "bad-message"
    assert stage.logs[-1].event == "message.refused"
