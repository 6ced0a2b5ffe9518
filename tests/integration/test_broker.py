"""The broker as a process of its own over ZeroMQ: kills, garbage, strangers, restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from isles.brokers.stage import blob_of
from isles.brokers.store.store import Store
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.client import Answered, Fetched, FetchFailed
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import RefusedError
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    Accepted,
    AskHeads,
    AskStatus,
    BlobRef,
    Contribution,
    Error,
    Heads,
    Hello,
    Init,
    Initialised,
    Message,
    Offer,
    Status,
    Stored,
    Upload,
    VersionInfo,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.address import Address
from isles.proto.transport.zmq_transport import ZmqClient

NUM_FRAGMENTS = 8
NUM_KILLS = 10
WAIT_SECONDS = 60.0
PARAMETERS = b"parameters " * 1000


class BrokerProcess:
    """`isles broker` on a folder; started, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._started = threading.Event()
        self.port = 0

    def start(self) -> Address:
        self._started.clear()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        command = [Path(sys.executable).with_name("isles"), "broker", "--store", self.folder, "--port", str(self.port)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self._reader = threading.Thread(target=self._read, args=(self._process,))
        self._reader.start()
        assert self._started.wait(WAIT_SECONDS), self.logs
        return Address.parse((self.folder / "address").read_text())

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.logs.append(json.loads(line) if line.startswith("{") else {"event": "printed", "text": line})
            if self.logs[-1]["event"] == "broker.started":
                self._started.set()

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self._process is not None
        assert self._reader is not None
        self._process.send_signal(number)
        code = self._process.wait(WAIT_SECONDS)
        self._reader.join(WAIT_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process = None
        return code

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def events(self) -> list[str]:
        return [log["event"] for log in self.logs]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path / "store")
    yield process
    if process.is_running:
        process.end()


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    """Makes connections, which are closed in the end."""
    made: list[Connection] = []

    def run(address: Address, role: Any = "worker", name: str = "us-1", **fields: Any) -> Connection:
        hello = Hello(role=role, id=name, incarnation="ab" * 8, **fields)
        made.append(Connection(hello, ZmqClient(address), SystemClock()))
        return made[-1]

    yield run
    for connection in made:
        connection.close()


def wait(connection: Connection, is_wanted: Callable[[Any], bool]) -> Any:
    """The next piece of news that is wanted."""
    clock = SystemClock()
    deadline = clock.now() + WAIT_SECONDS
    while clock.now() < deadline:
        for news in connection.poll(1.0):
            if is_wanted(news):
                return news
    raise AssertionError("nothing came")


def take_answers(connection: Connection, num_wanted: int) -> list[Message]:
    """At least so many answers, and all that came with the last of them: one poll may bring several."""
    clock = SystemClock()
    deadline = clock.now() + WAIT_SECONDS
    answers: list[Message] = []
    while len(answers) < num_wanted:
        assert clock.now() < deadline, f"{len(answers)} of {num_wanted} answers came"
        answers += [news.reply for news in connection.poll(1.0) if isinstance(news, Answered)]
    return answers


def ask(connection: Connection, message: Message, payload: bytes | None = None) -> Message:
    connection.ask(message, payload)
    answered = wait(connection, lambda news: isinstance(news, Answered) and news.ask is message)
    reply: Message = answered.reply
    return reply


def welcome(connection: Connection) -> Welcome:
    return connection.wait_for_welcome(WAIT_SECONDS, address="here").welcome


def initialise(connection: Connection) -> None:
    specs = [TensorSpec(f"w{number}", (2,), "float32", "parameter") for number in range(NUM_FRAGMENTS)]
    manifest = Manifest.build(specs, {}, NUM_FRAGMENTS)
    record = RunRecord(
        run="trial",
        seed=1,
        sync=SyncSettings(num_fragments=NUM_FRAGMENTS),
        budget=Budget(tokens=1000),
        manifest_digest=manifest.digest,
        manifest=manifest.to_text(),
    )
    assert isinstance(ask(connection, Upload(blob=blob_of(PARAMETERS)), PARAMETERS), Stored)
    versions = tuple(
        VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(PARAMETERS))
        for number in range(NUM_FRAGMENTS)
    )
    assert isinstance(ask(connection, Init(run_record=record, versions=versions)), Initialised)


