"""From the outbox to the home broker: whose turn it is, and what becomes of it. Pure."""

from __future__ import annotations

from isles.brokers.relay.outbox import SENT_MAX, Parcel
from isles.brokers.relay.state import RelayState
from isles.brokers.relay.vocabulary import BlobMapped, BlobUnmappable, DropOffer, Instruction, MapBlob
from isles.brokers.replies import log, named
from isles.brokers.vocabulary import DeleteBlob
from isles.proto.client import Answered
from isles.proto.messages import Error, Fenced, Message, Offer, Upload


def forward(state: RelayState) -> list[Instruction]:
    """Has as many payloads looked up as the links may ask for."""
    orders: list[Instruction] = []
    digests: set[str] = set()
    while state.outbox.num_under_way < SENT_MAX * len(state.links.clients):
        parcel = state.outbox.take_next()
        if parcel is None:
            break
        if parcel.blob.digest not in digests:
            digests.add(parcel.blob.digest)
            orders.append(MapBlob(parcel.blob))
    return orders


def blob_mapped(state: RelayState, event: BlobMapped) -> list[Instruction]:
    """The bytes are right: the link that has the least to ask for asks the home broker for whoever waits for them."""
    orders: list[Instruction] = []
    links = range(len(state.links.clients))
    for parcel in state.outbox.mapped(event.blob.digest):
        link = min(links, key=lambda number: (state.outbox.num_on(number), number))
        parcel.stage, parcel.link = "sent", link
        asked = state.links.clients[link].ask(parcel.message, state.now, memoryview(event.payload))
        orders += state.links.split(link, asked)[0]
    return orders


def blob_unmappable(state: RelayState, event: BlobUnmappable) -> list[Instruction]:
    """The disk has lost what it was given: whoever sent it has it still, and offers it again."""
    orders: list[Instruction] = [log("error", "blob.corrupt", digest=event.blob.digest, text=event.text)]
    if state.cache.drop(event.blob.digest) is not None:
        orders.append(DeleteBlob(event.blob))
    for parcel in state.outbox.mapped(event.blob.digest):
        orders += state.tell(parcel.askers, Error(code="damaged", text=event.text))
        orders += end(state, parcel)
    return [*orders, *forward(state)]


def home_answered(state: RelayState, news: Answered) -> list[Instruction]:
    """The home broker has the final word on a payload: who sent it hears of it, and it is let go of here."""
    asked = news.ask
    assert isinstance(asked, Offer | Upload)
    parcel = state.outbox.find(asked.contribution.id if isinstance(asked, Offer) else asked.blob.digest)
    if parcel is None or parcel.message is not asked:
        return []
    answer = _for_its_maker(news.reply)
    orders = state.tell(parcel.askers, answer)
    if isinstance(asked, Offer):
        orders.append(_said(asked, news.reply))
        if not isinstance(answer, Error | Fenced):
            state.outbox.remember(asked.contribution.id, answer.addressed(request=0))
    return [*orders, *end(state, parcel), *forward(state)]


def _for_its_maker(reply: Message) -> Message:
    """To the relay the home broker says that somebody else is retired; to that one it means that it is fenced."""
    return Fenced() if isinstance(reply, Error) and reply.code == "retired" else reply


def _said(offer: Offer, reply: Message) -> Instruction:
    answer = reply.code if isinstance(reply, Error) else type(reply).__name__.lower()
    fields = {**named(offer.contribution.id), "answer": answer, "bytes": offer.contribution.blob.size_bytes}
    if isinstance(reply, Error):
        return log("warning", "contribution.forwarded", **fields, text=reply.text)
    return log("debug", "contribution.forwarded", **fields)


def end(state: RelayState, parcel: Parcel) -> list[Instruction]:
    """Lets go of a parcel: first of the offer, so that no crash leaves one without its blob."""
    state.outbox.drop(parcel)
    orders: list[Instruction] = []
    if isinstance(parcel.message, Offer):
        orders.append(DropOffer(parcel.message.contribution.id, parcel.blob))
        if not state.cache.holds(parcel.blob.digest) and not state.outbox.holds(parcel.blob.digest):
            orders.append(DeleteBlob(parcel.blob))
    return [*orders, *state.make_room()]
