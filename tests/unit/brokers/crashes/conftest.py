"""One life of a broker on a real folder, with notes of everything that it does to its store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from isles.brokers.broker import Broker
from isles.brokers.settings import BrokerSettings
from isles.brokers.stage import blob_of
from isles.brokers.store.blobs import FolderBlobs
from isles.brokers.store.disk import InlineDisk
from isles.brokers.store.rehearsal import (
    Note,
    Promised,
    RecordingFiles,
    RecordingIndex,
)
from isles.brokers.store.store import BLOBS_NAME, INDEX_NAME, Store
from isles.brokers.vocabulary import DiskEvent, DiskOrder
from isles.proto.agreement import RunRecord
from isles.proto.clock import ManualClock
from isles.proto.ids import ContributionId
from isles.proto.logs import ListLogger
from isles.proto.messages import (
    Accepted,
    Channel,
    Checkpoint,
    Chunk,
    Commit,
    Committed,
    Contribution,
    Credit,
    Done,
    Grant,
    Hello,
    Ingredient,
    Init,
    Initialised,
    Lease,
    List,
    Listing,
    Message,
    Offer,
    Recipe,
    Rejection,
    Settle,
    Settled,
    Stored,
    Upload,
    VersionInfo,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.interface import Arrival, Bytes

CHUNK = 4096
CHECKPOINTED = (2, 3, 6)
REJECTED_AT, RESTART_AT, LAST = 3, 4, 8


class Wire:
    """A transport that notes what the broker says, and to which question."""

    def __init__(self, notes: list[Note]) -> None:
        self.notes = notes
        self.arrivals: list[Arrival] = []
        self.answers: list[Message] = []
        self._asks: dict[tuple[bytes, int], Message] = {}

    def send(self, channel: Channel, connection: bytes, header: bytes, payload: Bytes | None = None) -> bool:
        message = unpack(header)
        if not isinstance(message, Credit):
            self.notes.append(Promised((self._asks.get((connection, message.request)), message)))
        self.answers.append(message)
        return True

    def publish(self, header: bytes) -> None:
        self.notes.append(Promised((None, unpack(header))))

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        for arrival in arrivals:
            message = unpack(arrival.header)
            self._asks[arrival.connection, message.request] = message
        return arrivals

    def take_cuts(self) -> dict[str, int]:
        return {}

    def recheck(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class LateDisk(InlineDisk):
    """Does what it is told one turn later, so that more has been decided meanwhile."""

    def __init__(self, blobs: Any, wake: Callable[[], None]) -> None:
        super().__init__(blobs, wake)
        self._orders: list[DiskOrder] = []

    def submit(self, order: DiskOrder) -> None:
        self._orders.append(order)

    def completed(self) -> list[DiskEvent]:
        orders, self._orders = self._orders, []
        for order in orders:
            super().submit(order)
        return super().completed()


@dataclass
class House:
    """A broker on a real folder, turned by hand."""

    folder: Path
    notes: list[Note] = field(default_factory=list)
    is_disk_late: bool = False
    clock: ManualClock = field(default_factory=ManualClock)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.settings = BrokerSettings(
            chunk_bytes=CHUNK, versions_kept=2, num_shards=4, flush_seconds=0.5, unused_blob_seconds=4.0
        )
        self.start()

    def start(self) -> None:
        files = RecordingFiles(self.notes)
        files.make_folder(self.folder)
        self.index = RecordingIndex(self.folder / INDEX_NAME, self.notes)
        self.blobs = FolderBlobs(self.folder / BLOBS_NAME, files)
        self.wire = Wire(self.notes)
        disk = (LateDisk if self.is_disk_late else InlineDisk)(self.blobs, self.wire.wake)
        store = Store(self.index, self.blobs)
        self.broker = Broker(self.settings, self.wire, store, self.clock, ListLogger(), disk)
        self.broker.start()
        self.sessions: dict[str, str] = {}

    def kill(self) -> None:
        """The process is gone, with nothing tidied up."""
        self.index.close()
        for unfinished in self.blobs._partials.values():
            unfinished.file.close()

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.broker.work(0.0)

    def say(self, who: str, message: Message, payload: bytes | None = None) -> Message:
        """Says one thing as a client of this name, once HELLO was said; the last answer but CREDIT."""
        if who not in self.sessions and not isinstance(message, Hello):
            role: Any = "outer" if who.startswith("outer") else "worker"
            welcome = self.say(who, Hello(role=role, id=who, incarnation=incarnation(who)))
            assert isinstance(welcome, Welcome)
            self.sessions[who] = welcome.new_session
        self.num_asked += 1
        said = message.model_copy(update={"session": self.sessions.get(who, ""), "request": self.num_asked})
        channel = Channel.CONTROL if payload is None else Channel.BULK
        self.wire.answers.clear()
        self.wire.arrivals.append(Arrival(channel, who.encode(), pack(said), payload))
        for _ in range(4):
            self.broker.work(0.0)
        answers = [answer for answer in self.wire.answers if not isinstance(answer, Credit | Chunk)]
        return answers[-1] if answers else Credit(transfer=0, offset=0)

    def send(self, who: str, message: Message, data: bytes, num_bytes: int | None = None) -> Message:
        """Uploads, perhaps only so many bytes; the last answer."""
        answer = self.say(who, message)
        if not isinstance(answer, Grant):
            return answer
        last: Message = answer
        for offset in range(answer.offset, len(data) if num_bytes is None else num_bytes, CHUNK):
            last = self.say(who, Chunk(transfer=answer.transfer, offset=offset), data[offset : offset + CHUNK])
        return last


def incarnation(who: str) -> str:
    return who.encode().hex().ljust(16, "0")[-16:]


# ------------------------------------------------------------------------------------------------------------ one life


def begin(house: House, record: RunRecord) -> None:
    first = [f"parameters {fragment} ".encode() * 500 for fragment in range(2)]
    for data in first:
        assert isinstance(house.send("a", Upload(blob=blob_of(data)), data), Stored)
    infos = tuple(
        VersionInfo(fragment=fragment, version=0, parameters_sha256="0" * 64, parameters=blob_of(data))
        for fragment, data in enumerate(first)
    )
    assert isinstance(house.say("a", Init(run_record=record, versions=infos)), Initialised)


def contribute(house: House, who: str, number: int, base: int, data: bytes | None = None) -> Contribution:
    data = data or f"delta {number} of {who} ".encode() * 400
    contribution = Contribution(
        id=ContributionId(who, 0, incarnation(who), number),
        base_version=base,
        blob=blob_of(data),
        codec="int4",
        tokens=10,
        steps=1,
        seconds=1.0,
        norms=(1.0,),
    )
    assert isinstance(house.send(who, Offer(contribution=contribution), data), Accepted)
    return contribution


def make_commit(contributions: tuple[Contribution, ...], epoch: int, base: int) -> tuple[Commit, bytes]:
    update = f"update {base + 1} ".encode() * 300
    ingredients = tuple(
        Ingredient(
            id=one.id,
            digest=one.blob.digest,
            size_bytes=one.blob.size_bytes,
            base_version=one.base_version,
            tokens=one.tokens,
            steps=one.steps,
            weight=1.0,
        )
        for one in contributions
    )
    commit = Commit(
        commit_id=f"{base + 1:016x}",
        fragment=0,
        epoch=epoch,
        base_version=base,
        parameters_sha256="1" * 64,
        update=blob_of(update),
        recipe=Recipe(ingredients=ingredients, fraction=1.0, merge_rule="mean", settings_digest="2" * 64),
    )
    return commit, update


def merge(house: House, epoch: int, base: int) -> Commit:
    listing = house.say("outer-a", List(fragment=0))
    assert isinstance(listing, Listing)
    commit, update = make_commit(listing.pending, epoch, base)
    assert isinstance(house.send("outer-a", Upload(blob=blob_of(update)), update), Stored)
    assert isinstance(house.say("outer-a", commit), Committed)
    return commit


def checkpoint(house: House, epoch: int, version: int) -> Checkpoint:
    parts = [f"{part} of version {version} ".encode() * 300 for part in ("parameters", "momentum", "remainder")]
    for data in parts:
        assert isinstance(house.send("outer-a", Upload(blob=blob_of(data)), data), Stored)
    parameters, momentum, remainder = map(blob_of, parts)
    message = Checkpoint(
        fragment=0, epoch=epoch, version=version, parameters=parameters, momentum=momentum, remainder=remainder
    )
    assert isinstance(house.say("outer-a", message), Done)
    return message


def lease(house: House) -> int:
    house.wait(house.settings.outer_lease_seconds + 0.1)
    leased = house.say("outer-a", Lease(fragments=(0, 1)))
    return int(leased.epochs[0])  # type: ignore[attr-defined]


def live(house: House, record: RunRecord) -> None:
    """Everything that a broker does to its store, some of it twice."""
    begin(house, record)
    epoch, first_delta = lease(house), b"delta 0 of a " * 400
    for base in range(LAST):
        contribute(house, "a", base, base, first_delta if base == LAST - 1 else None)
        other = contribute(house, "b", base, base)
        if base == REJECTED_AT:
            rejection = Rejection(id=other.id, reason="not finite")
            assert isinstance(house.say("outer-a", Settle(fragment=0, epoch=epoch, rejections=(rejection,))), Settled)
        commit = merge(house, epoch, base)
        if base + 1 in CHECKPOINTED:
            message = checkpoint(house, epoch, base + 1)
        house.wait(0.6)
        if base == RESTART_AT:
            spare = b"spare " * 1000
            house.send("b", Upload(blob=blob_of(b"half" * 3000)), b"half" * 3000, num_bytes=CHUNK)
            assert isinstance(house.send("b", Upload(blob=blob_of(spare)), spare), Stored)
            house.kill()
            house.start()
            assert isinstance(house.say("outer-a", commit), Committed)
            assert isinstance(house.say("outer-a", message), Done)
            house.wait(5.0)
            assert blob_of(spare).digest not in house.index.digests()
            assert isinstance(house.send("b", Upload(blob=blob_of(spare)), spare), Stored)
            epoch = lease(house)


def recorded(folder: Path, *, record: RunRecord, is_disk_late: bool = False) -> list[Note]:
    house = House(folder, is_disk_late=is_disk_late)
    live(house, record)
    house.kill()
    return house.notes


@pytest.fixture
def record_life(record: RunRecord) -> Callable[..., list[Note]]:
    """Lives once in a folder; the notes."""
    return partial(recorded, record=record)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., list[Note]], bool], list[Note]]:
    """The notes of one life, recorded once."""
    made: dict[bool, list[Note]] = {}

    def get(record_life: Callable[..., list[Note]], is_disk_late: bool) -> list[Note]:
        if is_disk_late not in made:
            made[is_disk_late] = record_life(tmp_path_factory.mktemp("life"), is_disk_late=is_disk_late)
        return made[is_disk_late]

    return get


@pytest.fixture
def go_on() -> Callable[[Path], tuple[int, int]]:
    """Starts a broker on what a crash left and works with it; the head before and after."""

    def run(folder: Path) -> tuple[int, int]:
        house = House(folder)
        before = house.index.head_version(0)
        assert before is not None
        contribute(house, "late", 0, before)
        epoch = lease(house)
        merge(house, epoch, before)
        checkpoint(house, epoch, before + 1)
        after = house.index.head_version(0)
        assert after is not None
        house.kill()
        return before, after

    return run
