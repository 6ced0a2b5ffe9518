"""A broker's watch over its connections: counts them, looks at what waits for them, and hangs up where it is too much.

libzmq's monitors tell which descriptors are connections, its messages from which one they came, and the kernel how many
bytes went over it. Nothing of that needs to be exact at any moment: whoever is hung up on by mistake dials again.
Where the kernel does not tell, nobody is.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from isles.proto.messages import Channel
from isles.proto.transport import tcp
from isles.proto.transport.backlog import Backlog, Counts, Place, Reason, wire_bytes

ATTEND_SECONDS: Final = 0.05
"""Between two readings of the monitors: at thousands of messages a second each costs as much as a message."""
HASTY_SECONDS: Final = 0.01
"""The same while the memory grows: loopback brings some 10 MB in it."""
GROWING_BYTES: Final = 4 << 20
"""By so much between two readings, which is what a few messages take."""
LOOK_SECONDS: Final = 0.25
"""Between two looks while there is something to see: what a link of 10 Gbit/s brings in it are 300 MB."""
LOOK_REST: Final = 20
"""Times as long as the processor was busy with a look, at least, until the next one: thousands of connections take
a while."""
IDLE_LOOK_SECONDS: Final = 5.0
"""Between two looks otherwise."""
SEEN_SHARE: Final = 0.5
"""Of the bound: while this process has grown by less there is nothing to see; and at once there is when it has, from
its least size since the last look, as loopback may bring the whole bound between two."""
REPORTS_MAX: Final = 4096
"""Reports of one monitor that are taken at a time: strangers who knock do not keep those waiting who are inside."""

Ready = dict[zmq.Socket[bytes], int]
"""Sockets that have something to read."""

_REPORTED: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Exchange:
    """The connections of all sockets of a broker. Belongs to the thread of the sockets."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        bytes_max: int,
        per_key_max: int,
        has_keys: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watches nothing yet."""
        self.cuts: dict[Reason, int] = {}
        """How many connections were hung up on, and why; whoever reads it empties it."""
        self._context = context
        self._backlog = Backlog(bytes_max, per_key_max, has_keys)
        self._clock = clock
        self._monitors: dict[Channel, zmq.Socket[bytes]] = {}
        self._watched: dict[Channel, zmq.Socket[bytes]] = {}
        self._ports: dict[Channel, int] = {}
        self._first_bytes = self._least_bytes = self._attended_bytes = tcp.resident_bytes()
        self._looked_at = clock()
        self._look_at = self._attend_at = self._looked_at

    def watch(self, channel: Channel, socket: zmq.Socket[bytes]) -> None:
        """From now on the connections of a socket are known; before it is bound."""
        endpoint = f"inproc://exchange-{secrets.token_hex(8)}"
        socket.monitor(endpoint, _REPORTED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would stop libzmq's own thread
        monitor.connect(endpoint)
        self._monitors[channel], self._watched[channel] = monitor, socket

    def bound(self, channel: Channel, port: int) -> None:
        """The socket listens at this port."""
        self._ports[channel] = port

    def forget(self, channel: Channel) -> None:
        """A socket is closed now."""
        monitor = self._monitors.pop(channel, None)
        if monitor is not None:
            self._watched.pop(channel).disable_monitor()
            monitor.close(linger=0)
        self._backlog.forget(channel)

    def read(self, channel: Channel, frames: Sequence[zmq.Frame]) -> None:
        """A message was read; the first frame names the connection, or is all of it on the events channel."""
        try:
            descriptor = int(frames[0].get(zmq.SRCFD))
            public = str(frames[0].get("User-Id")) if self._backlog.has_keys else ""
        except zmq.ZMQError:  # of a connection that is gone: libzmq itself takes back what it had subscribed to
            return
        is_named = channel is not Channel.EVENTS
        connection = frames[0].bytes if is_named else b"%d" % descriptor
        sizes = [len(frame) for frame in (frames[1:] if is_named else frames)]
        num_bytes = wire_bytes(sizes, is_sealed=self._backlog.has_keys)
        place = Place(channel, descriptor)
        if not self._backlog.knows(place, connection):
            self._take_reports(channel, self._clock())
        self._backlog.read(place, connection, public, num_bytes)

    def give(self, channel: Channel, frames: Sequence[bytes | memoryview]) -> None:
        """A message was given to libzmq; the first frame names the connection."""
        num_bytes = wire_bytes((len(frame) for frame in frames[1:]), is_sealed=self._backlog.has_keys)
        self._backlog.give(channel, bytes(frames[0]), num_bytes)

    def attend_while(self, wait: Callable[[float], Ready], seconds: float) -> Ready:
        """Waits as `wait` does, and attends meanwhile: who fills the memory with half a message wakes nobody."""
        now = self._clock()
        until = now + seconds
        while True:
            ready = wait(max(0.0, min(until, self._attend_at) - now))
            now = self._clock()
            if ready or now >= until:
                return ready
            self.attend()

    def attend(self) -> None:
        """Takes what the monitors say, and looks at what waits when it is time."""
        now = self._clock()
        if now < self._attend_at:
            return
        resident_bytes = tcp.resident_bytes()
        is_growing = resident_bytes - self._attended_bytes > GROWING_BYTES
        self._attend_at, self._attended_bytes = now + (HASTY_SECONDS if is_growing else ATTEND_SECONDS), resident_bytes
        for channel in self._monitors:
            self._take_reports(channel, now)
        self._least_bytes = min(self._least_bytes, resident_bytes)
        if now < self._look_at and not self._is_much(resident_bytes - self._least_bytes):
            return
        has_something = self._is_much(resident_bytes - self._first_bytes) or self._backlog.is_crowded
        if now - self._looked_at < IDLE_LOOK_SECONDS and not has_something:
            return
        begun = time.thread_time()
        self._look(now)
        self._looked_at, self._least_bytes = now, resident_bytes
        self._look_at = now + max(LOOK_SECONDS, LOOK_REST * (time.thread_time() - begun))

    def close(self) -> None:
        """Ends the reports; before the sockets are closed."""
        for channel in list(self._monitors):
            self.forget(channel)

    def _take_reports(self, channel: Channel, now: float) -> None:
        monitor = self._monitors[channel]
        for _ in range(REPORTS_MAX):
            if not int(monitor.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN):
                return
            event, descriptor = struct.unpack("=Hi", monitor.recv_multipart(zmq.DONTWAIT)[0])
            place = Place(channel, descriptor)
            if event == zmq.EVENT_ACCEPTED:
                self._backlog.open(place, now)
            elif event == zmq.EVENT_DISCONNECTED:
                self._backlog.close(place)

    def _is_much(self, grown_bytes: int) -> bool:
        return grown_bytes > SEEN_SHARE * self._backlog.bytes_max

    def _look(self, now: float) -> None:
        if not tcp.IS_LINUX:
            return
        counts: dict[Place, Counts] = {}
        for place in self._backlog.lines:
            found = tcp.count(place.descriptor)
            if found is not None:
                counts[place] = found
        self._backlog.see(counts)
        for place, reason in self._backlog.excess(now).items():
            tcp.hang_up(place.descriptor, self._ports[place.channel])
            self._backlog.close(place)
            self.cuts[reason] = self.cuts.get(reason, 0) + 1
