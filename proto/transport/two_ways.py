"""A transport that takes one of two ways, as `isles.proto.ways` decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from isles.proto.clock import Clock
from isles.proto.errors import MessageError
from isles.proto.messages import COUNT_MAX, AskStatus, Channel, Status, pack, unpack
from isles.proto.transport.interface import Arrival, Bytes, ClientTransport
from isles.proto.ways import Way, Ways

ASK_SECONDS: Final = 2.0
"""Between two questions on the way that is not taken."""
SLICE_SECONDS: Final = 0.2
"""Longest wait on the one way while the other one is asked."""
QUESTION: Final = AskStatus(request=1, reports_after=COUNT_MAX)
"""Needs no session, and its answer is short without the reports."""


class TwoWays:
    """Listens on the present way, and asks on the other one while it should. Belongs to one thread, but for `wake`."""

    def __init__(self, dial: Callable[[Way], ClientTransport], timeout_seconds: float, clock: Clock) -> None:
        """Dials the relay at once; a way is dialled anew each time that it is needed. Raises as `dial`."""
        self._dial = dial
        self._clock = clock
        self.ways = Ways(timeout_seconds, clock.now())
        self._transport = dial(self.ways.present)
        self._other: ClientTransport | None = None
        self._asked_at = 0.0
        self._silent_seconds: float | None = None

    @property
    def denial(self) -> str | None:
        """One sentence: why neither way will ever let this process in; None while one may."""
        denial = self._transport.denial
        if denial is None or self._other is None:
            return None
        home = self._other if self.ways.present is Way.RELAY else self._transport
        return home.denial

    def take_change(self) -> float | None:
        """For how long the way before was silent, in seconds, if another one was taken since the last call."""
        silent, self._silent_seconds = self._silent_seconds, None
        return silent

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message over; False if it could not be taken (not connected, or full)."""
        return self._transport.send(channel, header, payload)

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        """Everything that has arrived by the present way."""
        self.ways.attend(self._clock.now())
        wait = timeout_seconds if self._other is None else min(timeout_seconds, SLICE_SECONDS)
        arrivals = self._transport.poll(wait)
        now = self._clock.now()
        self.ways.listened(now, is_heard=bool(arrivals), is_denied=self._transport.denial is not None)
        if not self.ways.should_ask(now):
            self._hang_up()
        elif self._is_answered(now):
            self._silent_seconds = self.ways.silent_seconds(now)
            self.ways.answered(now)
            self._transport.close()
            assert self._other is not None
            self._transport, self._other = self._other, None
        return arrivals

    def wake(self) -> None:
        """Makes a `poll` under way return; callable from any thread."""
        self._transport.wake()

    def close(self) -> None:
        """Closes both; idempotent."""
        self._hang_up()
        self._transport.close()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _is_answered(self, now: float) -> bool:
        """Asks on the other way, if that is due, and says whether somebody has answered there."""
        if self._other is None:
            self._other = self._dial(self.ways.present.other)
            self._asked_at = now - ASK_SECONDS
        if now - self._asked_at >= ASK_SECONDS and self._other.send(Channel.CONTROL, pack(QUESTION)):
            self._asked_at = now
        return any(_is_status(arrival) for arrival in self._other.poll(0.0))

    def _hang_up(self) -> None:
        if self._other is not None:
            self._other.close()
            self._other = None


def _is_status(arrival: Arrival) -> bool:
    try:
        return arrival.channel is Channel.CONTROL and isinstance(unpack(arrival.header), Status)
    except MessageError:
        return False
