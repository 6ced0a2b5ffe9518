"""The shell around `Client`: one thread's connection to its broker, over any transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final, TypeVar

from isles.proto.client import Answered, Client, Fetched, FetchFailed, Hinted, Instruction, Refused, Send, Welcomed
from isles.proto.clock import Clock
from isles.proto.errors import MessageError, PayloadError, UnreachableError, refusal_error, unanswered
from isles.proto.messages import BlobRef, Hello, Hint, Message, pack, unpack
from isles.proto.transport.interface import ClientTransport

_News = TypeVar("_News", Welcomed, Answered)

News = Welcomed | Answered | Fetched | FetchFailed | Hinted | Refused

POLL_SECONDS_MAX: Final = 1.0
"""Longest single wait: an answer to a stop request comes within it."""


@dataclass(slots=True)
class Dropped:
    """Messages that did not come through; whatever matters of them is repeated."""

    unsent: int = 0
    """Own ones that the transport did not take: no connection, or too much waits for it."""
    unread: int = 0
    """Arrivals that are no message of this protocol."""
    hints: int = 0
    """Hints that never came, by the gaps in their numbers."""


class Connection:
    """Performs what the protocol core orders and hands its news on. Belongs to one thread; only `wake` does not."""

    def __init__(
        self,
        hello: Hello,
        transport: ClientTransport,
        clock: Clock,
        *,
        prove: Callable[[Message, str], Message] | None = None,
    ) -> None:
        """`prove` adds the proofs that a relay hands over, see `Client`."""
        self.client = Client(hello, prove)
        self._transport = transport
        self._clock = clock
        self._news: list[News] = []
        self._dropped = Dropped()
        self._last_hint: Hint | None = None

    def start(self) -> None:
        """Says HELLO; also the way to read the state of the run anew."""
        self._perform(self.client.start(self._clock.now()))

    def ask(self, message: Message, payload: bytes | memoryview | None = None) -> None:
        """Asks until answered; the news will be an Answered with this very message."""
        self._perform(self.client.ask(message, self._clock.now(), payload))

    def fetch(self, blob: BlobRef, *, bytes_max: int) -> None:
        """Brings a blob of at most `bytes_max` bytes; the news will be Fetched or FetchFailed."""
        self._perform(self.client.fetch(blob, self._clock.now(), bytes_max=bytes_max))

    def poll(self, timeout_seconds: float) -> list[News]:
        """All news, waiting for the first at most `timeout_seconds` or until `wake`."""
        deadline = self.client.next_deadline
        wait = min(timeout_seconds, POLL_SECONDS_MAX)
        if self._news:
            wait = 0.0
        elif deadline is not None:
            wait = max(0.0, min(wait, deadline - self._clock.now()))
        for arrival in self._transport.poll(wait):
            try:
                message = unpack(arrival.header)
            except MessageError:
                self._dropped.unread += 1
                continue  # a broker that is newer than we are may say things we need not know
            self._perform(self.client.handle(message, self._clock.now(), arrival.payload))
        if self._transport.denial is not None:
            self._perform(self.client.deny(self._transport.denial))
        self._perform(self.client.tick(self._clock.now()))
        news, self._news = self._news, []
        return news

    def wait_for_welcome(self, timeout_seconds: float, *, address: str) -> Welcomed:
        """Polls until the broker has let us in. For commands and start-up; drops other news.

        Raises UnreachableError after `timeout_seconds`, RefusedError or FencedError if the broker refuses.
        """
        if not self.client.session:
            self.start()
        return self._wait(Welcomed, None, timeout_seconds, address)

    def ask_and_wait(
        self, message: Message, timeout_seconds: float, *, address: str, payload: bytes | memoryview | None = None
    ) -> Message:
        """Asks and polls until the answer is there. For commands and start-up; drops other news. Raises as above."""
        self.ask(message, payload)
        return self._wait(Answered, message, timeout_seconds, address).reply

    def fetch_and_wait(self, blob: BlobRef, timeout_seconds: float, *, bytes_max: int, address: str) -> bytearray:
        """Brings a blob of at most `bytes_max` bytes. For commands; drops other news.

        Raises PayloadError if it cannot be had, and as `wait_for_welcome`.
        """
        self.fetch(blob, bytes_max=bytes_max)
        deadline = self._clock.now() + timeout_seconds
        while (left := deadline - self._clock.now()) > 0:
            for news in self.poll(left):
                raise_if_refused(news, address)
                if isinstance(news, FetchFailed) and news.blob.digest == blob.digest:
                    raise PayloadError(news.text)
                if isinstance(news, Fetched) and news.blob.digest == blob.digest:
                    return news.data
        raise UnreachableError(
            f"blob {blob.digest[:12]} of {blob.size_bytes} bytes did not come from {address} within "
            f"{timeout_seconds:g} s: is the broker still running, and is the link fast enough?"
        )

    def _wait(self, kind: type[_News], ask: Message | None, timeout: float, address: str) -> _News:
        deadline = self._clock.now() + timeout
        while (left := deadline - self._clock.now()) > 0:
            for news in self.poll(left):
                raise_if_refused(news, address)
                if isinstance(news, kind) and (ask is None or getattr(news, "ask", None) is ask):
                    return news
        raise unanswered(address, timeout)

    def leave_and_wait(self, session: str, timeout_seconds: float) -> None:
        """Leaves a session that this process is not let into again, if the broker answers in time; drops all news."""
        self._perform(self.client.leave(session, self._clock.now()))
        deadline = self._clock.now() + timeout_seconds
        while (left := deadline - self._clock.now()) > 0:
            if any(isinstance(news, Answered | Refused) for news in self.poll(left)):
                return

    def take_dropped(self) -> dict[str, int]:
        """How many messages of which kind were dropped since the last call: fields of the event `messages.dropped`.

        Empty if there were none.
        """
        dropped, self._dropped = self._dropped, Dropped()
        counts = asdict(dropped)
        return counts if any(counts.values()) else {}

    def wake(self) -> None:
        """Makes a `poll` under way return; callable from any thread."""
        self._transport.wake()

    def close(self) -> None:
        """Closes the transport."""
        self._transport.close()

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if not isinstance(instruction, Send):
                self._count_gap(instruction)
                self._news.append(instruction)
            elif not self._transport.send(instruction.channel, pack(instruction.message), instruction.payload):
                self._dropped.unsent += 1

    def _count_gap(self, news: News) -> None:
        if isinstance(news, Hinted):
            last, self._last_hint = self._last_hint, news.hint
            if last is not None and last.broker_incarnation == news.hint.broker_incarnation:
                self._dropped.hints += max(0, news.hint.seq - last.seq - 1)


def raise_if_refused(news: News, address: str) -> None:
    """Turns a refusal into the exception that ends a process."""
    if isinstance(news, Refused):
        raise refusal_error(news.code)(f"the broker at {address} refused this process ({news.code}): {news.text}")
