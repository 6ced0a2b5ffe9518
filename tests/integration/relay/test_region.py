"""A region behind its relay, over real sockets: kills, a link that is cut, a disk that is lost."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from isles.brokers.stage import blob_of
from isles.proto.client import Answered
from isles.proto.messages import (
    Accepted,
    AskHeads,
    AskVersion,
    Heads,
    Offer,
    Status,
    VersionReply,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
PAYLOAD_BYTES: Final = 4 << 20
OVERHEAD: Final = 1.02
"""Bytes on the link for each payload byte, with headers, heartbeats and hints."""


@pytest.fixture
def payload() -> Callable[[int], bytes]:
    """Bytes that nothing shortens, another set for each number."""
    return lambda number, num_bytes=PAYLOAD_BYTES: random.Random(number).randbytes(num_bytes)


def test_each_payload_crosses_the_link_once_in_each_direction(
    make_region: Any, initialise: Any, offer_of: Any, commit: Any, payload: Any
) -> None:
    region = make_region()
    first = region.worker("us-1")
    initialise(first)
    second = region.worker("us-2", incarnation="b2" * 8)
    workers = [first, second]
    before = region.passed("up")
    offers = []
    for number, worker in enumerate(workers):
        data = payload(number)
        offers.append(offer_of(worker, data))
        answer = worker.ask(offers[-1], data)
        assert isinstance(answer, Accepted)
        assert answer.id == offers[-1].contribution.id
    assert region.passed("up") - before <= OVERHEAD * len(workers) * PAYLOAD_BYTES

    outer = region.at_home("outer", "outer")
    update = commit(outer, offers, payload(9))
    before = region.passed("down")
    for worker in workers:
        reply = worker.ask(AskVersion(fragment=0, base_version=0))
        assert isinstance(reply, VersionReply)
        assert reply.updates == (update,)
        assert worker.fetch(update) == payload(9)
    assert region.passed("down") - before <= OVERHEAD * PAYLOAD_BYTES
    assert reply.row is not None
    assert reply.row.id == offers[1].contribution.id


def test_payloads_are_spread_over_several_links_and_still_cross_once(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region("--upstream-connections", 3)
    for link in range(3):
        region.relay.logs.wait_for("link.joined", link=link)
    initialise(region.worker("us-0"))
    workers = [region.worker(f"us-{number}", incarnation=f"{number:016x}") for number in range(1, 4)]
    before = region.passed("up")
    offers = [offer_of(worker, payload(number)) for number, worker in enumerate(workers)]
    for number, (worker, offer) in enumerate(zip(workers, offers, strict=True)):
        worker.connection.ask(offer, payload(number))
    for worker, offer in zip(workers, offers, strict=True):
        assert isinstance(worker.answer(offer), Accepted)
    assert region.passed("up") - before <= OVERHEAD * len(workers) * PAYLOAD_BYTES


def test_an_offer_gets_home_after_kill_9_though_its_learner_is_gone(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region()
    worker = region.worker()
    initialise(worker)
    region.cut()
    data = payload(1)
    offer = offer_of(worker, data)
    worker.connection.ask(offer, data)
    worker.poll_until(lambda: bool(region.relay.logs.of("contribution.kept")), "the relay keeping the contribution")
    worker.close()
    region.relay.end(signal.SIGKILL)
    region.heal()
    region.relay.start()
    region.home.logs.wait_for("contribution.accepted", learner="us-1", number=0)
    assert region.at_home().fetch(blob_of(data)) == data
    region.relay.logs.wait_for("contribution.forwarded", learner="us-1", answer="accepted")
    assert list((region.relay.store / "offers").iterdir()) == []


def test_a_relay_that_is_killed_again_and_again_loses_nothing_that_it_said_it_had(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region("--ack", "region")
    initialise(region.worker("us-0"))
    kept: list[Offer] = []
    for number in range(1, 4):
        worker = region.worker(f"us-{number}", incarnation=f"{number:016x}")
        data = payload(number, 300_000)
        offer = offer_of(worker, data)
        worker.connection.ask(offer, data)
        worker.poll_until(
            lambda name=worker.id: any(one["learner"] == name for one in region.relay.logs.of("contribution.kept")),
            "the relay keeping the contribution",
        )
        kept.append(offer)
        region.relay.end(signal.SIGKILL)
        worker.close()
        region.relay.start()
    for offer in kept:
        region.home.logs.wait_for("contribution.accepted", learner=offer.contribution.id.learner)
    accepted = [one["learner"] for one in region.home.logs.of("contribution.accepted")]
    assert sorted(accepted) == ["us-1", "us-2", "us-3"]


def test_while_the_link_is_cut_offers_are_taken_up_to_the_quota_and_all_arrive_once_after_it(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region("--outbox-bytes-max", 700_000)
    initialise(region.worker("us-0"))
    workers = [region.worker(f"us-{number}", incarnation=f"{number:016x}") for number in range(1, 5)]
    region.cut()
    offers = []
    for number, worker in enumerate(workers):
        data = payload(number, 300_000)
        offers.append(offer_of(worker, data))
        worker.connection.ask(offers[-1], data)
        logged = "contribution.kept" if number < 2 else "outbox.full"
        num = number + 1 if number < 2 else 1
        worker.poll_until(
            lambda event=logged, num=num: len(region.relay.logs.of(event)) >= num,
            "the relay taking it or putting it off",
        )
    assert len(region.relay.logs.of("contribution.kept")) == 2
    region.relay.logs.wait_for("link.lost")
    region.heal()
    for worker, offer in zip(workers, offers, strict=True):
        assert isinstance(worker.answer(offer), Accepted)
    region.relay.logs.wait_for("link.restored")
    accepted = [one["learner"] for one in region.home.logs.of("contribution.accepted")]
    assert sorted(accepted) == ["us-1", "us-2", "us-3", "us-4"]


def test_when_the_disk_of_the_relay_is_lost_learners_offer_again(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region()
    worker = region.worker()
    initialise(worker)
    region.cut()
    data = payload(1)
    offer = offer_of(worker, data)
    worker.connection.ask(offer, data)
    worker.poll_until(lambda: bool(region.relay.logs.of("contribution.kept")), "the relay keeping the contribution")
    region.relay.end(signal.SIGKILL)
    shutil.rmtree(region.relay.store)
    region.heal()
    region.relay.start()
    region.relay.logs.wait_for("link.joined")
    again = region.worker()  # the same incarnation, at the relay's new port
    assert isinstance(again.ask(offer, data), Accepted)
    assert len(region.home.logs.of("contribution.accepted")) == 1


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_file_of_the_cache_is_fetched_anew(make_region: Any, initialise: Any, payload: Any) -> None:
    region = make_region()
    founder = region.at_home("founder", "worker")
    parameters = payload(1)
    initialise(founder, parameters)
    blob = blob_of(parameters)
    worker = region.worker()
    assert worker.fetch(blob) == parameters
    damage(region.relay.store / "blobs" / blob.digest)
    assert region.worker("us-2", incarnation="b2" * 8).fetch(blob) == parameters
    region.relay.logs.wait_for("blob.corrupt", digest=blob.digest)
    assert (region.relay.store / "blobs" / blob.digest).read_bytes() == parameters


def test_with_region_acks_a_contribution_is_safe_before_home_has_it_and_stays_open_until_then(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region("--ack", "region")
    worker = region.worker()
    initialise(worker)
    region.cut()
    data = payload(1)
    offer = offer_of(worker, data)
    worker.connection.ask(offer, data)
    worker.poll_until(lambda: bool(region.relay.logs.of("contribution.kept")), "the relay keeping the contribution")
    assert not any(isinstance(news, Answered) and news.ask is offer for news in worker.heard)
    assert worker.connection.client.is_asking(Offer)
    region.heal()
    assert isinstance(worker.answer(offer), Accepted)


def test_a_learner_may_change_between_two_relays_and_is_accepted_once(
    make_region: Any, initialise: Any, offer_of: Any, payload: Any
) -> None:
    region = make_region()
    other = region.add_relay("relay-2")
    worker = region.worker()
    initialise(worker)
    region.cut()
    data = payload(1)
    offer = offer_of(worker, data)
    worker.connection.ask(offer, data)
    worker.poll_until(lambda: bool(region.relay.logs.of("contribution.kept")), "the relay keeping the contribution")
    worker.close()
    region.heal()
    moved = region.worker(relay=other)
    assert isinstance(moved.ask(offer, data), Accepted)
    region.relay.logs.wait_for("contribution.forwarded", learner="us-1")
    assert len(region.home.logs.of("contribution.accepted")) == 1


def test_the_home_broker_tells_of_its_relays(make_region: Any, initialise: Any) -> None:
    region = make_region()
    worker = region.worker()
    initialise(worker)
    operator = region.at_home()
    found: list[Any] = []

    def is_told() -> bool:
        found[:] = operator.status().relays
        return bool(found) and found[0].facts.num_clients == 1

    operator.poll_until(is_told, "a beat that counts the worker")
    assert [(one.relay, one.is_live, one.facts.region) for one in found] == [("relay", True, "us")]
    assert isinstance(worker.status(), Status)


def test_a_relay_stops_when_it_is_told_to_and_goes_on_where_it_was(make_region: Any, initialise: Any) -> None:
    region = make_region()
    worker = region.worker()
    initialise(worker)
    assert region.relay.end() == 0
    region.relay.start()
    assert isinstance(region.worker("us-2", incarnation="b2" * 8).ask(AskHeads()), Heads)
    assert region.relay.end() == 0
