"""Two halves of moving a blob in chunks with credit: what a client has sent, what it has received. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final

from isles.proto.errors import PayloadError
from isles.proto.messages import BlobRef, Chunk, Credit, Fetch

RESTARTS_MAX: Final = 3
"""How often a blob that arrives damaged is asked for again before its asker is told."""


@dataclass
class Upload:
    """A payload on its way to the broker, from the moment a GRANT came."""

    payload: memoryview
    transfer: int
    chunk_bytes: int
    credit_chunks: int
    offset_sent: int
    offset_taken: int

    def credit(self, offset: int) -> None:
        """The broker has taken everything below `offset`."""
        if self.offset_taken < offset <= self.offset_sent:
            self.offset_taken = offset

    def next_chunks(self) -> list[tuple[Chunk, memoryview]]:
        """What may be sent now; counts as sent."""
        chunks = []
        window_end = self.offset_taken + self.credit_chunks * self.chunk_bytes
        while self.offset_sent < min(len(self.payload), window_end):
            piece = self.payload[self.offset_sent : self.offset_sent + self.chunk_bytes]
            chunks.append((Chunk(transfer=self.transfer, offset=self.offset_sent), piece))
            self.offset_sent += len(piece)
        return chunks


@dataclass
class Download:
    """A blob on its way from the broker. Memory is the blob's size, which the asker has bounded."""

    blob: BlobRef
    transfer: int
    credit_chunks: int
    deadline: float
    num_restarts: int = 0
    received: bytearray = field(default_factory=bytearray)

    def fetch(self) -> Fetch:
        """Asks for what is still missing."""
        return Fetch(
            request=self.transfer,
            transfer=self.transfer,
            digest=self.blob.digest,
            offset=len(self.received),
            credit_chunks=self.credit_chunks,
            size_bytes=self.blob.size_bytes,
        )

    def take(self, chunk: Chunk, payload: bytes | memoryview) -> Credit | None:
        """Appends a chunk; None if it is not the next one, which a later FETCH mends.

        Raises PayloadError if the chunk runs past the announced size.
        """
        if chunk.offset != len(self.received):
            return None
        if not payload or len(self.received) + len(payload) > self.blob.size_bytes:
            raise PayloadError(f"blob {self.blob.digest[:12]} runs past its announced {self.blob.size_bytes} bytes")
        self.received += payload
        return Credit(transfer=self.transfer, offset=len(self.received))

    @property
    def is_complete(self) -> bool:
        return len(self.received) == self.blob.size_bytes

    def has_digest(self) -> bool:
        """Whether what was received is what was asked for."""
        return hashlib.sha256(self.received).hexdigest() == self.blob.digest

    def restart(self) -> bool:
        """Drops what was received; False once that was done too often."""
        self.num_restarts += 1
        self.received = bytearray()
        return self.num_restarts <= RESTARTS_MAX
