"""Blobs going out: FETCH, CREDIT, and what the disk says of them. Pure."""

from __future__ import annotations

from isles.brokers.replies import log, respond
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.vocabulary import (
    ChunkRead,
    Instruction,
    MessageArrived,
    ReadFailed,
)
from isles.proto.messages import (
    Channel,
    Chunk,
    Credit,
    Error,
    Fetch,
    Message,
)


def take_fetch(state: State, session: Session, arrival: MessageArrived, message: Fetch) -> list[Instruction]:
    """FETCH: orders the first reads of a blob."""
    blob = state.index.blob(message.digest)
    if blob is None:
        text = f"blob {message.digest[:12]} is not in the store (any more): ask for the version again"
        return respond(arrival, Error(code="not-found", text=text))
    if message.size_bytes not in (0, blob.size_bytes):
        text = f"blob {message.digest[:12]} has {blob.size_bytes} bytes, and not {message.size_bytes}"
        return respond(arrival, Error(code="broken-rule", text=text))
    result = state.downloads.fetch(session, message, blob, state.now)
    return respond(arrival, result) if isinstance(result, Message) else result


def take_credit(state: State, session: Session, _: MessageArrived, message: Credit) -> list[Instruction]:
    """CREDIT: orders more reads."""
    return state.downloads.credit(session, message, state.now)


def chunk_read(state: State, event: ChunkRead) -> list[Instruction]:
    """Sends what was read to who fetches it."""
    download = state.downloads.disk_is_done(event.download, len(event.payload))
    session = None if download is None else state.sessions.get(download.session)
    if download is None or session is None:
        return state.downloads.serve()
    if session.role in ("worker", "evaluator", "relay"):
        state.bytes_down += len(event.payload)
    chunk = Chunk(transfer=download.transfer, offset=event.offset)
    return state.send(download.session, Channel.BULK, chunk, event.payload)


def read_failed(state: State, event: ReadFailed) -> list[Instruction]:
    """Says that a blob is gone or damaged; nothing else is deleted."""
    download = state.downloads.disk_is_done(event.download, 0)
    if download is None:
        return state.downloads.serve()
    state.downloads.drop(event.download)
    state.damaged.add(download.blob.digest)
    error = Error(request=download.transfer, code=event.code, text=event.text)
    said = log("error", "blob.corrupt", digest=download.blob.digest, text=event.text)
    return [*state.send(download.session, Channel.BULK, error), said, *state.downloads.serve()]
