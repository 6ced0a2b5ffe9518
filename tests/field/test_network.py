"""What goes wrong between processes: what the network may do to them, and what they say about it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.ops import main
from isles.ops.chaos.campaign import CLEAR, LinkShape
from isles.ops.chaos.proxy import Network
from isles.proto.clock import ManualClock, SystemClock
from isles.proto.config import Config
from isles.proto.connection import Connection
from isles.proto.errors import FencedError, RefusedError, UnreachableError
from isles.proto.logs import ListLogger
from isles.proto.messages import (
    AskHeads,
    BlobRef,
    Channel,
    Error,
    Fenced,
    Heads,
    Hello,
    Limits,
    Message,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.address import Address
from isles.proto.transport.bounds import ARRIVALS_MAX
from isles.proto.transport.interface import Arrival
from isles.proto.transport.memory import MemoryBroker
from isles.proto.transport.zmq_transport import SEND_HIGH_WATER, ZmqBroker, ZmqClient
from isles.workers.parameters import ask
from isles.workers.record import say_hello

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("brokers", "ops", "outer", "proto", "workers")
PATIENCE_SECONDS = 20.0
"""Bound of a wait; nothing passes because of it."""
NOBODY = "tcp://127.0.0.1:1"
HINT = "is it running there, and do"

LISTENERS = {
    "ops/chaos/proxy.py": "the links that stand in for a bad network",
    "ops/run_folder.py": "looks whether a port is free",
    "proto/transport/zmq_transport.py": "the broker's three sockets, and inproc",
}
"""Whatever may listen, and why. Everybody else dials, so it works behind NAT and has no address of its own."""

STARTERS = {
    "ops/chaos/compose.py": "asks docker",
    "ops/chaos/targets.py": "thaws what was frozen, should the one who froze it die",
    "ops/children.py": "everything that `isles up` supervises, with a log of its own",
    "ops/simulate.py": "asks git which commit this is",
    "ops/simulation/exploration.py": "seeds side by side",
}
"""Whatever may start processes, and why: no training process has a hidden helper."""


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    """Everything in each installed file."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    return {path: list(ast.walk(tree)) for path, tree in trees.items()}


def listens(node: ast.AST) -> bool:
    names = {"bind", "listen", "create_server", "start_server", "bind_to_random_port"}
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def starts_processes(node: ast.AST) -> bool:
    modules = {"subprocess", "multiprocessing"}
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in modules for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return (node.module or "").split(".")[0] in modules or "ProcessPoolExecutor" in names
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr in {"fork", "posix_spawn", "spawnv"}  # type: ignore[attr-defined]


def test_nobody_but_a_broker_listens_so_nobody_needs_an_address_that_others_reach(
    nodes: dict[str, list[ast.AST]],
) -> None:
    assert {path for path in nodes if any(map(listens, nodes[path]))} == set(LISTENERS)


def test_no_process_has_hidden_helpers(nodes: dict[str, list[ast.AST]]) -> None:
    assert {path for path in nodes if any(map(starts_processes, nodes[path]))} == set(STARTERS)


# ------------------------------------------------------------------------------------- address, cause, and what to do


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["history"],
        ["replay"],
        ["export", "--output", "model.safetensors"],
        ["init", "--from", "weights.safetensors"],
    ],
)
def test_a_command_that_reaches_nobody_says_where_and_what_to_check(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*arguments, "--broker", NOBODY, "--timeout", "0.2"]) == UnreachableError.exit_code
    [line] = capsys.readouterr().err.splitlines()
    assert f"no broker answered at {NOBODY} within 0.2 s: {HINT}" in line


def test_a_command_with_much_patience_for_a_model_has_less_for_nobody_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(_: Connection, timeout_seconds: float, *, address: str) -> None:
        waits.append(timeout_seconds)
        raise UnreachableError(f"no broker at {address}")

    monkeypatch.setattr(Connection, "wait_for_welcome", wait)
    assert main.run(["init", "--from", "none", "--broker", NOBODY, "--timeout", "3000"]) == UnreachableError.exit_code
    assert waits == [30.0]
    assert NOBODY in capsys.readouterr().err


