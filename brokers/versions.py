"""What is kept of versions, and the ways to the head that lead over it. Pure rules over an index.

    version    0 ........ c ....... h - versions_kept ....... h
    kept       parameters |-- updates, payloads and whole states --|

A version is a checkpoint if its whole state is in the store: version 0 always is, others once CHECKPOINT says so. From
the newest checkpoint c at or before `h - versions_kept` on everything is kept, so whoever begins at c, or at any later
checkpoint, can recompute every version up to the head h from recipes and payloads, or follow the updates there.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from isles.brokers.store.index import Index
from isles.proto.messages import (
    BlobRef,
    Checkpoint,
    Done,
    Error,
    Fenced,
    Head,
    Message,
    Row,
    VersionInfo,
    VersionReply,
)

UPDATES_MAX: Final = 4096
"""Most updates in one VERSION reply, and so most versions after a checkpoint: with more of them nobody could join."""


def version_owner(fragment: int, version: int) -> str:
    """Refers to a version's update, and to the payloads that it was made from."""
    return f"version/{fragment}/{version}"


def _state_owner(fragment: int, version: int) -> str:
    return f"state/{fragment}/{version}"


def heads(index: Index) -> tuple[Head, ...]:
    """The newest version of every fragment, in short."""
    return tuple(
        Head(fragment=info.fragment, version=info.version, tokens_total=info.tokens_total) for info in index.heads()
    )


def state_blobs(version: Checkpoint | VersionInfo) -> list[BlobRef]:
    """The whole state of a version; nothing if it is no checkpoint."""
    candidates = (version.parameters, version.momentum, version.remainder)
    return [] if version.parameters is None else [blob for blob in candidates if blob is not None]


def blob_fault(index: Index, blob: BlobRef, damaged: AbstractSet[str] = frozenset()) -> str | None:
    """Why a message may not refer to this blob; None if it is stored."""
    stored = index.blob(blob.digest)
    if stored is None:
        return f"blob {blob.digest[:12]} is not in the store: UPLOAD it first"
    if stored.size_bytes != blob.size_bytes:
        return f"blob {blob.digest[:12]} has {stored.size_bytes} bytes, not {blob.size_bytes}"
    if blob.digest in damaged:
        return f"blob {blob.digest[:12]} is damaged in the store: UPLOAD it again"
    return None


# -------------------------------------------------------------------------------------------------------- checkpoints


def newest_checkpoint(index: Index, fragment: int, head: int, damaged: AbstractSet[str]) -> VersionInfo | None:
    """Where a new outer begins: the newest checkpoint that can be read, or, if there is none, the newest at all.

    The run's origin is always kept, and of no use once what comes after it was let go.
    """
    found = index.checkpoints(fragment, head)
    if len(found) > 1 and found[-1].version == 0 and not index.retained(fragment, 1):
        found.pop()
    return next((info for info in found if is_readable(info, damaged)), found[0] if found else None)


def is_readable(checkpoint: VersionInfo, damaged: AbstractSet[str]) -> bool:
    """Whether nothing of a checkpoint's state is known to be damaged."""
    return not any(blob.digest in damaged for blob in state_blobs(checkpoint))


def num_since_checkpoint(index: Index, fragment: int, head: int) -> int:
    """Versions after the newest checkpoint."""
    found = index.checkpoints(fragment, head)
    return head - found[0].version if found else head


def checkpoint(
    index: Index, message: Checkpoint, *, epoch: int, versions_kept: int, damaged: AbstractSet[str]
) -> Message:
    """Makes a retained version a checkpoint, and lets go of what it makes needless. `epoch` is the newest one.

    A repeated one changes nothing; a version whose state turned out to be damaged gets the new one.
    """
    fragment, version = message.fragment, message.version
    if message.epoch < epoch:
        return Fenced(epoch=epoch)
    if epoch == 0 or message.epoch > epoch:
        return Error(code="broken-rule", text=f"CHECKPOINT of fragment {fragment} without a LEASE on it")
    head, info = index.head_version(fragment), index.version(fragment, version)
    if head is None or info is None:
        return Error(code="not-found", text=f"CHECKPOINT: fragment {fragment} has no version {version}, only {head}")
    if info.parameters is not None and is_readable(info, damaged):
        return Done()
    if info.update is None and version:
        text = f"CHECKPOINT: version {version} of fragment {fragment} has been let go: a later checkpoint covers it"
        return Error(code="not-found", text=text)
    for blob in state_blobs(message):
        if fault := blob_fault(index, blob, damaged):
            return Error(code="not-found", text=f"CHECKPOINT: {fault}")
    index.drop_references(_state_owner(fragment, version))
    _refer_to_state(index, message)
    fields = {"parameters": message.parameters, "momentum": message.momentum, "remainder": message.remainder}
    index.put_checkpoint(info.model_copy(update=fields))
    let_go(index, fragment, head, versions_kept=versions_kept, damaged=damaged)
    return Done()


