"""What the broker's pure cores are told (events) and what they order (instructions)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from isles.proto.keys import AllowList
from isles.proto.messages import BlobRef, Channel, Hint, Message

Bytes = bytes | memoryview


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A client said something."""

    channel: Channel
    connection: bytes
    message: Message
    payload: Bytes | None = None
    key: str = ""
    """The public key (z85) that its sender proved; empty = a broker without keys."""


@dataclass(frozen=True, slots=True)
class GarbageArrived:
    """A client sent bytes that are no message; `text` says why."""

    channel: Channel
    connection: bytes
    text: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class ChunkWritten:
    """Everything of an upload below `offset` is on its way to the disk and no longer in memory."""

    transfer: int
    offset: int


@dataclass(frozen=True, slots=True)
class UploadDurable:
    """All bytes of an upload are on the disk, have the announced digest and survive a crash."""

    transfer: int


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """An upload is gone: its bytes do not have their digest, or the disk is full."""

    transfer: int
    code: Literal["damaged", "full"]
    text: str


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Some bytes of a blob that a client fetches."""

    download: int
    offset: int
    payload: Bytes


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A blob that a client fetches is not there or not what it should be."""

    download: int
    code: Literal["not-found", "damaged"]
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `disk_free_bytes` as the disk says now."""

    disk_free_bytes: int


@dataclass(frozen=True, slots=True)
class AllowListChanged:
    """Whom the broker lets in from now on; None = it has no keys."""

    allowed: AllowList | None


DiskEvent = ChunkWritten | UploadDurable | UploadFailed | ChunkRead | ReadFailed
Event = MessageArrived | GarbageArrived | DiskEvent | Tick | AllowListChanged


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Hand this to one connection."""

    channel: Channel
    connection: bytes
    message: Message
    payload: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell every subscriber."""

    hint: Hint


@dataclass(frozen=True, slots=True)
class WriteChunk:
    """Append to the partial file of an upload; reported by ChunkWritten or UploadFailed."""

    transfer: int
    blob: BlobRef
    offset: int
    payload: Bytes


@dataclass(frozen=True, slots=True)
class FinishUpload:
    """Check the digest and make the blob durable; reported by UploadDurable or UploadFailed."""

    transfer: int
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class AbandonUpload:
    """Delete the partial file of an upload."""

    transfer: int
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Read some bytes of a blob; reported by ChunkRead or ReadFailed."""

    download: int
    blob: BlobRef
    offset: int
    num_bytes: int
    is_doubted: bool = False
    """Check all of the blob first, even if it was found to be right before."""


@dataclass(frozen=True, slots=True)
class DeleteBlob:
    """Delete a blob to which nothing refers any more."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class Log:
    """Say what happened."""

    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: Mapping[str, Any]


DiskOrder = WriteChunk | FinishUpload | AbandonUpload | ReadChunk | DeleteBlob
Instruction = Send | Publish | DiskOrder | Log