@pytest.mark.parametrize("role", ["worker", "outer", "evaluator"])
def test_a_process_that_reaches_nobody_says_where_and_what_to_check(
    role: str, configure: Callable[..., Config], serve: Callable[..., int]
) -> None:
    config = configure(NOBODY, **{f"{role}__join_timeout_seconds": "0.2"})
    with pytest.raises(UnreachableError) as found:
        serve(role, config, 1000, ListLogger())
    assert f"no broker answered at {NOBODY} within 0.2 s: {HINT}" in str(found.value)


def test_a_process_that_is_let_in_logs_the_address_that_it_used(
    address: str, configure: Callable[..., Config], serve: Callable[..., int]
) -> None:
    class StopOnceIn(ListLogger):
        def info(self, event: str, **fields: Any) -> None:
            super().info(event, **fields)
            if event == "broker.joined":
                joined.append(fields["address"])
                stop.set()

    config = configure(address)
    for role in ("worker", "evaluator", "outer"):
        stop = threading.Event()
        joined: list[str] = []
        assert serve(role, config, stop, StopOnceIn()) == 0
        assert set(joined) == {address}


def is_mentioned(handler: ast.ExceptHandler) -> bool:
    """Whether what was caught is used for more than the `from` of an error."""
    names = [node for line in handler.body for node in ast.walk(line) if isinstance(node, ast.Name)]
    causes = [node.cause for line in handler.body for node in ast.walk(line) if isinstance(node, ast.Raise)]
    return any(name.id == handler.name and name not in causes for name in names)


def test_no_cause_is_dropped_from_an_error(nodes: dict[str, list[ast.AST]]) -> None:
    """What the system said is in the sentence, wherever the class of the error does not say it all."""
    broad = {"OSError", "Error", "ZMQError", "SafetensorError", "Exception"}
    found = []
    for path, all_nodes in nodes.items():
        for node in all_nodes:
            if not isinstance(node, ast.ExceptHandler) or node.type is None:
                continue
            caught = {name for one in ast.walk(node.type) if (name := getattr(one, "attr", getattr(one, "id", "")))}
            raises = [one for line in node.body for one in ast.walk(line) if isinstance(one, ast.Raise) and one.exc]
            if raises and caught & broad and not is_mentioned(node):
                found.append(f"{path}:{node.lineno}")
    assert found == []


class Refusing(MemoryBroker):
    """Lets a client in if it is told to, and refuses everything else with these words."""

    def __init__(self, refusal: Message, *, is_welcoming: bool) -> None:
        super().__init__()
        self._refusal = refusal
        self._is_welcoming = is_welcoming

    def receive(self, arrival: Arrival) -> None:
        message = unpack(arrival.header)
        reply = self._refusal
        if isinstance(message, Hello) and self._is_welcoming:
            limits = Limits()
            reply = Welcome(new_session="cd" * 8, protocol=(1, 0), broker_incarnation="ee" * 8, seq=0, limits=limits)
        reply = reply.model_copy(update={"request": message.request})
        self.send(arrival.channel, arrival.connection, pack(reply))


WAITS: dict[str, Callable[[Connection], object]] = {
    "for a welcome": lambda connection: connection.wait_for_welcome(9.0, address="tcp://there:7700"),
    "for a welcome that may be stopped": lambda connection: say_hello(
        connection, 9.0, address="tcp://there:7700", should_stop=lambda: False
    ),
    "for an answer": lambda connection: connection.ask_and_wait(AskHeads(), 9.0, address="tcp://there:7700"),
    "for a reply of a kind": lambda connection: ask(connection, AskHeads(), Welcome, 9.0, address="tcp://there:7700"),
    "for a blob": lambda connection: connection.fetch_and_wait(
        BlobRef(digest="ab" * 32, size_bytes=9), 9.0, bytes_max=9, address="tcp://there:7700"
    ),
}


