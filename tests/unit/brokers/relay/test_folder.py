"""What a relay keeps on its disk, and what it makes of what it finds there."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from isles.brokers.relay.folder import BLOBS_NAME, KEYS_NAME, OFFERS_NAME, RelayFolder
from isles.brokers.relay.vocabulary import (
    BlobMapped,
    BlobUnmappable,
    DropOffer,
    KeepOffer,
    MapBlob,
    OfferKept,
    OfferNotKept,
)
from isles.brokers.stage import blob_of
from isles.brokers.store.files import DiskFiles
from isles.brokers.store.store import Store
from isles.brokers.vocabulary import FinishUpload, WriteChunk
from isles.proto.errors import StoreError, StoreLockedError, UsageError
from isles.proto.messages import KeyInfo, RelayAlive


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RelayFolder]:
    folder = RelayFolder.open(tmp_path / "relay")
    yield folder
    folder.close()


@pytest.fixture
def reopened(folder: RelayFolder) -> Iterator[Callable[[], RelayFolder]]:
    """The next process's view of the folder."""
    opened = [folder]

    def reopen() -> RelayFolder:
        opened[-1].close()
        opened.append(RelayFolder.open(folder.folder))
        return opened[-1]

    yield reopen
    opened[-1].close()


def put(folder: RelayFolder, data: bytes, transfer: int = 1) -> None:
    blob = blob_of(data)
    folder.perform(WriteChunk(transfer, blob, 0, data))
    folder.perform(FinishUpload(transfer, blob))


def test_an_offer_that_was_kept_is_found_by_the_next_process(reopened: Any, folder: Any, offer_of: Any) -> None:
    offer, data = offer_of()
    put(folder, data)
    assert folder.perform(KeepOffer(offer)) == OfferKept(offer.contribution.id)
    kept = reopened().find()
    assert kept.offers == (offer,)
    assert kept.blobs == (offer.contribution.blob,)


def test_an_offer_that_was_dropped_is_not(reopened: Any, folder: Any, offer_of: Any) -> None:
    offer, data = offer_of()
    put(folder, data)
    folder.perform(KeepOffer(offer))
    folder.perform(DropOffer(offer.contribution.id, offer.contribution.blob))
    assert reopened().find().offers == ()


def test_offers_are_found_in_the_order_in_which_they_came(reopened: Any, folder: Any, offer_of: Any) -> None:
    offers = [offer_of(name)[0] for name in ("us-3", "us-1", "us-2")]
    for offer in offers:
        folder.perform(KeepOffer(offer))
    found = reopened().find().offers
    assert found == tuple(sorted(offers, key=lambda one: (_stamp(folder, one), one.contribution.id)))
    assert len(found) == 3


def _stamp(folder: RelayFolder, offer: Any) -> int:
    [path] = (folder.folder / OFFERS_NAME).glob(f"{offer.contribution.id.learner}.*")
    return path.stat().st_mtime_ns


@pytest.mark.parametrize("data", [b"", b"\x00garbage", b"\x92\x01\x80"])
def test_a_damaged_offer_is_deleted_and_named(reopened: Any, folder: Any, offer_of: Any, data: bytes) -> None:
    offer, _ = offer_of()
    folder.perform(KeepOffer(offer))
    [path] = (folder.folder / OFFERS_NAME).iterdir()
    path.write_bytes(data)
    found = reopened()
    assert found.find().offers == ()
    assert found.damaged == [path.name]
    assert not path.exists()


def test_an_offer_under_anothers_name_is_not_believed(reopened: Any, folder: Any, offer_of: Any) -> None:
    offer, _ = offer_of()
    folder.perform(KeepOffer(offer))
    [path] = (folder.folder / OFFERS_NAME).iterdir()
    path.rename(path.with_name(path.name.replace("us-1", "us-2")))
    assert reopened().find().offers == ()


def test_what_was_half_written_is_deleted_at_the_start_and_nothing_else(reopened: Any, folder: Any) -> None:
    (folder.folder / OFFERS_NAME / "us-1.0.aa.1.offer.tmp").write_bytes(b"half")
    (folder.folder / BLOBS_NAME / "17.tmp").write_bytes(b"half")
    (folder.folder / BLOBS_NAME / "notes.txt").write_text("mine")
    assert reopened().find().blobs == ()
    assert list((folder.folder / OFFERS_NAME).iterdir()) == []
    assert [path.name for path in (folder.folder / BLOBS_NAME).iterdir()] == ["notes.txt"]


def test_a_blob_is_mapped_without_a_copy_and_a_damaged_one_is_not(reopened: Any, folder: Any) -> None:
    data = bytes(range(256)) * 100
    put(folder, data)
    mapped = folder.perform(MapBlob(blob_of(data)))
    assert isinstance(mapped, BlobMapped)
    assert bytes(mapped.payload) == data
    (folder.folder / BLOBS_NAME / blob_of(data).digest).write_bytes(data[:-1] + b"?")
    assert isinstance(reopened().perform(MapBlob(blob_of(data))), BlobUnmappable)
    assert isinstance(reopened().perform(MapBlob(blob_of(b"nowhere"))), BlobUnmappable)


def test_a_blob_that_is_deleted_may_still_be_sent(folder: Any) -> None:
    data = bytes(range(256)) * 100
    put(folder, data)
    mapped = folder.perform(MapBlob(blob_of(data)))
    folder.blobs.delete(blob_of(data).digest)
    assert bytes(mapped.payload) == data


def test_the_allow_list_is_found_by_the_next_process(reopened: Any, folder: Any) -> None:
    alive = RelayAlive(keys_sha256="5e" * 32, keys=(KeyInfo(name="us-1", role="worker", public="0" * 40),))
    folder.keep_keys(alive)
    assert reopened().find().keys == alive
    (folder.folder / KEYS_NAME).write_bytes(b"?")
    found = reopened()
    assert found.find().keys is None
    assert found.damaged == [KEYS_NAME]


def test_two_relays_never_share_a_folder(folder: Any) -> None:
    with pytest.raises(StoreLockedError):
        RelayFolder.open(folder.folder)


def test_a_home_brokers_store_is_not_taken_over_and_neither_is_anything_else(tmp_path: Path) -> None:
    Store.open(tmp_path / "home").close()
    with pytest.raises(UsageError, match="home broker"):
        RelayFolder.open(tmp_path / "home")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    with pytest.raises(UsageError, match="not empty"):
        RelayFolder.open(tmp_path / "letters")


def test_a_home_broker_does_not_take_over_a_relays_folder(folder: Any) -> None:
    folder.close()
    with pytest.raises(UsageError, match="no store"):
        Store.open(folder.folder)


class FailingFiles(DiskFiles):
    """A disk that fails each write with one error."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, file: IO[bytes], payload: Any) -> None:
        raise OSError(self._number, "failed")


def test_a_full_disk_keeps_no_offer_and_says_so(folder: Any, offer_of: Any) -> None:
    offer, _ = offer_of()
    folder.files = FailingFiles(errno.ENOSPC)
    assert isinstance(folder.perform(KeepOffer(offer)), OfferNotKept)
    assert list((folder.folder / OFFERS_NAME).iterdir()) == []


def test_a_disk_that_fails_ends_the_process(folder: Any, offer_of: Any) -> None:
    offer, _ = offer_of()
    folder.files = FailingFiles(errno.EIO)
    with pytest.raises(StoreError, match="could not make an offer durable"):
        folder.perform(KeepOffer(offer))
