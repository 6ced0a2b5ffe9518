"""The parts of the world of faults: its disk, its links, its values and the law of credit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from isles.brokers.store.blobs import FolderBlobs, MissingBlobError
from isles.ops.simulation.credit import CreditBook
from isles.ops.simulation.disk import FOLDER, ROTS, PowerLostError, SimulatedFiles
from isles.ops.simulation.network import Episode, Network
from isles.ops.simulation.values import Pair, counted, is_once_each, lane_of, missing, once
from isles.proto.errors import PayloadError
from isles.proto.messages import BlobRef, Channel, Chunk, Credit, Fetch, Grant

BLOB = BlobRef(digest="a591a6d40bf420404a011733cfb7b190d62c65bf0bcda32b57b277d9ad9f146e", size_bytes=11)
DATA = b"Hello World"


def files(seed: int = 0) -> SimulatedFiles:
    return SimulatedFiles(random.Random(seed))


def test_a_blob_that_was_made_durable_survives_every_power_failure() -> None:
    for seed in range(20):
        disk = files(seed)
        blobs = FolderBlobs(FOLDER, disk)
        blobs.write(1, 0, DATA)
        blobs.finish(1, BLOB)
        disk.fail_power()
        assert FolderBlobs(FOLDER, disk).read(BLOB, 0, 11) == DATA


def test_a_file_that_was_not_synced_may_lose_any_of_its_bytes() -> None:
    left = set()
    for seed in range(60):
        disk = files(seed)
        with disk.create(Path("blobs/x")) as file:
            disk.write(file, DATA)
        disk.sync_folder(FOLDER)
        disk.fail_power()
        with disk.open(Path("blobs/x")) as file:
            left.add(file.read())
    assert {b"", DATA} < left
    assert any(data.strip(b"\0") == b"" and data for data in left)


def test_a_name_that_was_not_synced_may_be_gone() -> None:
    found = set()
    for seed in range(20):
        disk = files(seed)
        with disk.create(Path("blobs/x")) as file:
            disk.sync(file)
        disk.fail_power()
        found.add(tuple(disk.names(FOLDER)))
    assert found == {(), ("x",)}


def test_power_fails_in_the_middle_of_what_a_disk_does() -> None:
    disk = files()
    blobs = FolderBlobs(FOLDER, disk)
    blobs.write(1, 0, DATA)
    disk.operations_left = 1
    with pytest.raises(PowerLostError):
        blobs.finish(1, BLOB)


def test_a_blob_that_rots_is_noticed_when_it_is_read_or_doubted() -> None:
    seen = set()
    for seed in range(30):
        disk = files(seed)
        blobs = FolderBlobs(FOLDER, disk)
        blobs.write(1, 0, DATA)
        blobs.finish(1, BLOB)
        how = disk.rot(BLOB.digest)
        assert disk.is_rotten(BLOB.digest)
        if how == "flip":
            assert blobs.read(BLOB, 0, 11) != DATA, "its time of change is what it was when it was found to be right"
            blobs.doubt(BLOB.digest)
        seen.add(how)
        for reader in (blobs, FolderBlobs(FOLDER, disk)):
            with pytest.raises((PayloadError, MissingBlobError)):
                reader.read(BLOB, 0, 11)
    assert seen == set(ROTS)


def test_what_has_rotted_is_whole_again_once_it_was_written_anew_or_put_back() -> None:
    for seed in range(6):
        disk = files(seed)
        blobs = FolderBlobs(FOLDER, disk)
        for transfer in (1, 2):
            blobs.write(transfer, 0, DATA)
            blobs.finish(transfer, BLOB)
            assert not disk.is_rotten(BLOB.digest)
            disk.rot(BLOB.digest)
        disk.mend(BLOB.digest)
        assert not disk.is_rotten(BLOB.digest)
        disk.fail_power()
        assert blobs.read(BLOB, 0, 11) == DATA


def arrivals(network: Network, direction: str = "up", time: float = 0.0) -> list[float]:
    assert direction in ("up", "down")
    return network.send(b"c1", "l0", "near", "up" if direction == "up" else "down", Channel.CONTROL, time)


def test_messages_on_one_link_arrive_in_order_unless_the_weather_is_bad() -> None:
    network = Network(random.Random(1))
    times = [time for sent in range(100) for time in arrivals(network, time=sent / 10_000)]
    assert len(times) == 100
    assert times == sorted(times)
    network.begin(Episode("reordering", "l0", 9.0))
    times = [time for sent in range(100) for time in arrivals(network, time=sent / 10_000)]
    assert times != sorted(times)


def test_a_partition_of_one_way_lets_the_other_way_through() -> None:
    network = Network(random.Random(1))
    network.begin(Episode("one-way partition", "near", 5.0, "up"))
    assert arrivals(network, "up", 1.0) == []
    assert len(arrivals(network, "down", 1.0)) == 1
    assert len(arrivals(network, "up", 5.0)) == 1


def test_a_clogged_link_delivers_everything_when_it_is_free_again() -> None:
    network = Network(random.Random(1))
    network.begin(Episode("clog", "near", 5.0))
    assert {time for sent in range(10) for time in arrivals(network, time=sent / 10)} == {5.0}


def test_other_places_have_their_own_weather() -> None:
    network = Network(random.Random(1))
    network.begin(Episode("partition", "far", 5.0))
    assert len(arrivals(network)) == 1


def test_more_than_was_granted_breaks_the_law_of_credit() -> None:
    book = CreditBook(chunk_bytes=10, credit_chunks=2)
    book.reach(b"c", Grant(transfer=7, offset=0, credit_chunks=2), is_at_broker=False)
    book.leave(b"c", Chunk(transfer=7, offset=10), 10, is_from_broker=False)
    with pytest.raises(AssertionError, match="byte 30"):
        book.leave(b"c", Chunk(transfer=7, offset=20), 10, is_from_broker=False)
    book.reach(b"c", Credit(transfer=7, offset=10), is_at_broker=False)
    book.leave(b"c", Chunk(transfer=7, offset=20), 10, is_from_broker=False)


def test_a_broker_sends_no_more_than_was_asked_for() -> None:
    book = CreditBook(chunk_bytes=10, credit_chunks=1)
    with pytest.raises(AssertionError):
        book.leave(b"c", Chunk(transfer=7, offset=0), 10, is_from_broker=True)
    book.reach(b"c", Fetch(transfer=7, digest="0" * 64), is_at_broker=True)
    book.leave(b"c", Chunk(transfer=7, offset=0), 10, is_from_broker=True)
    book.reach(b"c", Credit(transfer=7, offset=10), is_at_broker=True)
    book.leave(b"c", Chunk(transfer=7, offset=10), 10, is_from_broker=True)


def test_each_item_of_each_learner_has_a_lane_of_its_own() -> None:
    lanes = [lane_of(index, item) for index in range(8) for item in range(50)]
    total = sum(map(once, lanes))
    assert is_once_each(total)
    assert counted(total) == sorted(lanes)
    assert not is_once_each(total + once(lanes[3]))
    assert missing(total, total - once(lanes[3])) == [lanes[3]]


def test_values_come_back_from_their_bytes() -> None:
    for value in (Pair(0), Pair(-7, once(3)), Pair(12, -once(900) - once(901)), Pair(1, once(0))):
        assert Pair.decode(value.encode()) == value


def test_bytes_of_no_value_are_refused() -> None:
    for data in (b"", b"1 2", b"a b c", b"1 2 3 4"):
        with pytest.raises(PayloadError):
            Pair.decode(data)


def test_what_two_versions_share_is_added_exactly() -> None:
    first, second = Pair(3, once(1)), Pair(5, once(1) + once(2))
    assert first + second - second == first
    assert (second - first).lanes == once(2)
    assert first * 0.5 + (first - first * 0.5) == first
