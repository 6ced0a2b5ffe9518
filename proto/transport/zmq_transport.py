"""The ZeroMQ transport. Only the broker binds; everybody else dials out.

Sockets are touched by one thread. `wake` goes through an inproc pair guarded by a lock, the one thing that other
threads may call.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import zmq

from isles.proto.errors import ConfigError
from isles.proto.messages import HEADER_BYTES_MAX, Channel
from isles.proto.transport.address import Address
from isles.proto.transport.interface import Arrival, Bytes

FRAME_BYTES_MAX: Final = 17 << 20
"""Longest frame that libzmq takes in: the largest permitted chunk and its header; above the longest header, too."""
HEARTBEAT_MILLISECONDS: Final = 5_000
HEARTBEAT_TIMEOUT_MILLISECONDS: Final = 30_000
"""A PONG is counted only after a whole frame: 1 MiB at 0.5 Mbit/s takes 17 s."""
RECONNECT_MILLISECONDS: Final = 200
RECONNECT_MILLISECONDS_MAX: Final = 2_000
SEND_HIGH_WATER: Final = 4_096
"""Messages waiting for one connection; credit bounds the bulk far below it."""
COPY_BELOW_BYTES: Final = 65_536
"""Sending without a copy pays from about here."""
ARRIVALS_MAX: Final = 256
"""Messages taken from one socket before the next one has its turn: control never waits behind bulk for long."""

assert FRAME_BYTES_MAX > HEADER_BYTES_MAX


class _Sockets(ABC):
    """A poller over some sockets, a way to wake it, and what both sides do alike."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._channels: dict[Channel, zmq.Socket[bytes]] = {}
        self._wake_lock = threading.Lock()
        self._is_closed = False
        self._waker = self._context.socket(zmq.PAIR)
        self._wakee = self._context.socket(zmq.PAIR)
        for socket in (self._waker, self._wakee):
            socket.linger = 0
        self._wakee.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._poller.register(self._wakee, zmq.POLLIN)

    def _open(self, channel: Channel, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.IPV6, 1)
        self._channels[channel] = socket
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        """Everything that has arrived, waiting for the first at most `timeout_seconds` or until `wake`."""
        ready = dict(self._poller.poll(max(0, round(timeout_seconds * 1000))))
        if self._wakee in ready:
            for _ in self._receive(self._wakee):
                pass
        arrivals: list[Arrival] = []
        for channel, socket in self._channels.items():
            if socket in ready:
                read = (self._read(channel, frames) for frames in self._receive(socket))
                arrivals += [arrival for arrival in read if arrival is not None]
        return arrivals

    @staticmethod
    def _receive(socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
        """What waits on one socket. It is asked first: the exception for an empty one costs as much as a message."""
        for _ in range(ARRIVALS_MAX):
            if not int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
                return
            try:
                yield socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return

    @abstractmethod
    def _read(self, channel: Channel, frames: list[zmq.Frame]) -> Arrival | None:
        """What some received frames are; None to drop them."""

    @staticmethod
    def _send_frames(socket: zmq.Socket[bytes], frames: list[Bytes]) -> bool:
        is_small = len(frames[-1]) < COPY_BELOW_BYTES
        try:
            socket.send_multipart(frames, zmq.DONTWAIT, copy=is_small)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def wake(self) -> None:
        """Makes a `poll` under way return; callable from any thread."""
        with self._wake_lock:
            if not self._is_closed:
                with contextlib.suppress(zmq.Again):  # so many wakes are waiting that the poll returns anyway
                    self._waker.send(b"", zmq.DONTWAIT)

    def close(self) -> None:
        """Drops what is unsent; idempotent."""
        with self._wake_lock:
            if self._is_closed:
                return
            self._is_closed = True
            for socket in (*self._channels.values(), self._waker, self._wakee):
                socket.close(linger=0)
            self._context.term()


class ZmqClient(_Sockets):
    """A client's three sockets: DEALER, DEALER, SUB."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.denial: str | None = None
        self.address = address
        kinds = ((Channel.CONTROL, zmq.DEALER, address.control), (Channel.BULK, zmq.DEALER, address.bulk))
        for channel, kind, endpoint in (*kinds, (Channel.EVENTS, zmq.SUB, address.events)):
            socket = self._open(channel, kind)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MILLISECONDS_MAX)
            if kind == zmq.DEALER:
                # Nothing is queued for a broker that is away: the protocol repeats what matters when it is back.
                socket.setsockopt(zmq.IMMEDIATE, 1)
            else:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message over; False if it could not be taken (not connected, or full)."""
        return self._send_frames(self._channels[channel], [header] if payload is None else [header, payload])

    def _read(self, channel: Channel, frames: list[zmq.Frame]) -> Arrival | None:
        if len(frames) > 2:
            return None
        return Arrival(channel, b"", frames[0].buffer, frames[1].buffer if len(frames) == 2 else None)


class ZmqBroker(_Sockets):
    """The broker's three sockets: ROUTER, ROUTER, XPUB."""

    def __init__(self, bind_host: str, ports: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Binds at once; port 0 takes a free one. Raises ConfigError if an address cannot be bound."""
        super().__init__()
        bound = []
        kinds = ((Channel.CONTROL, zmq.ROUTER), (Channel.BULK, zmq.ROUTER), (Channel.EVENTS, zmq.XPUB))
        for (channel, kind), port in zip(kinds, ports, strict=True):
            socket = self._open(channel, kind)
            if kind == zmq.ROUTER:
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            bound.append(self._bind(socket, bind_host, port))
        self.address = Address(bind_host, *bound)

    def _bind(self, socket: zmq.Socket[bytes], host: str, port: int) -> int:
        endpoint = f"tcp://{host}:{port or '*'}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            reason = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"this broker cannot listen on {endpoint} ({reason}): is another process using the port, "
                "and is the address one of this machine's?"
            ) from error
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def send(self, channel: Channel, connection: bytes, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message to one connection; False if it is gone or full."""
        frames: list[Bytes] = [connection, header]
        if payload is not None:
            frames.append(payload)
        return self._send_frames(self._channels[channel], frames)

    def publish(self, header: bytes) -> None:
        """Sends to every subscriber of the events channel; a slow one misses it."""
        self._send_frames(self._channels[Channel.EVENTS], [header])

    def recheck(self) -> None:
        """Asks anew whether everybody who hears hints may be here: for when the allow-list has changed."""

    def _read(self, channel: Channel, frames: list[zmq.Frame]) -> Arrival | None:
        if channel is Channel.EVENTS:
            return None  # subscriptions: hints go to everybody
        if len(frames) < 2 or len(frames) > 3:
            return Arrival(channel, frames[0].bytes, b"")  # no message of ours has such frames: answered as a bad one
        return Arrival(channel, frames[0].bytes, frames[1].buffer, frames[2].buffer if len(frames) == 3 else None)
