"""What a relay's core is told and what it orders, besides the events and instructions of every broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.brokers import vocabulary
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Channel, Message, Offer, RelayAlive

Bytes = vocabulary.Bytes


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class HomeSaid:
    """The home broker said something on one of the links to it."""

    link: int
    channel: Channel
    message: Message
    payload: Bytes | None = None


@dataclass(frozen=True, slots=True)
class LinkDenied:
    """A link learnt that the home broker will never let this relay in; `text` says why."""

    text: str


@dataclass(frozen=True, slots=True)
class OfferKept:
    """An offer is on the disk beside its blob, and both survive a crash."""

    id: ContributionId


@dataclass(frozen=True, slots=True)
class OfferNotKept:
    """The disk was too full for an offer."""

    id: ContributionId
    text: str


@dataclass(frozen=True, slots=True)
class BlobMapped:
    """The bytes of a blob, which were found to be right."""

    blob: BlobRef
    payload: Bytes


@dataclass(frozen=True, slots=True)
class BlobUnmappable:
    """A blob is not there or not what it should be."""

    blob: BlobRef
    text: str


RelayDiskEvent = vocabulary.DiskEvent | OfferKept | OfferNotKept | BlobMapped | BlobUnmappable
Event = vocabulary.MessageArrived | vocabulary.GarbageArrived | vocabulary.Tick | RelayDiskEvent | HomeSaid | LinkDenied


# ------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class SendUp:
    """Hand this to one of the links to the home broker; if it cannot take it, forget it."""

    link: int
    channel: Channel
    message: Message
    payload: Bytes | None = None


@dataclass(frozen=True, slots=True)
class KeepOffer:
    """Make an offer durable, whose blob is; reported by OfferKept or OfferNotKept."""

    offer: Offer

    @property
    def blob(self) -> BlobRef:
        """What it offers."""
        return self.offer.contribution.blob


@dataclass(frozen=True, slots=True)
class DropOffer:
    """Delete an offer from the disk; its blob stays."""

    id: ContributionId
    blob: BlobRef


@dataclass(frozen=True, slots=True)
class MapBlob:
    """Check a blob and give its bytes without reading them into memory; reported by BlobMapped or BlobUnmappable."""

    blob: BlobRef


@dataclass(frozen=True, slots=True)
class KeepKeys:
    """Write down whom the home broker lets in, for the next start."""

    alive: RelayAlive


@dataclass(frozen=True, slots=True)
class Recheck:
    """Somebody is let in no longer: ask anew who hears hints."""


@dataclass(frozen=True, slots=True)
class End:
    """The home broker will not have this relay: end the process."""

    code: str
    text: str


OutboxOrder = KeepOffer | DropOffer | MapBlob
RelayDiskOrder = vocabulary.DiskOrder | OutboxOrder
Instruction = vocabulary.Instruction | SendUp | OutboxOrder | KeepKeys | Recheck | End

Ack = Literal["home", "region"]
