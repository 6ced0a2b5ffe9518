"""The ZeroMQ transport. Only the broker binds; everybody else dials out.

Sockets are touched by one thread. `wake` goes through an inproc pair guarded by a lock, the one thing that other
threads may call.

With keys, everything is encrypted and both sides have proved who they are before the first message (`curve.py`); a
client that will never be let in says why (`dialling.py`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from isles.proto.errors import ConfigError
from isles.proto.key_files import KeyWatch
from isles.proto.keys import BrokerKey, ClientKey
from isles.proto.messages import CHUNK_BYTES_MAX, HEADER_BYTES_MAX, Channel
from isles.proto.timeouts import HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS
from isles.proto.transport import bounds
from isles.proto.transport.address import Address
from isles.proto.transport.curve import Doors, Monitor, Probe, check_pair, prove_closed, show_key
from isles.proto.transport.dialling import Dialling
from isles.proto.transport.exchange import Exchange, Ready
from isles.proto.transport.interface import Arrival, Bytes

HEARTBEAT_MILLISECONDS: Final = round(1000 * HEARTBEAT_SECONDS)
HEARTBEAT_TIMEOUT_MILLISECONDS: Final = round(1000 * HEARTBEAT_TIMEOUT_SECONDS)
HANDSHAKE_MILLISECONDS: Final = 10_000
"""For a connection to get through its handshake, which takes three round trips: a stranger that says nothing holds a
descriptor for no longer."""
RECONNECT_MILLISECONDS: Final = 200
RECONNECT_MILLISECONDS_MAX: Final = 2_000
SEND_HIGH_WATER: Final = 4_096
"""Messages waiting for one connection; credit bounds the bulk far below it."""
COPY_BELOW_BYTES: Final = 65_536
"""Sending without a copy pays from about here."""
REOPEN_SECONDS: Final = 5.0
"""For libzmq to give the events port back when that socket is opened anew; it takes some milliseconds."""
REOPEN_POLL_SECONDS: Final = 0.01
KEY_CHECK_SECONDS: Final = 2.0
"""Between two looks at the key file of a client: a rotated key is used from then on."""


class _Sockets(ABC):
    """A poller over some sockets, a way to wake it, and what both sides do alike."""

    def __init__(self, num_threads: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=num_threads)
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
        socket.setsockopt(zmq.MAXMSGSIZE, bounds.FRAME_BYTES_MAX)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        socket.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MILLISECONDS)
        socket.setsockopt(zmq.IPV6, 1)
        self._channels[channel] = socket
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _shut(self, channel: Channel) -> None:
        """Drops one socket and what is under way on it."""
        socket = self._channels.pop(channel)
        self._poller.unregister(socket)
        socket.close(linger=0)

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        """Everything that has arrived, waiting for the first at most `timeout_seconds` or until `wake`."""
        ready = self._await(self._wait(timeout_seconds))
        if self._wakee in ready:
            for _ in self._receive(self._wakee):
                pass
        arrivals: list[Arrival] = []
        for channel, socket in self._channels.items():
            if socket in ready:
                num_max = bounds.SUBSCRIPTIONS_MAX if channel is Channel.EVENTS else bounds.ARRIVALS_MAX
                read = (self._read(channel, frames) for frames in self._receive(socket, num_max))
                arrivals += [arrival for arrival in read if arrival is not None]
        self._attend(ready)
        return arrivals

    def _await(self, seconds: float) -> Ready:
        return dict(self._poller.poll(max(0, math.ceil(1000 * seconds))))

    @abstractmethod
    def _wait(self, timeout_seconds: float) -> float:
        """How long a poll may wait at most: `timeout_seconds`, or less if something else is due."""

    @abstractmethod
    def _attend(self, ready: Ready) -> None:
        """Does what is due besides reading messages."""

    @staticmethod
    def _receive(socket: zmq.Socket[bytes], num_max: int = bounds.ARRIVALS_MAX) -> Iterator[list[zmq.Frame]]:
        """What waits on one socket. It is asked first: the exception for an empty one costs as much as a message."""
        num_bytes = 0
        for _ in range(num_max):
            if num_bytes >= bounds.ARRIVAL_BYTES_MAX or not int(socket.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
                return
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            num_bytes += sum(len(frame) for frame in frames)
            yield frames

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
            self._close_others()
            for socket in (*self._channels.values(), self._waker, self._wakee):
                socket.close(linger=0)
            self._context.term()

    @abstractmethod
    def _close_others(self) -> None:
        """Closes every socket that is no channel."""


class ZmqClient(_Sockets):
    """A client's three sockets: DEALER, DEALER, SUB."""

    def __init__(self, address: Address, key: ClientKey | None = None) -> None:
        """Dials at once. With `key`, only a broker that has one of the keys it names is talked to.

        A key that was read from a file is replaced by what stands there later. Raises ConfigError for a damaged one.
        """
        if key is not None:
            check_pair(key, f"the key of {key.role} {key.name}")
        super().__init__()
        self.address = address
        self._key = key
        self._key_watch = None if key is None else KeyWatch(key)
        self._key_checked_at = time.monotonic()
        self._dialling = Dialling(key)
        self._monitors: dict[Channel, Monitor] = {}
        self._probe: Probe | None = None
        for channel in Channel:
            self._dial(channel)

    @property
    def denial(self) -> str | None:
        """One sentence: why the broker will never let this process in; None while it may."""
        return self._dialling.denial

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message over; False if it could not be taken (not connected, or full)."""
        socket = self._channels.get(channel)
        return socket is not None and self._send_frames(socket, [header] if payload is None else [header, payload])

    def _read(self, channel: Channel, frames: list[zmq.Frame]) -> Arrival | None:
        if len(frames) > 2:
            return None
        return Arrival(channel, b"", frames[0].buffer, frames[1].buffer if len(frames) == 2 else None)

    # -------------------------------------------------------------------------------------------------------- dialling

    def _dial(self, channel: Channel) -> None:
        kind = zmq.SUB if channel is Channel.EVENTS else zmq.DEALER
        socket = self._open(channel, kind)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MILLISECONDS_MAX)
        if kind == zmq.DEALER:
            # Nothing is queued for a broker that is away: the protocol repeats what matters when it is back.
            socket.setsockopt(zmq.IMMEDIATE, 1)
        else:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        broker_key = self._dialling.broker_key
        if self._key is not None and broker_key is not None:
            show_key(socket, self._key, broker_key)
        monitor = self._monitors[channel] = Monitor(self._context, socket)
        self._poller.register(monitor.socket, zmq.POLLIN)
        socket.connect(self.address.of(channel))

    def _hang_up(self, channel: Channel) -> None:
        monitor = self._monitors.pop(channel)
        self._poller.unregister(monitor.socket)
        monitor.close()
        self._shut(channel)

    def _wait(self, timeout_seconds: float) -> float:
        wait = self._dialling.wait(time.monotonic())
        return timeout_seconds if wait is None else min(timeout_seconds, wait)

    def _attend(self, ready: Ready) -> None:
        now = time.monotonic()
        for channel, monitor in self._monitors.items():
            if monitor.socket in ready:
                for outcome in monitor.outcomes():
                    self._dialling.handle(channel, outcome, now)
        if self.denial is not None:
            self._end_probe()
            for channel in list(self._monitors):
                self._hang_up(channel)
            return
        self._ask_who_is_there(now)
        self._check_key(now)
        for channel in self._dialling.due(now):
            self._hang_up(channel)
            self._dial(channel)

    def _ask_who_is_there(self, now: float) -> None:
        if self._dialling.wants_probe and self._probe is None:
            self._probe = Probe(self._context, self.address.control, now)
            self._poller.register(self._probe.socket, zmq.POLLIN)
        if self._probe is not None and (has_keys := self._probe.answer(now)) is not None:
            self._end_probe()
            self._dialling.probed(has_keys=has_keys)

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._poller.unregister(self._probe.socket)
            self._probe.close()
            self._probe = None

    def _check_key(self, now: float) -> None:
        if self._key_watch is None or now - self._key_checked_at < KEY_CHECK_SECONDS:
            return
        self._key_checked_at = now
        key = self._key_watch.newer()
        if key is not None:
            self._key = key
            self._dialling.adopt(key, now)

    def _close_others(self) -> None:
        self._end_probe()
        for monitor in self._monitors.values():
            monitor.close()


class ZmqBroker(_Sockets):
    """The broker's three sockets: ROUTER, ROUTER, XPUB."""

    def __init__(
        self,
        bind_host: str,
        ports: tuple[int, int, int] = (0, 0, 0),
        keys: BrokerKey | None = None,
        is_allowed: Callable[[str], bool] = lambda _public: False,
        chunk_bytes: int = CHUNK_BYTES_MAX,
        waiting_bytes_max: int = bounds.WAITING_BYTES_MAX,
        connections_per_key_max: int = bounds.CONNECTIONS_PER_KEY_MAX,
    ) -> None:
        """Binds at once; port 0 takes a free one. With `keys`, only a client whose public key (z85) `is_allowed`
        comes in, and that strangers do not is tried out here. A chunk has at most `chunk_bytes` bytes. Connections are
        hung up on while more than `waiting_bytes_max` bytes wait for all of them, or a key has too many.

        Raises ConfigError if an address cannot be bound, or a stranger was not refused.
        """
        super().__init__(num_threads=2)
        self._doors: Doors | None = None
        self._reopened_at: float | None = None
        self._subscribed_bytes = 0
        self._bind_host = bind_host
        self._exchange = Exchange(
            self._context,
            bytes_max=waiting_bytes_max,
            per_key_max=connections_per_key_max,
            has_keys=keys is not None,
        )
        # A stranger may fill one frame before its handshake fails: no socket takes a longer one than it must.
        self._frame_bytes = {
            Channel.CONTROL: HEADER_BYTES_MAX + bounds.FRAME_BYTES_SPARE,
            Channel.BULK: 2 * chunk_bytes + bounds.FRAME_BYTES_SPARE,
            Channel.EVENTS: bounds.SUBSCRIPTION_BYTES_MAX,
        }
        self._bulk_send_high_water = max(
            bounds.BULK_SEND_HIGH_WATER_MIN, min(SEND_HIGH_WATER, bounds.BULK_SEND_BYTES_MAX // chunk_bytes)
        )
        try:
            if keys is not None:
                self._doors = Doors(self._context, keys, is_allowed)
                self._poller.register(self._doors.socket, zmq.POLLIN)
            bound = [self._listen(channel, port) for channel, port in zip(Channel, ports, strict=True)]
            self.address = Address(bind_host, *bound)
            if keys is not None and self._doors is not None:
                prove_closed(self.address.from_here(), keys.public, self._doors.answer)
        except ConfigError:
            self.close()
            raise

    def _listen(self, channel: Channel, port: int) -> int:
        kind = zmq.XPUB if channel is Channel.EVENTS else zmq.ROUTER
        socket = self._open(channel, kind)
        # Bulk has a thread of libzmq's for itself: hints and control never wait until a chunk is encrypted.
        socket.setsockopt(zmq.AFFINITY, 2 if channel is Channel.BULK else 1)
        # The heartbeats are the clients': where a connection with a full queue is reset, libzmq ends this process at
        # its own next one (https://github.com/zeromq/libzmq/issues/4767 and others). Theirs have a time to live.
        socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, bounds.CONTROL_RECEIVE_HIGH_WATER)
        if channel is Channel.CONTROL:
            socket.setsockopt(zmq.SNDHWM, bounds.CONTROL_SEND_HIGH_WATER)
        if channel is Channel.BULK:
            socket.setsockopt(zmq.RCVHWM, bounds.BULK_RECEIVE_HIGH_WATER)
            socket.setsockopt(zmq.SNDHWM, self._bulk_send_high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, min(bounds.FRAME_BYTES_MAX, self._frame_bytes[channel]))
        if self._doors is not None:
            self._doors.guard(socket)
        self._exchange.watch(channel, socket)
        endpoint = f"tcp://{self._bind_host}:{port or '*'}"
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            reason = zmq.strerror(error.errno or 0)
            raise ConfigError(
                f"this broker cannot listen on {endpoint} ({reason}): is another process using the port, "
                "and is the address one of this machine's?"
            ) from error
        found = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._exchange.bound(channel, found)
        return found

    def _shut(self, channel: Channel) -> None:
        self._exchange.forget(channel)
        super()._shut(channel)

    def send(self, channel: Channel, connection: bytes, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message to one connection; False if it is gone or full."""
        frames: list[Bytes] = [connection, header]
        if payload is not None:
            frames.append(payload)
        is_sent = self._send_frames(self._channels[channel], frames)
        if is_sent:
            self._exchange.give(channel, frames)
        return is_sent

    def take_cuts(self) -> dict[str, int]:
        """How many connections were hung up on since the last call, by the reason; empty if none was."""
        cuts, self._exchange.cuts = self._exchange.cuts, {}
        return {reason.value: num for reason, num in cuts.items()}

    def publish(self, header: bytes) -> None:
        """Sends to every subscriber of the events channel; a slow one misses it."""
        socket = self._channels.get(Channel.EVENTS)
        if socket is not None:
            self._send_frames(socket, [header])

    def recheck(self) -> None:
        """Asks anew whether everybody who hears hints may be here: for when the allow-list has changed.

        The events socket is opened anew: subscribers come back by themselves, those who may. A hint that is published
        meanwhile is lost. Does nothing without keys.
        """
        if self._doors is not None:
            self._renew_events()

    def _renew_events(self) -> None:
        """Forgets all subscribers, and what they asked for."""
        if Channel.EVENTS in self._channels:
            self._shut(Channel.EVENTS)
            self._reopened_at = time.monotonic()
            self._reopen()

    def _reopen(self) -> None:
        """Listens for subscribers again, or later: libzmq gives a port back in its own time, and strangers may hold all
        descriptors for a while. Raises what kept it from listening if that lasts.
        """
        try:
            self._listen(Channel.EVENTS, self.address.events_port)
        except (ConfigError, zmq.ZMQError):
            if Channel.EVENTS in self._channels:
                self._shut(Channel.EVENTS)
            if self._reopened_at is not None and time.monotonic() - self._reopened_at > REOPEN_SECONDS:
                raise
        else:
            self._reopened_at = None
            self._subscribed_bytes = 0

    def _wait(self, timeout_seconds: float) -> float:
        return timeout_seconds if self._reopened_at is None else min(timeout_seconds, REOPEN_POLL_SECONDS)

    def _await(self, seconds: float) -> Ready:
        return self._exchange.attend_while(super()._await, seconds)

    def _attend(self, ready: Ready) -> None:
        if self._doors is not None and self._doors.socket in ready:
            self._doors.answer()
        self._exchange.attend()
        if self._reopened_at is not None:
            self._reopen()
        elif self._subscribed_bytes > bounds.SUBSCRIBED_BYTES_MAX:
            self._renew_events()

    def _close_others(self) -> None:
        self._exchange.close()
        if self._doors is not None:
            self._doors.close()

    def _read(self, channel: Channel, frames: list[zmq.Frame]) -> Arrival | None:
        self._exchange.read(channel, frames)
        if channel is Channel.EVENTS:  # subscriptions: hints go to everybody
            self._subscribed_bytes += sum(len(frame) for frame in frames if len(frame) > 1)
            return None
        key = "" if self._doors is None else str(frames[0].get("User-Id"))
        if len(frames) < 2 or len(frames) > 3:
            # No message of ours has such frames: answered as a bad one.
            return Arrival(channel, frames[0].bytes, b"", key=key)
        payload = frames[2].buffer if len(frames) == 3 else None
        return Arrival(channel, frames[0].bytes, frames[1].buffer, payload, key)
