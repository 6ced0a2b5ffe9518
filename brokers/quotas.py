"""What one key may have of a broker: of its memory, and of its time. Pure.

A share of the memory for payloads is every key name's own: one that takes all of it slows down nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final

from isles.brokers.sessions import Owner
from isles.proto.keys import AllowList

MINUTE_SECONDS: Final = 60.0
RELAY_SHARES: Final = 4
"""Shares of the memory of a relay's key: it moves the payloads of a region, which would have a share each. With more, a
few relays would leave the outer too little for its own."""


def shares_of(allowed: AllowList | None) -> dict[str, int]:
    """How many shares of the memory for payloads each key name has."""
    return {key.name: RELAY_SHARES if key.role == "relay" else 1 for key in allowed or ()}


@dataclass
class Flight:
    """Payload bytes in memory in one direction; everything that is taken is given back."""

    bytes_max: int
    share_bytes_min: int
    """One chunk: with less, a key could move nothing at all."""
    num_keys: int = 1
    """Shares into which the memory is divided: one for each name, and more for a relay's."""
    total: int = 0
    _of: dict[str, int] = field(default_factory=dict)
    _shares: Mapping[str, int] = field(default_factory=dict)

    def share(self, shares: Mapping[str, int]) -> None:
        """Divides the memory among these names, each with so many shares; among nobody, all of it is everybody's."""
        self._shares, self.num_keys = shares, sum(shares.values()) if shares else 1

    @property
    def share_bytes(self) -> int:
        """What a key name with one share may take."""
        return max(self.share_bytes_min, self.bytes_max // max(1, self.num_keys))

    def share_of(self, key_name: str) -> int:
        """What this key name may take."""
        return self.share_bytes * self._shares.get(key_name, 1)

    def room(self, key_name: str) -> int:
        """Bytes that this name may take now; may be negative once there are more names than there were."""
        return self.share_of(key_name) - self._of.get(key_name, 0)

    def take(self, key_name: str, num_bytes: int) -> None:
        """Some bytes are in memory from now on."""
        self.total += num_bytes
        self._of[key_name] = self._of.get(key_name, 0) + num_bytes

    def give_back(self, key_name: str, num_bytes: int) -> None:
        """Some bytes have left it."""
        if not num_bytes:
            return
        self.total -= num_bytes
        self._of[key_name] -= num_bytes
        if not self._of[key_name]:
            del self._of[key_name]


@dataclass
class DiskQueue:
    """The chunks that wait for the disk, by transfer, in the order in which it takes them."""

    flight: Flight
    _waiting: dict[int, tuple[str, deque[int]]] = field(default_factory=dict)

    def put(self, transfer: int, key_name: str, num_bytes: int) -> None:
        """A chunk was ordered to be written."""
        self.flight.take(key_name, num_bytes)
        self._waiting.setdefault(transfer, (key_name, deque()))[1].append(num_bytes)

    def take(self, transfer: int) -> str | None:
        """The disk is done with the oldest chunk of a transfer, whatever came of it; the name whose it was."""
        found = self._waiting.get(transfer)
        if found is None:
            return None
        key_name, sizes = found
        self.flight.give_back(key_name, sizes.popleft())
        if not sizes:
            del self._waiting[transfer]
        return key_name


@dataclass
class UnusedBlobs:
    """Stored blobs to which nothing refers yet, each with the name of the key that sent it."""

    _of: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Digest -> key name and size in bytes."""
    _num: dict[str, int] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)

    def put(self, digest: str, key_name: str, num_bytes: int) -> None:
        """A blob was stored."""
        self._drop(digest)
        self._of[digest] = key_name, num_bytes
        self._num[key_name] = self.num(key_name) + 1
        self._bytes[key_name] = self.num_bytes(key_name) + num_bytes

    def keep(self, digests: Container[str]) -> None:
        """All others are gone, or something refers to them."""
        for digest in [digest for digest in self._of if digest not in digests]:
            self._drop(digest)

    def num(self, key_name: str) -> int:
        """How many there are of this name."""
        return self._num.get(key_name, 0)

    def num_bytes(self, key_name: str) -> int:
        """How many bytes those have."""
        return self._bytes.get(key_name, 0)

    def _drop(self, digest: str) -> None:
        found = self._of.pop(digest, None)
        if found is None:
            return
        key_name, num_bytes = found
        self._num[key_name] -= 1
        self._bytes[key_name] -= num_bytes
        if not self._num[key_name]:
            del self._num[key_name], self._bytes[key_name]


@dataclass
class OfferRates:
    """How many offers each client made in the minute that began with the first of them."""

    per_minute_max: int
    _counted: dict[Owner, tuple[float, int]] = field(default_factory=dict)

    def count(self, owner: Owner, now: float) -> float:
        """Counts one offer; the seconds to wait before the next one is heard, 0 if this one is."""
        begun, num = self._counted.get(owner, (now, 0))
        if now - begun >= MINUTE_SECONDS:
            begun, num = now, 0
        if num >= self.per_minute_max:
            return begun + MINUTE_SECONDS - now
        self._counted[owner] = begun, num + 1
        return 0.0

    def forget(self, now: float) -> None:
        """Lets go of the minutes that are over."""
        self._counted = {who: one for who, one in self._counted.items() if now - one[0] < MINUTE_SECONDS}