def contribution_of(learner: str, fragment: int, data: bytes) -> Contribution:
    return Contribution(
        id=ContributionId(learner, fragment, "ab" * 8, 0),
        base_version=0,
        blob=blob_of(data),
        codec="int4",
        tokens=1,
        steps=1,
        seconds=1.0,
        norms=(1.0,),
    )


def fetch(connection: Connection, blob: BlobRef) -> bytes:
    connection.fetch(blob, bytes_max=1 << 30)
    news = wait(connection, lambda news: isinstance(news, Fetched | FetchFailed))
    assert isinstance(news, Fetched), news
    return bytes(news.data)


@pytest.mark.slow
def test_no_acknowledged_contribution_is_lost_by_kill_9_at_any_moment(
    broker: BrokerProcess, connect: Callable[..., Connection]
) -> None:
    chance = random.Random(20)
    promised: dict[ContributionId, bytes] = {}
    for attempt in range(NUM_KILLS):
        connection = connect(broker.start(), name=f"us-{attempt}")
        welcome(connection)
        if attempt == 0:
            initialise(connection)
        offered = {}
        for fragment in range(NUM_FRAGMENTS):
            data = chance.randbytes(chance.choice([3_000, 400_000, 1_500_000]))
            contribution = contribution_of(f"us-{attempt}", fragment, data)
            offered[contribution.id] = data
            connection.ask(Offer(contribution=contribution), data)
        for answer in take_answers(connection, chance.randrange(NUM_FRAGMENTS)):
            assert isinstance(answer, Accepted)
            promised[answer.id] = offered[answer.id]
        broker.end(signal.SIGKILL)
        connection.close()
    check_promises(broker, promised, connect)
    assert promised


def check_promises(
    broker: BrokerProcess, promised: dict[ContributionId, bytes], connect: Callable[..., Connection]
) -> None:
    """Everything that was promised has its row, every row has its bytes, and a start leaves nothing lying about."""
    connection = connect(broker.start(), role="operator", name="me")
    welcome(connection)
    for name, data in promised.items():
        assert fetch(connection, blob_of(data)) == data, name
    broker.end(signal.SIGTERM)
    store = Store.open(broker.folder)
    rows = {row.id: row for number in range(NUM_KILLS) for row in store.index.rows_of(f"us-{number}")}
    assert {name for name in promised if rows[name].state != "pending"} == set()
    for row in rows.values():
        blob = row.contribution.blob
        assert store.blobs.read(blob, 0, blob.size_bytes)
    assert {path.name for path in (broker.folder / "blobs").iterdir()} == store.index.digests()
    store.close()


def test_a_stranger_and_garbage_on_every_socket_change_nothing(
    broker: BrokerProcess, connect: Callable[..., Connection]
) -> None:
    address = broker.start()
    honest = connect(address)
    welcome(honest)
    initialise(honest)
    chance = random.Random(7)
    messages = [[chance.randbytes(chance.randrange(1, 300))] for _ in range(40)] + [
        [],
        [b"", b"", b"", b""],
        [pack(AskHeads(session="nobody"))],
        [b"\x92" * 5000],
        [pack(Upload(blob=blob_of(b"x"), session="cd" * 8)), b"payload"],
    ]
    context = zmq.Context()
    answered = 0
    for endpoint in (address.control, address.bulk):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 1000
        dealer.connect(endpoint)
        for frames in messages:
            dealer.send_multipart(frames or [b""])
        for _ in messages:
            assert dealer.poll(WAIT_SECONDS * 1000)
            answered += isinstance(unpack(dealer.recv_multipart()[0]), Error)
        dealer.close()
    subscriber = context.socket(zmq.XSUB)
    subscriber.linger = 1000
    subscriber.connect(address.events)
    for frames in messages:
        subscriber.send_multipart(frames or [b""])
    subscriber.close()
    context.term()
    assert answered == 2 * len(messages)
    status = ask(honest, AskStatus())
    assert isinstance(status, Status)
    assert (status.run, [info.version for info in status.fragments]) == ("trial", [0] * NUM_FRAGMENTS)
    assert fetch(honest, blob_of(PARAMETERS)) == PARAMETERS
    assert broker.events().count("message.refused") == answered
    assert {"printed", "process.failed"}.isdisjoint(broker.events())


