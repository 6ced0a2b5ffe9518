"""Inputs that once did harm, here or elsewhere, given to everything that reads strangers' bytes. Add to them whatever a
longer search finds."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from isles.brokers.store.index import DamagedEntryError
from isles.brokers.store.sqlite_schema import decode, decode_version
from isles.proto import codec
from isles.proto.codec import torch_codec
from isles.proto.errors import MessageError, PayloadError
from isles.proto.manifest import Manifest
from isles.proto.messages import Contribution, pack, unpack

if TYPE_CHECKING:
    from tests.fuzz.conftest import Spoiler

CORPUS: Final[dict[str, bytes]] = {
    "nothing": b"",
    "a zero": b"\x00",
    "the byte that msgpack never uses": b"\xc1",
    "an array that claims four billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims four billion items": b"\xdf\xff\xff\xff\xff",
    "a text that claims four gigabytes": b"\xdb\xff\xff\xff\xff",
    "bytes that claim four gigabytes": b"\xc6\xff\xff\xff\xff",
    "an extension that claims four gigabytes": b"\xc9\xff\xff\xff\xff\x01",
    "a thousand arrays in each other": b"\x91" * 1000 + b"\xc0",
    "a hundred thousand maps in each other": b"\x81\x00" * 100_000,
    "a message with itself for a tag": b"\x92\x92\x01\x80\x80",
    "a tag that is true": b"\x92\xc3\x80",
    "a tag that is a float": b"\x92\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x80",
    "a tag of 64 bits": b"\x92\xcf" + b"\xff" * 8 + b"\x80",
    "a tag below zero": b"\x92\xff\x80",
    "a message and one more": b"\x92\x07\x80\x92\x07\x80",
    "fields that are an array": b"\x92\x07\x90",
    "a key that cannot be hashed": b"\x92\x07\x81\x80\xc0",
    "a key that is nothing": b"\x92\x07\x81\xc0\xc0",
    "the same key twice": b"\x92\x05\x82\xa5steps\x01\xa5steps\xff",
    "a text that is no UTF-8": b"\x92\x38\x81\xa7learner\xa2\xff\xfe",
    "half of a pair of surrogates": b"\x92\x38\x81\xa7learner\xa3\xed\xa0\x80",
    "a learner named like a path": b"\x92\x38\x81\xa7learner\xb0../../etc/passwd",
    "a learner with a zero in its name": b"\x92\x38\x81\xa7learner\xa3us\x00",
    "a learner with a line break behind its name": b"\x92\x38\x81\xa7learner\xa3us\n",
    "steps that are not a number": b"\x92\x05\x81\xacstep_seconds\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    "steps without end": b"\x92\x05\x81\xacstep_seconds\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    "tokens beyond what is exact": b"\x92\x05\x81\xa6tokens\xcf" + b"\xff" * 8,
    "tokens below zero": b"\x92\x05\x81\xa6tokens\xff",
    "a fragment that does not exist": b"\x92\x1e\x81\xa8fragment\xcd\x10\x00",
    "a timestamp for a count": b"\x92\x05\x81\xa5steps\xd6\xff\x00\x00\x00\x00",
    "a million empty maps": b"\x92\x20\x81\xa1x\xdd\x00\x0f\x42\x40" + b"\x80" * 1_000_000,
    "a pickle that starts a program": b"cposix\nsystem\n(S'true'\ntR.",
    "a pickle of the newer kind": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00"
    b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a marshalled nothing": b"N",
    "YAML that makes an object": b"!!python/object/apply:os.system ['true']",
    "XML that grows": b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><x>&b;</x>',
    "JSON for msgpack": b'{"tag": 1}',
    "a request of the web": b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
    "a greeting of ZMTP": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32),
    "a zip": b"PK\x03\x04" + bytes(30),
    "a gzip": b"\x1f\x8b\x08" + bytes(20),
    "a frame of zstd alone": bytes.fromhex("28b52ffd040001000099e9d851"),
    "a frame that states a tebibyte": b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\x00\x00",
    "a frame with a window of gigabytes": b"\x28\xb5\x2f\xfd\x00\xff\x01\x00\x00",
    "a frame to be skipped": b"\x50\x2a\x4d\x18\xff\xff\xff\xff",
    "a frame that needs a dictionary": b"\x28\xb5\x2f\xfd\x03" + b"\xff" * 4 + b"\x00\x01\x00\x00",
    "a header of a payload alone": b"ISLD" + bytes(28),
    "a header of a step codec without a parameter": bytes.fromhex(
        "49534c44010501000000000001000000000000000300000000000000"
    )
    + bytes.fromhex("00000000")
    + bytes.fromhex("28b52ffd"),
    "a header of a payload full of ones": b"ISLD" + b"\xff" * 60,
    "the header of safetensors that claims everything": b"\xff" * 8 + b"{}",
    "an array of numpy with objects": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
}
"""Name -> bytes."""

NUM_VALUES = 300
DECODE_BYTES_MAX = 4 << 20
"""Most memory that decoding 300 values may take; a decompressor has 128 KiB of its own."""

READERS: Final[dict[str, tuple[Callable[[bytes], Any], type[Exception]]]] = {
    "message": (unpack, MessageError),
    "payload": (lambda data: codec.decode(data, num_values=NUM_VALUES), PayloadError),
    "payload, by torch": (lambda data: torch_codec.decode(data, num_values=NUM_VALUES), PayloadError),
    "header of a payload": (codec.inspect, PayloadError),
    "manifest": (lambda data: Manifest.from_text(data.decode("latin-1")), MessageError),
    "row of the index": (lambda data: decode(Contribution, data, "a row"), DamagedEntryError),
    "version of the index": (lambda data: decode_version(data, 0, 2, b"\x90"), DamagedEntryError),
}


@pytest.mark.parametrize("name", CORPUS)
def test_what_did_harm_does_none(name: str, check_sentence: Callable[[Exception], None]) -> None:
    for reader, (read, kind) in READERS.items():
        try:
            found = read(CORPUS[name])
        except kind as error:
            check_sentence(error)
        else:
            assert reader == "message", f"this is no {reader}"
            assert unpack(pack(found)) == found


PAYLOADS = {
    name: codec.encode(name, (np.random.default_rng(7).standard_normal(NUM_VALUES) * 1e-3).astype(np.float32))
    for name in (*codec.CODEC_NAMES, "step1", "step1.5", "step2.5")
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_spoilt_payload_costs_no_more_memory_than_a_good_one_may(
    name: str, spoilers: Callable[[int], Spoiler], check_sentence: Callable[[Exception], None]
) -> None:
    spoiler = spoilers(4)
    tracemalloc.start()
    try:
        for _ in range(150):
            payload = PAYLOADS[name]
            header, frame = payload[:32], payload[32:]
            spoilt = (
                header + spoiler.spoil_bytes(frame) if spoiler.chance.random() < 0.7 else spoiler.spoil_bytes(payload)
            )
            for decode_payload in (codec.decode, torch_codec.decode):
                try:
                    values = decode_payload(spoilt, num_values=NUM_VALUES)
                except PayloadError as error:
                    check_sentence(error)
                else:
                    assert np.isfinite(np.asarray(values)).all()
        assert tracemalloc.get_traced_memory()[1] < DECODE_BYTES_MAX
    finally:
        tracemalloc.stop()
