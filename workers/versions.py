"""From VERSION replies to values: each fragment's newest version as a flat vector, brought forward by updates.

    Theta_w = Theta_v + dec(update of v + 1) + ... + dec(update of w)

Additions happen one after the other in fp32, as in the outer, so every learner that holds a version holds the same
bits; a digest proves it. What cannot be built by updates is fetched whole at the next occasion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from isles.proto.client import Answered, Fetched, FetchFailed
from isles.proto.codec import bound_bytes
from isles.proto.codec.torch_codec import decode
from isles.proto.connection import Connection, News
from isles.proto.errors import PayloadError
from isles.proto.logs import Logger
from isles.proto.messages import AskVersion, BlobRef, Row, VersionReply
from isles.workers.parameters import PARAMETERS_CODEC, parameters_digest


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
class _Track:
    """One fragment's way to the head; at most one reply is worked on at a time."""

    fragment: int
    num_values: int
    held: Held | None = None
    is_asking: bool = False
    is_wanted_again: bool = False
    needs_snapshot: bool = False
    reply: VersionReply | None = None
    missing: set[str] = field(default_factory=set)
    parts: dict[str, bytearray] = field(default_factory=dict)

    @property
    def is_busy(self) -> bool:
        return self.is_asking or self.reply is not None


class VersionBuilder:
    """Asks for versions, fetches what they are made of, and builds them. Belongs to the connection's thread."""

    def __init__(
        self,
        connection: Connection,
        num_values: Sequence[int],
        codec: str,
        log: Logger,
        held: Mapping[int, Held],
    ) -> None:
        """`num_values` per fragment, `codec` of the updates, `held`: fragment -> what is there already."""
        self._connection = connection
        self._codec = codec
        self._log = log
        self._tracks = [_Track(fragment, count, held.get(fragment)) for fragment, count in enumerate(num_values)]

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
        base = None if track.held is None or track.needs_snapshot else track.held.version
        self._connection.ask(AskVersion(fragment=fragment, base_version=base))

    def handle(self, news: News) -> list[Built]:
        """Takes one piece of news; returns what could be built with it."""
        match news:
            case Answered(ask=AskVersion() as ask, reply=reply):
                return self._take_reply(self._tracks[ask.fragment], ask, reply)
            case Fetched(blob=blob, data=data):
                waiting = [track for track in self._tracks if blob.digest in track.missing]
                return [built for track in waiting for built in self._take_part(track, blob, data)]
            case FetchFailed(blob=blob, text=text):
                for track in self._tracks:
                    if blob.digest in track.missing:
                        self._give_up(track, blob.digest, text)
        return []

    def _take_reply(self, track: _Track, ask: AskVersion, reply: object) -> list[Built]:
        track.is_asking = False
        if not isinstance(reply, VersionReply) or reply.head.fragment != track.fragment:
            return []
        if track.held is not None and reply.head.version <= track.held.version and not track.needs_snapshot:
            # An older head than the one held is another store's: its row would say nothing about these values.
            is_same = reply.head.version == track.held.version
            return (
                self._finish(track, Built(track.fragment, track.held, reply.row, reply.head.tokens_total))
                if is_same
                else []
            )
        blobs = self._blobs(reply, ask)
        if blobs is None:
            track.needs_snapshot = True
            self._log.warning(
                "blob.unavailable", digest="", text=f"no way from {ask.base_version} to {reply.head.version}"
            )
            return []
        track.reply, track.missing = reply, {blob.digest for blob in blobs}
        for blob in blobs:
            codec = PARAMETERS_CODEC if reply.is_snapshot else self._codec
            self._connection.fetch(blob, bytes_max=bound_bytes(codec, track.num_values))
        return []

    @staticmethod
    def _blobs(reply: VersionReply, ask: AskVersion) -> Sequence[BlobRef] | None:
        """What has to be fetched; None if the reply is no way from the base to the head."""
        if reply.is_snapshot:
            return None if reply.head.parameters is None else (reply.head.parameters,)
        is_way = ask.base_version is not None and len(reply.updates) == reply.head.version - ask.base_version
        return reply.updates if is_way and reply.updates else None

    def _take_part(self, track: _Track, blob: BlobRef, data: bytearray) -> list[Built]:
        track.missing.discard(blob.digest)
        track.parts[blob.digest] = data
        if track.missing or track.reply is None:
            return []
        reply = track.reply
        try:
            values = self._build(track, reply)
            if parameters_digest(values) != reply.head.parameters_sha256:
                raise PayloadError(
                    f"fragment {track.fragment}, version {reply.head.version}: not the values that the outer made"
                )
        except PayloadError as error:
            self._give_up(track, blob.digest, str(error))
            return []
        track.held = Held(reply.head.version, values)
        track.needs_snapshot = False
        return self._finish(track, Built(track.fragment, track.held, reply.row, reply.head.tokens_total))

    def _build(self, track: _Track, reply: VersionReply) -> torch.Tensor:
        if reply.is_snapshot:
            assert reply.head.parameters is not None
            return decode(track.parts[reply.head.parameters.digest], num_values=track.num_values)
        assert track.held is not None
        values = track.held.values.clone()
        decoded = torch.empty_like(values)
        for update in reply.updates:
            values += decode(track.parts[update.digest], num_values=track.num_values, out=decoded)
        return values

    def _give_up(self, track: _Track, digest: str, text: str) -> None:
        """The next ask is for the whole parameters; there will be one, at the latest when the heads are looked at."""
        self._log.warning("blob.unavailable", digest=digest, text=text)
        track.needs_snapshot = True
        self._clear(track)

    def _finish(self, track: _Track, built: Built) -> list[Built]:
        self._clear(track)
        if track.is_wanted_again:
            self.want(track.fragment)
        return [built]

    @staticmethod
    def _clear(track: _Track) -> None:
        track.reply = None
        track.missing.clear()
        track.parts.clear()
