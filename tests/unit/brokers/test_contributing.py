"""OFFER, its answers, and the row that is kept for ever."""

from __future__ import annotations

from collections.abc import Callable

from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.messages import (
    Accepted,
    AskHeads,
    Channel,
    Chunk,
    Contribution,
    Credit,
    Error,
    Expired,
    Fenced,
    Grant,
    Heads,
    List,
    Listing,
    Merged,
    Offer,
    Rejected,
    Rejection,
    RetryAfter,
    Settle,
    Settled,
)

Make = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Merge = Callable[..., object]


def test_an_offer_whose_bytes_are_durable_is_accepted(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    contribution = contribute(worker, 0)
    answer = worker.send(Offer(contribution=contribution), payload(worker, 0))
    assert answer == Accepted(id=contribution.id, request=answer.request)
    assert stage.blobs.blobs[contribution.blob.digest] == payload(worker, 0)
    assert stage.hints[-1].kind == "contribution"
    assert stage.events()[-1] == "contribution.accepted"


def test_nothing_is_accepted_before_the_disk_has_it(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    stage.is_disk_slow = True
    answer = worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0))
    assert isinstance(answer, Grant)
    assert stage.index.rows_of("us-1") == []
    stage.work()
    assert isinstance(stage.sent[-1].message, Accepted)


def test_a_repeated_offer_gets_the_answer_already_given(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge
) -> None:
    offer = Offer(contribution=contribute(worker, 0))
    worker.send(offer, payload(worker, 0))
    assert isinstance(worker.ask(offer), Accepted)
    merge(outer, [offer.contribution])
    answer = worker.ask(offer)
    assert isinstance(answer, Merged)
    assert answer.version == 1


def test_a_late_copy_of_a_merged_contribution_is_never_stored_again(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge
) -> None:
    first, second = contribute(worker, 0), contribute(worker, 1, base=1)
    worker.send(Offer(contribution=first), payload(worker, 0))
    merge(outer, [first])
    worker.send(Offer(contribution=second), payload(worker, 1))
    merge(outer, [second], base=1)
    answer = worker.ask(Offer(contribution=first))
    assert isinstance(answer, Error)
    assert answer.code == "broken-rule"
    listing = outer.ask(List(fragment=0))
    assert isinstance(listing, Listing)
    assert listing.pending == ()


def test_a_rejected_contribution_is_answered_with_its_reason(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload
) -> None:
    offer = Offer(contribution=contribute(worker, 0))
    worker.send(offer, payload(worker, 0))
    rejection = Rejection(id=offer.contribution.id, reason="not finite")
    assert isinstance(outer.ask(Settle(fragment=0, epoch=1, rejections=(rejection,))), Settled)
    answer = worker.ask(offer)
    assert isinstance(answer, Rejected)
    assert answer.reason == "not finite"


def test_a_new_number_while_the_row_is_pending_breaks_the_rules(
    worker: Member, contribute: Make, payload: Payload
) -> None:
    worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0))
    answer = worker.ask(Offer(contribution=contribute(worker, 1)))
    assert isinstance(answer, Error)
    assert answer.code == "broken-rule"


def test_two_uploads_of_one_learner_end_with_one_row(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    stage.is_disk_slow = True
    worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0))
    worker.send(Offer(contribution=contribute(worker, 1)), payload(worker, 1))
    stage.work()
    finals = [send.message for send in stage.sent[-8:] if not isinstance(send.message, Credit)]
    assert [type(message) for message in finals] == [Accepted, Error]


def far_behind(stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge) -> None:
    """Brings fragment 0 to version 5, one above the horizon."""
    for number in range(5):
        contribution = contribute(worker, number, base=number)
        worker.send(Offer(contribution=contribution), payload(worker, number))
        merge(outer, [contribution], base=number)


def test_an_offer_from_beyond_the_horizon_expires(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge
) -> None:
    far_behind(stage, worker, outer, contribute, payload, merge)
    answer = worker.ask(Offer(contribution=contribute(worker, 5, base=0)))
    assert isinstance(answer, Expired)
    assert answer.head == 5
    assert stage.events()[-1] == "contribution.expired"


