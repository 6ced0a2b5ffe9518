"""Contributions and other blobs coming in: OFFER, UPLOAD, CHUNK, and what the disk says of them. Pure."""

from __future__ import annotations

from isles.brokers import retained
from isles.brokers.relayed import for_offerer, offer_error
from isles.brokers.replies import log, named, refusal_log, refuse, reply, respond
from isles.brokers.sessions import Owner, Session
from isles.brokers.state import State
from isles.brokers.uploads import DISK_FULL_RETRY_SECONDS
from isles.brokers.vocabulary import (
    ChunkWritten,
    Instruction,
    MessageArrived,
    UploadDurable,
    UploadFailed,
)
from isles.proto.messages import (
    Accepted,
    Channel,
    Chunk,
    Error,
    Expired,
    Offer,
    RetryAfter,
    Stored,
    Upload,
)


def take_offer(state: State, session: Session, arrival: MessageArrived, message: Offer) -> list[Instruction]:
    """OFFER: GRANT if the bytes are wanted, else the answer that the books give."""
    contribution = message.contribution
    name = contribution.id
    if error := _whose_error(state, session, message):
        return refuse(arrival, error)
    offerer = Owner("worker", name.learner, session.key_name)
    if session.key_name and (seconds := state.offers.count(offerer, state.now)):
        text = f"{offerer} has made {state.offers.per_minute_max} offers in a minute (offers_per_minute_max)"
        return reply(arrival, RetryAfter(seconds=seconds, reason=text))
    upload = state.uploads.find_contribution(session.owner, contribution.blob, name.learner)
    if upload is not None and upload.contribution is not None and upload.contribution.id == name:
        grant = state.uploads.grant(upload, session, message.request, state.now)
        return reply(arrival, grant)
    if state.uploads.names_other_bytes(name, contribution.blob):
        text = f"contribution {name} is being received with other bytes: an id never names two payloads"
        return refuse(arrival, Error(code="conflict", text=text))
    assert state.record is not None
    horizon = state.record.sync.horizon_versions
    if len(contribution.norms) > state.num_tensors(name.fragment):
        text = f"contribution {name} has {len(contribution.norms)} norms, its fragment fewer tensors"
        return refuse(arrival, Error(code="broken-rule", text=text))
    if contribution.blob.size_bytes > (bytes_max := state.contribution_bytes_max(name.fragment)):
        text = f"contribution {name} has {contribution.blob.size_bytes} bytes; at most {bytes_max} can be right"
        return refuse(arrival, Error(code="too-large", text=text))
    answer = retained.judge_offer(state.index, contribution, horizon_versions=horizon)
    if isinstance(answer, Expired):
        fields = {"base_version": contribution.base_version, "head": answer.head}
        warned = state.warnings.take_expiry(name, answer.head - contribution.base_version, state.unix)
        return [*reply(arrival, answer), log("warning", "contribution.expired", **named(name), **fields), *warned]
    if answer is not None:
        return respond(arrival, for_offerer(session.role, name, answer))
    if upload is not None:
        upload.contribution, upload.signer = contribution, _signer(session, message)
        return reply(arrival, state.uploads.grant(upload, session, message.request, state.now))
    return _open_upload(state, session, arrival, message)


def _whose_error(state: State, session: Session, offer: Offer) -> Error | None:
    """Why this session may not offer this contribution."""
    if session.role == "relay":
        return offer_error(state, offer)
    name = offer.contribution.id
    if (name.learner, name.incarnation) == (session.id, session.incarnation):
        return None
    text = f"{session.role} {session.id} offers contribution {name}, which is not its own"
    return Error(code="broken-rule", text=text)


def _signer(session: Session, offer: Offer | Upload) -> str:
    """The key that the learner of an offer has proved to be its own, if a relay hands it over."""
    proof = offer.proof if session.role == "relay" and isinstance(offer, Offer) else None
    return "" if proof is None else proof.public


def take_upload(state: State, session: Session, arrival: MessageArrived, message: Upload) -> list[Instruction]:
    """UPLOAD: GRANT, or STORED if the bytes are here already."""
    blob = message.blob
    if state.index.blob(blob.digest) == blob and blob.digest not in state.damaged:
        state.index.put_blob(blob, state.unix)
        state.unused_since[blob.digest] = state.now
        return reply(arrival, Stored(digest=blob.digest))
    upload = state.uploads.find(session.owner, blob)
    if upload is not None:
        return reply(arrival, state.uploads.grant(upload, session, message.request, state.now))
    if session.key_name and (limit := _unused_limit(state, session, blob.size_bytes)):
        text = f"nothing refers to what the key {session.key_name} has stored ({limit})"
        return reply(arrival, RetryAfter(seconds=state.settings.retry_seconds, reason=text))
    return _open_upload(state, session, arrival, message)


