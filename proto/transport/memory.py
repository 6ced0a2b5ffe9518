"""The transport inside one process: same interface, no sockets; for tests and simulations.

Messages are bytes here too, so everything that a wire would refuse is refused.
"""

from __future__ import annotations

import threading
from collections import deque

from isles.proto.messages import Channel
from isles.proto.transport.interface import Arrival, Bytes


class _Inbox:
    """Arrivals and the condition a poll waits for."""

    def __init__(self) -> None:
        self._arrivals: deque[Arrival] = deque()
        self._condition = threading.Condition()
        self._is_woken = False

    def put(self, arrival: Arrival) -> None:
        with self._condition:
            self._arrivals.append(arrival)
            self._condition.notify()

    def wake(self) -> None:
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def take(self, timeout_seconds: float) -> list[Arrival]:
        with self._condition:
            self._condition.wait_for(lambda: self._arrivals or self._is_woken, timeout_seconds)
            self._is_woken = False
            taken = list(self._arrivals)
            self._arrivals.clear()
            return taken


class MemoryBroker:
    """The broker's side; make clients with `connect`."""

    def __init__(self) -> None:
        self._inbox = _Inbox()
        self._clients: dict[bytes, MemoryClient] = {}
        self._num_connected = 0

    def connect(self, key: str = "") -> MemoryClient:
        """A new connection, of the owner of the public key `key` (z85) if it is not empty."""
        self._num_connected += 1
        client = MemoryClient(self, str(self._num_connected).encode(), key)
        self._clients[client.connection] = client
        return client

    def receive(self, arrival: Arrival) -> None:
        """Takes what a client sent."""
        self._inbox.put(arrival)

    def disconnect(self, connection: bytes) -> None:
        """Forgets a client."""
        self._clients.pop(connection, None)

    def send(self, channel: Channel, connection: bytes, header: bytes, payload: Bytes | None = None) -> bool:
        client = self._clients.get(connection)
        if client is None:
            return False
        client.receive(Arrival(channel, b"", header, payload))
        return True

    def publish(self, header: bytes) -> None:
        for client in list(self._clients.values()):
            client.receive(Arrival(Channel.EVENTS, b"", header))

    def recheck(self) -> None:
        """Nothing to do: who is let in here is for the test to say."""

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        return self._inbox.take(timeout_seconds)

    def take_cuts(self) -> dict[str, int]:
        """None ever: nothing waits anywhere here but in Python's own lists."""
        return {}

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self._clients.clear()


class MemoryClient:
    """A client's side; made by `MemoryBroker.connect`."""

    def __init__(self, broker: MemoryBroker, connection: bytes, key: str = "") -> None:
        self.connection = connection
        self.key = key
        self.denial: str | None = None
        self._broker = broker
        self._inbox = _Inbox()
        self._is_open = True

    def receive(self, arrival: Arrival) -> None:
        """Takes what the broker sent."""
        self._inbox.put(arrival)

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        if self._is_open:
            self._broker.receive(Arrival(channel, self.connection, header, payload, self.key))
        return self._is_open

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        return self._inbox.take(timeout_seconds)

    def wake(self) -> None:
        self._inbox.wake()

    def close(self) -> None:
        self._is_open = False
        self._broker.disconnect(self.connection)
