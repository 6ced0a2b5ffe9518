"""From VERSION replies to values: each fragment's newest version as a flat vector, brought forward by updates.

    Theta_w = Theta_v + dec(update of v + 1) + ... + dec(update of w)

v is the version held, or a checkpoint that is fetched whole. Additions happen one after the other in fp32, as in the
outer, so every learner that holds a version holds the same bits; a digest at the head proves it. A way that fails is
followed by an ask for the other one at the next occasion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol, TypeVar

import torch

from isles.proto.client import Answered, Fetched, FetchFailed
from isles.proto.codec.torch_codec import decode
from isles.proto.connection import Connection, News
from isles.proto.errors import PayloadError
from isles.proto.logs import Logger
from isles.proto.messages import AskVersion, BlobRef, Row, VersionReply
from isles.workers.parameters import parameters_digest, payload_bytes_max

_Result = TypeVar("_Result")

FETCHES_AHEAD: Final = 2
"""Blobs of one fragment that are fetched or wait at once: one is decoded while the next is on its way, and what a
long chain takes in memory does not grow with it."""

FETCH_BYTES_MAX: Final = 256 << 20
"""Payload bytes of all fragments that are fetched or wait at once, unless those of one fragment are more: what joining
takes in memory beside the model does not grow with it, and a fast link is still busy."""


class Work(Protocol):
    """Does something heavy, on whichever thread, and returns what came of it."""

    def __call__(self, call: Callable[[], _Result], /) -> _Result:
        """Returns when it is done. Raises what `call` raises."""


def do_here(call: Callable[[], _Result], /) -> _Result:
    """Does it at once, on the caller's thread."""
    return call()


@dataclass(frozen=True, slots=True)
class Held:
    """A version's values, [num_values] float32 on the host. They are shared between threads and never changed."""

    version: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Built:
    """What one VERSION reply led to: the newest version and the learner's own row, read together with it."""

    fragment: int
    held: Held
    row: Row | None
    tokens_total: int


@dataclass
class _Way:
    """One reply being followed: `values` have taken in every blob that is no longer in `blobs`."""

    reply: VersionReply
    blobs: deque[BlobRef]
    """The checkpoint's parameters, if it begins with one, then the updates; in the order of their use."""
    start: torch.Tensor | None
    """What is held, if it begins with that."""
    values: torch.Tensor | None = None
    """Changed in place; None until the first blob is here."""
    num_ordered: int = 0
    """Of `blobs`, from the left, those that are being fetched or are here."""
    parts: dict[str, bytearray] = field(default_factory=dict)

    @property
    def bytes_ahead(self) -> int:
        """Payload bytes that following it takes now."""
        return sum(blob.size_bytes for blob in islice(self.blobs, FETCHES_AHEAD))


@dataclass
class _Track:
    """One fragment's way to the head; at most one reply is worked on at a time."""

    fragment: int
    num_values: int
    held: Held | None = None
    is_asking: bool = False
    is_wanted_again: bool = False
    needs_checkpoint: bool = False
    """The last way began with what is held, and failed."""
    way: _Way | None = None

    @property
    def is_busy(self) -> bool:
        return self.is_asking or self.way is not None