def _unused_limit(state: State, session: Session, num_bytes: int) -> str:
    """The limit that one more unused blob would be over, those that are being sent included; empty if there is none."""
    key_name, times = session.key_name, state.settings.times(session.role)
    num_open, bytes_open = state.uploads.unused_of_key(key_name)
    if state.unused.num(key_name) + num_open >= times * state.settings.unused_blobs_per_key_max:
        return "unused_blobs_per_key_max"
    if state.unused.num_bytes(key_name) + bytes_open + num_bytes > times * state.settings.unused_bytes_per_key_max:
        return "unused_bytes_per_key_max"
    return ""


def _open_upload(state: State, session: Session, arrival: MessageArrived, message: Offer | Upload) -> list[Instruction]:
    contribution = message.contribution if isinstance(message, Offer) else None
    blob = message.contribution.blob if isinstance(message, Offer) else message.blob
    if (refusal := state.uploads.refusal(session.owner, blob, state.index.stored_bytes)) is not None:
        answer = respond(arrival, refusal)
        if isinstance(refusal, RetryAfter):
            answer.append(refusal_log("retry-after", refusal.reason))
        return answer
    upload = state.uploads.open(session, blob, contribution, state.now)
    upload.signer = _signer(session, message)
    return reply(arrival, state.uploads.grant(upload, session, message.request, state.now))


def take_chunk(state: State, session: Session, arrival: MessageArrived, message: Chunk) -> list[Instruction]:
    """CHUNK: the next piece of an upload."""
    return state.uploads.take(session, message, arrival.payload, state.now)


def chunk_written(state: State, event: ChunkWritten) -> list[Instruction]:
    """More credit for who sends."""
    granted = _chunk_gone(state, event.transfer)
    written = state.uploads.wrote(event.transfer, event.offset)
    if written is None:
        return granted
    upload, credit = written
    return [*state.send(upload.session, Channel.BULK, credit), *granted]


def _chunk_gone(state: State, transfer: int) -> list[Instruction]:
    """A chunk is in memory no more: others may send theirs."""
    return [
        order
        for upload, grant in state.uploads.disk_is_done(transfer)
        for order in state.send(upload.session, Channel.CONTROL, grant)
    ]


def upload_durable(state: State, event: UploadDurable) -> list[Instruction]:
    """The bytes survive a crash, so they can be promised: ACCEPTED or STORED."""
    upload = state.uploads.drop(event.transfer)
    if upload is None:
        return []
    blob, contribution = upload.blob, upload.contribution
    state.damaged.discard(blob.digest)
    if upload.is_unwanted:
        if state.index.blob(blob.digest) is None:
            state.index.put_blob(blob, 0.0)
        return []
    if contribution is None:
        if upload.owner.key_name:
            state.unused.put(blob.digest, upload.owner.key_name, blob.size_bytes)
        state.index.put_blob(blob, state.unix)
        state.unused_since[blob.digest] = state.now
        return state.send(upload.session, Channel.CONTROL, Stored(request=upload.request, digest=blob.digest))
    name = contribution.id
    answer = retained.accept(state.index, contribution, unix=state.unix)
    answer = for_offerer(upload.owner.role, name, answer)
    sent = state.send(upload.session, Channel.CONTROL, answer.addressed(request=upload.request))
    if not isinstance(answer, Accepted):
        if state.index.blob(blob.digest) is None:
            state.index.put_blob(blob, 0.0)  # nothing refers to it: deleted with the next such ones
        return [
            *sent,
            refusal_log(type(answer).__name__.lower(), f"contribution {name}"),
        ]
    state.membership.keep(name.learner)
    state.membership.advance_shards(name.learner, dict(contribution.cursor))
    head = state.index.head_version(name.fragment) or 0
    hint = state.hint("contribution", fragment=name.fragment, version=head, learner=name.learner)
    facts = {"base_version": contribution.base_version, "tokens": contribution.tokens, "bytes": blob.size_bytes}
    eased = state.warnings.take_acceptance(name.learner)
    return [*sent, hint, log("info", "contribution.accepted", **named(name), **facts), *eased]


def upload_failed(state: State, event: UploadFailed) -> list[Instruction]:
    """The bytes are damaged, or the disk is full: nothing was stored."""
    granted = _chunk_gone(state, event.transfer)
    upload = state.uploads.drop(event.transfer)
    if upload is None:
        return granted
    if event.code == "full":
        later = RetryAfter(request=upload.request, seconds=DISK_FULL_RETRY_SECONDS, reason=event.text)
        said = log("error", "store.full", bytes=state.uploads.disk_free_bytes, limit_bytes=upload.blob.size_bytes)
        return [*state.send(upload.session, Channel.CONTROL, later), said, *granted]
    error = Error(request=upload.request, code="damaged", text=event.text)
    said = refusal_log("damaged", event.text)
    if upload.contribution is not None:
        said = log("warning", "contribution.damaged", **named(upload.contribution.id), text=event.text)
    return [*state.send(upload.session, Channel.CONTROL, error), said, *granted]