@pytest.mark.parametrize(
    "fields",
    [{"protocol_min": (9, 0), "protocol_max": (9, 1)}, {"run": "other"}, {"manifest_digest": "d" * 64}],
)
def test_a_process_that_does_not_belong_here_ends_with_the_reason(
    broker: BrokerProcess, connect: Callable[..., Connection], fields: dict[str, Any]
) -> None:
    address = broker.start()
    first = connect(address, name="founder")
    welcome(first)
    initialise(first)
    with pytest.raises(RefusedError, match="refused this process"):
        welcome(connect(address, **fields))
    broker.end(signal.SIGTERM)
    assert "client.refused" in broker.events()


def test_a_restarted_broker_at_the_same_address_is_found_again_and_goes_on(
    broker: BrokerProcess, connect: Callable[..., Connection]
) -> None:
    address = free_ports(broker)
    connection = connect(address)
    before = welcome(connection).broker_incarnation
    initialise(connection)
    data = bytes(range(256)) * 20_000
    connection.ask(Offer(contribution=contribution_of("us-1", 3, data)), data)
    broker.end(signal.SIGKILL)
    assert broker.start() == address
    answered = wait(connection, lambda news: isinstance(news, Answered) and isinstance(news.ask, Offer))
    assert isinstance(answered.reply, Accepted)
    heads = ask(connection, AskHeads())
    assert isinstance(heads, Heads)
    assert heads.broker_incarnation != before
    assert [row.id.fragment for row in heads.rows] == [3]
    assert fetch(connection, blob_of(data)) == data


def free_ports(broker: BrokerProcess) -> Address:
    """Starts the broker on three ports in a row; another process may take them first, so it may need to try again."""
    chance = random.Random()
    for _ in range(20):
        broker.port = chance.randrange(20_000, 32_000)
        probes: list[zmq.Socket[bytes]] = [zmq.Context.instance().socket(zmq.REP) for _ in range(3)]
        try:
            for number, probe in enumerate(probes):
                probe.bind(f"tcp://127.0.0.1:{broker.port + number}")
        except zmq.ZMQError:
            continue
        finally:
            for probe in probes:
                probe.close(0)
        return broker.start()
    raise AssertionError("no free ports")


def test_a_second_broker_on_the_store_is_refused_and_the_first_goes_on(
    broker: BrokerProcess, connect: Callable[..., Connection]
) -> None:
    address = broker.start()
    second = subprocess.run(
        [Path(sys.executable).with_name("isles"), "broker", "--store", broker.folder, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert second.returncode == 2
    assert "another broker is using the store folder" in second.stderr
    assert "Traceback" not in second.stderr
    assert welcome(connect(address)).run_record is None


def test_a_broker_that_is_told_to_stop_ends_cleanly_and_keeps_its_counters(
    broker: BrokerProcess, connect: Callable[..., Connection]
) -> None:
    connection = connect(broker.start())
    welcome(connection)
    initialise(connection)
    fetch(connection, blob_of(PARAMETERS))
    assert broker.end(signal.SIGTERM) == 0
    store = Store.open(broker.folder)
    assert store.index.counter("bytes_down") == len(PARAMETERS)
    store.close()


def test_the_broker_loads_no_tensor_library() -> None:
    program = (
        "import sys, isles.brokers.broker, isles.brokers.settings, isles.proto.transport.zmq_transport\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=WAIT_SECONDS)
