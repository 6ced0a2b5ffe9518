"""Headers from strangers: a message, or one sentence about what is wrong, within bounded memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.proto.errors import MessageError
from isles.proto.messages import Message, pack, unpack

if TYPE_CHECKING:
    from tests.fuzz.conftest import Spoiler

BOMB_BYTES_MAX = 160 << 20
"""Most memory that reading one header may take, the longest one included: HEADER_VALUES_MAX values of 60 bytes and 8
more where they are listed, their 8 MiB twice, and a third to spare."""

Spoilers = Callable[[int], "Spoiler"]


def read(header: bytes, check_sentence: Callable[[Exception], None]) -> Message | None:
    """The message, which comes back as it was; or None for what is refused in a sentence."""
    try:
        message = unpack(header)
    except MessageError as error:
        check_sentence(error)
        return None
    assert unpack(pack(message)) == message
    return message


@pytest.mark.parametrize("seed", range(4))
def test_a_spoilt_message_is_another_message_or_refused(
    spoilers: Spoilers, every_message: tuple[Message, ...], check_sentence: Callable[[Exception], None], seed: int
) -> None:
    spoiler, num_read = spoilers(seed), 0
    for _ in range(12):
        for message in every_message:
            num_read += read(spoiler.spoil_message(message), check_sentence) is not None
    assert num_read > 20, "some of them are no longer spoilt enough to be refused"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_more_spoilt_messages(
    spoilers: Spoilers, every_message: tuple[Message, ...], check_sentence: Callable[[Exception], None], seed: int
) -> None:
    spoiler = spoilers(seed)
    for _ in range(1000):
        for message in every_message:
            read(spoiler.spoil_message(message), check_sentence)


@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    for header in (data, b"\x92\x01\x80" + data, b"\x92\x05\x81\xa5steps" + data):
        try:
            message = unpack(header)
        except MessageError:
            continue
        assert unpack(pack(message)) == message


BOMBS = """
import resource, sys
import msgpack
from isles.proto.errors import MessageError
from isles.proto.messages import HEADER_BYTES_MAX, unpack

SIZE = HEADER_BYTES_MAX - 200
def array(item, num):
    return b"\\xdd" + num.to_bytes(4, "big") + item * num
def arrays(item):
    whole = array(item, 60_000)
    return array(whole, SIZE // len(whole))
def under(tag, field, value):
    return b"\\x92" + msgpack.packb(tag) + b"\\x81" + msgpack.packb(field) + value
ITEMS = [b"\\x80", b"\\x90", b"\\x91\\x00", b"\\x81\\x00\\x00", b"\\xa2ab", b"\\xcd\\x7f\\xff", b"\\xc0",
         b"\\xcb" + bytes(8), b"\\xc4\\x01a", b"\\xd6\\xff" + bytes(4)]
FIELDS = [(32, "unknown"), (3, "versions"), (10, "contribution"), (46, "recipe"), (40, "fragments"), (1, "stated")]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number, item in enumerate(ITEMS):
    maps = b"\\xdf" + (4000).to_bytes(4, "big") + b"".join(b"\\xcd" + n.to_bytes(2, "big") + item for n in range(4000))
    bomb = (array(item, SIZE // len(item)), arrays(item), array(maps, SIZE // len(maps)))[number % 3]
    try:
        unpack(under(*FIELDS[number % len(FIELDS)], bomb))
    except MessageError:
        pass
wrong = {"norms": ["x"] * 60_000}
versions = [{"recipe": {"ingredients": [wrong]}}] * 14 + [{}] * 4000
for tag, fields in ((3, {"versions": versions}), (10, {"contribution": wrong}),
                    (46, {"recipe": {"ingredients": [{}] * 4000}}), (1, {"stated": {str(n): [] for n in range(4000)}})):
    try:
        unpack(msgpack.packb([tag, fields]))
    except MessageError:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_no_header_takes_more_memory_than_is_stated() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", BOMBS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= BOMB_BYTES_MAX
