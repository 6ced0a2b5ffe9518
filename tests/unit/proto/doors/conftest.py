"""A house: a broker with keys, its allow-list, and clients over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

from isles.proto.key_files import (
    generate_pair,
)
from isles.proto.keys import (
    AllowedKey,
    AllowList,
    BrokerKey,
    ClientKey,
)
from isles.proto.messages import Channel
from isles.proto.transport import dialling, zmq_transport
from isles.proto.transport.address import Address
from isles.proto.transport.interface import Arrival
from isles.proto.transport.zmq_transport import ZmqBroker, ZmqClient

TURNS = 1500
"""Turns of a few milliseconds until a test gives up; nothing passes because of it."""
TURN_SECONDS = 0.005
BOTH_WAYS = (Channel.CONTROL, Channel.BULK)


class House:
    """A broker with keys, its allow-list, and clients; one thread turns them all."""

    def __init__(self) -> None:
        self.key = BrokerKey(**generate_pair().model_dump())
        self.allowed: AllowList = AllowList()
        self.clients: list[ZmqClient] = []
        self.arrivals: list[Arrival] = []
        self.broker = self.start(self.key)

    def start(self, key: BrokerKey | None, ports: tuple[int, int, int] = (0, 0, 0)) -> ZmqBroker:
        self.is_open = key is None
        return ZmqBroker("127.0.0.1", ports, key, lambda public: self.allowed.find(public) is not None)

    def restart(self, key: BrokerKey | None) -> None:
        """Another broker, or one without keys, at the same ports."""
        ports = self.ports
        self.broker.close()
        self.broker = self.start(key, ports)

    @property
    def ports(self) -> tuple[int, int, int]:
        """Control, bulk and events."""
        address = self.broker.address
        return address.control_port, address.bulk_port, address.events_port

    def make_key(
        self, *, is_allowed: bool = True, broker: tuple[str, ...] | None = None, name: str = "us"
    ) -> ClientKey:
        pair = generate_pair()
        if is_allowed:
            self.allowed = self.allowed.with_key(AllowedKey(name=name, role="worker", public=pair.public))
        return ClientKey(name=name, role="worker", **pair.model_dump(), broker=broker or (self.key.public,))

    def revoke(self, key: ClientKey) -> None:
        entry = self.allowed.find(key.public)
        assert entry is not None
        self.allowed = self.allowed.without(entry)
        self.broker.recheck()

    def dial(self, key: ClientKey | None, address: Address | None = None) -> ZmqClient:
        self.clients.append(ZmqClient(address or self.broker.address, key))
        return self.clients[-1]

    def turn(self) -> None:
        self.arrivals += self.broker.poll(TURN_SECONDS)

    def until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if is_done():
                return
            self.turn()
        pytest.fail("it never happened")

    def send(self, client: ZmqClient, channel: Channel = Channel.CONTROL) -> Arrival:
        """Lets a message of a client arrive, with the key that it has by then."""
        self.arrivals.clear()

        def expected() -> str:
            return "" if client._key is None or self.is_open else client._key.public

        def has_arrived() -> bool:
            client.send(channel, b"message")
            client.poll(0.0)
            self.arrivals = [arrival for arrival in self.arrivals if arrival.key == expected()]
            return bool(self.arrivals)

        self.until(has_arrived)
        return self.arrivals[0]

    def hint(self, client: ZmqClient) -> None:
        """Lets a hint reach a client."""
        heard: list[Arrival] = []

        def has_heard() -> bool:
            self.broker.publish(b"hint")
            heard.extend(arrival for arrival in client.poll(0.0) if arrival.channel is Channel.EVENTS)
            return bool(heard)

        self.until(has_heard)

    def denial(self, client: ZmqClient) -> str:
        """Waits for a denial, while the client tries to say something all the time."""

        def is_denied() -> bool:
            for channel in BOTH_WAYS:
                client.send(channel, b"let me in")
            client.poll(0.0)
            return client.denial is not None

        self.until(is_denied)
        assert client.denial is not None
        return client.denial


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is tried again is tried again soon."""
    monkeypatch.setattr(zmq_transport, "RECONNECT_MILLISECONDS", 20)
    monkeypatch.setattr(dialling, "SWITCH_SECONDS", 0.02)
    monkeypatch.setattr(dialling, "GIVEN_UP_SECONDS", 0.02)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    for client in made.clients:
        client.close()
    made.broker.close()


def with_shutdown(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def stop(sockets: list[socket.socket], threads: list[threading.Thread]) -> None:
    for one in sockets:
        with_shutdown(one)
    for thread in list(threads):
        thread.join()
    for one in sockets:
        one.close()


@pytest.fixture
def lone_forwarder() -> Iterator[Address]:
    """Three ports where every connection is taken and closed, as a forwarder does whose broker is away."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in Channel]

    def hang_up(listener: socket.socket) -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threads = [threading.Thread(target=hang_up, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    yield Address("127.0.0.1", *(listener.getsockname()[1] for listener in listeners))
    stop(listeners, threads)


@contextmanager
def relaying(target: int, num_damaged: int) -> Iterator[int]:
    """A port in front of another one; of the first connections it damages the greeting that comes back."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    pairs: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, is_damaged: bool) -> None:
        try:
            while data := source.recv(4096):
                sink.sendall(bytes([data[0] ^ 0x40]) + data[1:] if is_damaged else data)
        except OSError:
            pass
        for one in (source, sink):
            with_shutdown(one)

    def serve() -> None:
        number = 0
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", target))
            pairs.extend((near, far))
            for source, sink, is_back in ((near, far, False), (far, near, True)):
                threads.append(threading.Thread(target=pump, args=(source, sink, is_back and number < num_damaged)))
                threads[-1].start()
            number += 1

    threads.append(threading.Thread(target=serve))
    threads[0].start()
    yield listener.getsockname()[1]
    stop([listener, *pairs], threads)


@pytest.fixture
def relay() -> Callable[[int, int], AbstractContextManager[int]]:
    """The port of a relay in front of a port, which damages so many connections before it lets all through."""
    return relaying