def test_a_late_copy_of_an_expired_offer_is_refused(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge
) -> None:
    far_behind(stage, worker, outer, contribute, payload, merge)
    old = contribute(worker, 5, base=0)
    worker.ask(Offer(contribution=old))
    stage.restart()
    worker.join()
    assert isinstance(worker.ask(Offer(contribution=old.model_copy(update={"base_version": 5}))), Expired)
    assert stage.index.row("us-1", 0).id.number == 4  # type: ignore[union-attr]


def test_an_upload_under_way_is_not_judged_by_its_age_again(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Merge
) -> None:
    slow = stage.member("worker", "slow")
    slow.join()
    offer = Offer(contribution=contribute(slow, 0))
    assert isinstance(slow.ask(offer), Grant)
    far_behind(stage, worker, outer, contribute, payload, merge)
    assert isinstance(slow.send(offer, payload(slow, 0)), Accepted)


def test_an_older_incarnation_is_fenced_and_never_becomes_current_again(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    newer = stage.member("worker", "us-1", "a2" * 8)
    newer.join()
    assert isinstance(worker.ask(Offer(contribution=contribute(worker, 0))), Fenced)
    assert isinstance(worker.join(), Fenced)
    stage.restart()
    assert isinstance(worker.join(), Fenced)
    newer.join()
    assert isinstance(newer.send(Offer(contribution=contribute(newer, 0)), payload(newer, 0)), Accepted)


def test_an_upload_of_an_older_incarnation_is_fenced_when_it_ends(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    stage.is_disk_slow = True
    worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0))
    stage.member("worker", "us-1", "a2" * 8).join()
    stage.work()
    assert isinstance(stage.sent[-1].message, Fenced)
    assert stage.index.rows_of("us-1") == []


def test_hello_returns_the_rows_of_the_learner(worker: Member, contribute: Make, payload: Payload) -> None:
    contribution = contribute(worker, 0, cursor={3: 7})
    worker.send(Offer(contribution=contribution), payload(worker, 0))
    answer = worker.ask(AskHeads())
    assert isinstance(answer, Heads)
    [row] = answer.rows
    assert (row.id, row.state, row.settled_in, row.cursor) == (contribution.id, "pending", None, {3: 7})


def test_an_offer_under_another_name_is_refused(stage: Stage, worker: Member, contribute: Make) -> None:
    other = stage.member("worker", "eu-1")
    answer = worker.ask(Offer(contribution=contribute(other, 0)))
    assert isinstance(answer, Error)
    assert answer.code == "broken-rule"


def test_an_id_with_other_bytes_is_a_conflict_whether_stored_or_under_way(
    worker: Member, contribute: Make, payload: Payload
) -> None:
    first, second = contribute(worker, 0), contribute(worker, 0, data=b"other bytes")
    assert isinstance(worker.ask(Offer(contribution=first)), Grant)
    under_way = worker.ask(Offer(contribution=second))
    worker.send(Offer(contribution=first), payload(worker, 0))
    stored = worker.ask(Offer(contribution=second))
    for answer in (under_way, stored):
        assert isinstance(answer, Error)
        assert answer.code == "conflict"


def test_a_base_from_the_future_is_refused(worker: Member, contribute: Make) -> None:
    answer = worker.ask(Offer(contribution=contribute(worker, 0, base=9)))
    assert isinstance(answer, Error)
    assert "newest version is 0" in answer.text


def test_damaged_bytes_are_named_and_nothing_is_stored(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    data = bytearray(payload(worker, 0))
    data[5000] ^= 1
    answer = worker.send(Offer(contribution=contribute(worker, 0)), bytes(data))
    assert isinstance(answer, Error)
    assert answer.code == "damaged"
    assert stage.index.rows_of("us-1") == []
    assert stage.events()[-1] == "contribution.damaged"
    assert isinstance(worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0)), Accepted), (
        "the same id may try again"
    )


def test_an_interrupted_upload_resumes_where_it_stopped(worker: Member, contribute: Make, payload: Payload) -> None:
    offer, data = Offer(contribution=contribute(worker, 0)), payload(worker, 0)
    grant = worker.ask(offer)
    assert isinstance(grant, Grant)
    worker.say(Chunk(transfer=grant.transfer, offset=0), data[:4096], Channel.BULK)
    again = worker.ask(offer)
    assert isinstance(again, Grant)
    assert (again.transfer, again.offset) == (grant.transfer, 4096)
    assert isinstance(worker.send(offer, data), Accepted)


