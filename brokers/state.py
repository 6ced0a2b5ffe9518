"""What the parts of a broker's core share: the index, the time, and who is there. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from isles.brokers import retained
from isles.brokers.downloads import Downloads
from isles.brokers.leases import Leases
from isles.brokers.limits import RoutingSettings
from isles.brokers.membership import Membership
from isles.brokers.sessions import Sessions
from isles.brokers.store.index import Index
from isles.brokers.uploads import Uploads
from isles.brokers.vocabulary import Bytes, Instruction, Publish, Send
from isles.brokers.warnings import Warnings
from isles.proto.agreement import RunRecord
from isles.proto.manifest import Manifest
from isles.proto.messages import Channel, Hint, Message

HintKind = Literal["contribution", "version", "settled", "initialised", "report", "beat"]


@dataclass
class State:
    """The state of one broker process; everything durable is in the index."""

    index: Index
    settings: RoutingSettings
    incarnation: str
    """Random per start of the process."""
    draw_token: Callable[[], str]
    """Random, hard to guess: names sessions."""
    now: float
    """Monotonic seconds of the event that is being handled; at first, of the start."""
    unix: float
    """The same moment in seconds since 1970: what gets stored."""
    seq: int = 0
    """Of the last hint."""
    bytes_down: int = 0
    """Payload bytes sent to workers and evaluators, not yet in the index."""
    damaged: set[str] = field(default_factory=set)
    """Digests of blobs that could not be read; sending one again mends it."""
    unused_since: dict[str, float] = field(default_factory=dict)
    """Digests of blobs to which nothing refers yet, and since when: by a clock that nobody sets. What an earlier
    process stored counts from the start of this one."""
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
    warnings: Warnings = field(init=False)
    store: str = field(init=False)
    """Random name of the store."""
    _record: RunRecord | None = None
    _num_tensors: list[int] | None = None

    def __post_init__(self) -> None:
        settings, now = self.settings, self.now
        self.started_at = self.hinted_at = now
        self.sessions = Sessions(self.draw_token, settings.sessions_max)
        self.uploads = Uploads(settings, first_transfer=int(self.incarnation[:8], 16) << 20)
        self.downloads = Downloads(settings)
        self.warnings = Warnings(settings)
        with self.index.transaction():
            self.store = retained.store_name(self.index, self.incarnation)
            self.leases = Leases(self.index, lease_seconds=settings.outer_lease_seconds, now=now)
            self.membership = Membership(
                self.index, lease_seconds=settings.learner_lease_seconds, num_shards=settings.num_shards, now=now
            )

    @property
    def record(self) -> RunRecord | None:
        """The run record, once there is one; it never changes."""
        if self._record is None:
            self._record = retained.run_record(self.index)
        return self._record

    def num_tensors(self, fragment: int) -> int:
        """How many tensors a fragment of the run has; 0 if there is no such fragment."""
        if self._num_tensors is None:
            assert self.record is not None
            manifest = Manifest.from_text(self.record.manifest)
            self._num_tensors = [len(fragment.tensor_names) for fragment in manifest.fragments]
        return self._num_tensors[fragment] if fragment < len(self._num_tensors) else 0

    def send(self, token: str, channel: Channel, message: Message, payload: Bytes | None = None) -> list[Instruction]:
        """Says something to a session, wherever it was last heard on the channel."""
        session = self.sessions.get(token)
        if session is None or channel not in session.connections:
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
