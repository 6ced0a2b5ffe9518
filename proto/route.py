"""How a process reaches its run: the home broker, the relay of its region, or the one in place of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isles.proto.clock import Clock, SystemClock
from isles.proto.connection import Connection, News
from isles.proto.key_files import KeyWatch, read_client_key
from isles.proto.keys import ClientKey
from isles.proto.messages import Hello, Message
from isles.proto.proofs import Prover
from isles.proto.transport.interface import ClientTransport
from isles.proto.transport.two_ways import TwoWays
from isles.proto.ways import Way

RELAY_TIMEOUT_SECONDS: Final = 15.0
"""Silence of a relay after which the home broker is asked, unless somebody sets it."""


@dataclass(frozen=True)
class Route:
    """Addresses, and the file of the key that opens the doors there; None without keys."""

    broker: str | None
    """Of the home broker; None = only the relay is dialled."""
    key: Path | None = None
    relay: str | None = None
    """None = there is none, and `broker` is dialled."""
    relay_timeout_seconds: float = RELAY_TIMEOUT_SECONDS

    @property
    def address(self) -> str:
        """Whom this process means to talk to, for sentences."""
        return self.relay or self.broker or ""

    def connect(
        self, hello: Hello, clock: Clock | None = None, tell: Callable[[str, float], None] | None = None
    ) -> Connection:
        """A connection; nothing is said yet. `tell` hears the address of each other way that is taken, and for how long
        the one before was silent, in seconds.

        Raises ConfigError for addresses or a key file that cannot be used.
        """
        clock = clock or SystemClock()
        if self.relay is None:
            return Connection(hello, self._dial(Way.HOME), clock)
        prove = None if self.key is None else _FileProver(read_client_key(self.key)).prove
        if self.broker is None:
            return Connection(hello, self._dial(Way.RELAY), clock, prove=prove)
        ways = TwoWays(self._dial, self.relay_timeout_seconds, clock)
        addresses = {Way.RELAY: self.relay, Way.HOME: self.broker}
        return _TwoWayConnection(hello, ways, clock, prove, lambda way, seconds: tell and tell(addresses[way], seconds))

    def _dial(self, way: Way) -> ClientTransport:
        from isles.proto.transport.dial import dial, dial_relay

        if way is Way.RELAY:
            return dial_relay(self.relay or "", self.key)
        return dial(self.broker or "", self.key)


class _TwoWayConnection(Connection):
    """Says HELLO again, with the same incarnation, whenever another way is taken."""

    def __init__(
        self,
        hello: Hello,
        ways: TwoWays,
        clock: Clock,
        prove: Callable[[Message, str], Message] | None,
        tell: Callable[[Way, float], object],
    ) -> None:
        super().__init__(hello, ways, clock, prove=prove)
        self._ways = ways
        self._tell = tell

    def poll(self, timeout_seconds: float) -> list[News]:
        news = super().poll(timeout_seconds)
        silent_seconds = self._ways.take_change()
        if silent_seconds is not None and not self.client.is_refused:
            self._tell(self._ways.ways.present, silent_seconds)
            self.start()
        return news


class _FileProver:
    """Proves with the key that stands in a file at that moment."""

    def __init__(self, key: ClientKey) -> None:
        self._watch = KeyWatch(key)
        self._prover = Prover(key)

    def prove(self, message: Message, store: str) -> Message:
        newer = self._watch.newer()
        if newer is not None:
            self._prover = Prover(newer)
        return self._prover.prove(message, store)