def test_a_chunk_out_of_order_is_dropped_and_the_right_place_named_once(
    worker: Member, contribute: Make, payload: Payload
) -> None:
    data = payload(worker, 0)
    grant = worker.ask(Offer(contribution=contribute(worker, 0)))
    assert isinstance(grant, Grant)
    chunk = Chunk(transfer=grant.transfer, offset=4096)
    [answer] = worker.say(chunk, data[4096:8192], Channel.BULK)
    assert isinstance(answer.message, Grant)
    assert answer.message.offset == 0
    assert worker.say(chunk, data[4096:8192], Channel.BULK) == []


def test_a_chunk_beyond_the_announced_size_ends_the_upload(stage: Stage, worker: Member, contribute: Make) -> None:
    grant = worker.ask(Offer(contribution=contribute(worker, 0, data=b"short")))
    assert isinstance(grant, Grant)
    [answer] = worker.say(Chunk(transfer=grant.transfer, offset=0), b"longer than that", Channel.BULK)
    assert isinstance(answer.message, Error)
    assert answer.message.code == "too-large"
    [gone] = worker.say(Chunk(transfer=grant.transfer, offset=0), b"short", Channel.BULK)
    assert isinstance(gone.message, Error)
    assert gone.message.code == "not-found"


def test_whoever_ignores_its_credit_loses_the_upload(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    stage.is_disk_slow = True
    data = payload(worker, 0) * 2
    answer = worker.send(Offer(contribution=contribute(worker, 0, data=data)), data)
    assert isinstance(answer, Error)
    assert answer.code == "broken-rule"
    assert len(stage.waiting) <= 5, "what may wait in memory is bounded"


def test_another_client_cannot_write_into_an_upload(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    grant = worker.ask(Offer(contribution=contribute(worker, 0)))
    assert isinstance(grant, Grant)
    thief = stage.member("worker", "thief")
    thief.join()
    [answer] = thief.say(Chunk(transfer=grant.transfer, offset=0), b"x", Channel.BULK)
    assert isinstance(answer.message, Error)
    assert answer.message.code == "not-found"


def test_sizes_are_checked_before_anything_is_stored(stage: Stage, worker: Member, contribute: Make) -> None:
    contribution = contribute(worker, 0)
    for size in (0, stage.settings.blob_bytes_max + 1):
        blob = contribution.blob.model_copy(update={"size_bytes": size})
        answer = worker.ask(Offer(contribution=contribution.model_copy(update={"blob": blob})))
        assert isinstance(answer, Error)


def test_a_full_disk_puts_off_and_recovers(stage: Stage, worker: Member, contribute: Make, payload: Payload) -> None:
    stage.blobs.free = stage.settings.disk_free_bytes_min
    stage.advance(0.3)
    offer = Offer(contribution=contribute(worker, 0))
    answer = worker.ask(offer)
    assert isinstance(answer, RetryAfter)
    assert "disk_free_bytes_min" in answer.reason
    stage.blobs.free *= 2
    stage.advance(0.3)
    assert isinstance(worker.send(offer, payload(worker, 0)), Accepted)


def test_an_upload_that_nobody_continues_is_dropped(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    offer, data = Offer(contribution=contribute(worker, 0)), payload(worker, 0)
    grant = worker.ask(offer)
    assert isinstance(grant, Grant)
    worker.say(Chunk(transfer=grant.transfer, offset=0), data[:4096], Channel.BULK)
    stage.advance(stage.settings.upload_idle_seconds + 1)
    again = worker.ask(offer)
    assert isinstance(again, Grant)
    assert again.offset == 0
    assert isinstance(worker.send(offer, data), Accepted)


def test_bytes_that_were_refused_in_the_end_are_swept(
    stage: Stage, worker: Member, contribute: Make, payload: Payload
) -> None:
    stage.is_disk_slow = True
    data = payload(worker, 0)
    worker.send(Offer(contribution=contribute(worker, 0)), data)
    stage.member("worker", "us-1", "a2" * 8).join()
    stage.work()
    assert blob_of(data).digest in stage.blobs.blobs
    stage.is_disk_slow = False
    stage.advance(stage.settings.flush_seconds)
    assert blob_of(data).digest not in stage.blobs.blobs


def test_more_norms_than_tensors_are_refused(worker: Member, contribute: Make) -> None:
    contribution = contribute(worker, 0).model_copy(update={"norms": (1.0, 2.0)})
    answer = worker.ask(Offer(contribution=contribution))
    assert isinstance(answer, Error)
    assert "norms" in answer.text
