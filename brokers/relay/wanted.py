"""Blobs that somebody wants and the cache has not: each is fetched from the home broker once. Pure.

    queued      its turn has not come: what is being fetched is held in memory
    fetching    a link brings it
    writing     the disk takes it

However many ask for a blob, it comes once; they are served when it is on the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from isles.proto.messages import BlobRef, Fetch

REFETCHES_MAX: Final = 3
"""How often a blob that is damaged in the cache is fetched anew before who wants it is told: a disk that damages what
it is given would cost the link without end."""
DAMAGED_MAX: Final = 1024
"""Digests of damaged blobs that are remembered."""
FETCHING_MAX: Final = 16
"""Blobs that each link brings at once; a home broker permits a client some more."""


@dataclass(eq=False)
class Want:
    """One blob on its way from the home broker, and who waits for it."""

    blob: BlobRef
    stage: Literal["queued", "fetching", "writing"] = "queued"
    link: int = 0
    transfer: int = 0
    """Under which the disk takes it."""
    askers: dict[tuple[str, int], Fetch] = field(default_factory=dict)
    """Session and number of the transfer -> the newest FETCH."""


@dataclass
class Wanted:
    """All of them, in the order in which they were first asked for."""

    bytes_max: int
    """Of what is fetched at once, unless one alone is longer."""
    first_transfer: int
    _wants: dict[tuple[str, int], Want] = field(default_factory=dict)
    """Digest and size, as the asker says it: who lies about it waits for a blob of its own."""
    _transfers: dict[int, Want] = field(default_factory=dict)
    _num_asked: Counter[str] = field(default_factory=Counter)
    """Session -> FETCHes of it that wait here."""
    _damaged: dict[str, int] = field(default_factory=dict)
    """Digest -> how often it was found damaged in the cache, those first that were found first."""
    _num_written: int = 0

    def ask(self, session: str, fetch: Fetch, blob: BlobRef) -> None:
        """Somebody wants a blob; a repeated FETCH takes the place of the one before."""
        want = self._wants.setdefault((blob.digest, blob.size_bytes), Want(blob))
        self._num_asked[session] += (session, fetch.transfer) not in want.askers
        want.askers[session, fetch.transfer] = fetch

    def num_asked(self, session: str) -> int:
        """FETCHes of a session that wait here."""
        return self._num_asked[session]

    def take_next(self, num_links: int) -> tuple[Want, int] | None:
        """The one whose turn it is, if there is room, and the link that is to bring it: the one that brings least."""
        # A client brings one blob of a digest at a time, so who lies about a size has its turn alone.
        digests = {want.blob.digest for want in self._at_work()}
        queued = next(
            (one for one in self._wants.values() if one.stage == "queued" and one.blob.digest not in digests), None
        )
        if queued is None:
            return None
        loads = [[want.blob.size_bytes for want in self._at_work() if want.link == link] for link in range(num_links)]
        link = min(range(num_links), key=lambda number: (sum(loads[number]), len(loads[number]), number))
        num_bytes = sum(want.blob.size_bytes for want in self._at_work())
        if len(loads[link]) >= FETCHING_MAX or (num_bytes and num_bytes + queued.blob.size_bytes > self.bytes_max):
            return None
        queued.stage, queued.link = "fetching", link
        return queued, link

    def _at_work(self) -> Iterator[Want]:
        return (want for want in self._wants.values() if want.stage != "queued")

    def fetched(self, blob: BlobRef) -> Want | None:
        """A blob is here: the disk takes it under a number of its own."""
        want = self._wants.get((blob.digest, blob.size_bytes))
        if want is None:
            return None
        self._num_written += 1
        want.stage, want.transfer = "writing", self.first_transfer + self._num_written
        self._transfers[want.transfer] = want
        return want

    def written(self, transfer: int) -> Want | None:
        """The disk is done with a blob, whatever came of it; nobody waits for it any more."""
        want = self._transfers.pop(transfer, None)
        return None if want is None else self._end(want)

    def failed(self, blob: BlobRef) -> Want | None:
        """A blob cannot be had."""
        want = self._wants.get((blob.digest, blob.size_bytes))
        return None if want is None else self._end(want)

    def _end(self, want: Want) -> Want:
        del self._wants[want.blob.digest, want.blob.size_bytes]
        for session, _ in want.askers:
            self._forget(session)
        return want

    def drop_session(self, token: str) -> None:
        """Nobody asks in this session any more; what is under way for it comes all the same."""
        for place, want in list(self._wants.items()):
            for asker in [asker for asker in want.askers if asker[0] == token]:
                del want.askers[asker]
                self._forget(token)
            if not want.askers and want.stage == "queued":
                del self._wants[place]

    def _forget(self, session: str) -> None:
        self._num_asked[session] -= 1
        if not self._num_asked[session]:
            del self._num_asked[session]

    def is_hopeless(self, digest: str) -> bool:
        """Counts that a blob was found damaged; whether that was so too often to fetch it anew."""
        self._damaged[digest] = self._damaged.pop(digest, 0) + 1
        if len(self._damaged) > DAMAGED_MAX:
            del self._damaged[next(iter(self._damaged))]
        return self._damaged[digest] > REFETCHES_MAX
