"""A relay's folder: blobs by their digests, a file for each offer that the home broker has not taken yet, and the last
allow-list that it sent.

    blobs/      what workers sent and what is cached, each named by its digest
    offers/     one packed OFFER for each contribution in the outbox; written after its blob, deleted before it
    home.keys   one packed RELAY_ALIVE
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from isles.brokers.relay.state import Kept
from isles.brokers.relay.vocabulary import (
    BlobMapped,
    BlobUnmappable,
    Bytes,
    DropOffer,
    KeepOffer,
    MapBlob,
    OfferKept,
    OfferNotKept,
    RelayDiskEvent,
    RelayDiskOrder,
)
from isles.brokers.store import disk
from isles.brokers.store.blobs import BlobStore, FolderBlobs, MissingBlobError
from isles.brokers.store.files import DiskFiles, Files
from isles.brokers.store.fullness import FULL_ERRORS, store_error
from isles.brokers.store.lock import StoreLock
from isles.brokers.store.store import INDEX_NAME
from isles.proto.errors import MessageError, PayloadError, StoreError, UsageError
from isles.proto.ids import ContributionId
from isles.proto.messages import HEADER_BYTES_MAX, BlobRef, Message, Offer, RelayAlive, pack, unpack

BLOBS_NAME: Final = "blobs"
OFFERS_NAME: Final = "offers"
KEYS_NAME: Final = "home.keys"
ADDRESS_NAME: Final = "address"
OFFER_ENDING: Final = ".offer"
PARTIAL_ENDING: Final = ".tmp"
DIGEST_LENGTH: Final = 64
LEFTOVERS: Final = frozenset({"lock", "lost+found"})
"""What is in a folder that is as good as empty."""


def offer_name(name: ContributionId) -> str:
    """The file of an offer. No two ids have one name: fragments have few digits, and incarnations have more."""
    return f"{name.learner}.{name.fragment}.{name.incarnation}.{name.number}{OFFER_ENDING}"


@dataclass
class RelayFolder:
    """Everything that a relay keeps."""

    blobs: BlobStore
    map_blob: Callable[[BlobRef], Bytes]
    """The bytes of a blob that was checked; raises MissingBlobError or PayloadError."""
    folder: Path
    files: Files
    lock: StoreLock | None = None
    damaged: list[str] = field(default_factory=list)
    """Files that could not be read at the start, and were deleted; whoever sent what was in them has it still."""

    @classmethod
    def open(cls, folder: Path) -> RelayFolder:
        """The folder of a relay, made durably if it is missing.

        Raises UsageError if it is somebody else's, StoreLockedError, or StoreError.
        """
        _refuse_foreign(folder)
        files = DiskFiles()
        with suppress(OSError):  # what cannot be made cannot be locked either, and that says why
            files.make_folder(folder)
        lock = StoreLock(folder)
        try:
            blobs = FolderBlobs(folder / BLOBS_NAME)
            files.make_folder(folder / OFFERS_NAME)
        except OSError as error:
            lock.release()
            text = f"the folder {folder} of this relay cannot be used ({error}): mend it or choose another"
            raise store_error(text, error, folder) from error
        return cls(blobs, lambda blob: _map(blobs, folder / BLOBS_NAME, blob), folder, files, lock)

    # ----------------------------------------------------------------------------------------------------- at the start

    def find(self) -> Kept:
        """Deletes what an earlier process left half done, and tells what is here. Raises StoreError."""
        try:
            offers = self._find_offers()
            found = self._find_blobs()
            return Kept(offers, found, self._find_keys())
        except OSError as error:
            text = f"the folder {self.folder} of this relay cannot be read ({error}): check the disk"
            raise store_error(text, error, self.folder) from error

    def _find_offers(self) -> tuple[Offer, ...]:
        folder = self.folder / OFFERS_NAME
        offers = []
        for name in self.files.names(folder):
            path = folder / name
            if name.endswith(PARTIAL_ENDING):
                self.files.delete(path)
            elif name.endswith(OFFER_ENDING):
                message = self._read(path)
                if isinstance(message, Offer) and offer_name(message.contribution.id) == name:
                    offers.append((self.files.stamp(path)[0], message.contribution.id, message))
                else:
                    self.damaged.append(name)
                    self.files.delete(path)
        return tuple(offer for _, _, offer in sorted(offers, key=lambda one: one[:2]))

    def _find_blobs(self) -> tuple[BlobRef, ...]:
        folder = self.folder / BLOBS_NAME
        found = []
        names = {name for name in self.files.names(folder) if len(name) == DIGEST_LENGTH}
        self.blobs.sweep(names)
        for name in names:
            changed_at, size_bytes = self.files.stamp(folder / name)
            with suppress(ValueError):  # no digest: somebody else's file
                found.append((changed_at, BlobRef(digest=name, size_bytes=size_bytes)))
        return tuple(blob for _, blob in sorted(found, key=lambda one: (one[0], one[1].digest)))

    def _find_keys(self) -> RelayAlive | None:
        path = self.folder / KEYS_NAME
        if KEYS_NAME not in self.files.names(self.folder):
            return None
        message = self._read(path)
        if isinstance(message, RelayAlive):
            return message
        self.damaged.append(KEYS_NAME)
        return None

    def _read(self, path: Path) -> Message | None:
        with self.files.open(path) as file:
            header = file.read(HEADER_BYTES_MAX + 1)
        try:
            return unpack(header)
        except MessageError:
            return None

    # ---------------------------------------------------------------------------------------------------- while it runs

    def perform(self, order: RelayDiskOrder) -> RelayDiskEvent | None:
        """Does what the core ordered and says what came of it. Raises StoreError if the disk cannot be trusted."""
        match order:
            case KeepOffer(offer):
                return self._keep(offer)
            case DropOffer(name):
                self.files.delete(self.folder / OFFERS_NAME / offer_name(name))
                return None
            case MapBlob(blob):
                try:
                    return BlobMapped(blob, self.map_blob(blob))
                except (MissingBlobError, PayloadError) as error:
                    return BlobUnmappable(blob, str(error))
        return disk.perform(self.blobs, order)

    def _keep(self, offer: Offer) -> OfferKept | OfferNotKept:
        name = offer.contribution.id
        try:
            self._write(self.folder / OFFERS_NAME / offer_name(name), pack(offer))
        except OSError as error:
            if error.errno in FULL_ERRORS:
                return OfferNotKept(name, f"the relay's disk is full ({error.strerror})")
            text = f"the disk under {self.folder} could not make an offer durable ({error}): check it"
            raise StoreError(f"{text}, then start this relay again") from error
        return OfferKept(name)

    def keep_keys(self, alive: RelayAlive) -> None:
        """Writes down whom the home broker lets in. Raises StoreError, but not where there is merely no room."""
        try:
            self._write(self.folder / KEYS_NAME, pack(alive))
        except OSError as error:
            if error.errno not in FULL_ERRORS:
                raise store_error(
                    f"{self.folder / KEYS_NAME} cannot be written ({error})", error, self.folder
                ) from error

    def write_address(self, address: str) -> None:
        """Says where this relay listens; whole or not at all, since others read it. Raises StoreError."""
        path = self.folder / ADDRESS_NAME
        try:
            self._write(path, f"{address}\n".encode())
        except OSError as error:
            text = f"{path} cannot be written ({error}): mend the folder, then start this relay again"
            raise store_error(text, error, self.folder) from error

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_name(path.name + PARTIAL_ENDING)
        try:
            with self.files.create(partial) as file:
                self.files.write(file, data)
                self.files.sync(file)
            self.files.rename(partial, path)
            self.files.sync_folder(path.parent)
        except OSError:
            with suppress(OSError):
                self.files.delete(partial)
            raise

    def close(self) -> None:
        """Gives the folder back; idempotent."""
        self.blobs.close()
        if self.lock is not None:
            self.lock.release()


def _map(blobs: BlobStore, folder: Path, blob: BlobRef) -> memoryview:
    """The bytes of a blob, once they were checked: they are read as they are sent."""
    blobs.read(blob, 0, 1)
    try:
        with (folder / blob.digest).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise PayloadError(f"blob {blob.digest[:12]} cannot be read from {folder} ({error})") from error
    if len(mapped) != blob.size_bytes:
        raise PayloadError(f"blob {blob.digest[:12]} has {len(mapped)} bytes, not {blob.size_bytes}")
    return memoryview(mapped)


def _refuse_foreign(folder: Path) -> None:
    """A relay deletes what it needs no longer: a folder that was named by mistake is not to be taken over."""
    try:
        names = {found.name for found in folder.iterdir()}
    except NotADirectoryError as error:
        raise UsageError(f"the store {folder} is a file or lies in one: name a folder") from error
    except OSError:
        return  # not there yet, or not to be read: making and locking it says more
    if INDEX_NAME in names:
        raise UsageError(
            f"{folder} is the store of a home broker ({INDEX_NAME} is in it): name another folder for this relay with "
            "--store"
        )
    foreign = sorted(names - LEFTOVERS - {BLOBS_NAME})
    if foreign and OFFERS_NAME not in names:
        raise UsageError(
            f"{folder} is no relay's, and not empty ({foreign[0]!r} is in it, {OFFERS_NAME}/ is not): name an empty "
            "folder or one that does not exist yet"
        )
