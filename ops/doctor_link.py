"""Talks to a broker the way its clients do, and measures: round trip, clock, bandwidth."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from isles.ops.watch import operator_hello
from isles.proto.client import Answered, Fetched, FetchFailed, Hinted, Refused, Welcomed
from isles.proto.clock import Clock, SystemClock
from isles.proto.connection import Connection, News
from isles.proto.messages import (
    COUNT_MAX,
    AskStatus,
    AskVersion,
    BlobRef,
    Error,
    Hello,
    Leave,
    Message,
    Role,
    Status,
    VersionReply,
    Welcome,
)

if TYPE_CHECKING:
    from isles.proto.messages import Channel
    from isles.proto.transport.interface import Arrival, Bytes, ClientTransport

ROUND_TRIPS: Final = 7
"""Questions whose answers are timed: an odd number, so that the median is one of them; up to three may be disturbed."""
ASK_AGAIN_SECONDS: Final = 0.25
"""Until the broker has been heard: what is sent before the connection stands is dropped."""
FETCH_SECONDS_MAX: Final = 10.0
"""For the measurement of the bandwidth; what has come by then is what is counted."""
BLOB_BYTES_WANTED: Final = 4 << 20
"""A blob of at least this size is fetched where there is one: less is over before TCP has found its pace."""
BLOB_BYTES_MAX: Final = 1 << 30
"""Larger ones are left alone: the doctor's memory is small."""
LEAVE_SECONDS: Final = 1.0
"""For the answer to LEAVE; without it the session ends by itself."""
DENIAL_SECONDS: Final = 15.0
"""Until a transport is sure that its key will never open this broker; it tries everything more than once."""
ROLES: Final[dict[str, Role]] = {"operator": "operator", "outer": "outer"}
"""Role of a key -> the role that looks around with it and disturbs nobody. A worker that says HELLO is a learner, for
which rounds wait."""


@dataclass
class Measured:
    """What came of it; what is None or empty could not be had."""

    status: Status | None = None
    refusal: str = ""
    """Why the broker, or its transport, will not have this process."""
    round_trips: list[float] = field(default_factory=list)
    """Seconds."""
    clock_ahead_seconds: float | None = None
    """How far the broker's clock is ahead of ours, known to half a round trip."""
    welcome: Welcome | None = None
    has_hint: bool = False
    """Whether anything came on the channel of events."""
    bytes_moved: int = 0
    seconds_moving: float = 0.0
    fetch_fault: str = ""
    """Why nothing was fetched."""

    @property
    def round_trip(self) -> float | None:
        """The median, in seconds."""
        return statistics.median(self.round_trips) if self.round_trips else None

    @property
    def bytes_per_second(self) -> float | None:
        """From the broker to here."""
        return self.bytes_moved / self.seconds_moving if self.seconds_moving > 0 and self.bytes_moved else None


class Meter:
    """A transport that counts the payload that comes in."""

    def __init__(self, transport: ClientTransport) -> None:
        self._transport = transport
        self.num_bytes = 0

    @property
    def denial(self) -> str | None:
        return self._transport.denial

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        return self._transport.send(channel, header, payload)

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        arrivals = self._transport.poll(timeout_seconds)
        self.num_bytes += sum(len(arrival.payload) for arrival in arrivals if arrival.payload is not None)
        return arrivals

    def wake(self) -> None:
        self._transport.wake()

    def close(self) -> None:
        self._transport.close()


