"""What the parts of a broker's core share: the index, the time, and who is there. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from isles.brokers import retained
from isles.brokers.doors import Doors
from isles.brokers.downloads import Downloads
from isles.brokers.leases import Leases
from isles.brokers.limits import RoutingSettings
from isles.brokers.membership import Membership
from isles.brokers.quotas import Flight, OfferRates, UnusedBlobs, shares_of
from isles.brokers.relay_watch import RelayWatch
from isles.brokers.sessions import Sessions
from isles.brokers.store.index import DamagedEntryError, Index
from isles.brokers.uploads import Uploads
from isles.brokers.vocabulary import Bytes, Instruction, Publish, Send
from isles.brokers.warnings import Warnings
from isles.proto.agreement import RunRecord
from isles.proto.keys import AllowList
from isles.proto.manifest import Manifest
from isles.proto.messages import Channel, Hint, Message

BYTES_PER_VALUE_MAX: Final = 8
"""Of a contribution: the longest codec takes 4, compression that fails and the header add little."""
CONTRIBUTION_BYTES_MIN: Final = 16 << 20
"""So long any contribution may be, however small its fragment: the longest single chunk costs no broker much."""

HintKind = Literal["contribution", "version", "settled", "initialised", "report", "beat"]


class FragmentFacts(NamedTuple):
    """What the manifest says of a fragment."""

    num_tensors: int
    num_values: int


@dataclass
class State:
    """The state of one broker process; everything durable is in the index."""

    index: Index
    settings: RoutingSettings
    incarnation: str
    """Random per start of the process."""
    draw_token: Callable[[], str]
    """Random, hard to guess: names sessions, and lets a worker take an id again."""
    now: float
    """Monotonic seconds of the event that is being handled; at first, of the start."""
    unix: float
    """The same moment in seconds since 1970: what gets stored."""
    seq: int = 0
    """Of the last hint."""
    bytes_down: int = 0
    """Payload bytes sent to workers, evaluators and relays, not yet in the index."""
    damaged: set[str] = field(default_factory=set)
    """Digests of blobs that could not be read; sending one again mends it."""
    unused_since: dict[str, float] = field(default_factory=dict)
    """Digests of blobs to which nothing refers yet, and since when: by a clock that nobody sets. What an earlier
    process stored counts from the start of this one."""
    unused: UnusedBlobs = field(default_factory=UnusedBlobs)
    """The same blobs by the keys that sent them to this process."""
    doors: Doors = field(default_factory=Doors)
    version: str = ""
    """Of this broker's isles."""
    num_required: int = 0
    """Live learners without which the outer that leads merges nothing, as its last LEASE says."""
    hinted_at: float = field(init=False)
    started_at: float = field(init=False)
    sessions: Sessions = field(init=False)
    uploads: Uploads = field(init=False)
    downloads: Downloads = field(init=False)
    membership: Membership = field(init=False)
    leases: Leases = field(init=False)
    offers: OfferRates = field(init=False)
    relays: RelayWatch = field(init=False)
    quarantined: dict[str, float] = field(init=False)
    """Learner -> when its quarantine ends, in seconds since 1970; perhaps it has."""
    warnings: Warnings = field(init=False)
    store: str = field(init=False)
    """Random name of the store."""
    _record: RunRecord | None = None
    _fragments: list[FragmentFacts] | None = None

    def __post_init__(self) -> None:
        settings, now = self.settings, self.now
        self.started_at = self.hinted_at = now
        self.sessions = Sessions(self.draw_token, settings.sessions_max, settings.sessions_per_key_max)
        first_transfer = int(self.incarnation[:8], 16) << 20
        self.uploads = Uploads(settings, self._new_flight(), first_transfer=first_transfer)
        self.downloads = Downloads(settings, self._new_flight())
        self.offers = OfferRates(settings.offers_per_minute_max)
        self.relays = RelayWatch(settings.learner_lease_seconds)
        self.warnings = Warnings(settings)
        with self.index.transaction():
            self.store = retained.store_name(self.index, self.incarnation)
            self.quarantined = self.index.quarantined()
            self.leases = Leases(self.index, lease_seconds=settings.outer_lease_seconds, now=now)
            self.membership = Membership(
                self.index, lease_seconds=settings.learner_lease_seconds, num_shards=settings.num_shards, now=now
            )

    def _new_flight(self) -> Flight:
        return Flight(self.settings.flight_bytes_max // 2, self.settings.chunk_bytes)

    def share_memory(self, allowed: AllowList | None) -> None:
        """From now on these key names have a share each; what is under way beyond a share ends as it may."""
        for flight in (self.uploads.flight, self.downloads.flight):
            flight.share(shares_of(allowed))

    @property
    def record(self) -> RunRecord | None:
        """The run record, once there is one; it never changes."""
        if self._record is None:
            try:
                self._record = retained.run_record(self.index)
            except ValueError as error:
                raise DamagedEntryError(
                    "the run record in the index of the store is damaged: stop the broker and restore the store folder "
                    "from a copy"
                ) from error
        return self._record

    def num_tensors(self, fragment: int) -> int:
        """How many tensors a fragment of the run has; 0 if there is no such fragment."""
        return self._facts(fragment).num_tensors

    def contribution_bytes_max(self, fragment: int) -> int:
        """More than any codec needs for a contribution to this fragment, in bytes."""
        return CONTRIBUTION_BYTES_MIN + BYTES_PER_VALUE_MAX * self._facts(fragment).num_values

    def _facts(self, fragment: int) -> FragmentFacts:
        if self._fragments is None:
            assert self.record is not None
            manifest = Manifest.from_text(self.record.manifest)
            self._fragments = [FragmentFacts(len(one.tensor_names), one.num_values) for one in manifest.fragments]
        return self._fragments[fragment] if fragment < len(self._fragments) else FragmentFacts(0, 0)

    def send(self, token: str, channel: Channel, message: Message, payload: Bytes | None = None) -> list[Instruction]:
        """Says something to a session, wherever it was last heard on the channel.

        Not through a relay, which passes on only answers to what it passed: whoever is behind it asks again.
        """
        session = self.sessions.get(token)
        if session is None or session.via or channel not in session.connections:
            return []
        return [Send(channel, session.connections[channel], message, payload)]

    def hint(self, kind: HintKind, *, fragment: int = 0, version: int = 0, learner: str = "") -> Publish:
        """Tells everybody."""
        self.seq += 1
        self.hinted_at = self.now
        return Publish(
            Hint(
                broker_incarnation=self.incarnation,
                seq=self.seq,
                kind=kind,
                fragment=fragment,
                version=version,
                learner=learner,
            )
        )
