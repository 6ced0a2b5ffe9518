"""What goes to the home broker: contributions, on the disk until their final answer is here, and blobs for INIT. Pure.

    kept        it is being written to the disk
    waiting     it is durable here, and waits for its turn
    mapping     its bytes are being checked
    sent        a link asks the home broker for it, and sends the bytes when they are granted

Payloads go in the order in which they came, some at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from isles.brokers.sessions import Session
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Message, Offer, Role, Upload

SENT_MAX: Final = 8
"""Contributions and blobs that each link asks for at once: while one waits for the disk at home others are on their
way, and no more than this many windows of credit are under way."""
ANSWERS_MAX: Final = 4096
"""Final answers that are remembered, one of each learner that there may be, for who did not hear the first one."""

Asker = tuple[Role, str, str]
"""Role, id and incarnation of who asks."""
Stage = Literal["kept", "waiting", "mapping", "sent"]


def asker_of(session: Session) -> Asker:
    """Who speaks in a session."""
    return session.role, session.id, session.incarnation


def key_of(message: Offer | Upload) -> ContributionId | str:
    """What tells one parcel from another: the id of a contribution, the digest of any other blob."""
    return message.contribution.id if isinstance(message, Offer) else message.blob.digest


def blob_of(message: Offer | Upload) -> BlobRef:
    """The payload of a message that has one."""
    return message.contribution.blob if isinstance(message, Offer) else message.blob


@dataclass(eq=False)
class Parcel:
    """One payload on its way to the home broker."""

    message: Offer | Upload
    """As it will be asked; without number and session."""
    stage: Stage
    askers: dict[Asker, int] = field(default_factory=dict)
    """Who wants to hear the final answer, each with its newest number."""
    link: int = 0
    """That asks for it, once it is sent."""

    @property
    def blob(self) -> BlobRef:
        return blob_of(self.message)

    @property
    def key(self) -> ContributionId | str:
        return key_of(self.message)

    @property
    def is_offer(self) -> bool:
        return isinstance(self.message, Offer)


@dataclass
class Outbox:
    """All parcels, in the order in which they came."""

    bytes_max: int
    num_waiting: int = 0
    """Contributions that are here and not at home."""
    waiting_bytes: int = 0
    upload_bytes: int = 0
    """Of the blobs that are no contributions."""
    _parcels: dict[ContributionId | str, Parcel] = field(default_factory=dict)
    _queue: deque[Parcel] = field(default_factory=deque)
    """Those that wait for their turn."""
    _under_way: dict[ContributionId | str, Parcel] = field(default_factory=dict)
    """Those whose turn has come: few."""
    _num_of: dict[str, int] = field(default_factory=dict)
    """Digest -> number of parcels with this payload."""
    _answers: dict[ContributionId, Message] = field(default_factory=dict)
    """The newest final answers, the oldest first."""
    _home: str = ""
    """Incarnation of the home broker that gave them."""

    def put(self, message: Offer | Upload, stage: Stage) -> Parcel:
        """Takes a payload that is on the disk."""
        parcel = Parcel(message, stage)
        self._parcels[parcel.key] = parcel
        self._num_of[parcel.blob.digest] = self._num_of.get(parcel.blob.digest, 0) + 1
        if parcel.is_offer:
            self.num_waiting += 1
            self.waiting_bytes += parcel.blob.size_bytes
        else:
            self.upload_bytes += parcel.blob.size_bytes
        if stage == "waiting":
            self._queue.append(parcel)
        return parcel

    def find(self, key: ContributionId | str) -> Parcel | None:
        return self._parcels.get(key)

    def is_kept(self, parcel: Parcel) -> None:
        """It survives a crash from now on, and may go when it is its turn."""
        parcel.stage = "waiting"
        self._queue.append(parcel)

    def take_next(self) -> Parcel | None:
        """The one whose turn it is; its bytes are being looked up from now on."""
        while self._queue:
            parcel = self._queue.popleft()
            if self._parcels.get(parcel.key) is parcel:
                parcel.stage = "mapping"
                self._under_way[parcel.key] = parcel
                return parcel
        return None

    def mapped(self, digest: str) -> list[Parcel]:
        """Those that wait for the bytes of this blob."""
        under_way = self._under_way.values()
        return [parcel for parcel in under_way if parcel.stage == "mapping" and parcel.blob.digest == digest]

    @property
    def num_under_way(self) -> int:
        """Parcels whose turn has come."""
        return len(self._under_way)

    def num_on(self, link: int) -> int:
        """Parcels that this link asks for."""
        return sum(parcel.stage == "sent" and parcel.link == link for parcel in self._under_way.values())

    def drop(self, parcel: Parcel) -> None:
        """Forgets one that has its final answer, or is lost."""
        del self._parcels[parcel.key]
        self._under_way.pop(parcel.key, None)
        digest = parcel.blob.digest
        self._num_of[digest] -= 1
        if not self._num_of[digest]:
            del self._num_of[digest]
        if parcel.is_offer:
            self.num_waiting -= 1
            self.waiting_bytes -= parcel.blob.size_bytes
        else:
            self.upload_bytes -= parcel.blob.size_bytes

    def holds(self, digest: str) -> bool:
        """Whether this blob must stay."""
        return digest in self._num_of

    def remember(self, name: ContributionId, answer: Message) -> None:
        """Keeps a final answer for a while."""
        self._answers.pop(name, None)
        self._answers[name] = answer
        if len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]

    def note_home(self, incarnation: str) -> None:
        """Which home broker it is: what another one answered need not hold in a store that is older."""
        if incarnation != self._home:
            self._home = incarnation
            self._answers.clear()

    def answer_to(self, name: ContributionId) -> Message | None:
        """The final answer that this contribution was given lately."""
        return self._answers.get(name)
