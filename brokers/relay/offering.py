"""Payloads of workers on their way into the outbox: OFFER, UPLOAD, CHUNK, and what the disk says of them. Pure."""

from __future__ import annotations

from isles.brokers.relay.forwarding import forward
from isles.brokers.relay.outbox import Parcel, asker_of, blob_of, key_of
from isles.brokers.relay.state import RelayState
from isles.brokers.relay.vocabulary import Instruction, KeepOffer, OfferKept, OfferNotKept
from isles.brokers.replies import log, named, refusal_log, refuse, reply, respond
from isles.brokers.sessions import Session
from isles.brokers.uploads import DISK_FULL_RETRY_SECONDS
from isles.brokers.vocabulary import ChunkWritten, DeleteBlob, MessageArrived, UploadDurable, UploadFailed
from isles.proto.messages import BlobRef, Channel, Chunk, Contribution, Error, Offer, Receipt, RetryAfter, Upload


def take_offer(state: RelayState, session: Session, arrival: MessageArrived, message: Offer) -> list[Instruction]:
    """OFFER: GRANT if the bytes are not here; whether they are wanted the home broker says later."""
    contribution = message.contribution
    name = contribution.id
    if (session.role, name.learner, name.incarnation) != ("worker", session.id, session.incarnation):
        text = f"{session.role} {session.id} offers contribution {name}, which is not its own"
        return [*refuse(arrival, Error(code="broken-rule", text=text))]
    if session.key_name and (seconds := state.offers.count(session.owner, state.now)):
        text = f"{session.owner} has made {state.offers.per_minute_max} offers in a minute (offers_per_minute_max)"
        return [*reply(arrival, RetryAfter(seconds=seconds, reason=text))]
    parcel = state.outbox.find(name)
    upload = state.uploads.find_contribution(session.owner, contribution.blob, name.learner)
    is_under_way = upload is not None and upload.contribution is not None and upload.contribution.id == name
    if (parcel is not None and parcel.blob != contribution.blob) or (
        not is_under_way and state.uploads.names_other_bytes(name, contribution.blob)
    ):
        text = f"contribution {name} is here with other bytes: an id never names two payloads"
        return [*refuse(arrival, Error(code="conflict", text=text))]
    if parcel is not None:
        parcel.askers = {asker_of(session): message.request}
        return _receipt(state, parcel)
    if (answer := state.outbox.answer_to(name)) is not None:
        return [*reply(arrival, answer)]
    if upload is not None and is_under_way:
        state.offered[upload.transfer] = message
        return [*reply(arrival, state.uploads.grant(upload, session, message.request, state.now))]
    return _open_upload(state, session, arrival, message)


def _receipt(state: RelayState, parcel: Parcel) -> list[Instruction]:
    """Tells a worker that its contribution is safe here, if that is what it is to hear, and as soon as it is so."""
    if state.settings.ack != "region" or parcel.stage == "kept" or not isinstance(parcel.message, Offer):
        return []
    return state.tell(parcel.askers, Receipt(id=parcel.message.contribution.id))


def take_upload(state: RelayState, session: Session, arrival: MessageArrived, message: Upload) -> list[Instruction]:
    """UPLOAD: GRANT, if the bytes are not here; STORED comes when the home broker has them."""
    blob = message.blob
    parcel = state.outbox.find(blob.digest)
    if parcel is None and state.cache.use(blob.digest) == blob:
        parcel = state.outbox.put(Upload(blob=blob), "waiting")
    if parcel is not None and parcel.blob == blob:
        parcel.askers[asker_of(session)] = message.request
        return forward(state)
    upload = state.uploads.find(session.owner, blob)
    if upload is not None:
        return [*reply(arrival, state.uploads.grant(upload, session, message.request, state.now))]
    return _open_upload(state, session, arrival, message)


def _open_upload(
    state: RelayState, session: Session, arrival: MessageArrived, message: Offer | Upload
) -> list[Instruction]:
    contribution = message.contribution if isinstance(message, Offer) else None
    blob = blob_of(message)
    refusal = state.uploads.refusal(session.owner, blob, lambda: state.outbox.waiting_bytes + state.cache.num_bytes)
    if refusal is not None:
        refused = respond(arrival, refusal)
        if isinstance(refusal, RetryAfter):
            refused.append(refusal_log("retry-after", refusal.reason))
        return [*refused]
    held_bytes, bytes_max, limit = _room(state, message)
    if held_bytes + blob.size_bytes > bytes_max:
        state.is_full, was_full = True, state.is_full
        text = f"{held_bytes} of {bytes_max} bytes wait at this relay for the home broker ({limit})"
        answer = reply(arrival, RetryAfter(seconds=state.settings.retry_seconds, reason=text))
        said = log("warning", "outbox.full", bytes=held_bytes, limit_bytes=bytes_max)
        return [*answer, *([] if was_full else [said])]
    upload = state.uploads.open(session, blob, contribution, state.now)
    if isinstance(message, Offer):
        state.offered[upload.transfer] = message
    return [*reply(arrival, state.uploads.grant(upload, session, message.request, state.now))]