class VersionBuilder:
    """Asks for versions, fetches what they are made of, and builds them. Belongs to the connection's thread."""

    def __init__(
        self,
        connection: Connection,
        num_values: Sequence[int],
        log: Logger,
        held: Mapping[int, Held],
        *,
        work: Work = do_here,
    ) -> None:
        """`num_values` per fragment, `held`: fragment -> what is there already; `work` decodes and adds."""
        self._connection = connection
        self._log = log
        self._work = work
        self._tracks = [_Track(fragment, count, held.get(fragment)) for fragment, count in enumerate(num_values)]
        self._waiting: deque[tuple[_Track, _Way]] = deque()
        """Ways that nothing is fetched for yet."""

    def version(self, fragment: int) -> int:
        """The newest version that was built; -1 = none yet."""
        held = self._tracks[fragment].held
        return -1 if held is None else held.version

    def want(self, fragment: int) -> None:
        """Asks for the head and the own row; if that is under way already, once more afterwards."""
        track = self._tracks[fragment]
        if track.is_busy:
            track.is_wanted_again = True
            return
        track.is_asking, track.is_wanted_again = True, False
        base = None if track.held is None or track.needs_checkpoint else track.held.version
        self._connection.ask(AskVersion(fragment=fragment, base_version=base))

    def handle(self, news: News) -> list[Built]:
        """Takes one piece of news; returns what could be built with it."""
        found = self._take(news)
        self._start_ways()
        return found

    def _take(self, news: News) -> list[Built]:
        match news:
            case Answered(ask=AskVersion() as ask, reply=reply):
                return self._take_reply(self._tracks[ask.fragment], ask, reply)
            case Fetched(blob=blob, data=data):
                return [built for track in self._awaiting(blob) for built in self._take_part(track, blob, data)]
            case FetchFailed(blob=blob, text=text):
                for track in self._awaiting(blob):
                    self._give_up(track, blob.digest, text)
        return []

    def _awaiting(self, blob: BlobRef) -> list[_Track]:
        """The tracks that this blob is being fetched for."""
        return [
            track
            for track in self._tracks
            if track.way is not None
            and blob.digest not in track.way.parts
            and any(track.way.blobs[place].digest == blob.digest for place in range(track.way.num_ordered))
        ]

    def _start_ways(self) -> None:
        """Follows waiting replies as far as their payloads may be in memory beside those of the others."""
        while self._waiting:
            track, way = self._waiting[0]
            busy = sum(one.way.bytes_ahead for one in self._tracks if one.way is not None and one.way.num_ordered)
            if track.way is way and busy and busy + way.bytes_ahead > FETCH_BYTES_MAX:
                return
            self._waiting.popleft()
            if track.way is way:
                self._fetch_ahead(track, way)

    # ---------------------------------------------------------------------------------------------------- one fragment

    def _take_reply(self, track: _Track, ask: AskVersion, reply: object) -> list[Built]:
        track.is_asking = False
        if not isinstance(reply, VersionReply) or reply.head.fragment != track.fragment:
            return []
        if track.held is not None and reply.head.version <= track.held.version and not track.needs_checkpoint:
            # An older head than the one held is another store's: its row would say nothing about these values.
            is_same = reply.head.version == track.held.version
            return self._finish(track, track.held, reply) if is_same else []
        track.way = self._way(track, ask, reply)
        if track.way is None:
            self._give_up(track, "", f"no way from {ask.base_version} to {reply.head.version}")
            return []
        self._waiting.append((track, track.way))
        return []

    @staticmethod
    def _way(track: _Track, ask: AskVersion, reply: VersionReply) -> _Way | None:
        """What has to be fetched; None if the reply is no way to the head."""
        begin, blobs = reply.snapshot, deque(reply.updates)
        first = ask.base_version if begin is None else begin.version
        if first is None or len(reply.updates) != reply.head.version - first:
            return None
        if begin is not None:
            if begin.parameters is None:
                return None
            blobs.appendleft(begin.parameters)
            return _Way(reply, blobs, None)
        if track.held is None or track.held.version != first or not blobs:
            return None
        return _Way(reply, blobs, track.held.values)

    def _fetch_ahead(self, track: _Track, way: _Way) -> None:
        bytes_max = payload_bytes_max(track.num_values)
        while way.num_ordered < min(FETCHES_AHEAD, len(way.blobs)):
            way.num_ordered += 1
            blob = way.blobs[way.num_ordered - 1]
            if blob.digest not in way.parts:
                self._connection.fetch(blob, bytes_max=bytes_max)

    def _take_part(self, track: _Track, blob: BlobRef, data: bytearray) -> list[Built]:
        way = track.way
        assert way is not None
        way.parts[blob.digest] = data
        try:
            while way.blobs and way.blobs[0].digest in way.parts:
                self._work(lambda: self._take_in(track, way))
            if way.blobs:
                self._fetch_ahead(track, way)
                return []
            values, head = way.values, way.reply.head
            assert values is not None
            self._work(lambda: _check(values, track.fragment, head.version, head.parameters_sha256))
        except PayloadError as error:
            self._give_up(track, blob.digest, str(error))
            return []
        track.needs_checkpoint = False
        track.held = Held(head.version, values)
        return self._finish(track, track.held, way.reply)

    @staticmethod
    def _take_in(track: _Track, way: _Way) -> None:
        """Decodes the blob that comes next. Raises PayloadError."""
        blob = way.blobs.popleft()
        way.num_ordered -= 1
        is_last_use = all(way.blobs[place].digest != blob.digest for place in range(way.num_ordered))
        payload = way.parts.pop(blob.digest) if is_last_use else way.parts[blob.digest]
        decoded = decode(payload, num_values=track.num_values)
        if way.values is not None:
            way.values += decoded
            return
        way.values = decoded if way.start is None else decoded.add_(way.start)
        begin = way.reply.snapshot
        if begin is not None and way.blobs:  # else it is the head, which is checked anyway
            _check(decoded, track.fragment, begin.version, begin.parameters_sha256)

    def _give_up(self, track: _Track, digest: str, text: str) -> None:
        """Asks for the other way the next time; there will be one, at the latest when the heads are looked at."""
        self._log.warning("blob.unavailable", digest=digest, text=text)
        track.needs_checkpoint = track.held is not None and not track.needs_checkpoint
        track.way = None

    def _finish(self, track: _Track, held: Held, reply: VersionReply) -> list[Built]:
        track.way = None
        if track.is_wanted_again:
            self.want(track.fragment)
        return [Built(track.fragment, held, reply.row, reply.head.tokens_total)]


def _check(values: torch.Tensor, fragment: int, version: int, digest: str) -> None:
    if parameters_digest(values) != digest:
        raise PayloadError(f"fragment {fragment}, version {version}: not the values that the outer made")
