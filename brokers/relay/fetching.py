"""Payloads on their way to workers: from the cache, which has each of them fetched from the home broker once. Pure."""

from __future__ import annotations

from isles.brokers.relay.state import RelayState
from isles.brokers.relay.vocabulary import Instruction
from isles.brokers.relay.wanted import Want
from isles.brokers.replies import log, respond
from isles.brokers.sessions import Session
from isles.brokers.uploads import DISK_FULL_RETRY_SECONDS
from isles.brokers.vocabulary import (
    ChunkRead,
    DeleteBlob,
    FinishUpload,
    MessageArrived,
    ReadFailed,
    UploadFailed,
    WriteChunk,
)
from isles.proto.client import Fetched, FetchFailed
from isles.proto.messages import BlobRef, Channel, Chunk, Credit, Error, Fetch, Message, RetryAfter


def take_fetch(state: RelayState, session: Session, arrival: MessageArrived, message: Fetch) -> list[Instruction]:
    """FETCH: out of the cache, or as soon as it is there."""
    blob = state.cache.use(message.digest)
    if blob is not None:
        result = state.downloads.fetch(session, message, blob, state.now)
        return [*respond(arrival, result)] if isinstance(result, Message) else [*result]
    if (refusal := _refusal(state, session, message)) is not None:
        return [*respond(arrival, refusal)]
    state.wanted.ask(session.token, message, BlobRef(digest=message.digest, size_bytes=message.size_bytes))
    return fetch_next(state)


def _refusal(state: RelayState, session: Session, message: Fetch) -> Message | None:
    settings = state.settings
    which = f"blob {message.digest[:12]}"
    if message.size_bytes == 0:
        text = (
            f"{which} is not in the cache of this relay, and FETCH says not how long it is: ask for the version again"
        )
        return Error(code="not-found", text=text)
    if message.size_bytes > settings.blob_bytes_max:
        text = f"{which} has {message.size_bytes} bytes; the limit is {settings.blob_bytes_max} (blob_bytes_max)"
        return Error(code="too-large", text=text)
    if state.wanted.num_asked(session.token) >= settings.downloads_per_client_max:
        text = f"{session.role} {session.id} has too many fetches open (downloads_per_client_max)"
        return RetryAfter(seconds=settings.retry_seconds, reason=text)
    return None


def fetch_next(state: RelayState) -> list[Instruction]:
    """Asks the home broker for as many blobs as there is room for."""
    orders: list[Instruction] = []
    while (found := state.wanted.take_next(len(state.links.clients))) is not None:
        want, link = found
        sent, news = state.links.fetch(link, want.blob, state.now, state.settings.blob_bytes_max)
        assert not news
        orders += sent
    return orders


def take_fetched(state: RelayState, news: Fetched) -> list[Instruction]:
    """A blob is here and right: the disk takes it first, so that whoever wants it reads it from there."""
    want = state.wanted.fetched(news.blob)
    if want is None:
        return []
    write = WriteChunk(want.transfer, want.blob, 0, memoryview(news.data))
    said = log(
        "debug", "blob.fetched", digest=want.blob.digest, bytes=want.blob.size_bytes, num_askers=len(want.askers)
    )
    return [said, *state.make_room(want.blob.size_bytes), write, FinishUpload(want.transfer, want.blob)]


def take_fetch_failed(state: RelayState, news: FetchFailed) -> list[Instruction]:
    """The home broker has no such blob: whoever wants it hears what it said."""
    want = state.wanted.failed(news.blob)
    error = Error(code=news.code, text=news.text)
    return [*([] if want is None else _tell(state, want, error)), *fetch_next(state)]


def _tell(state: RelayState, want: Want, message: Message) -> list[Instruction]:
    return [
        order
        for (token, _), fetch in want.askers.items()
        for order in state.send_to(token, Channel.BULK, message.addressed(request=fetch.request))
    ]


def blob_cached(state: RelayState, want: Want) -> list[Instruction]:
    """A fetched blob is on the disk: all who wait for it are served."""
    state.cache.put(want.blob)
    orders: list[Instruction] = []
    for (token, _), fetch in want.askers.items():
        session = state.sessions.get(token)
        if session is None:
            continue
        result = state.downloads.fetch(session, fetch, want.blob, state.now)
        if isinstance(result, Message):
            orders += state.send_to(token, Channel.BULK, result.addressed(request=fetch.request))
        else:
            orders += result
    return [*orders, *fetch_next(state)]


def blob_not_cached(state: RelayState, want: Want, event: UploadFailed) -> list[Instruction]:
    """The disk could not take a fetched blob: the cache makes room for the next try."""
    doomed = state.cache.clear(state.is_pinned)
    later = RetryAfter(seconds=DISK_FULL_RETRY_SECONDS, reason=event.text)
    said = log("error", "store.full", bytes=state.disk_free_bytes, limit_bytes=want.blob.size_bytes)
    return [said, *state.delete(doomed), *_tell(state, want, later), *fetch_next(state)]


def take_credit(state: RelayState, session: Session, message: Credit) -> list[Instruction]:
    """CREDIT: orders more reads."""
    return [*state.downloads.credit(session, message, state.now)]


def chunk_read(state: RelayState, event: ChunkRead) -> list[Instruction]:
    """Sends what was read to who fetches it."""
    download = state.downloads.disk_is_done(event.download, len(event.payload))
    if download is None or state.sessions.get(download.session) is None:
        return [*state.downloads.serve()]
    chunk = Chunk(transfer=download.transfer, offset=event.offset)
    return state.send_to(download.session, Channel.BULK, chunk, event.payload)


def read_failed(state: RelayState, event: ReadFailed) -> list[Instruction]:
    """A cached blob is gone or damaged: it is deleted and fetched anew, and who wants it waits; not without end."""
    download = state.downloads.disk_is_done(event.download, 0)
    if download is None:
        return [*state.downloads.serve()]
    state.downloads.drop(event.download)
    blob, place = download.blob, (download.session, download.transfer)
    orders: list[Instruction] = []
    is_hopeless = False
    if state.cache.drop(blob.digest) is not None:
        is_hopeless = state.wanted.is_hopeless(blob.digest)
        orders.append(log("error", "blob.corrupt", digest=blob.digest, text=event.text))
        orders.append(DeleteBlob(blob))
    if is_hopeless:
        error = Error(request=download.transfer, code=event.code, text=event.text)
        return [*orders, *state.send_to(download.session, Channel.BULK, error), *state.downloads.serve()]
    again = Fetch(
        request=download.transfer,
        transfer=download.transfer,
        digest=blob.digest,
        offset=download.sent,
        credit_chunks=max(1, download.window_bytes // state.settings.chunk_bytes),
        size_bytes=blob.size_bytes,
    )
    if state.sessions.get(place[0]) is not None:
        state.wanted.ask(place[0], again, blob)
    return [*orders, *fetch_next(state), *state.downloads.serve()]
