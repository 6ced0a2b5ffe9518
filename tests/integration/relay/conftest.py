"""A home broker, relays and their workers over real sockets, with a link between that can be cut and is counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest

from isles.brokers.stage import blob_of
from isles.ops.chaos.campaign import CLEAR, LinkShape
from isles.ops.chaos.proxy import Network
from isles.ops.key_folder import KeyFolder
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.client import Answered, Fetched, FetchFailed
from isles.proto.clock import SystemClock
from isles.proto.connection import News
from isles.proto.ids import ContributionId
from isles.proto.key_files import client_file
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    AskStatus,
    BlobRef,
    Commit,
    Contribution,
    Hello,
    Ingredient,
    Init,
    Initialised,
    Lease,
    Leased,
    Message,
    Offer,
    Recipe,
    Role,
    Status,
    Stored,
    Upload,
    VersionInfo,
    Welcome,
)
from isles.proto.route import Route
from isles.proto.transport.address import Address

WAIT_SECONDS: Final = 90.0
"""Bound of every wait here; nothing takes a tenth of it unless it is broken."""
POLL_SECONDS: Final = 0.25
ISLES: Final = Path(sys.executable).with_name("isles")
LINK: Final = "relay"
PARAMETERS: Final = b"parameters " * 1000


class Lines:
    """What a process says in JSON, one object a line; read as it comes."""

    def __init__(self, stream: IO[str]) -> None:
        self._said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._stream = stream
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            said = json.loads(line) if line.startswith("{") else {"event": "printed", "text": line}
            with self._changed:
                self._said.append(said)
                self._changed.notify_all()

    def wait_for(self, event: str, num: int = 1, **fields: Any) -> dict[str, Any]:
        """The so-manieth line with this event and these fields, whenever it is or was said."""

        def find() -> dict[str, Any] | None:
            found = [said for said in self._said if said["event"] == event and fields.items() <= said.items()]
            return found[num - 1] if len(found) >= num else None

        with self._changed:
            wanted = self._changed.wait_for(find, WAIT_SECONDS)
        assert wanted, (event, fields, self._said[-20:])
        return wanted

    def of(self, event: str) -> list[dict[str, Any]]:
        with self._changed:
            return [said for said in self._said if said["event"] == event]

    def close(self) -> None:
        """Once the process has ended."""
        self._thread.join(WAIT_SECONDS)
        self._stream.close()


class BrokerProcess:
    """`isles broker` with some flags; it may be killed and started again."""

    def __init__(self, store: Path, *flags: object) -> None:
        self.store = store
        self._flags = flags
        self.start()

    def start(self, *more: object) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        command = [ISLES, "broker", "--store", self.store, "--port", 0, "--tick-seconds", 0.05, "--log-level", "debug"]
        self.process = subprocess.Popen(
            [str(part) for part in (*command, *self._flags, *more)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            text=True,
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        self.logs = Lines(self.process.stderr)
        started = "relay.started" if "--upstream" in self._flags else "broker.started"
        self.address = Address.parse(str(self.logs.wait_for(started)["address"]))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(WAIT_SECONDS)
        self.logs.close()
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


class Party:
    """A connection of a worker, an outer or an operator, and what it says and hears."""

    def __init__(self, route: Route, role: Role, name: str, incarnation: str) -> None:
        self.id, self.incarnation = name, incarnation
        hello = Hello(role=role, id=name, incarnation=incarnation, region="us")
        self.connection = route.connect(hello)
        self.heard: list[News] = []

    def join(self) -> Welcome:
        return self.connection.wait_for_welcome(WAIT_SECONDS, address="here").welcome

    def wait_for(self, is_wanted: Callable[[Any], bool]) -> Any:
        """The first piece of news that is wanted, whenever it comes or came."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_SECONDS
        while clock.now() < deadline:
            for news in self.heard:
                if is_wanted(news):
                    return news
            self.heard += self.connection.poll(1.0)
        raise AssertionError(f"{self.id} did not hear it, but {self.heard[-5:]}")

    def answer(self, ask: Message) -> Message:
        """The final answer to this very ask."""
        reply: Message = self.wait_for(lambda news: isinstance(news, Answered) and news.ask is ask).reply
        return reply

    def ask(self, message: Message, payload: bytes | None = None) -> Message:
        self.connection.ask(message, payload)
        return self.answer(message)

    def fetch(self, blob: BlobRef) -> bytes:
        def is_it(news: News) -> bool:
            return isinstance(news, Fetched | FetchFailed) and news.blob == blob and news not in before

        before = list(self.heard)
        self.connection.fetch(blob, bytes_max=1 << 30)
        news = self.wait_for(is_it)
        assert isinstance(news, Fetched), news
        return bytes(news.data)

    def status(self) -> Status:
        status = self.ask(AskStatus())
        assert isinstance(status, Status)
        return status

    def poll_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Goes on with the protocol until something is so."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_SECONDS
        while not is_done():
            assert clock.now() < deadline, f"{what} did not happen"
            self.heard += self.connection.poll(POLL_SECONDS)

    def close(self) -> None:
        self.connection.close()


