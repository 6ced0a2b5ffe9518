"""Blobs on their way into the store, in chunks with credit. Pure.

    client      OFFER or UPLOAD           CHUNK ..                   OFFER again (nothing heard)
    here        open -> GRANT(offset)     WriteChunk .. -> CREDIT    find -> GRANT(offset received so far)
    disk                                  ChunkWritten, at the end FinishUpload -> UploadDurable | UploadFailed

A partial upload belongs to (role, id, key name) and digest, so it survives a lost connection or session; not a broker's
restart. Sizes are checked before anything is stored. What waits for the disk is bounded: a chunk for which there is no
room is dropped, and its upload gets another GRANT when there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from isles.brokers.limits import RoutingSettings
from isles.brokers.quotas import DiskQueue, Flight
from isles.brokers.sessions import Owner, Session
from isles.brokers.vocabulary import AbandonUpload, Bytes, FinishUpload, Instruction, Send, WriteChunk
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Channel, Chunk, Contribution, Credit, Error, Grant, Message, RetryAfter

DISK_FULL_RETRY_SECONDS: Final = 5.0
"""A full disk is seldom free again sooner."""
REGRANT_SECONDS: Final = 1.0
"""A gap in the chunks is answered by one GRANT; the chunks behind it that are under way then need none of their own."""


@dataclass
class Upload:
    """One blob that is being received."""

    transfer: int
    owner: Owner
    session: str
    incarnation: str
    request: int
    blob: BlobRef
    contribution: Contribution | None
    touched_at: float
    received: int = 0
    """Bytes in order that have come in."""
    written: int = 0
    """Bytes that the disk has taken."""
    regranted_at: float | None = None
    is_unwanted: bool = False
    """Whoever sent it has been turned away since; it is too late to stop the disk."""
    signer: str = ""
    """Of a contribution that a relay sends: the public key (z85) that its learner has proved."""

    @property
    def learner(self) -> str:
        """Whose it is, whoever sends it; empty = no learner's, or a relay's for any."""
        if self.contribution is not None:
            return self.contribution.id.learner
        return self.owner.id if self.owner.role == "worker" else ""

    @property
    def is_complete(self) -> bool:
        return self.received == self.blob.size_bytes


@dataclass
class Uploads:
    """All open uploads."""

    settings: RoutingSettings
    flight: Flight
    first_transfer: int = 0
    """Differs between two starts of a broker, so that a GRANT of the one before names no upload of this one."""
    disk_free_bytes: int = 2**53
    _open: dict[int, Upload] = field(default_factory=dict)
    _num_opened: int = 0
    _starved: dict[int, None] = field(default_factory=dict)
    """Transfers of which a chunk was dropped, those first that have waited longest."""
    _queue: DiskQueue = field(init=False)

    def __post_init__(self) -> None:
        self._queue = DiskQueue(self.flight)

    def find(self, owner: Owner, blob: BlobRef) -> Upload | None:
        """The upload of these bytes by this client that is no contribution, if it is under way."""
        return next((one for one in self._of(owner) if one.blob == blob and one.contribution is None), None)

    def find_contribution(self, owner: Owner, blob: BlobRef, learner: str) -> Upload | None:
        """The upload of these bytes by this client as a contribution of this learner, if it is under way."""
        for upload in self._of(owner):
            if upload.contribution is not None and (upload.blob, upload.learner) == (blob, learner):
                return upload
        return None

    def names_other_bytes(self, contribution_id: ContributionId, blob: BlobRef) -> bool:
        """Whether this id is being received with other bytes."""
        return any(
            upload.contribution is not None and upload.contribution.id == contribution_id and upload.blob != blob
            for upload in self._open.values()
        )

    def is_open(self, digest: str) -> bool:
        """Whether somebody is sending this blob."""
        return any(upload.blob.digest == digest for upload in self._open.values())

    def open_bytes(self, *, is_contribution: bool) -> int:
        """Announced bytes of all contributions that are being received, or of all other blobs."""
        sizes = (
            upload.blob.size_bytes
            for upload in self._open.values()
            if (upload.contribution is not None) is is_contribution
        )
        return sum(sizes)

    def _of(self, owner: Owner) -> Iterator[Upload]:
        return (upload for upload in self._open.values() if upload.owner == owner)

    def refusal(self, owner: Owner, blob: BlobRef, stored_bytes: Callable[[], int]) -> Message | None:
        """Why this blob may not be sent, or not now; `stored_bytes` adds up all that is stored, where that matters."""
        settings = self.settings
        if blob.size_bytes > settings.blob_bytes_max:
            limit = f"the limit is {settings.blob_bytes_max} (blob_bytes_max)"
            return Error(code="too-large", text=f"blob {blob.digest[:12]} has {blob.size_bytes} bytes; {limit}")
        if blob.size_bytes == 0:
            return Error(code="broken-rule", text="a blob has at least one byte")
        times = settings.times(owner.role)
        sizes = [upload.blob.size_bytes for upload in self._of(owner)]
        if len(sizes) >= times * settings.uploads_per_client_max:
            return self._later(f"{owner} has {len(sizes)} uploads open (uploads_per_client_max)")
        if sum(sizes) + blob.size_bytes > times * settings.open_bytes_per_client_max:
            return self._later(f"{owner} has {sum(sizes)} bytes under way (open_bytes_per_client_max)")
        if owner.key_name and self._num_of_key(owner.key_name) >= times * settings.uploads_per_key_max:
            return self._later(f"the key {owner.key_name} has too many uploads open (uploads_per_key_max)")
        promised = sum(upload.blob.size_bytes - upload.written for upload in self._open.values())
        if self.disk_free_bytes - promised - blob.size_bytes < settings.disk_free_bytes_min:
            text = f"the broker's disk has {self.disk_free_bytes} bytes left (disk_free_bytes_min)"
            return RetryAfter(seconds=DISK_FULL_RETRY_SECONDS, reason=text)
        if settings.stored_bytes_max is None:
            return None
        if (stored := stored_bytes()) + promised + blob.size_bytes > settings.stored_bytes_max:
            text = f"the store holds {stored} bytes (stored_bytes_max)"
            return RetryAfter(seconds=DISK_FULL_RETRY_SECONDS, reason=text)
        return None

    def _num_of_key(self, key_name: str) -> int:
        return sum(upload.owner.key_name == key_name for upload in self._open.values())

    def unused_of_key(self, key_name: str) -> tuple[int, int]:
        """Uploads of this name that are no contributions, and their announced bytes: nothing refers to them yet."""
        sizes = [
            upload.blob.size_bytes
            for upload in self._open.values()
            if upload.owner.key_name == key_name and upload.contribution is None
        ]
        return len(sizes), sum(sizes)

    def _later(self, reason: str) -> RetryAfter:
        return RetryAfter(seconds=self.settings.retry_seconds, reason=reason)

    def open(self, session: Session, blob: BlobRef, contribution: Contribution | None, now: float) -> Upload:
        """Makes room for a blob that was not refused."""
        self._num_opened += 1
        transfer = self.first_transfer + self._num_opened
        upload = Upload(transfer, session.owner, session.token, session.incarnation, 0, blob, contribution, now)
        self._open[upload.transfer] = upload
        return upload

    def grant(self, upload: Upload, session: Session, request: int, now: float) -> Grant:
        """Tells where to go on; the answer to the newest ask is the one that will be given."""
        upload.session, upload.incarnation, upload.request = session.token, session.incarnation, request
        upload.touched_at = now
        self._starved.pop(upload.transfer, None)
        return self._grant(upload)

    def _grant(self, upload: Upload) -> Grant:
        return Grant(
            request=upload.request,
            transfer=upload.transfer,
            offset=upload.received,
            credit_chunks=self.settings.credit_chunks,
        )

    def take(self, session: Session, chunk: Chunk, payload: Bytes | None, now: float) -> list[Instruction]:
        """Takes one CHUNK: the next one is written, any other one is answered or dropped."""
        upload = self._open.get(chunk.transfer)
        connection = session.connections[Channel.BULK]
        if upload is None or upload.owner != session.owner:
            text = f"there is no open upload {chunk.transfer}: repeat the ask that it belongs to"
            return [Send(Channel.BULK, connection, Error(code="not-found", text=text))]
        if chunk.offset < upload.received or upload.transfer in self._starved:
            return []
        if chunk.offset > upload.received:
            return self._regrant(upload, session, now)
        if fault := self._fault(upload, payload):
            self.drop(upload.transfer)
            error = fault.addressed(request=upload.request)
            return [AbandonUpload(upload.transfer, upload.blob), Send(Channel.BULK, connection, error)]
        assert payload is not None
        upload.touched_at = now
        if self.flight.room(upload.owner.key_name) < len(payload):
            self._starved[upload.transfer] = None
            return []
        self._queue.put(upload.transfer, upload.owner.key_name, len(payload))
        upload.received += len(payload)
        orders: list[Instruction] = [WriteChunk(upload.transfer, upload.blob, chunk.offset, payload)]
        return [*orders, FinishUpload(upload.transfer, upload.blob)] if upload.is_complete else orders

    def _regrant(self, upload: Upload, session: Session, now: float) -> list[Instruction]:
        if upload.regranted_at is not None and now - upload.regranted_at < REGRANT_SECONDS:
            return []
        upload.regranted_at = now
        return [Send(Channel.CONTROL, session.connections[Channel.CONTROL], self._grant(upload))]

    def _fault(self, upload: Upload, payload: Bytes | None) -> Error | None:
        size = 0 if payload is None else len(payload)
        if size == 0:
            return Error(code="bad-message", text="a CHUNK needs a frame with payload")
        if size > self.settings.chunk_bytes:
            return Error(code="too-large", text=f"a CHUNK of {size} bytes; the limit is {self.settings.chunk_bytes}")
        if upload.received + size > upload.blob.size_bytes:
            text = f"upload of {upload.blob.digest[:12]} runs past its announced {upload.blob.size_bytes} bytes"
            return Error(code="too-large", text=text)
        # A repeated GRANT opens a second window while the first is still on its way to the disk.
        if upload.received + size - upload.written > 2 * self.settings.credit_chunks * self.settings.chunk_bytes:
            text = f"upload of {upload.blob.digest[:12]} ignores its credit of {self.settings.credit_chunks} chunks"
            return Error(code="broken-rule", text=text)
        return None

    def disk_is_done(self, transfer: int) -> list[tuple[Upload, Grant]]:
        """The disk is done with one chunk, whatever came of it: grants for who was put off for want of memory."""
        key_name = self._queue.take(transfer)
        room = 0 if key_name is None else self.flight.room(key_name)
        share = 0 if key_name is None else self.flight.share_of(key_name)
        window = min(self.settings.credit_chunks * self.settings.chunk_bytes, share)
        granted = []
        for starved in list(self._starved):
            upload = self._open.get(starved)
            if upload is None:
                del self._starved[starved]
            elif upload.owner.key_name == key_name:
                room -= min(window, upload.blob.size_bytes - upload.received)
                if room < 0:
                    break
                del self._starved[starved]
                granted.append((upload, self._grant(upload)))
        return granted

    def wrote(self, transfer: int, offset: int) -> tuple[Upload, Credit] | None:
        """The disk has taken everything below `offset`, so as much may follow."""
        upload = self._open.get(transfer)
        if upload is None:
            return None
        upload.written = max(upload.written, offset)
        return upload, Credit(transfer=transfer, offset=upload.written)

    def drop(self, transfer: int) -> Upload | None:
        """Forgets an upload that has ended."""
        self._starved.pop(transfer, None)
        return self._open.pop(transfer, None)

    def drop_idle(self, touched_before: float) -> list[Upload]:
        """Forgets and returns the uploads whose clients have stopped sending."""
        idle = [up for up in self._open.values() if up.touched_at < touched_before and not up.is_complete]
        return [self._open.pop(upload.transfer) for upload in idle]

    def drop_older(self, owner: Owner, incarnation: str) -> list[Upload]:
        """Forgets and returns what other incarnations of this client were sending."""
        older = [up for up in self._of(owner) if up.incarnation != incarnation and not up.is_complete]
        return [self._open.pop(upload.transfer) for upload in older]

    def drop_where(self, is_dropped: Callable[[Upload], bool]) -> list[Upload]:
        """Forgets and returns uploads that are not wanted; those that are complete are marked instead."""
        dropped = []
        for upload in [upload for upload in self._open.values() if is_dropped(upload)]:
            upload.is_unwanted = True
            if not upload.is_complete:
                dropped.append(self._open.pop(upload.transfer))
        return dropped
