"""Contributions that relays hand over, and what a relay that lies gets; and brokers without keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.quarantine import _begin
from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import AbandonUpload
from isles.proto.keys import ClientKey
from isles.proto.messages import (
    Accepted,
    Alive,
    Channel,
    Chunk,
    Contribution,
    Error,
    Grant,
    Initialised,
    Lease,
    Merged,
    Message,
    Offer,
    Progress,
    RelayAlive,
    RelayBeat,
    RetryAfter,
    Stored,
    Upload,
    Welcome,
)
from isles.proto.proofs import Prover

Behinds = Callable[..., Any]
Come = Callable[..., Member]
Contribute = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Keys = dict[str, ClientKey]
Refusal = Callable[[Message, str], str]
SessionOf = Callable[[Member], Any]

A, B = "a1" * 8, "b2" * 8


def test_a_relay_hands_over_what_a_learner_made(
    stage: Stage, relay: Member, worker: Any, contribute: Contribute, payload: Payload, merge: Any, come: Come
) -> None:
    contribution = contribute(worker, 0)
    answer = relay.send(worker.offer(contribution), payload(worker, 0))
    assert answer.changed(request=0) == Accepted(id=contribution.id)
    assert stage.hints[-1].learner == "us-1"
    assert isinstance(relay.ask(worker.offer(contribution)), Accepted)
    outer = come("outer-1", "outer")
    outer.ask(Lease(fragments=(0, 1)))
    merge(outer, [contribution])
    assert isinstance(relay.ask(worker.offer(contribution)), Merged)


def test_an_outbox_is_emptied_whether_or_not_its_learners_are_there(
    stage: Stage, relay: Member, worker: Any, contribute: Contribute, payload: Payload
) -> None:
    offer = worker.offer(contribute(worker, 0))
    stage.advance(1000)
    stage.restart()
    relay.join()
    assert isinstance(relay.send(offer, payload(worker, 0)), Accepted)


@pytest.mark.parametrize(
    "forge",
    [
        lambda offer, _: offer.changed(proof=None),
        lambda offer, keys: Prover(keys["eu-1"]).prove(offer, ""),
        lambda offer, keys: Prover(keys["relay-us"]).prove(offer, ""),
        lambda offer, keys: offer.changed(proof=offer.proof.changed(public=keys["eu-1"].public)),
        lambda offer, _: offer.changed(proof=offer.proof.changed(tags=("00" * 32,))),
        lambda offer, _: offer.changed(contribution=offer.contribution.changed(tokens=10**9)),
        lambda offer, _: offer.changed(contribution=offer.contribution.changed(steps=1)),
        lambda offer, _: offer.changed(contribution=offer.contribution.changed(blob=blob_of(b"another payload"))),
        lambda offer, _: offer.changed(contribution=offer.contribution.changed(cursor={0: 10**6})),
        lambda offer, _: offer.changed(contribution=offer.contribution.changed(base_version=1)),
    ],
)
def test_an_offer_that_its_learner_did_not_make_is_not_taken(
    stage: Stage, relay: Member, worker: Any, contribute: Contribute, forge: Callable[[Offer, Keys], Offer], keys: Keys
) -> None:
    answer = relay.ask(forge(worker.offer(contribute(worker, 0)), keys))
    assert isinstance(answer, Error)
    assert answer.code == "broken-rule"
    assert stage.router.state.index.row("us-1", 0) is None
    assert not any(isinstance(one, AbandonUpload) for one in stage.waiting)
    assert isinstance(relay.ask(RelayBeat()), RelayAlive), "its own session goes on"


def test_a_relay_with_a_workers_key_makes_no_offer_for_the_learner_of_another(
    stage: Stage, relay: Member, worker: Any, behind: Behinds, contribute: Contribute, refusal: Refusal
) -> None:
    thief = behind(relay, "eu-1", name="us-1", inc=A)
    assert "belongs to another key" in refusal(relay.ask(thief.offer(contribute(worker, 0))), "broken-rule")


def test_a_relay_invents_no_learner(
    stage: Stage, relay: Member, behind: Behinds, contribute: Contribute, refusal: Refusal
) -> None:
    ghost = behind(relay, "us-1", name="us-9")
    assert "never seen" in refusal(relay.ask(ghost.offer(contribute(ghost, 0))), "broken-rule")
    assert {one.learner for one in stage.router.state.membership.infos()} == set()


def test_an_offer_of_another_run_is_not_taken(
    relay: Member, worker: Any, contribute: Contribute, refusal: Refusal, keys: Keys
) -> None:
    offer = Prover(keys["us-1"]).prove(Offer(contribution=contribute(worker, 0)), "another store")
    assert "does not fit" in refusal(relay.ask(offer), "broken-rule")


def test_offers_of_an_incarnation_that_was_replaced_are_over(
    stage: Stage,
    relay: Member,
    worker: Any,
    behind: Behinds,
    contribute: Contribute,
    payload: Payload,
    refusal: Refusal,
) -> None:
    kept, sent = worker.offer(contribute(worker, 0)), worker.offer(contribute(worker, 0, fragment=1))
    grant = relay.ask(sent)
    assert isinstance(grant, Grant)
    assert isinstance(behind(relay, inc=B).join(), Welcome)
    refusal(relay.ask(kept), "retired")
    data = payload(worker, 0)
    for offset in range(0, len(data), 4096):
        said = relay.say(Chunk(transfer=grant.transfer, offset=offset), data[offset : offset + 4096], Channel.BULK)
    refusal(said[-1].message, "retired")
    assert isinstance(relay.ask(RelayBeat()), RelayAlive)


def test_offers_of_a_learner_in_quarantine_are_not_taken(
    stage: Stage, relay: Member, worker: Any, contribute: Contribute, refusal: Refusal
) -> None:
    assert isinstance(relay.ask(worker.offer(contribute(worker, 0))), Grant)
    with stage.index.transaction():
        instructions = _begin(stage.router.state, "us-1", 3, "of its norm")
    assert any(isinstance(one, AbandonUpload) for one in instructions), "what is under way is dropped"
    refusal(relay.ask(worker.offer(contribute(worker, 0))), "quarantined")


def test_the_limit_of_offers_is_each_learners_own(
    empty_stage: Stage, relay: Member, worker: Any, behind: Behinds, contribute: Contribute
) -> None:
    empty_stage.router.state.offers.per_minute_max = 3
    other = behind(relay, "eu-1", name="eu-1")
    other.join()
    answers = [relay.ask(worker.offer(contribute(worker, 0))) for _ in range(4)]
    assert [type(one) for one in answers] == [Grant, Grant, Grant, RetryAfter]
    assert isinstance(relay.ask(other.offer(contribute(other, 0))), Grant)


def test_two_learners_may_make_the_same_bytes(
    relay: Member, worker: Any, behind: Behinds, contribute: Contribute
) -> None:
    other = behind(relay, "eu-1", name="eu-1")
    other.join()
    data = b"the same" * 100
    offers = [one.offer(contribute(one, 0, data=data)) for one in (worker, other)]
    grants = [relay.ask(offer) for offer in offers]
    assert len({grant.transfer for grant in grants if isinstance(grant, Grant)}) == 2
    assert [type(relay.send(offer, data)) for offer in offers] == [Accepted, Accepted]


def test_a_relay_has_the_room_of_many(relay: Member, worker: Any, stage: Stage) -> None:
    settings = stage.settings
    num = settings.uploads_per_client_max + 1
    answers = [relay.ask(Upload(blob=blob_of(f"blob {number}".encode()))) for number in range(num)]
    assert {type(answer) for answer in answers} == {Grant}


def test_what_init_refers_to_may_come_through_a_relay(
    empty_stage: Stage, come: Come, first_init: Any, behind: Behinds
) -> None:
    relay = come("relay-us", "relay")
    worker = behind(relay)
    assert isinstance(worker.join(), Welcome)
    for number in range(2):
        data = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)[number]
        assert isinstance(relay.send(Upload(blob=blob_of(data)), data), Stored)
    answer = worker.ask(first_init)
    assert isinstance(answer, Initialised)
    assert answer.is_mine


# -------------------------------------------------------------------------------------------------------- without keys


@pytest.fixture
def open_stage(settings: RoutingSettings, initialise: Callable[[Member], Initialised]) -> Stage:
    """A broker without keys, and a run at version 0."""
    stage = Stage(settings)
    founder = stage.member("operator", "founder")
    founder.join()
    initialise(founder)
    return stage


def test_without_keys_everybody_behind_a_relay_is_believed(
    open_stage: Stage, contribute: Contribute, payload: Payload, behind: Behinds
) -> None:
    relay = open_stage.member("relay", "relay-us", B)
    assert isinstance(relay.join(), Welcome)
    worker = behind(relay, "", name="us-1", inc=A)
    assert isinstance(worker.join(), Welcome)
    assert open_stage.router.state.sessions.get(worker.session).via == "relay-us"
    assert isinstance(worker.ask(Progress()), Alive)
    assert isinstance(relay.send(worker.offer(contribute(worker, 0)), payload(worker, 0)), Accepted)
    alive = relay.ask(RelayBeat())
    assert isinstance(alive, RelayAlive)
    assert (alive.keys_sha256, alive.keys) == ("", None)


def test_without_keys_a_learner_that_nobody_saw_offers_nothing(
    open_stage: Stage, contribute: Contribute, refusal: Refusal, behind: Behinds
) -> None:
    relay = open_stage.member("relay", "relay-us", B)
    relay.join()
    ghost = behind(relay, "", name="us-9", inc=A)
    refusal(relay.ask(ghost.offer(contribute(ghost, 0))), "broken-rule")
    newer = behind(relay, "", name="us-9", inc=B)
    newer.join()
    refusal(relay.ask(ghost.offer(contribute(ghost, 0))), "retired")
