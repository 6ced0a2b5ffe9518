"""Links pass every byte in order, and do to them what they are told."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from isles.ops.chaos.campaign import CLEAR, LinkShape
from isles.ops.chaos.proxy import Network
from isles.proto.errors import UsageError
from isles.proto.transport.address import Address

PATIENCE_SECONDS = 20.0
"""Far above what anything here takes."""
SHORT_SECONDS = 0.2
"""Long enough that an unhindered byte would have come."""


class Echo:
    """A broker's three ports that send everything back."""

    def __init__(self) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.address = Address("127.0.0.1", *(one.getsockname()[1] for one in self._listeners))
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(taken,), daemon=True).start()

    def _echo(self, taken: socket.socket) -> None:
        with taken, contextlib.suppress(OSError):
            while data := taken.recv(65536):
                taken.sendall(data)

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def network(echo: Echo) -> Iterator[Network]:
    network = Network(echo.address, ["us-0", "eu-0"])
    network.start()
    yield network
    network.close()


def dial(network: Network, worker: str = "us-0") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", network.addresses[worker].control_port), PATIENCE_SECONDS)
    found.settimeout(PATIENCE_SECONDS)
    return found


def receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def is_refused(network: Network) -> bool:
    """A reset may come while the connection is being made, or right after."""
    try:
        connection = dial(network)
    except ConnectionError:
        return True
    with connection:
        return is_cut(connection)


def test_every_worker_has_three_ports_of_its_own_and_they_lead_to_the_broker(network: Network) -> None:
    ports = [port for one in network.addresses.values() for port in (one.control_port, one.bulk_port, one.events_port)]
    assert len(set(ports)) == 6
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
            connection.sendall(b"hello")
            assert receive(connection, 5) == b"hello"


def test_what_has_passed_is_counted_in_each_direction_for_each_link(network: Network) -> None:
    with dial(network) as connection:
        connection.sendall(b"x" * 100_000)
        assert len(receive(connection, 100_000)) == 100_000
    assert [network.num_bytes("us-0", way) for way in ("up", "down")] == [100_000, 100_000]  # type: ignore[arg-type]
    assert network.num_bytes("eu-0", "up") == 0


def test_a_large_payload_passes_unchanged(network: Network) -> None:
    payload = bytes(range(256)) * 8192
    with dial(network) as connection:
        sender = threading.Thread(target=connection.sendall, args=(payload,))
        sender.start()
        assert receive(connection, len(payload)) == payload
        sender.join(PATIENCE_SECONDS)


def test_a_delay_makes_every_byte_late_both_ways(network: Network) -> None:
    network.shape("us-0", LinkShape(delay_seconds=0.1))
    with dial(network) as connection:
        began = time.monotonic()
        connection.sendall(b"late")
        assert receive(connection, 4) == b"late"
        assert time.monotonic() - began >= 0.2


def test_a_rate_is_kept(network: Network) -> None:
    network.shape("us-0", LinkShape(bytes_per_second=100_000))
    payload = b"x" * 20_000
    with dial(network) as connection:
        began = time.monotonic()
        connection.sendall(payload)
        assert receive(connection, len(payload)) == payload
        assert time.monotonic() - began >= 0.15


def test_a_blackhole_holds_everything_back_and_loses_nothing(network: Network) -> None:
    with dial(network) as connection, dial(network, "eu-0") as other:
        connection.sendall(b"before")
        assert receive(connection, 6) == b"before"
        network.shape("us-0", LinkShape(is_blackhole=True))
        connection.sendall(b"into it")
        connection.settimeout(SHORT_SECONDS)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        other.sendall(b"elsewhere")
        assert receive(other, 9) == b"elsewhere"
        network.shape("us-0", CLEAR)
        connection.settimeout(PATIENCE_SECONDS)
        assert receive(connection, 7) == b"into it"


def test_a_reset_cuts_connections_and_new_ones_stand(network: Network) -> None:
    with dial(network) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        assert network.reset("us-0") == 1
        assert is_cut(connection)
    with dial(network) as again:
        again.sendall(b"y")
        assert receive(again, 1) == b"y"


def test_a_link_that_refuses_cuts_old_connections_and_new_ones(network: Network) -> None:
    with dial(network) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        network.shape("us-0", LinkShape(is_refusing=True))
        assert is_cut(connection)
    assert is_refused(network)
    network.shape("us-0", CLEAR)
    with dial(network) as again:
        again.sendall(b"y")
        assert receive(again, 1) == b"y"


def test_a_broker_that_is_gone_cuts_the_worker_off(network: Network, echo: Echo) -> None:
    echo.close()
    assert is_refused(network)


def test_a_worker_without_a_link_is_named(network: Network) -> None:
    with pytest.raises(UsageError, match="asia-0 reaches its broker without a link"):
        network.shape("asia-0", CLEAR)


def test_a_network_ends_under_connections_that_stand_and_may_be_ended_twice(echo: Echo) -> None:
    network = Network(echo.address, ["us-0"])
    network.start()
    with dial(network) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        network.shape("us-0", LinkShape(is_blackhole=True))
        network.close()
        assert is_cut(connection)
    network.close()
