"""Dialling a broker: its address as text, and the file with the key that opens its door."""

from __future__ import annotations

from pathlib import Path

from isles.proto.key_files import read_client_key
from isles.proto.transport.address import Address
from isles.proto.transport.zmq_transport import ZmqClient


def dial(address: str, key: Path | None = None) -> ZmqClient:
    """The way to the broker at `address`, with the key in the file `key`; a broker without keys wants none.

    Connects in the background, and again whenever it has to. Raises ConfigError for an address or a key file that
    cannot be used.
    """
    return ZmqClient(Address.parse(address), None if key is None else read_client_key(key))


def dial_relay(address: str, key: Path | None = None) -> ZmqClient:
    """The way to the relay at `address`; as `dial`, but only a relay is talked to that the key file names."""
    return ZmqClient(Address.parse(address), None if key is None else read_client_key(key).for_relay())