def _room(state: RelayState, message: Offer | Upload) -> tuple[int, int, str]:
    """The bytes that wait for the home broker or are on their way here to do so, their limit, and its name.

    Contributions have the outbox. Other blobs stay in the cache, which may let none of them go before.
    """
    if isinstance(message, Offer):
        held_bytes = state.outbox.waiting_bytes + state.uploads.open_bytes(is_contribution=True)
        return held_bytes, state.outbox.bytes_max, "outbox_bytes_max"
    held_bytes = state.outbox.upload_bytes + state.uploads.open_bytes(is_contribution=False)
    return held_bytes, state.cache.bytes_max, "cache_bytes_max"


def take_chunk(state: RelayState, session: Session, arrival: MessageArrived, message: Chunk) -> list[Instruction]:
    """CHUNK: the next piece of an upload."""
    return [*state.uploads.take(session, message, arrival.payload, state.now)]


def chunk_written(state: RelayState, event: ChunkWritten) -> list[Instruction]:
    """More credit for who sends."""
    granted = _chunk_gone(state, event.transfer)
    written = state.uploads.wrote(event.transfer, event.offset)
    if written is None:
        return granted
    upload, credit = written
    return [*state.send_to(upload.session, Channel.BULK, credit), *granted]


def _chunk_gone(state: RelayState, transfer: int) -> list[Instruction]:
    """A chunk is in memory no more: others may send theirs."""
    return [
        order
        for upload, grant in state.uploads.disk_is_done(transfer)
        for order in state.send_to(upload.session, Channel.CONTROL, grant)
    ]


def upload_durable(state: RelayState, event: UploadDurable) -> list[Instruction]:
    """A payload survives a crash, so it goes on to the home broker; a contribution once its offer survives one, too."""
    offer = state.offered.pop(event.transfer, None)
    upload = state.uploads.drop(event.transfer)
    if upload is None:
        return []
    if upload.is_unwanted:
        return [*delete_unused(state, upload.blob)]
    asker = upload.owner.role, upload.owner.id, upload.incarnation
    if offer is None:
        state.cache.put(upload.blob)
        parcel = state.outbox.find(upload.blob.digest) or state.outbox.put(Upload(blob=upload.blob), "waiting")
        parcel.askers[asker] = upload.request
        return [*state.make_room(), *forward(state)]
    if (known := state.outbox.find(key_of(offer))) is not None:
        known.askers[asker] = upload.request
        return _receipt(state, known)
    kept = offer.addressed(request=0)
    parcel = state.outbox.put(kept, "kept")
    parcel.askers[asker] = upload.request
    return [KeepOffer(kept)]


def delete_unused(state: RelayState, blob: BlobRef) -> list[Instruction]:
    """Deletes a blob that is neither cached nor waits for the home broker."""
    if state.cache.holds(blob.digest) or state.outbox.holds(blob.digest):
        return []
    return [DeleteBlob(blob)]


def upload_failed(state: RelayState, event: UploadFailed) -> list[Instruction]:
    """The bytes are damaged, or the disk is full: nothing was stored."""
    granted = _chunk_gone(state, event.transfer)
    state.offered.pop(event.transfer, None)
    upload = state.uploads.drop(event.transfer)
    if upload is None:
        return granted
    if event.code == "full":
        later = RetryAfter(request=upload.request, seconds=DISK_FULL_RETRY_SECONDS, reason=event.text)
        said = log("error", "store.full", bytes=state.disk_free_bytes, limit_bytes=upload.blob.size_bytes)
        return [*state.send_to(upload.session, Channel.CONTROL, later), said, *granted]
    error = Error(request=upload.request, code="damaged", text=event.text)
    said = refusal_log("damaged", event.text)
    if upload.contribution is not None:
        said = log("warning", "contribution.damaged", **named(upload.contribution.id), text=event.text)
    return [*state.send_to(upload.session, Channel.CONTROL, error), said, *granted]


def offer_kept(state: RelayState, event: OfferKept) -> list[Instruction]:
    """A contribution will get home, whatever becomes of this process and of its learner."""
    parcel = state.outbox.find(event.id)
    if parcel is None or not isinstance(parcel.message, Offer):
        return []
    state.outbox.is_kept(parcel)
    said = log("debug", "contribution.kept", **named(event.id), **_facts(parcel.message.contribution))
    return [said, *_receipt(state, parcel), *forward(state)]


def _facts(contribution: Contribution) -> dict[str, int]:
    return {"base_version": contribution.base_version, "bytes": contribution.blob.size_bytes}


def offer_not_kept(state: RelayState, event: OfferNotKept) -> list[Instruction]:
    """The disk has room for the bytes, but not for what is to be said about them: the worker keeps them."""
    parcel = state.outbox.find(event.id)
    if parcel is None:
        return []
    state.outbox.drop(parcel)
    later = RetryAfter(seconds=DISK_FULL_RETRY_SECONDS, reason=event.text)
    said = log("error", "store.full", bytes=state.disk_free_bytes, limit_bytes=parcel.blob.size_bytes)
    return [*state.tell(parcel.askers, later), said, *delete_unused(state, parcel.blob)]
