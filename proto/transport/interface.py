"""What a shell needs of a transport; ZeroMQ and the in-memory one offer it alike.

Nothing here blocks but `poll`, which has a timeout. A send that cannot be taken now returns False and is forgotten:
protocols repeat themselves, transports do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isles.proto.messages import Channel

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Arrival:
    """One received message: its header and, on the bulk channel, perhaps a payload frame."""

    channel: Channel
    connection: bytes
    """Where it came from, on the broker's side; empty at a client."""
    header: Bytes
    payload: Bytes | None = None
    key: str = ""
    """The public key (z85) that its sender proved; empty at a client, and at a broker without keys."""


class ClientTransport(Protocol):
    """One process's way to its broker. All methods but `wake` belong to one thread."""

    @property
    def denial(self) -> str | None:
        """One sentence: why the broker will never let this process in; None while it may."""

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message over; False if it could not be taken (not connected, or full)."""

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        """Everything that has arrived, waiting for the first at most `timeout_seconds` or until `wake`."""

    def wake(self) -> None:
        """Makes a `poll` under way return; callable from any thread."""

    def close(self) -> None:
        """Drops what is unsent; idempotent."""


class BrokerTransport(Protocol):
    """The broker's side. All methods but `wake` belong to one thread."""

    def send(self, channel: Channel, connection: bytes, header: bytes, payload: Bytes | None = None) -> bool:
        """Hands one message to one connection; False if it is gone or full."""

    def publish(self, header: bytes) -> None:
        """Sends to every subscriber of the events channel; a slow one misses it."""

    def recheck(self) -> None:
        """Asks anew whether everybody who hears hints may be here: for when the allow-list has changed."""

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        """Everything that has arrived, waiting for the first at most `timeout_seconds` or until `wake`."""

    def take_cuts(self) -> dict[str, int]:
        """How many connections were hung up on since the last call, by the reason; empty if none was."""

    def wake(self) -> None:
        """Makes a `poll` under way return; callable from any thread."""

    def close(self) -> None:
        """Unbinds; idempotent."""