@pytest.mark.parametrize("wait", [name for name in WAITS if "welcome" in name])
def test_a_refusal_says_which_broker_it_comes_from_and_repeats_its_words(wait: str) -> None:
    refusal = Error(code="run", text="this broker serves run demo, outer x wants other: check the address")
    broker = Refusing(refusal, is_welcoming=False)
    connection = Connection(Hello(role="outer", id="x", incarnation="ab" * 8), broker.connect(), ManualClock())
    with pytest.raises(RefusedError) as found:
        WAITS[wait](connection)
    assert f"the broker at tcp://there:7700 refused this process (run): {refusal.text}" in str(found.value)


@pytest.mark.parametrize("wait", [name for name in WAITS if "welcome" not in name and "blob" not in name])
def test_a_fence_says_which_broker_it_comes_from_and_who_is_meant(wait: str) -> None:
    broker = Refusing(Fenced(), is_welcoming=True)
    connection = Connection(Hello(role="worker", id="us-0", incarnation="ab" * 8), broker.connect(), ManualClock())
    connection.wait_for_welcome(1.0, address="tcp://there:7700")
    with pytest.raises(RefusedError) as found:
        WAITS[wait](connection)
    assert "the broker at tcp://there:7700 refused this process (fenced): " in str(found.value)
    assert "worker us-0" in str(found.value)


# -------------------------------------------------------------------------------------------------- bad and full links


def test_a_connection_that_hangs_half_open_keeps_no_name(address: str) -> None:
    network = Network(Address.parse(address), ["us-0"])
    network.start()

    def dial(incarnation: str, where: Address) -> Connection:
        hello = Hello(role="worker", id="us-0", incarnation=incarnation * 8)
        return Connection(hello, ZmqClient(where), SystemClock())

    dead, again = dial("01", network.addresses["us-0"]), dial("02", Address.parse(address))
    try:
        dead.wait_for_welcome(PATIENCE_SECONDS, address=address)
        network.shape("us-0", LinkShape(is_blackhole=True))  # the broker's end stands and never hears of this
        again.wait_for_welcome(PATIENCE_SECONDS, address=address)
        assert isinstance(again.ask_and_wait(AskHeads(), PATIENCE_SECONDS, address=address), Heads)
        network.shape("us-0", CLEAR)
        with pytest.raises(FencedError):
            dead.ask_and_wait(AskHeads(), PATIENCE_SECONDS, address=address)
    finally:
        dead.close()
        again.close()
        network.close()


@pytest.fixture
def pair() -> Iterator[tuple[ZmqBroker, ZmqClient]]:
    broker = ZmqBroker("127.0.0.1")
    client = ZmqClient(broker.address)
    yield broker, client
    client.close()
    broker.close()


def say_until_heard(client: ZmqClient, broker: ZmqBroker, channel: Channel) -> bytes:
    """The connection of the client, once it stands."""
    for _ in range(1000):
        client.send(channel, b"hello")
        client.poll(0.0)
        if arrivals := broker.poll(0.01):
            return arrivals[0].connection
    pytest.fail("they never met")


def test_control_does_not_wait_behind_bulk(pair: tuple[ZmqBroker, ZmqClient]) -> None:
    broker, client = pair
    for channel in (Channel.BULK, Channel.CONTROL):
        say_until_heard(client, broker, channel)
    while broker.poll(0.05):
        pass
    for _ in range(4 * ARRIVALS_MAX):
        assert client.send(Channel.BULK, b"chunk", b"x" * 1000)
    assert client.send(Channel.CONTROL, b"heartbeat")
    assert broker._channels[Channel.BULK].poll(20_000)
    assert broker._channels[Channel.CONTROL].poll(20_000)
    first = broker.poll(0.0)
    assert b"heartbeat" in [bytes(arrival.header) for arrival in first]
    assert len(first) <= ARRIVALS_MAX + 1


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
def test_a_reader_that_never_reads_is_refused_more_after_a_while(
    pair: tuple[ZmqBroker, ZmqClient], channel: Channel
) -> None:
    broker, client = pair
    connection = say_until_heard(client, broker, channel)
    payload = b"x" * 4000
    taken = 0
    while broker.send(channel, connection, b"header", payload):
        taken += 1
        assert taken < 4 * SEND_HIGH_WATER, "memory grows with a slow reader"
    assert taken >= 1
