"""Blobs on their way out of the store, in chunks with credit. Pure.

A FETCH orders as many reads as its credit permits; each CREDIT orders more. A FETCH repeated with the same transfer
number starts again where it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isles.brokers.limits import RoutingSettings
from isles.brokers.sessions import Session
from isles.brokers.vocabulary import Instruction, ReadChunk
from isles.proto.messages import BlobRef, Credit, Error, Fetch, Message, RetryAfter


@dataclass
class Download:
    """One blob that is being sent."""

    number: int
    session: str
    transfer: int
    blob: BlobRef
    ordered: int
    """Bytes below this are read or being read."""
    taken: int
    """Bytes below this have arrived."""
    window_bytes: int
    touched_at: float


@dataclass
class Downloads:
    """All open downloads."""

    settings: RoutingSettings
    _open: dict[int, Download] = field(default_factory=dict)
    _numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    _num_opened: int = 0

    def fetch(self, session: Session, message: Fetch, blob: BlobRef, now: float) -> list[Instruction] | Message:
        """Starts a download, or says why not."""
        if message.offset > blob.size_bytes:
            text = f"blob {blob.digest[:12]} has {blob.size_bytes} bytes; there is nothing at {message.offset}"
            return Error(code="broken-rule", text=text)
        self.drop(self._numbers.get((session.token, message.transfer), 0))
        if sum(token == session.token for token, _ in self._numbers) >= self.settings.downloads_per_client_max:
            text = f"{session.role} {session.id} has too many fetches open (downloads_per_client_max)"
            return RetryAfter(seconds=self.settings.retry_seconds, reason=text)
        self._num_opened += 1
        window_bytes = min(message.credit_chunks, self.settings.credit_chunks) * self.settings.chunk_bytes
        download = Download(
            number=self._num_opened,
            session=session.token,
            transfer=message.transfer,
            blob=blob,
            ordered=message.offset,
            taken=message.offset,
            window_bytes=window_bytes,
            touched_at=now,
        )
        self._open[download.number] = download
        self._numbers[session.token, message.transfer] = download.number
        return self._order(download)

    def credit(self, session: Session, message: Credit, now: float) -> list[Instruction]:
        """More has arrived, so more may be read. A CREDIT for an ended download means nothing."""
        download = self._open.get(self._numbers.get((session.token, message.transfer), 0))
        if download is None or not download.taken < message.offset <= download.ordered:
            return []
        download.taken, download.touched_at = message.offset, now
        if download.taken == download.blob.size_bytes:
            self.drop(download.number)
        return self._order(download)

    def _order(self, download: Download) -> list[Instruction]:
        orders: list[Instruction] = []
        end = min(download.blob.size_bytes, download.taken + download.window_bytes)
        while download.ordered < end:
            num_bytes = min(self.settings.chunk_bytes, end - download.ordered)
            orders.append(ReadChunk(download.number, download.blob, download.ordered, num_bytes))
            download.ordered += num_bytes
        return orders

    def get(self, number: int) -> Download | None:
        return self._open.get(number)

    def drop(self, number: int) -> None:
        """Forgets a download that has ended."""
        download = self._open.pop(number, None)
        if download is not None:
            del self._numbers[download.session, download.transfer]

    def drop_idle(self, touched_before: float) -> None:
        """Forgets what nobody takes any more."""
        for download in [down for down in self._open.values() if down.touched_at < touched_before]:
            self.drop(download.number)
