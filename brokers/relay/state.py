"""What the parts of a relay's core share. Pure; all that is durable is said to the core when it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from isles.brokers.doors import Doors
from isles.brokers.downloads import Downloads
from isles.brokers.quotas import Flight, OfferRates
from isles.brokers.relay.cache import Cache
from isles.brokers.relay.limits import RelayingSettings
from isles.brokers.relay.outbox import Asker, Outbox
from isles.brokers.relay.passing import Passing
from isles.brokers.relay.upstream import Links, make_links
from isles.brokers.relay.vocabulary import Instruction
from isles.brokers.relay.wanted import Wanted
from isles.brokers.replies import log
from isles.brokers.sessions import Session, Sessions
from isles.brokers.uploads import Upload, Uploads
from isles.brokers.vocabulary import AbandonUpload, Bytes, DeleteBlob, Send
from isles.proto.ids import Name, Token
from isles.proto.messages import BlobRef, Channel, Message, Offer, RelayAlive

FETCHED_FROM: Final = 1 << 60
"""Numbers of what is written to the disk that home sent; those of uploads are far below."""


@dataclass(frozen=True)
class Kept:
    """What a relay finds on its disk when it starts."""

    offers: tuple[Offer, ...] = ()
    """Contributions that the home broker has not, as far as is known, in the order in which they came."""
    blobs: tuple[BlobRef, ...] = ()
    """All blobs, those first that were used longest ago."""
    keys: RelayAlive | None = None
    """Whom the home broker let in when it was last heard."""


@dataclass
class RelayState:
    """The state of one relay process."""

    name: Name
    settings: RelayingSettings
    incarnation: Token
    """Random per start of the process."""
    has_keys: bool
    now: float
    """Monotonic seconds of the event that is being handled; at first, of the start."""
    doors: Doors = field(default_factory=Doors)
    keys_sha256: str = ""
    """Of the allow-list, as the home broker named it; empty = there is none yet."""
    passing: Passing = field(default_factory=Passing)
    disk_free_bytes: int = 2**53
    is_full: bool = False
    """Whether offers are put off for want of room in the outbox."""
    offered: dict[int, Offer] = field(default_factory=dict)
    """Transfer of an upload -> the newest OFFER of it, with its proof."""
    sessions: Sessions = field(init=False)
    uploads: Uploads = field(init=False)
    downloads: Downloads = field(init=False)
    offers: OfferRates = field(init=False)
    links: Links = field(init=False)
    outbox: Outbox = field(init=False)
    cache: Cache = field(init=False)
    wanted: Wanted = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.sessions = Sessions(_no_token, settings.sessions_max, settings.sessions_per_key_max)
        first_transfer = int(self.incarnation[:8], 16) << 20
        self.uploads = Uploads(settings, self._new_flight(), first_transfer=first_transfer)
        self.downloads = Downloads(settings, self._new_flight())
        self.offers = OfferRates(settings.offers_per_minute_max)
        self.links = make_links(self.name, self.incarnation, settings.region, settings.upstream_connections)
        self.outbox = Outbox(settings.outbox_bytes_max)
        self.cache = Cache(settings.cache_bytes_max)
        self.wanted = Wanted(settings.flight_bytes_max // 2, FETCHED_FROM)

    def _new_flight(self) -> Flight:
        return Flight(self.settings.flight_bytes_max // 2, self.settings.chunk_bytes)

    def send(
        self, session: Session | None, channel: Channel, message: Message, payload: Bytes | None = None
    ) -> list[Instruction]:
        """Says something in a session, wherever it was last heard on the channel."""
        if session is None or channel not in session.connections:
            return []
        return [Send(channel, session.connections[channel], message, payload)]

    def send_to(
        self, token: str, channel: Channel, message: Message, payload: Bytes | None = None
    ) -> list[Instruction]:
        """The same by the session's token."""
        return self.send(self.sessions.get(token), channel, message, payload)

    def tell(self, askers: dict[Asker, int], message: Message) -> list[Instruction]:
        """Gives the final answer to all who asked and are here."""
        return [
            order
            for asker, request in askers.items()
            for order in self.send(self.sessions.find(*asker), Channel.CONTROL, message.addressed(request=request))
        ]

    def drop_session(self, token: str) -> None:
        """Forgets what was fetched in a session that has ended."""
        self.downloads.drop_session(token)
        self.wanted.drop_session(token)

    def share_memory(self, shares: Mapping[str, int]) -> None:
        """From now on each of these key names has so many shares of the memory for payloads."""
        self.uploads.flight.share(shares)
        self.downloads.flight.share(shares)

    def abandon(self, uploads: list[Upload]) -> list[Instruction]:
        """Deletes what was received of uploads that are not wanted any more."""
        for upload in uploads:
            self.offered.pop(upload.transfer, None)
        return [AbandonUpload(upload.transfer, upload.blob) for upload in uploads]

    def make_room(self, num_bytes: int = 0) -> list[Instruction]:
        """Deletes the cached blobs that are too many, so that `num_bytes` more fit in."""
        return self.delete(self.cache.evict(self.is_pinned, num_bytes))

    def delete(self, evicted: list[BlobRef]) -> list[Instruction]:
        """Deletes blobs that the cache has let go of, and says so."""
        if not evicted:
            return []
        num_bytes = sum(blob.size_bytes for blob in evicted)
        said = log("debug", "cache.evicted", num_blobs=len(evicted), bytes=num_bytes)
        return [*(DeleteBlob(blob) for blob in evicted), said]

    def is_pinned(self, digest: str) -> bool:
        """Whether a cached blob is in use."""
        return self.outbox.holds(digest) or self.downloads.is_open(digest)


def _no_token() -> str:
    raise AssertionError("a relay opens no sessions: it learns of those that the home broker opened")
