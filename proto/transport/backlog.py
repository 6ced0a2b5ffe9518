"""What waits in the sockets of a broker, connection by connection, and whom to hang up on when it is too much. Pure.

libzmq bounds the messages that wait for each connection. It bounds neither the parts of one message, nor the number of
connections, nor what a stranger sends before a handshake fails. But the kernel counts the bytes of every connection:

    unread   received by the kernel, less what was read as messages      in the kernel, in libzmq, in half a message
    unsent   given to libzmq, less what the other side acknowledged

So all of it is measured where it arises, and bounded for all connections together. Over the bound those are hung up on
that hold the most, of the key that holds the most: they dial again, and repeat what was not answered. Nobody who keeps
to the protocol holds much, since credit bounds what is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from isles.proto.messages import Channel

GREETED_BYTES_MAX: Final = 250
"""Sent by a broker to whoever has not got through its handshake: a greeting of 64 bytes, WELCOME in 170, perhaps ERROR
in 12. READY, which ends the handshake, takes at least 50."""
HANDSHAKE_BYTES_MAX: Final = 4096
"""Received from whoever has not got through it: honest ones send a greeting of 64 bytes, HELLO in 202 and INITIATE in
some hundred, and then wait."""
IDLE_BYTES_PER_SECOND: Final = 20
"""What heartbeats of both sides add to what was received, which nobody reads: 82 bytes in 5 s."""
HANDSHAKES_MAX: Final = 4096
"""Connections that may be in their handshake at once: those of a thousand processes that start together. Of more, those
go that have been longest at it."""
SILENT_MAX: Final = 16_384
"""Connections that may be through their handshake without having said anything: 4096 learners have two such ones each,
for events and for bulk. Of more, those go that have been silent longest; they dial again."""
FRAME_BYTES: Final = 2
LONG_FRAME_BYTES: Final = 9
SHORT_FRAME_BYTES_MAX: Final = 255
"""Up to so many bytes a frame has a head of 2 bytes, and above one of 9."""
SEAL_BYTES: Final = 33
"""What CURVE adds to a frame."""


class Reason(StrEnum):
    """Why a connection is hung up on."""

    STRANGER = "stranger"
    """It has sent more than a handshake takes, and is not through it."""
    SURPLUS = "surplus"
    """Too many like it are open."""
    OVERFULL = "overfull"
    """Too much waits for it or of it."""


class Counts(NamedTuple):
    """What the kernel says of one connection, in bytes."""

    received: int
    sent: int
    acknowledged: int


NOTHING: Final = Counts(0, 0, 0)


class Place(NamedTuple):
    """Where a connection is: its descriptor may become that of another one, on another channel as well."""

    channel: Channel
    descriptor: int


@dataclass(slots=True)
class Line:
    """One connection."""

    opened_at: float
    public: str | None = None
    """The key with which it said something; None = it has not, empty = a broker without keys."""
    connection: bytes = b""
    """How the socket calls it, once it has said something."""
    read: int = 0
    given: int = 0
    counts: Counts = NOTHING

    def waiting(self, now: float) -> int:
        """Bytes that wait, in both directions."""
        idle = HANDSHAKE_BYTES_MAX + IDLE_BYTES_PER_SECOND * (now - self.opened_at)
        return max(0, self.counts.received - self.read - round(idle)) + max(0, self.given - self.counts.acknowledged)


@dataclass
class Backlog:
    """All connections of a broker's sockets."""

    bytes_max: int
    """That may wait for all of them together."""
    per_key_max: int
    """Connections of one key."""
    has_keys: bool = True
    lines: dict[Place, Line] = field(default_factory=dict)
    _named: dict[tuple[Channel, bytes], Line] = field(default_factory=dict)
    _early: dict[tuple[Place, bytes], int] = field(default_factory=dict)
    """Read before it was known that a connection is open."""
    _num_of: dict[str, int] = field(default_factory=dict)

    def open(self, place: Place, now: float) -> None:
        """A connection begins."""
        self.close(place)
        self.lines[place] = Line(now)

    def close(self, place: Place) -> None:
        """It has ended."""
        line = self.lines.pop(place, None)
        if line is None or line.public is None:
            return
        self._named.pop((place.channel, line.connection), None)
        self._num_of[line.public] -= 1
        if not self._num_of[line.public]:
            del self._num_of[line.public]

    def forget(self, channel: Channel) -> None:
        """All connections of a channel have ended."""
        for place in [place for place in self.lines if place.channel is channel]:
            self.close(place)

    def knows(self, place: Place, connection: bytes) -> bool:
        """Whether a message of a connection at this place is no surprise."""
        line = self.lines.get(place)
        return line is not None and (line.public is None or line.connection == connection)

    def read(self, place: Place, connection: bytes, public: str, num_bytes: int) -> None:
        """A message was read; `num_bytes` as it was on the wire."""
        line = self.lines.get(place)
        if line is not None and line.public is None:
            line.public, line.connection = public, connection
            line.read += self._early.pop((place, connection), 0)
            self._named[place.channel, connection] = line
            self._num_of[public] = self._num_of.get(public, 0) + 1
        if line is None or line.connection != connection:
            self._early[place, connection] = self._early.get((place, connection), 0) + num_bytes
        else:
            line.read += num_bytes

    def give(self, channel: Channel, connection: bytes, num_bytes: int) -> None:
        """A message was given to libzmq."""
        line = self._named.get((channel, connection))
        if line is not None:
            line.given += num_bytes

    @property
    def is_crowded(self) -> bool:
        """Whether there are so many connections that some may have to go."""
        num_silent = len(self.lines) - sum(self._num_of.values())
        return num_silent > HANDSHAKES_MAX or any(num > self.per_key_max for num in self._num_of.values())

    def see(self, counts: Mapping[Place, Counts]) -> None:
        """Takes what the kernel says of all connections; those of which it says nothing are gone."""
        for place in [place for place in self.lines if place not in counts]:
            self.close(place)
        for place, found in counts.items():
            self.lines[place].counts = found
        self._early.clear()

    def excess(self, now: float) -> dict[Place, Reason]:
        """Whom to hang up on, as of the last counts."""
        found: dict[Place, Reason] = {}
        knocking, silent = self._without_a_word()
        for place in knocking:
            if self.lines[place].counts.received > HANDSHAKE_BYTES_MAX:
                found[place] = Reason.STRANGER
        for places, num_max in ((knocking, HANDSHAKES_MAX), (silent, SILENT_MAX)):
            found |= dict.fromkeys(places[: -num_max or None] if len(places) > num_max else (), Reason.SURPLUS)
        found |= dict.fromkeys(self._beyond_their_number(), Reason.SURPLUS)
        return found | dict.fromkeys(self._overfull(set(found), now), Reason.OVERFULL)

    def _without_a_word(self) -> tuple[list[Place], list[Place]]:
        """Those in their handshake, and those that are through it and have said nothing; the oldest first."""
        mute = [place for place, line in self.lines.items() if line.public is None]
        knocking = [place for place in mute if self.has_keys and self.lines[place].counts.sent <= GREETED_BYTES_MAX]
        return knocking, [place for place in mute if place not in set(knocking)]

    def _beyond_their_number(self) -> Iterable[Place]:
        """The newest connections of keys that have too many."""
        for public, num in self._num_of.items():
            if num > self.per_key_max:
                yield from [place for place, line in self.lines.items() if line.public == public][self.per_key_max :]

    def _overfull(self, gone: set[Place], now: float) -> Iterable[Place]:
        """Those that hold the most, of the key that does, until the others are within the bound."""
        of_keys: dict[str | None, list[tuple[int, Place]]] = {}
        for place, line in self.lines.items():
            if place not in gone and (num_bytes := line.waiting(now)):
                of_keys.setdefault(line.public, []).append((num_bytes, place))
        sums = {public: sum(num_bytes for num_bytes, _ in held) for public, held in of_keys.items()}
        for held in of_keys.values():
            held.sort()
        while sum(sums.values()) > self.bytes_max:
            public = max(sums, key=lambda one: sums[one])
            num_bytes, place = of_keys[public].pop()
            sums[public] -= num_bytes
            yield place


def wire_bytes(sizes: Iterable[int], *, is_sealed: bool) -> int:
    """What frames of these sizes take on the wire, in bytes."""
    total = 0
    for size in sizes:
        sealed = size + SEAL_BYTES if is_sealed else size
        total += sealed + (FRAME_BYTES if sealed <= SHORT_FRAME_BYTES_MAX else LONG_FRAME_BYTES)
    return total
