"""Blobs on their way out of the store, in chunks with credit. Pure.

A FETCH orders as many reads as its credit permits; each CREDIT orders more. What is read and not yet taken is bounded:
without room a download waits for its turn, and all that wait take turns. A FETCH repeated with the same transfer
number starts again where it says; from the beginning, as of a blob that arrived damaged, it has the blob checked.
A read that was ordered counts until the disk is done with it, whatever became of its download meanwhile, and nobody
takes what was not sent: so neither repeated FETCHes nor CREDITs that are lies fill the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from isles.brokers.limits import RoutingSettings
from isles.brokers.quotas import DiskQueue, Flight
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
    sent: int
    """Bytes below this are read and were sent."""
    taken: int
    """Bytes below this have arrived."""
    window_bytes: int
    touched_at: float
    is_doubted: bool
    key_name: str


@dataclass
class Downloads:
    """All open downloads."""

    settings: RoutingSettings
    flight: Flight
    _open: dict[int, Download] = field(default_factory=dict)
    _numbers: dict[str, dict[int, int]] = field(default_factory=dict)
    """Session -> number that its client chose -> number of the download."""
    _num_opened: int = 0
    _waiting: dict[str, dict[int, None]] = field(default_factory=dict)
    """Key name -> downloads that may read on, in the order of their turns."""
    _reads: DiskQueue = field(init=False)

    def __post_init__(self) -> None:
        self._reads = DiskQueue(self.flight)

    def fetch(self, session: Session, message: Fetch, blob: BlobRef, now: float) -> list[Instruction] | Message:
        """Starts a download, or says why not."""
        if message.offset > blob.size_bytes:
            text = f"blob {blob.digest[:12]} has {blob.size_bytes} bytes; there is nothing at {message.offset}"
            return Error(code="broken-rule", text=text)
        own = self._numbers.get(session.token, {})
        earlier = own.get(message.transfer, 0)
        self.drop(earlier)
        times = self.settings.times(session.role)
        if len(own) >= times * self.settings.downloads_per_client_max:
            return self._later(f"{session.role} {session.id} has too many fetches open (downloads_per_client_max)")
        if session.key_name and self._num_of_key(session.key_name) >= times * self.settings.downloads_per_key_max:
            return self._later(f"the key {session.key_name} has too many fetches open (downloads_per_key_max)")
        self._num_opened += 1
        window_bytes = min(message.credit_chunks, self.settings.credit_chunks) * self.settings.chunk_bytes
        others = sum(self._open[number].window_bytes for number in own.values())
        window_bytes_max = times * self.settings.window_bytes_per_client_max
        window_bytes = min(window_bytes, max(self.settings.chunk_bytes, window_bytes_max - others))
        download = Download(
            number=self._num_opened,
            session=session.token,
            transfer=message.transfer,
            blob=blob,
            ordered=message.offset,
            sent=message.offset,
            taken=message.offset,
            window_bytes=window_bytes,
            touched_at=now,
            is_doubted=earlier > 0 and message.offset == 0,
            key_name=session.key_name,
        )
        self._open[download.number] = download
        self._numbers.setdefault(session.token, {})[message.transfer] = download.number
        return self._read_on(download)

    def _num_of_key(self, key_name: str) -> int:
        return sum(download.key_name == key_name for download in self._open.values())

    def _later(self, reason: str) -> RetryAfter:
        return RetryAfter(seconds=self.settings.retry_seconds, reason=reason)

    def credit(self, session: Session, message: Credit, now: float) -> list[Instruction]:
        """More has arrived, so more may be read. A CREDIT for an ended download means nothing."""
        download = self._open.get(self._numbers.get(session.token, {}).get(message.transfer, 0))
        if download is None or not download.taken < message.offset <= download.sent:
            return []
        self.flight.give_back(download.key_name, message.offset - download.taken)
        download.taken, download.touched_at = message.offset, now
        if download.taken < download.blob.size_bytes:
            return self._read_on(download)
        self.drop(download.number)
        return self._serve(download.key_name)

    def _read_on(self, download: Download) -> list[Instruction]:
        self._waiting.setdefault(download.key_name, {})[download.number] = None
        return self._serve(download.key_name)

    def serve(self) -> list[Instruction]:
        """Orders what there is room for since some downloads were dropped."""
        return [order for key_name in list(self._waiting) for order in self._serve(key_name)]

    def _serve(self, key_name: str) -> list[Instruction]:
        """Orders one chunk after the other, of all in turn that wait, while there is room."""
        orders: list[Instruction] = []
        waiting = self._waiting.get(key_name, {})
        while waiting:
            number = next(iter(waiting))
            order = self._next_read(number)
            if order is not None and self.flight.room(key_name) < order.num_bytes:
                break
            del waiting[number]
            if order is not None:
                self._reads.put(number, key_name, order.num_bytes)
                download = self._open[number]
                download.ordered += order.num_bytes
                orders.append(order)
                if download.ordered < download.blob.size_bytes:
                    waiting[number] = None
        if not waiting:
            self._waiting.pop(key_name, None)
        return orders

    def _next_read(self, number: int) -> ReadChunk | None:
        download = self._open.get(number)
        if download is None:
            return None
        end = min(download.blob.size_bytes, download.taken + download.window_bytes)
        num_bytes = min(self.settings.chunk_bytes, end - download.ordered)
        is_doubted = download.is_doubted and download.ordered == 0
        return ReadChunk(number, download.blob, download.ordered, num_bytes, is_doubted) if num_bytes > 0 else None

    def disk_is_done(self, number: int, num_bytes: int) -> Download | None:
        """The disk is done with the oldest read of a download: the one that is to be sent these bytes, if it lasts."""
        self._reads.take(number)
        download = self._open.get(number)
        if download is not None:
            self.flight.take(download.key_name, num_bytes)
            download.sent += num_bytes
        return download

    def is_open(self, digest: str) -> bool:
        """Whether somebody is fetching this blob."""
        return any(download.blob.digest == digest for download in self._open.values())

    def drop(self, number: int) -> None:
        """Forgets a download that has ended."""
        download = self._open.pop(number, None)
        if download is not None:
            own = self._numbers[download.session]
            del own[download.transfer]
            if not own:
                del self._numbers[download.session]
            self.flight.give_back(download.key_name, download.sent - download.taken)

    def drop_session(self, token: str) -> None:
        """Forgets what a session that has ended was fetching."""
        for number in list(self._numbers.get(token, {}).values()):
            self.drop(number)

    def drop_idle(self, touched_before: float) -> None:
        """Forgets what nobody takes any more."""
        for download in [down for down in self._open.values() if down.touched_at < touched_before]:
            self.drop(download.number)
