"""A home broker, a relay and clients of it on one stage: all cores, no sockets, a clock that is set by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from isles.brokers.relay.limits import RelayingSettings
from isles.brokers.relay.relay import Relay
from isles.brokers.relay.state import Kept
from isles.brokers.relay.vocabulary import (
    BlobMapped,
    BlobUnmappable,
    DropOffer,
    End,
    HomeSaid,
    Instruction,
    KeepKeys,
    KeepOffer,
    MapBlob,
    OfferKept,
    Recheck,
    SendUp,
)
from isles.brokers.stage import Stage, blob_of
from isles.brokers.store.blobs import MemoryBlobs, MissingBlobError
from isles.brokers.store.disk import perform
from isles.brokers.vocabulary import Log, MessageArrived, Publish, Send, Tick
from isles.proto import client as protocol
from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Refused, Welcomed
from isles.proto.errors import PayloadError
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    BlobRef,
    Channel,
    Chunk,
    Contribution,
    Hello,
    Init,
    Message,
    Offer,
    RelayAlive,
    Role,
    Upload,
    pack,
    unpack,
)

STEP_SECONDS = 0.5


@dataclass
class RelayDisk:
    """What a relay keeps, in memory; `restart` of the world leaves it as it is."""

    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    offers: dict[ContributionId, Offer] = field(default_factory=dict)
    keys: RelayAlive | None = None

    def perform(self, order: Any) -> Any:
        match order:
            case KeepOffer(offer):
                kept = unpack(pack(offer))
                assert isinstance(kept, Offer)
                self.offers[offer.contribution.id] = kept
                return OfferKept(offer.contribution.id)
            case DropOffer(name):
                self.offers.pop(name, None)
                return None
            case MapBlob(blob):
                try:
                    return BlobMapped(blob, self.blobs.read(blob, 0, blob.size_bytes))
                except (MissingBlobError, PayloadError) as error:
                    return BlobUnmappable(blob, str(error))
        return perform(self.blobs, order)

    def find(self) -> Kept:
        self.blobs.sweep(set(self.blobs.blobs))
        blobs = tuple(BlobRef(digest=digest, size_bytes=len(data)) for digest, data in self.blobs.blobs.items())
        return Kept(tuple(self.offers.values()), blobs, self.keys)


@dataclass
class Speaker:
    """A client of the relay, with everything it was told."""

    world: World
    client: Client
    connection: bytes
    key: str = ""
    """The public key that it proves to the relay; empty = there are none."""
    news: list[Any] = field(default_factory=list)
    is_gone: bool = False

    def do(self, instructions: list[protocol.Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, protocol.Send):
                self.world.hear_client(self, instruction)
            else:
                self.news.append(instruction)

    def join(self) -> Speaker:
        self.do(self.client.start(self.world.now))
        self.world.settle()
        return self

    def ask(self, message: Message, payload: bytes | None = None) -> None:
        self.do(self.client.ask(message, self.world.now, payload))
        self.world.settle()

    def fetch(self, blob: BlobRef) -> None:
        self.do(self.client.fetch(blob, self.world.now, bytes_max=1 << 30))
        self.world.settle()

    def answers(self, kind: type[Message] = Message) -> list[Message]:
        found = [one.reply for one in self.news if isinstance(one, Answered)]
        return [reply for reply in found if isinstance(reply, kind)]

    def fetched(self) -> list[bytes]:
        return [bytes(one.data) for one in self.news if isinstance(one, Fetched)]

    def told(self, kind: type) -> list[Any]:
        assert kind in (Welcomed, Answered, Fetched, FetchFailed, Hinted, Refused)
        return [one for one in self.news if isinstance(one, kind)]

    def die(self) -> None:
        """Nothing more is heard of it."""
        self.is_gone = True


@dataclass
class World:
    """What passes between them goes through one queue, in order."""

    home: Stage
    settings: RelayingSettings
    name: str = "relay-us"
    disk: RelayDisk = field(default_factory=RelayDisk)
    is_link_up: bool = True
    is_disk_slow: bool = False
    logs: list[Log] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    num_rechecks: int = 0
    sent: list[Send] = field(default_factory=list)
    """Everything that the relay said to its region."""
    passed_up: list[Message] = field(default_factory=list)
    """Everything that the relay said to the home broker and that came through."""
    payload_bytes: Counter[str] = field(default_factory=Counter)
    """Of chunks on the link: up and down."""
    relay_key: str = ""
    _todo: deque[Callable[[], None]] = field(default_factory=deque)
    _speakers: list[Speaker] = field(default_factory=list)
    _waiting: list[Any] = field(default_factory=list)
    _num_starts: int = 0
    _num_sent: int = 0
    _num_hints: int = 0

    def __post_init__(self) -> None:
        self.start()

    @property
    def now(self) -> float:
        return self.home.now

    # ------------------------------------------------------------------------------------------------------- the relay

    def start(self) -> None:
        """A relay starts on the disk as it is."""
        self._num_starts += 1
        incarnation = f"{self._num_starts:08x}" * 4
        kept = self.disk.find()
        self.relay = Relay(self.name, self.settings, incarnation, self.now, has_keys=bool(self.relay_key), kept=kept)
        self._num_sent, self._num_hints = len(self.home.sent), len(self.home.hints)
        self._perform(self.relay.start())
        self.settle()

    def restart(self) -> None:
        """The relay is killed, and starts again."""
        self._todo.clear()
        self._waiting.clear()
        self.start()

    def hear(self, event: Any) -> None:
        self._perform(self.relay.handle(event, self.now))

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Send():
                self.sent.append(instruction)
                self._todo.append(lambda: self._tell(instruction))
            case SendUp():
                self._todo.append(lambda: self._carry_up(instruction))
            case Publish(hint):
                for speaker in self._speakers:
                    self._todo.append(lambda one=speaker: one.do(one.client.handle(hint, self.now)))
            case Log():
                self.logs.append(instruction)
            case End():
                self.ends.append(instruction)
            case KeepKeys(alive):
                self.disk.keys = alive
            case Recheck():
                self.num_rechecks += 1
            case _ if self.is_disk_slow:
                self._waiting.append(instruction)
            case _:
                self._todo.append(lambda: self._work(instruction))

    def _work(self, order: Any) -> None:
        event = self.disk.perform(order)
        if event is not None:
            self.hear(event)

    def work(self) -> None:
        """A slow disk does what waits for it."""
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._work(order)
        self.settle()

    # ------------------------------------------------------------------------------------------------------- both sides

    def hear_client(self, speaker: Speaker, send: protocol.Send) -> None:
        message = unpack(pack(send.message))
        arrival = MessageArrived(send.channel, speaker.connection, message, send.payload, speaker.key)
        self._todo.append(lambda: None if speaker.is_gone else self.hear(arrival))

    def _tell(self, send: Send) -> None:
        for speaker in self._speakers:
            if speaker.connection == send.connection and not speaker.is_gone:
                message = unpack(pack(send.message))
                speaker.do(speaker.client.handle(message, self.now, send.payload))

    def _carry_up(self, order: SendUp) -> None:
        if not self.is_link_up:
            return
        self.passed_up.append(order.message)
        if isinstance(order.message, Chunk):
            self.payload_bytes["up"] += len(order.payload or b"")
        connection = f"{self.name}.{self._num_starts}.{order.link}".encode()
        message = unpack(pack(order.message))
        self.home.hear(MessageArrived(order.channel, connection, message, order.payload, self.relay_key))
        self.take_from_home()

    def take_from_home(self) -> None:
        """Brings the relay what the home broker has said since the last time."""
        sent, hints = self.home.sent[self._num_sent :], self.home.hints[self._num_hints :]
        self._num_sent, self._num_hints = len(self.home.sent), len(self.home.hints)
        for send in sent:
            name, _, link = send.connection.decode().rpartition(".")
            if name == f"{self.name}.{self._num_starts}" and self.is_link_up:
                if isinstance(send.message, Chunk):
                    self.payload_bytes["down"] += len(send.payload or b"")
                said = HomeSaid(int(link), send.channel, unpack(pack(send.message)), send.payload)
                self._todo.append(lambda one=said: self.hear(one))
        for hint in hints if self.is_link_up else ():
            self._todo.append(lambda one=hint: self.hear(HomeSaid(0, Channel.EVENTS, one)))

    def settle(self) -> None:
        """Everything that was said is heard."""
        while self._todo:
            self._todo.popleft()()

    def advance(self, seconds: float) -> None:
        """Time passes for everybody, in steps."""
        end = self.now + seconds
        while self.now < end:
            self.home.advance(min(STEP_SECONDS, end - self.now))
            self.take_from_home()
            self.hear(Tick(self.disk.blobs.free_bytes()))
            for speaker in self._speakers:
                if not speaker.is_gone:
                    speaker.do(speaker.client.tick(self.now))
            self.settle()

    # ----------------------------------------------------------------------------------------------------------- people

    def speaker(
        self,
        name: str = "us-1",
        role: Role = "worker",
        incarnation: str = "a1" * 8,
        *,
        key: str = "",
        prove: Callable[[Message, str], Message] | None = None,
    ) -> Speaker:
        """A client of the relay that has not said anything yet."""
        client = Client(Hello(role=role, id=name, incarnation=incarnation, region="us"), prove)
        self._speakers.append(Speaker(self, client, f"{name}/{incarnation}/{len(self._speakers)}".encode(), key))
        return self._speakers[-1]

    def events(self) -> list[str]:
        return [one.event for one in self.logs]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [dict(one.fields) for one in self.logs if one.event == event]


@pytest.fixture
def relaying() -> dict[str, Any]:
    """Settings of the relay; a test may change them before it asks for a world."""
    return {"chunk_bytes": 4096, "credit_chunks": 2, "region": "us"}


@pytest.fixture
def make_world(stage: Stage, relaying: dict[str, Any]) -> Callable[..., World]:
    """Makes a relay in front of a home broker whose run is at version 0, with other settings than usual."""

    def make(**fields: Any) -> World:
        return World(stage, RelayingSettings(**(relaying | fields)))

    return make


@pytest.fixture
def make_on() -> Callable[..., World]:
    """Makes a relay in front of any home broker."""
    return World


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def new_world(empty_stage: Stage, relaying: dict[str, Any]) -> World:
    """The same where nobody has made the run yet."""
    return World(empty_stage, RelayingSettings(**relaying))


@pytest.fixture
def offer_of() -> Callable[..., tuple[Offer, bytes]]:
    """Makes an OFFER of a learner, and its payload."""

    def make(name: str = "us-1", number: int = 0, *, size: int = 10_000, incarnation: str = "a1" * 8) -> Any:
        data = (f"delta {number} of {name} {incarnation} ".encode() * size)[:size]
        contribution = Contribution(
            id=ContributionId(name, 0, incarnation, number),
            base_version=0,
            blob=blob_of(data),
            codec="int4",
            tokens=100,
            steps=10,
            seconds=1.0,
            norms=(1.0,),
        )
        return Offer(contribution=contribution), data

    return make


@pytest.fixture
def begin(first_init: Init) -> Callable[[Speaker, tuple[bytes, ...]], None]:
    """Has a speaker make the run."""

    def run(speaker: Speaker, parameters: tuple[bytes, ...]) -> None:
        for data in parameters:
            speaker.ask(Upload(blob=blob_of(data)), data)
        speaker.ask(first_init)

    return run