class Link:
    """One examination; `measure` is all of it. It never raises for what the other end does."""

    def __init__(
        self,
        transport: ClientTransport,
        timeout_seconds: float,
        *,
        key_role: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`timeout_seconds` is for each single answer; `key_role` that of the key of this process, if it has one."""
        self._meter = Meter(transport)
        self._timeout_seconds = timeout_seconds
        self._first_seconds = timeout_seconds if key_role is None else max(timeout_seconds, DENIAL_SECONDS)
        self._role = ROLES.get(key_role or "operator")
        self._clock: Clock = clock or SystemClock()
        self._connection = Connection(self._hello(), self._meter, self._clock)
        self.measured = Measured()

    def _hello(self) -> Hello:
        hello = operator_hello("doctor")
        return hello if self._role is None else hello.model_copy(update={"role": self._role})

    def measure(self) -> Measured:
        """Everything, in at most some ten times the timeout; the connection is closed afterwards."""
        found = self.measured
        try:
            found.status = self._first_status()
            if found.status is not None:
                self._time_round_trips()
                self._join()
            if found.welcome is not None:
                self._fetch_something()
                self._wait_for_hint()
                self._ask(Leave(), LEAVE_SECONDS)
        finally:
            self._connection.close()
        return found

    # --------------------------------------------------------------------------------------------------------- asking

    def _poll(self, seconds: float) -> list[News]:
        news = self._connection.poll(max(0.0, seconds))
        for one in news:
            self.measured.has_hint |= isinstance(one, Hinted)
            if isinstance(one, Refused):
                self.measured.refusal = one.text
        return news

    def _ask(self, message: Message, seconds: float) -> Message | None:
        """The answer; None if it does not come in time, or the broker will not have this process."""
        self._connection.ask(message)
        deadline = self._clock.now() + seconds
        while (left := deadline - self._clock.now()) > 0 and not self.measured.refusal:
            for news in self._poll(left):
                if isinstance(news, Answered) and news.ask is message:
                    return news.reply
        self._connection.client.forget(lambda ask: ask is message)
        return None

    def _first_status(self) -> Status | None:
        deadline = self._clock.now() + self._first_seconds
        while (left := deadline - self._clock.now()) > 0 and not self.measured.refusal:
            reply = self._ask(AskStatus(reports_after=COUNT_MAX), min(left, ASK_AGAIN_SECONDS))
            if isinstance(reply, Status):
                return reply
            if isinstance(reply, Error):
                self.measured.refusal = f"{reply.code}: {reply.text}"
        return None

    def _time_round_trips(self) -> None:
        offsets = []
        for _ in range(ROUND_TRIPS):
            asked, asked_unix = self._clock.now(), self._clock.unix()
            reply = self._ask(AskStatus(reports_after=COUNT_MAX), self._timeout_seconds)
            if not isinstance(reply, Status):
                break
            seconds = self._clock.now() - asked
            self.measured.round_trips.append(seconds)
            self.measured.status = reply
            if reply.unix:
                offsets.append((seconds, reply.unix - asked_unix - seconds / 2))
        if offsets:
            # The quickest answer says most exactly when it was given.
            self.measured.clock_ahead_seconds = min(offsets)[1]

    def _join(self) -> None:
        if self._role is None:
            self.measured.fetch_fault = "with a worker's key nothing can be fetched without joining the run"
            return
        self._connection.start()
        deadline = self._clock.now() + self._timeout_seconds
        while (left := deadline - self._clock.now()) > 0 and not self.measured.refusal:
            for news in self._poll(left):
                if isinstance(news, Welcomed):
                    self.measured.welcome = news.welcome
                    return

    def _wait_for_hint(self) -> None:
        deadline = self._clock.now() + self._timeout_seconds
        while not self.measured.has_hint and (left := deadline - self._clock.now()) > 0 and not self.measured.refusal:
            self._poll(left)

    # -------------------------------------------------------------------------------------------------------- fetching

    def _fetch_something(self) -> None:
        found = self.measured
        assert found.welcome is not None
        if not found.welcome.heads:
            found.fetch_fault = "there is no run yet, so there is nothing to fetch"
            return
        reply = self._ask(AskVersion(fragment=0), self._timeout_seconds)
        blob = _choose_blob(reply) if isinstance(reply, VersionReply) else None
        if blob is None:
            text = reply.text if isinstance(reply, Error) else "the broker named no bytes of the run"
            found.fetch_fault = text
            return
        begun, before = self._clock.now(), self._meter.num_bytes
        deadline = begun + FETCH_SECONDS_MAX
        self._connection.fetch(blob, bytes_max=BLOB_BYTES_MAX)
        is_over = False
        while not is_over and (left := deadline - self._clock.now()) > 0 and not found.refusal:
            for news in self._poll(left):
                is_over |= isinstance(news, Fetched)
                if isinstance(news, FetchFailed):
                    found.fetch_fault, is_over = news.text, True
        found.seconds_moving = self._clock.now() - begun
        found.bytes_moved = self._meter.num_bytes - before
        if not found.bytes_moved and not found.fetch_fault:
            found.fetch_fault = f"of {blob.size_bytes} bytes none came within {FETCH_SECONDS_MAX:g} s"


def _choose_blob(reply: VersionReply) -> BlobRef | None:
    """The smallest one that is large enough to measure with, else the largest."""
    sources = (reply.snapshot, reply.head)
    blobs = [
        blob for info in sources if info is not None for blob in (info.parameters, info.update) if blob is not None
    ]
    blobs = sorted((blob for blob in (*blobs, *reply.updates) if blob.size_bytes <= BLOB_BYTES_MAX), key=_size)
    large = [blob for blob in blobs if blob.size_bytes >= BLOB_BYTES_WANTED]
    return large[0] if large else blobs[-1] if blobs else None


def _size(blob: BlobRef) -> int:
    return blob.size_bytes
