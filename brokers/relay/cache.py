"""Blobs that came by and may be wanted again: which ones are on the disk, and which go first. Pure.

A blob is named by its digest, so an old cache, or half of one, is as good as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from isles.proto.messages import BlobRef


@dataclass
class Cache:
    """All cached blobs, those first that were used longest ago."""

    bytes_max: int
    num_bytes: int = 0
    _blobs: dict[str, BlobRef] = field(default_factory=dict)

    def put(self, blob: BlobRef) -> None:
        """A blob is on the disk; it was used just now."""
        self.drop(blob.digest)
        self._blobs[blob.digest] = blob
        self.num_bytes += blob.size_bytes

    def use(self, digest: str) -> BlobRef | None:
        """The blob of this digest, if it is here; it goes last from now on."""
        blob = self._blobs.pop(digest, None)
        if blob is not None:
            self._blobs[digest] = blob
        return blob

    def holds(self, digest: str) -> bool:
        return digest in self._blobs

    def drop(self, digest: str) -> BlobRef | None:
        """Forgets a blob, which is gone, or of no use."""
        blob = self._blobs.pop(digest, None)
        if blob is not None:
            self.num_bytes -= blob.size_bytes
        return blob

    def evict(self, is_pinned: Callable[[str], bool], num_bytes: int = 0) -> list[BlobRef]:
        """Forgets and returns what has to go so that `num_bytes` more fit in; what is pinned stays."""
        return self.shrink(is_pinned, self.num_bytes + num_bytes - self.bytes_max)

    def shrink(self, is_pinned: Callable[[str], bool], num_bytes: int) -> list[BlobRef]:
        """Forgets and returns at least so many bytes of blobs, if there are that many that are not pinned."""
        evicted: list[BlobRef] = []
        for blob in self._blobs.values() if num_bytes > 0 else ():
            if num_bytes <= 0:
                break
            if not is_pinned(blob.digest):
                evicted.append(blob)
                num_bytes -= blob.size_bytes
        for blob in evicted:
            self.drop(blob.digest)
        return evicted

    def clear(self, is_pinned: Callable[[str], bool]) -> list[BlobRef]:
        """Forgets and returns all that is not pinned."""
        return self.shrink(is_pinned, self.num_bytes)
