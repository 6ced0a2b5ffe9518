"""Both transports behave alike: what a shell may rely on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from isles.proto.errors import ConfigError
from isles.proto.messages import Channel
from isles.proto.transport.address import Address, is_loopback
from isles.proto.transport.interface import Arrival, BrokerTransport, ClientTransport
from isles.proto.transport.memory import MemoryBroker
from isles.proto.transport.zmq_transport import ZmqBroker, ZmqClient

PATIENCE = 10.0
"""Seconds until a test gives up; nothing passes because of it."""

Pair = tuple[BrokerTransport, Callable[[], ClientTransport]]


@pytest.fixture(params=["memory", "zmq"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    clients: list[ClientTransport] = []
    broker: BrokerTransport
    if request.param == "memory":
        memory = broker = MemoryBroker()

        def connect() -> ClientTransport:
            clients.append(memory.connect())
            return clients[-1]

    else:
        zmq_broker = broker = ZmqBroker("127.0.0.1")

        def connect() -> ClientTransport:
            clients.append(ZmqClient(zmq_broker.address))
            return clients[-1]

    yield broker, connect
    for client in clients:
        client.close()
    broker.close()


def send_until_taken(client: ClientTransport, channel: Channel, header: bytes, payload: bytes | None = None) -> None:
    for _ in range(1000):
        if client.send(channel, header, payload):
            return
        client.poll(0.01)
    pytest.fail("the transport never took the message")


def next_arrivals(side: BrokerTransport | ClientTransport) -> list[Arrival]:
    for _ in range(100):
        arrivals = side.poll(PATIENCE / 100)
        if arrivals:
            return arrivals
    pytest.fail("nothing arrived")


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.BULK])
@pytest.mark.parametrize("payload", [None, b"", b"x" * 200_000])
def test_a_message_and_its_answer_arrive_whole(pair: Pair, channel: Channel, payload: bytes | None) -> None:
    broker, connect = pair
    client = connect()
    send_until_taken(client, channel, b"question", payload)
    [question] = next_arrivals(broker)
    assert (question.channel, bytes(question.header)) == (channel, b"question")
    assert (None if question.payload is None else bytes(question.payload)) == payload
    assert broker.send(channel, question.connection, b"answer", payload)
    [answer] = next_arrivals(client)
    assert (answer.channel, answer.connection, bytes(answer.header)) == (channel, b"", b"answer")


def test_two_clients_are_told_apart(pair: Pair) -> None:
    broker, connect = pair
    clients = [connect(), connect()]
    connections = []
    for client in clients:
        send_until_taken(client, Channel.CONTROL, b"hello")
        connections.append(next_arrivals(broker)[0].connection)
    assert connections[0] != connections[1]
    broker.send(Channel.CONTROL, connections[1], b"for the second")
    assert bytes(next_arrivals(clients[1])[0].header) == b"for the second"
    assert clients[0].poll(0.0) == []


def test_a_send_to_a_connection_that_is_gone_says_so(pair: Pair) -> None:
    broker, _ = pair
    assert broker.send(Channel.CONTROL, b"nobody", b"header") is False


def test_a_hint_reaches_every_subscriber(pair: Pair) -> None:
    broker, connect = pair
    clients = [connect(), connect()]
    for client in clients:
        for _ in range(1000):  # a subscription takes a moment to arrive; until then a hint is lost, as it may be
            broker.publish(b"hint")
            broker.poll(0.0)
            arrivals = client.poll(0.01)
            if arrivals:
                break
        assert arrivals[0].channel is Channel.EVENTS


def test_wake_ends_a_poll_from_another_thread(pair: Pair) -> None:
    broker, connect = pair
    for side in (broker, connect()):
        thread = threading.Thread(target=side.wake)
        thread.start()
        assert side.poll(PATIENCE) == []
        thread.join()


def test_closing_twice_is_harmless(pair: Pair) -> None:
    broker, connect = pair
    client = connect()
    for side in (client, broker):
        side.close()
        side.close()


def test_a_send_without_a_broker_returns_false_at_once() -> None:
    client = ZmqClient(Address("127.0.0.1", 1, 2, 3))
    assert client.send(Channel.CONTROL, b"header") is False
    client.close()


def test_a_taken_port_is_a_clear_error() -> None:
    broker = ZmqBroker("127.0.0.1")
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+ \(Address already in use\): is"):
        ZmqBroker("127.0.0.1", (broker.address.control_port, 0, 0))
    broker.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:7700", Address("127.0.0.1", 7700, 7701, 7702)),
        ("tcp://broker:7700,8000,9000", Address("broker", 7700, 8000, 9000)),
        ("tcp://[::1]:7700", Address("[::1]", 7700, 7701, 7702)),
    ],
)
def test_an_address_names_three_ports(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert Address.parse(str(address)) == address


NO_ADDRESSES = ["", "broker:7700", "udp://b:1", "tcp://b", "tcp://b:0", "tcp://b:65535", "tcp://b:1,2", "tcp://a b:1"]


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ConfigError):
        Address.parse(text)


def test_loopback_is_known_when_seen() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "localhost", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "broker", "*", "[::]"))
