"""Contributions and other payloads on their way home: what is kept, and what crosses the link only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isles.brokers.relay.outbox import SENT_MAX
from isles.brokers.stage import blob_of
from isles.proto.client import Refused
from isles.proto.messages import (
    Accepted,
    Error,
    Initialised,
    Message,
    Offer,
    Receipt,
    Stored,
    Upload,
)

LONG_SECONDS = 30.0
PARAMETERS = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)
"""As the stage's founder brought them."""


def offers_in(messages: list[Message]) -> list[Offer]:
    return [message for message in messages if isinstance(message, Offer)]


def test_a_contribution_gets_home_with_its_id_and_its_bytes_cross_the_link_once(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    offer, data = offer_of()
    worker.ask(offer, data)
    assert worker.answers() == [Accepted(request=worker.answers()[0].request, id=offer.contribution.id)]
    assert world.payload_bytes["up"] == len(data)
    assert world.home.blobs.blobs[offer.contribution.blob.digest] == data
    assert world.disk.offers == {}
    assert offer.contribution.blob.digest not in world.disk.blobs.blobs


def test_an_offer_that_is_repeated_after_its_answer_is_not_sent_home_again(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    offer, data = offer_of()
    worker.ask(offer, data)
    before = len(world.passed_up)
    worker.ask(offer, data)
    assert [type(answer) for answer in worker.answers()] == [Accepted, Accepted]
    assert offers_in(world.passed_up[before:]) == []


def test_an_id_never_names_two_payloads(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    offer, data = offer_of()
    other, other_data = offer_of(size=5000)
    worker.ask(offer, data)
    worker.ask(other, other_data)
    [error] = worker.answers(Error)
    assert error.code == "conflict"


def test_nobody_offers_in_anothers_name(world: Any, offer_of: Any) -> None:
    world.speaker("us-2").join()
    worker = world.speaker().join()
    worker.ask(*offer_of("us-2"))
    [error] = worker.answers(Error)
    assert error.code == "broken-rule"
    assert offers_in(world.passed_up) == []


def test_an_offer_in_the_outbox_gets_home_after_a_crash_though_its_learner_is_gone(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    offer, data = offer_of()
    worker.ask(offer, data)
    worker.die()
    assert list(world.disk.offers) == [offer.contribution.id]
    world.restart()
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    [row] = world.home.index.rows_of("us-1")
    assert (row.id, row.state) == (offer.contribution.id, "pending")
    assert world.disk.offers == {}


def test_with_region_acks_a_receipt_comes_first_and_the_contribution_stays_open(make_world: Any, offer_of: Any) -> None:
    world = make_world(ack="region")
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(*offer_of())
    told = receipts(worker)
    assert told
    assert worker.client.is_asking(Offer)
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert worker.answers(Accepted)
    assert not worker.client.is_asking(Offer)


def receipts(worker: Any) -> list[Receipt]:
    return [send.message for send in worker.world.sent if isinstance(send.message, Receipt)]


def test_with_home_acks_nobody_hears_of_a_receipt(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(*offer_of())
    world.advance(LONG_SECONDS)
    assert receipts(worker) == []
    assert worker.answers() == []


def test_a_full_outbox_puts_workers_off_and_everything_arrives_after_it(make_world: Any, offer_of: Any) -> None:
    world = make_world(outbox_bytes_max=35_000)
    workers = join_all(world, 6)
    world.is_link_up = False
    for worker in workers:
        worker.ask(*offer_of(worker.client.hello.id))
    assert len(world.disk.offers) == 3
    assert len(world.said("outbox.full")) == 1
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert [len(worker.answers(Accepted)) for worker in workers] == [1] * 6
    assert world.payload_bytes["up"] == 60_000
    assert "outbox.relieved" in world.events()


def join_all(world: Any, num: int) -> list[Any]:
    """So many workers, each of which has one contribution to make."""
    return [world.speaker(f"us-{number}").join() for number in range(num)]


def test_a_full_disk_puts_workers_off(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.disk.blobs.free = 0
    world.advance(1.0)
    worker.ask(*offer_of())
    assert world.disk.offers == {}
    world.disk.blobs.free = 2**50
    world.advance(LONG_SECONDS)
    assert worker.answers(Accepted)


def test_a_relay_whose_disk_is_lost_is_sent_everything_again(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(*offer_of())
    world.disk.offers.clear()
    world.disk.blobs.blobs.clear()
    world.restart()
    world.is_link_up = True
    world.advance(2 * LONG_SECONDS)
    assert worker.answers(Accepted)


def test_a_blob_that_rots_in_the_outbox_is_sent_again_by_its_learner(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    offer, data = offer_of()
    worker.ask(offer, data)
    world.disk.blobs.blobs[offer.contribution.blob.digest] = b"x" * len(data)
    world.restart()
    world.is_link_up = True
    world.advance(2 * LONG_SECONDS)
    assert "blob.corrupt" in world.events()
    assert worker.answers(Accepted)
    assert world.home.blobs.blobs[offer.contribution.blob.digest] == data


def test_an_offer_without_its_blob_is_let_go_of_at_the_start(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    offer, data = offer_of()
    worker.ask(offer, data)
    worker.die()
    del world.disk.blobs.blobs[offer.contribution.blob.digest]
    world.restart()
    assert world.disk.offers == {}


def test_what_a_replaced_incarnation_left_is_told_to_nobody_and_ends(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    offer, data = offer_of()
    worker.ask(offer, data)
    worker.die()
    successor = world.speaker(incarnation="b2" * 8)
    world.is_link_up = True
    successor.join()
    world.advance(LONG_SECONDS)
    assert world.disk.offers == {}
    assert [fields["answer"] for fields in world.said("contribution.forwarded")] == ["retired"]
    assert world.ends == []


def test_a_replaced_incarnation_that_still_lives_is_fenced(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(*offer_of())
    world.is_link_up = True
    world.speaker(incarnation="b2" * 8).join()
    world.advance(LONG_SECONDS)
    assert [refused.code for refused in worker.told(Refused)] == ["fenced"]


def test_two_relays_of_one_region_bring_a_contribution_once(make_world: Any, offer_of: Any) -> None:
    first = make_world()
    worker = first.speaker().join()
    offer, data = offer_of()
    first.is_link_up = False
    worker.ask(offer, data)
    second = make_world(id="relay-us-2")
    second.name = "relay-us-2"
    second.start()
    moved = second.speaker().join()
    moved.ask(offer, data)
    assert moved.answers(Accepted)
    first.is_link_up = True
    first.advance(LONG_SECONDS)
    assert first.disk.offers == {}
    assert first.payload_bytes["up"] == 0
    assert len(world_rows(first)) == 1


def world_rows(world: Any) -> list[Any]:
    return list(world.home.index.rows_of("us-1"))


def test_no_more_than_a_few_payloads_are_under_way_at_once(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    for number in range(3 * SENT_MAX):
        worker.ask(*offer_of(number=number, size=100))
    world.restart()
    assert world.relay.state.outbox.num_under_way == SENT_MAX
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert world.relay.state.outbox.num_under_way == 0
    assert world.disk.offers == {}


def test_a_run_is_begun_through_a_relay_and_its_parameters_come_back_from_the_cache(
    new_world: Any, begin: Callable[..., None]
) -> None:
    founder = new_world.speaker().join()
    begin(founder, PARAMETERS)
    assert [type(answer) for answer in founder.answers()] == [Stored, Stored, Initialised]
    assert new_world.payload_bytes["up"] == sum(map(len, PARAMETERS))
    other = new_world.speaker("us-2", incarnation="b2" * 8).join()
    other.fetch(blob_of(PARAMETERS[0]))
    assert other.fetched() == [PARAMETERS[0]]
    assert new_world.payload_bytes["down"] == 0


def test_blobs_that_cannot_go_home_yet_do_not_fill_the_disk(make_world: Any) -> None:
    world = make_world(cache_bytes_max=20_000)
    worker = world.speaker().join()
    world.is_link_up = False
    blobs = [bytes([number]) * 9_000 for number in range(5)]
    for data in blobs:
        worker.ask(Upload(blob=blob_of(data)), data)
    assert len(world.disk.blobs.blobs) == 2
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert len(worker.answers(Stored)) == 5
    assert sum(map(len, world.disk.blobs.blobs.values())) <= 20_000
