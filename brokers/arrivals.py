"""What the shells of a broker and of a relay make of whatever their sockets bring: events, and no more."""

from __future__ import annotations

from typing import Final

from isles.brokers.vocabulary import GarbageArrived, MessageArrived
from isles.proto.errors import IslesError, MessageError
from isles.proto.messages import Channel, unpack
from isles.proto.transport.interface import Arrival

OWN_FAULTS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IslesError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a mistake of ours raises: it costs the one event that ran into it, not the process."""


def read_arrival(arrival: Arrival) -> MessageArrived | GarbageArrived:
    """The event that something arrived, which may be no message."""
    try:
        message = unpack(arrival.header)
    except MessageError as error:
        return GarbageArrived(arrival.channel, arrival.connection, str(error), arrival.key)
    payload = arrival.payload if arrival.channel is Channel.BULK else None
    return MessageArrived(arrival.channel, arrival.connection, message, payload, arrival.key)