class Region:
    """A run at home, a relay of the region us, and the link between them."""

    def __init__(self, folder: Path, *flags: object, keys: KeyFolder | None = None) -> None:
        self._folder = folder
        self._flags = flags
        self._closing: list[Any] = []
        self.keys = keys
        if keys is not None:
            keys.add("relay", "relay", 0)
            keys.add("me", "operator", 0)
            for name in ("us-1", "us-2"):
                keys.add(name, "worker", 0, relays=["relay"])
        self.home = self._keep(BrokerProcess(folder / "home", *(() if keys is None else ("--keys", keys.path))))
        self.network = Network(self.home.address, [LINK])
        self.network.start()
        self.relay = self.add_relay("relay")

    def _keep(self, made: Any) -> Any:
        self._closing.append(made)
        return made

    def add_relay(self, name: str, *flags: object) -> BrokerProcess:
        upstream = self.network.addresses[LINK]
        own = ("--id", name) if self.keys is None else ("--key", self._key(name))
        more = ("--upstream", upstream, *own, "--region", "us", *self._flags, *flags)
        relay: BrokerProcess = self._keep(BrokerProcess(self._folder / name, *more))
        relay.logs.wait_for("link.joined")
        return relay

    def _key(self, name: str) -> Path | None:
        return None if self.keys is None else client_file(self.keys.path, name)

    def party(self, route: Route, name: str, role: Role, incarnation: str) -> Party:
        party: Party = self._keep(Party(route, role, name, incarnation))
        party.join()
        return party

    def worker(self, name: str = "us-1", *, incarnation: str = "a1" * 8, relay: BrokerProcess | None = None) -> Party:
        """A worker of the relay, or of another one, which has joined."""
        address = str((relay or self.relay).address)
        return self.party(Route(None, self._key(name), address), name, "worker", incarnation)

    def at_home(self, name: str = "me", role: Role = "operator", *, incarnation: str = "0f" * 8) -> Party:
        """Somebody who talks to the home broker itself."""
        return self.party(Route(str(self.home.address), self._key(name)), name, role, incarnation)

    def cut(self) -> None:
        self.network.shape(LINK, LinkShape(is_blackhole=True))

    def heal(self) -> None:
        self.network.shape(LINK, CLEAR)

    def passed(self, direction: Any) -> int:
        """Bytes that crossed the link, with everything around them."""
        return self.network.num_bytes(LINK, direction)

    def close(self) -> None:
        for made in reversed(self._closing):
            made.close()
        self.network.close()


@pytest.fixture
def make_region(tmp_path: Path) -> Iterator[Callable[..., Region]]:
    """Makes a region whose relays have some flags; everything ends with the test."""
    made: list[Region] = []

    def make(*flags: object, has_keys: bool = False) -> Region:
        keys = KeyFolder(tmp_path / "keys") if has_keys else None
        made.append(Region(tmp_path, *flags, keys=keys))
        return made[-1]

    yield make
    for region in made:
        region.close()


@pytest.fixture
def initialise() -> Callable[[Party], None]:
    """Has a party make a run of two fragments."""

    def run(party: Party, parameters: bytes = PARAMETERS) -> None:
        specs = [TensorSpec(f"w{number}", (2,), "float32", "parameter") for number in range(2)]
        manifest = Manifest.build(specs, {}, 2)
        record = RunRecord(
            run="trial",
            seed=1,
            sync=SyncSettings(num_fragments=2),
            budget=Budget(tokens=1000),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )
        assert isinstance(party.ask(Upload(blob=blob_of(parameters)), parameters), Stored)
        versions = tuple(
            VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(parameters))
            for number in range(2)
        )
        assert isinstance(party.ask(Init(run_record=record, versions=versions)), Initialised)
        party.connection.start()  # as every worker does, to learn of the run that it has begun
        party.poll_until(lambda: bool(party.connection.client.session), "a WELCOME to the run")

    return run


@pytest.fixture
def offer_of() -> Callable[..., Offer]:
    """The OFFER of some bytes by a party."""

    def make(party: Party, data: bytes, number: int = 0) -> Offer:
        return Offer(
            contribution=Contribution(
                id=ContributionId(party.id, 0, party.incarnation, number),
                base_version=0,
                blob=blob_of(data),
                codec="int4",
                tokens=1,
                steps=1,
                seconds=1.0,
                norms=(1.0,),
            )
        )

    return make


@pytest.fixture
def commit() -> Callable[..., BlobRef]:
    """Has an outer at home make version 1 of fragment 0 out of some offers; the blob of its update."""

    def run(outer: Party, offers: list[Offer], update: bytes) -> BlobRef:
        leased = outer.ask(Lease(fragments=(0,)))
        assert isinstance(leased, Leased)
        assert isinstance(outer.ask(Upload(blob=blob_of(update)), update), Stored)
        ingredients = tuple(
            Ingredient(id=one.id, digest=one.blob.digest, base_version=0, tokens=1, steps=1, weight=1.0)
            for one in sorted((offer.contribution for offer in offers), key=lambda one: one.id)
        )
        message = Commit(
            commit_id="c0" * 8,
            fragment=0,
            epoch=leased.epochs[0],
            base_version=0,
            parameters_sha256="1" * 64,
            optimizer_sha256="3" * 64,
            update=blob_of(update),
            recipe=Recipe(ingredients=ingredients, fraction=1.0, merge_rule="mean", settings_digest="2" * 64),
        )
        outer.ask(message)
        return blob_of(update)

    return run