def _refer_to_state(index: Index, message: Checkpoint) -> None:
    for blob in state_blobs(message):
        index.add_reference(blob.digest, _state_owner(message.fragment, message.version))


# ---------------------------------------------------------------------------------------------------------- retention


def keep_from(index: Index, fragment: int, head: int, *, versions_kept: int, damaged: AbstractSet[str]) -> int:
    """The version from which on everything is kept: the newest readable checkpoint that is `versions_kept` old."""
    old = index.checkpoints(fragment, max(0, head - versions_kept))
    return next((info.version for info in old if is_readable(info, damaged)), 0)


def let_go(index: Index, fragment: int, head: int, *, versions_kept: int, damaged: AbstractSet[str]) -> None:
    """Drops what is kept of old versions, but for their rows and for version 0, which is the run's origin."""
    first = keep_from(index, fragment, head, versions_kept=versions_kept, damaged=damaged)
    for version in index.retained(fragment, first - 1):
        index.drop_references(version_owner(fragment, version))
        index.drop_references(_state_owner(fragment, version))
        index.put_not_retained(fragment, version)


# ---------------------------------------------------------------------------------------------------- ways to the head


def version_reply(
    index: Index,
    fragment: int,
    base_version: int | None,
    row: Row | None,
    damaged: AbstractSet[str] = frozenset(),
) -> Message:
    """The way from a version to the head: updates from there, or a checkpoint and updates, whichever is fewer bytes.

    `row` is the asker's own. Digests in `damaged` cannot be read at the moment; no way leads over one of them.
    """
    head = index.head(fragment)
    if head is None:
        return Error(code="not-found", text=f"there is no fragment {fragment} in this run")
    if base_version is not None and base_version > head.version:
        return Error(
            code="broken-rule",
            text=f"version {base_version} of fragment {fragment} is not in this store, whose newest is {head.version}: "
            "was the store replaced by an older one?",
        )
    if base_version == head.version:
        return VersionReply(head=head, row=row)
    chain = None if base_version is None else _chain(index, fragment, base_version, head.version, damaged)
    bytes_max = None if chain is None else _num_bytes(chain)
    whole = _from_checkpoint(index, fragment, head.version, damaged, bytes_max)
    if chain is not None and (whole is None or _num_bytes(chain) < _num_bytes(whole[1], whole[0])):
        return VersionReply(head=head, updates=chain, row=row)
    if whole is None:
        text = f"fragment {fragment} has no undamaged way to its head; the outer's next checkpoint will be one"
        return Error(code="not-found", text=text)
    return VersionReply(head=head, snapshot=whole[0], updates=whole[1], row=row)


def _from_checkpoint(
    index: Index, fragment: int, head: int, damaged: AbstractSet[str], bytes_max: int | None
) -> tuple[VersionInfo, tuple[BlobRef, ...]] | None:
    """The newest readable checkpoint with an unbroken chain; an older one could only be more bytes.

    None also if it alone is more than `bytes_max`: who has something to begin with seldom wants a whole one.
    """
    for info in index.checkpoints(fragment, head):
        if bytes_max is not None and _num_bytes((), info) > bytes_max:
            return None
        chain = _chain(index, fragment, info.version, head, damaged)
        if chain is None:
            return None  # what is broken here is broken for all older ones
        if info.parameters is not None and info.parameters.digest not in damaged:
            return info.changed(recipe=None), chain
    return None


def _chain(
    index: Index, fragment: int, base_version: int, head: int, damaged: AbstractSet[str]
) -> tuple[BlobRef, ...] | None:
    if head - base_version > UPDATES_MAX:
        return None
    updates = index.updates(fragment, base_version + 1, head)
    is_whole = len(updates) == head - base_version and not any(blob.digest in damaged for blob in updates)
    return tuple(updates) if is_whole else None


def _num_bytes(updates: tuple[BlobRef, ...], snapshot: VersionInfo | None = None) -> int:
    parameters = None if snapshot is None else snapshot.parameters
    return sum(blob.size_bytes for blob in updates) + (parameters.size_bytes if parameters else 0)
