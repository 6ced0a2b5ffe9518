"""The law of credit: of no transfer more is under way than whoever receives it has allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from isles.proto.messages import Chunk, Credit, Fetch, Grant, Message

ALLOWING: Final = frozenset({Credit, Fetch, Grant})
"""What allows more; most messages do not."""


@dataclass
class CreditBook:
    """Up to which byte each transfer may be sent; shown every message where it arrives and where it leaves."""

    chunk_bytes: int
    credit_chunks: int
    _uploads: dict[tuple[bytes, int], int] = field(default_factory=dict)
    _downloads: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def reach(self, connection: bytes, message: Message, *, is_at_broker: bool) -> None:
        """A message that may allow more arrives."""
        if type(message) not in ALLOWING:
            return
        window = self.credit_chunks * self.chunk_bytes
        match message:
            case Grant(transfer=transfer, offset=offset) if not is_at_broker:
                self._allow(self._uploads, connection, transfer, offset + window)
            case Credit(transfer=transfer, offset=offset):
                limits = self._downloads if is_at_broker else self._uploads
                self._allow(limits, connection, transfer, offset + window)
            case Fetch(transfer=transfer, offset=offset) if is_at_broker:
                self._allow(self._downloads, connection, transfer, offset + window)

    def leave(self, connection: bytes, chunk: Chunk, num_bytes: int, *, is_from_broker: bool) -> None:
        """A piece is sent. Raises AssertionError if it is beyond what was allowed."""
        limits = self._downloads if is_from_broker else self._uploads
        limit = limits.get((connection, chunk.transfer), 0)
        end = chunk.offset + num_bytes
        assert end <= limit, f"byte {end} of transfer {chunk.transfer} is sent, and {limit} are allowed"

    @staticmethod
    def _allow(limits: dict[tuple[bytes, int], int], connection: bytes, transfer: int, limit: int) -> None:
        key = connection, transfer
        limits[key] = max(limit, limits.get(key, 0))
