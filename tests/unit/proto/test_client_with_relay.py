"""What a client does otherwise where a relay may be in between: proofs, receipts, and words about others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from isles.proto.client import RECEIPT_SECONDS, RETRY_SECONDS, STALL_SECONDS, Answered, Client, Refused, Send
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    Accepted,
    BlobRef,
    Channel,
    Chunk,
    Contribution,
    Error,
    Grant,
    Hello,
    Leave,
    Message,
    Offer,
    Proof,
    Receipt,
    Role,
    Welcome,
)

PAYLOAD = b"x" * 100
ID = ContributionId("us-1", 0, "a1" * 8, 1)
OTHER = ID._replace(number=2)
OFFER = Offer(
    contribution=Contribution(
        id=ID,
        base_version=0,
        blob=BlobRef(digest="5e" * 32, size_bytes=len(PAYLOAD)),
        codec="int4",
        tokens=1,
        steps=1,
        seconds=1.0,
        norms=(),
    )
)


@dataclass
class Notary:
    """Proves by counting: the number is in the tag."""

    seen: list[tuple[Any, str]] = field(default_factory=list)

    def prove(self, message: Message, store: str) -> Message:
        self.seen.append((message, store))
        return message.changed(proof=Proof(public="", tags=(f"{len(self.seen):064x}",)))


def welcome(client: Client, **fields: object) -> list[Any]:
    """Has the client let in; what it says then."""
    [said] = client.start(0.0)
    answer = Welcome(
        request=said.message.request, new_session="5e" * 8, protocol=(1, 2), broker_incarnation="ab" * 8, seq=0,
        limits=client.limits, **fields,
    )  # fmt: skip
    return said_in(client.handle(answer, 0.0))


def said_in(instructions: list[object]) -> list[Any]:
    return [one.message for one in instructions if isinstance(one, Send)]


def make_client(role: Role = "worker", notary: Notary | None = None, name: str = "us-1") -> Client:
    hello = Hello(role=role, id=name, incarnation="a1" * 8)
    return Client(hello, None if notary is None else notary.prove)


def test_without_a_relay_nothing_is_proved() -> None:
    client = make_client()
    [said] = said_in(client.start(0.0))
    assert said.proof is None
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    assert offer.proof is None


def test_hello_is_proved_anew_each_time_with_what_it_says_by_then() -> None:
    notary = Notary()
    client = make_client(notary=notary, name="")
    welcome(client, learner="us-7", rejoin="77" * 8)
    [said] = said_in(client.start(5.0))
    assert (said.id, said.rejoin) == ("us-7", "77" * 8)
    [repeated] = said_in(client.tick(60.0))
    assert [message.id for message, _ in notary.seen] == ["", "us-7", "us-7"]
    assert {said.proof.tags, repeated.proof.tags} == {(f"{number:064x}",) for number in (2, 3)}
    assert client.hello.proof is None, "a proof is not kept"


def test_an_offer_is_proved_with_the_store_of_its_run_and_other_asks_are_not() -> None:
    notary = Notary()
    client = make_client(notary=notary)
    client.hello = client.hello.changed(store="5a" * 16)
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    assert offer.proof is not None
    assert notary.seen[-1] == (OFFER, "5a" * 16)
    num_proved = len(notary.seen)
    client.ask(Leave(), 0.0)
    assert len(notary.seen) == num_proved


def test_what_a_relay_has_is_not_sent_again_and_asked_for_seldom() -> None:
    client = make_client()
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    chunks = client.handle(Grant(request=offer.request, transfer=9, offset=0, credit_chunks=8), 1.0)
    assert [type(message) for message in said_in(chunks)] == [Chunk]
    assert client.handle(Receipt(request=offer.request, id=ID), 2.0) == []
    assert client.tick(1.0 + STALL_SECONDS + 1) == [], "nothing stalls"
    assert client.next_deadline == 2.0 + RECEIPT_SECONDS
    [again] = said_in(client.tick(2.0 + RECEIPT_SECONDS))
    assert isinstance(again, Offer)
    assert client.handle(Receipt(request=again.request, id=ID), 40.0) == []
    assert client.next_deadline == 40.0 + RECEIPT_SECONDS
    assert client.handle(Accepted(request=again.request, id=ID), 41.0) == [Answered(OFFER, Accepted(request=2, id=ID))]


def test_a_relay_that_has_lost_it_is_sent_it_again() -> None:
    client = make_client()
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    client.handle(Receipt(request=offer.request, id=ID), 1.0)
    chunks = client.handle(Grant(request=offer.request, transfer=10, offset=0, credit_chunks=8), 40.0)
    assert [one.channel for one in chunks if isinstance(one, Send)] == [Channel.BULK]


def test_after_a_receipt_another_way_is_asked_at_once() -> None:
    client = make_client()
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    client.handle(Receipt(request=offer.request, id=ID), 1.0)
    [again] = welcome(client)
    assert isinstance(again, Offer)
    assert client.next_deadline == RETRY_SECONDS


@pytest.mark.parametrize("answer", [Accepted(id=OTHER), Receipt(id=OTHER)])
def test_an_answer_about_another_contribution_is_none(answer: Message) -> None:
    client = make_client()
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    assert client.handle(answer.addressed(request=offer.request), 1.0) == []
    assert client.is_asking(Offer)


def test_a_relay_is_not_ended_by_the_quarantine_of_a_learner() -> None:
    client = make_client("relay", name="relay-us")
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    error = Error(request=offer.request, code="quarantined", text="no")
    assert client.handle(error, 1.0) == [Answered(OFFER, error)]
    assert not client.is_refused


@pytest.mark.parametrize(
    ("role", "code"), [("relay", "denied"), ("worker", "denied"), ("worker", "quarantined"), ("relay", "quarantined")]
)
def test_words_about_itself_end_a_process(role: Role, code: str) -> None:
    client = make_client(role)
    welcome(client)
    assert client.handle(Error(code=code, text="no"), 1.0) == [Refused(code, "no")]


def test_a_learner_is_ended_by_its_own_quarantine() -> None:
    client = make_client()
    welcome(client)
    [offer] = said_in(client.ask(OFFER, 0.0, PAYLOAD))
    error = Error(request=offer.request, code="quarantined", text="no")
    assert client.handle(error, 1.0) == [Refused("quarantined", "no")]
