"""`isles doctor` against whatever may be at the other end of an address: real sockets, all of this machine."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from isles.brokers.broker import serve
from isles.brokers.settings import BrokerSettings
from isles.brokers.stage import blob_of
from isles.ops import main
from isles.ops.key_folder import KeyFolder
from isles.ops.watch import operator_hello
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Init, Initialised, Upload, VersionInfo
from isles.proto.transport.address import Address
from isles.proto.transport.zmq_transport import ZmqClient

HOST = "127.0.0.1"
TIMEOUT = "1"
"""Seconds for whatever does not answer at all; what answers does so at once."""
WAIT_SECONDS = 60.0
PARAMETERS = bytes(range(256)) * (5 << 12)
"""5 MiB, as one fragment's parameters."""


def examine(capsys: pytest.CaptureFixture[str], broker: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and finding by check; one line of JSON and no traceback whatever is there."""
    code = main.run(["doctor", "--broker", broker, "--timeout", TIMEOUT, "--json", *more])
    output = capsys.readouterr()
    assert output.err == ""
    told = json.loads(output.out)
    assert told["is_well"] is (code == 0)
    return code, {finding["check"]: finding for finding in told["findings"]}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Address]]:
    """Starts a broker without a run, on free ports."""
    stop = threading.Event()
    threads = []

    def run(**settings: Any) -> Address:
        made = BrokerSettings(store=tmp_path / "store", port=0, beat_seconds=0.2, **settings)
        thread = threading.Thread(target=serve, args=(made,), kwargs={"logger": ListLogger(), "should_stop": stop})
        thread.start()
        threads.append(thread)
        path = made.store / "address"
        while not path.exists():
            assert thread.is_alive()
            thread.join(0.01)
        return Address.parse(path.read_text(encoding="utf-8").strip())

    yield run
    stop.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def broker(start: Callable[..., Address]) -> Address:
    return start()


@pytest.fixture
def listen() -> Iterator[Callable[[bytes | None], int]]:
    """Opens a port whose other end says these bytes to everybody; None = it takes the connection and says nothing."""
    stop = threading.Event()
    listeners: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def talk(listener: socket.socket, words: bytes | None) -> None:
        connections = []
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                break
            connections.append(connection)
            if words is not None:
                connection.sendall(words)
        for connection in connections:
            connection.close()

    def run(words: bytes | None) -> int:
        listener = socket.create_server((HOST, 0))
        listeners.append(listener)
        threads.append(threading.Thread(target=talk, args=(listener, words)))
        threads[-1].start()
        return int(listener.getsockname()[1])

    yield run
    stop.set()
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


@pytest.fixture
def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_broker_in_order_is_well_line_by_line(broker: Address, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examine(capsys, str(broker))
    assert code == 0
    assert {finding["verdict"] for finding in found.values()} <= {"ok", "warning"}
    assert list(found)[:5] == ["address", "port control", "port bulk", "port events", "key"]
    for check in ("answer", "versions", "round trip", "clock", "events", "store"):
        assert found[check]["verdict"] == "ok", found[check]


def test_the_same_as_a_table_for_a_person(broker: Address, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--broker", str(broker), "--timeout", TIMEOUT]) == 0
    output = capsys.readouterr()
    assert "round trip" in output.out
    assert "nothing is wrong" in output.out


def begin_run(broker: Address) -> None:
    """Starts a run of one fragment at a broker."""
    manifest = Manifest.build([TensorSpec("weight", (len(PARAMETERS) // 4,), "float32", "parameter")], {}, 1)
    record = RunRecord(
        run="trial", seed=1, sync=SyncSettings(num_fragments=1), budget=Budget(tokens=1000),
        manifest_digest=manifest.digest, manifest=manifest.to_text(),
    )  # fmt: skip
    blob = blob_of(PARAMETERS)
    first = VersionInfo(fragment=0, version=0, parameters_sha256=blob.digest, parameters=blob)
    connection = Connection(operator_hello(), ZmqClient(broker), SystemClock())
    where = str(broker)
    connection.wait_for_welcome(WAIT_SECONDS, address=where)
    connection.ask_and_wait(Upload(blob=blob), WAIT_SECONDS, address=where, payload=PARAMETERS)
    answer = connection.ask_and_wait(Init(run_record=record, versions=(first,)), WAIT_SECONDS, address=where)
    assert isinstance(answer, Initialised)
    connection.close()


def test_with_a_run_the_bandwidth_is_measured_on_its_parameters(
    broker: Address, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_run(broker)
    code = main.run(["doctor", "--broker", str(broker), "--timeout", TIMEOUT, "--json"])
    told = json.loads(capsys.readouterr().out)
    found = {finding["check"]: finding for finding in told["findings"]}
    assert code == 0
    assert told["measures"]["bytes_moved"] == len(PARAMETERS)
    assert told["measures"]["bytes_per_second"] > 0
    assert "run trial" in found["answer"]["text"]
    assert "5.24 MB in" in found["bandwidth"]["text"]
    assert "1.31 M parameters" in found["model"]["text"]
    assert "1.31 M parameters" in found["memory here"]["text"]


@pytest.mark.parametrize("channel", ["control", "bulk", "events"])
def test_the_one_port_that_is_closed_is_named(
    channel: str, broker: Address, closed_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {"control": broker.control_port, "bulk": broker.bulk_port, "events": broker.events_port}
    ports[channel] = closed_port
    code, found = examine(capsys, f"tcp://{HOST}:" + ",".join(map(str, ports.values())))
    assert code == 1
    assert [check for check, finding in found.items() if finding["verdict"] == "wrong"] == [f"port {channel}"]
    assert "refused" in found[f"port {channel}"]["text"]
    assert "nobody listens there" in found[f"port {channel}"]["advice"]


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: nobody\r\n\r\n", "foreign"),
        (b"\x00" * 200, "foreign"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "foreign"),
        (b"\xff", "foreign"),
        (b"\xff" + b"\xee" * 100, "foreign"),
        (None, "silent"),
    ],
    ids=["http", "zeros", "ssh", "one-byte", "nearly", "nothing"],
)
def test_what_is_no_broker_is_told_from_one(
    words: bytes | None, state: str, listen: Callable[[bytes | None], int], capsys: pytest.CaptureFixture[str]
) -> None:
    port = listen(words)
    code, found = examine(capsys, f"tcp://{HOST}:{port},{port},{port}")
    assert code == 1
    assert {found[f"port {channel}"]["verdict"] for channel in ("control", "bulk", "events")} == {"wrong"}
    assert f"is {state}" in found["port control"]["text"]


@pytest.mark.parametrize("garbage", [None, b"", b"garbage", b"\xc1" * 1000])
def test_another_program_that_uses_zeromq_is_no_broker_whatever_it_answers(
    garbage: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.linger = 0
        port = stranger.bind_to_random_port(f"tcp://{HOST}")
        stop = threading.Event()

        def answer() -> None:
            while not stop.is_set():
                if garbage is not None and stranger.poll(20):
                    stranger.send_multipart([stranger.recv_multipart()[0], garbage])
                stop.wait(0.01)

        thread = threading.Thread(target=answer)
        thread.start()
        code, found = examine(capsys, f"tcp://{HOST}:{port},{port},{port}")
        stop.set()
        thread.join()
    assert code == 1
    assert found["answer"]["verdict"] == "wrong"
    assert "no broker answered" in found["answer"]["text"]


def test_a_name_that_stands_for_nothing_is_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examine(capsys, "tcp://no-such-host.invalid:7700")
    assert code == 1
    assert found["address"]["verdict"] == "wrong"
    assert "cannot be resolved" in found["address"]["text"]
    assert "port control" not in found


def test_an_address_that_is_none_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["doctor", "--broker", "http://somewhere"]) == 2
    assert "write tcp://HOST:PORT" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ with keys


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """A key folder with a key of each role that looks around."""
    folder = KeyFolder(tmp_path / "keys")
    for role in ("operator", "outer", "worker"):
        folder.add(role, role, now_unix=1)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("role", ["operator", "outer", "worker"])
def test_with_its_key_every_role_may_look(
    role: str, start: Callable[..., Address], keys: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examine(capsys, str(start(keys=keys.path)), "--key", str(keys.path / f"{role}.key"))
    assert code == 0, found
    assert found["key"]["text"] == "the broker asks for a key"
    assert ("a worker's key" in found["bandwidth"]["text"]) is (role == "worker")


def test_a_broker_with_keys_and_none_given_says_which_file_to_give(
    start: Callable[..., Address], keys: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examine(capsys, str(start(keys=keys.path)))
    assert code == 1
    assert found["key"]["verdict"] == "wrong"
    assert "--key FILE" in found["key"]["advice"]


def test_a_key_and_a_broker_without_any_do_not_belong_together(
    broker: Address, keys: KeyFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = examine(capsys, str(broker), "--key", str(keys.path / "operator.key"))
    assert code == 1
    assert "lets everybody in" in found["key"]["text"]


def test_a_key_that_is_no_longer_allowed_is_denied_in_the_words_of_the_transport(
    start: Callable[..., Address], keys: KeyFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.key"
    kept.write_bytes((keys.path / "operator.key").read_bytes())
    kept.chmod(0o600)
    keys.revoke("operator")
    code, found = examine(capsys, str(start(keys=keys.path)), "--key", str(kept))
    assert code == 1
    assert found["answer"]["verdict"] == "wrong"
    assert "allow-list" in found["answer"]["text"]
