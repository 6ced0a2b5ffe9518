"""Payloads on their way into a region: each crosses the link once, whoever wants it."""

from __future__ import annotations

from typing import Any

import pytest

from isles.brokers.stage import blob_of
from isles.proto.client import FetchFailed, Send
from isles.proto.messages import (
    AskHeads,
    Channel,
    Fetch,
)

LONG_SECONDS = 30.0
PARAMETERS = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)
"""As the stage's founder brought them."""


def test_a_blob_that_several_want_crosses_the_link_once(world: Any) -> None:
    workers = [world.speaker(f"us-{number}", incarnation=f"{number:016x}").join() for number in range(5)]
    for worker in workers:
        worker.do(worker.client.fetch(blob_of(PARAMETERS[0]), world.now, bytes_max=1 << 20))
    world.settle()
    assert [worker.fetched() for worker in workers] == [[PARAMETERS[0]]] * 5
    assert world.payload_bytes["down"] == len(PARAMETERS[0])


def test_what_is_in_the_cache_is_served_without_a_link_and_after_a_restart(world: Any) -> None:
    worker = world.speaker().join()
    worker.fetch(blob_of(PARAMETERS[0]))
    world.restart()
    worker.ask(AskHeads())
    world.is_link_up = False
    worker.fetch(blob_of(PARAMETERS[0]))
    assert worker.fetched() == [PARAMETERS[0]] * 2


def test_what_the_home_broker_has_not_is_told_to_who_asks(world: Any) -> None:
    worker = world.speaker().join()
    worker.fetch(blob_of(b"nowhere"))
    [failed] = worker.told(FetchFailed)
    assert failed.code == "not-found"


def test_who_lies_about_the_length_of_a_blob_hinders_nobody_else(world: Any) -> None:
    blob = blob_of(PARAMETERS[0])
    liar = world.speaker("us-2", incarnation="b2" * 8).join()
    worker = world.speaker().join()
    for number, size_bytes in enumerate([1, blob.size_bytes + 1, 1 << 20]):
        fetch = Fetch(transfer=100 + number, digest=blob.digest, size_bytes=size_bytes)
        world.hear_client(liar, Send(Channel.BULK, fetch.addressed(request=100 + number, session=liar.client.session)))
    worker.fetch(blob)
    assert worker.fetched() == [PARAMETERS[0]]
    assert liar.fetched() == []


@pytest.mark.parametrize("data", [b"", b"y" * len(PARAMETERS[0]), None], ids=["empty", "flipped", "lost"])
def test_a_damaged_file_of_the_cache_is_fetched_anew(world: Any, data: bytes | None) -> None:
    blob = blob_of(PARAMETERS[0])
    worker = world.speaker().join()
    worker.fetch(blob)
    if data is None:
        del world.disk.blobs.blobs[blob.digest]
    else:
        world.disk.blobs.blobs[blob.digest] = data
    worker.fetch(blob)
    world.advance(LONG_SECONDS)
    assert worker.fetched() == [PARAMETERS[0]] * 2
    assert world.payload_bytes["down"] == 2 * len(PARAMETERS[0])


def test_a_cache_that_is_full_lets_go_of_what_was_used_longest_ago(make_world: Any) -> None:
    world = make_world(cache_bytes_max=len(PARAMETERS[0]) + 10)
    worker = world.speaker().join()
    for data in PARAMETERS:
        worker.fetch(blob_of(data))
    assert set(world.disk.blobs.blobs) == {blob_of(PARAMETERS[1]).digest}
    assert "cache.evicted" in world.events()
    assert worker.fetched() == list(PARAMETERS)


def test_nothing_of_the_outbox_goes_for_the_cache(make_world: Any, offer_of: Any) -> None:
    world = make_world(cache_bytes_max=1)
    worker = world.speaker().join()
    offer, data = offer_of()
    world.is_link_up = False
    worker.ask(offer, data)
    world.advance(5.0)
    assert offer.contribution.blob.digest in world.disk.blobs.blobs


def test_a_session_that_ends_is_waited_for_no_longer(world: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.fetch(blob_of(PARAMETERS[0]))
    worker.die()
    assert world.relay.state.wanted.num_asked(worker.client.session) == 1
    world.advance(200.0)
    assert world.relay.state.wanted.num_asked(worker.client.session) == 0
