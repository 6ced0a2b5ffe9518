"""What the wire takes and what it refuses."""

from __future__ import annotations

from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.proto.errors import MessageError
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    HEADER_BYTES_MAX,
    MESSAGES,
    AskVersion,
    BlobRef,
    Contribution,
    Grant,
    Hello,
    Offer,
    Progress,
    pack,
    unpack,
)

CONTRIBUTION = Contribution(
    id=ContributionId("us-0", 3, "ab" * 8, 17),
    base_version=4,
    blob=BlobRef(digest="0" * 64, size_bytes=99),
    codec="int4",
    tokens=4096,
    steps=24,
    seconds=1.5,
    norms=(1.0, 0.25),
    cursor={7: 12},
)


def test_a_message_comes_back_as_it_was_packed() -> None:
    offer = Offer(request=5, session="cd" * 8, contribution=CONTRIBUTION)
    assert unpack(pack(offer)) == offer


def test_no_two_messages_share_a_tag() -> None:
    assert len({cls.tag for cls in MESSAGES.values()}) == len(MESSAGES)
    assert all(cls.tag == tag for tag, cls in MESSAGES.items())


def test_a_field_from_a_newer_protocol_is_ignored() -> None:
    tag, fields = msgpack.unpackb(pack(Grant(transfer=1, offset=2, credit_chunks=3)))
    assert unpack(msgpack.packb([tag, {**fields, "colour": "blue"}])) == Grant(transfer=1, offset=2, credit_chunks=3)


def test_a_field_that_has_its_default_takes_no_bytes() -> None:
    assert b"steps" not in pack(Progress(tokens=3))


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (b"\x91" * 100_000, "msgpack"),
        (b"\x81" * 3000, "msgpack"),
        (msgpack.packb([1, 2, 3]), "pair"),
        (msgpack.packb([True, {}]), "pair"),
        (msgpack.packb({"tag": 1}), "pair"),
        (msgpack.packb([9999, {}]), "tag 9999"),
        (msgpack.packb([-1, {}]), "tag -1"),
        (msgpack.packb([30, {}]), "AskVersion: fragment"),
        (msgpack.packb([30, {"fragment": "3"}]), "AskVersion: fragment"),
        (msgpack.packb([30, {"fragment": True}]), "AskVersion: fragment"),
        (msgpack.packb([30, {"fragment": -1}]), "AskVersion: fragment"),
        (msgpack.packb([30, {"fragment": 1.0}]), "AskVersion: fragment"),
        (msgpack.packb([5, {"step_seconds": float("nan")}]), "Progress: step_seconds"),
        (msgpack.packb([5, {"step_seconds": float("inf")}]), "Progress: step_seconds"),
        (msgpack.packb([5, {"tokens": 2**60}]), "Progress: tokens"),
        (bytes(HEADER_BYTES_MAX + 1), "over the limit"),
    ],
)
def test_what_is_no_message_is_refused_in_one_sentence(header: bytes, fault: str) -> None:
    with pytest.raises(MessageError, match=fault):
        unpack(header)


@pytest.mark.parametrize("name", ["../etc", "/root", "a/b", " ", "A", "-a", "a" * 65, "a\n", "a\x00", "é"])
def test_a_learner_cannot_be_named_like_a_path(name: str) -> None:
    with pytest.raises(MessageError):
        unpack(msgpack.packb([1, {"role": "worker", "id": name, "incarnation": "ab" * 8}]))
    tag, fields = msgpack.unpackb(pack(Offer(contribution=CONTRIBUTION)), strict_map_key=False)
    fields["contribution"]["id"][0] = name
    with pytest.raises(MessageError):
        unpack(msgpack.packb([tag, fields]))


def test_a_contribution_is_of_a_learner_that_has_a_name() -> None:
    tag, fields = msgpack.unpackb(pack(Offer(contribution=CONTRIBUTION)), strict_map_key=False)
    fields["contribution"]["id"][0] = ""
    with pytest.raises(MessageError):
        unpack(msgpack.packb([tag, fields]))


def test_a_digest_is_hexadecimal_and_nothing_else() -> None:
    for digest in ("0" * 63, "g" * 64, "../" + "0" * 61, "A" * 64):
        with pytest.raises(ValueError, match="digest"):
            BlobRef(digest=digest, size_bytes=1)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_understood_but_never_crash(header: bytes) -> None:
    with suppress(MessageError):
        unpack(header)


_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


_FIELD_NAMES = sorted({name for cls in MESSAGES.values() for name in cls.model_fields})


@given(st.sampled_from(sorted(MESSAGES)), st.dictionaries(st.sampled_from(_FIELD_NAMES), _ANYTHING, max_size=6))
def test_fields_of_any_type_are_refused_or_understood_but_never_crash(tag: int, fields: dict[str, object]) -> None:
    with suppress(MessageError):
        unpack(msgpack.packb([tag, fields]))


def test_messages_are_values_that_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        AskVersion(fragment=1).fragment = 2  # type: ignore[misc]


def test_a_hello_states_its_settings_as_plain_values() -> None:
    stated = {"sync.interval_steps": 24, "sync.codec_up": "int4"}
    hello = Hello(role="worker", id="a", incarnation="ab" * 8, stated=stated)
    assert unpack(pack(hello)) == hello


def test_a_message_is_addressed_as_a_copy_is_changed() -> None:
    ask = AskVersion(fragment=2, base_version=7)
    sent = ask.addressed(request=5, session="ab" * 8)
    assert sent == ask.model_copy(update={"request": 5, "session": "ab" * 8})
    assert pack(sent) == pack(AskVersion(fragment=2, base_version=7, request=5, session="ab" * 8))
    assert sent.model_fields_set == {"fragment", "base_version", "request", "session"}
    assert ask == AskVersion(fragment=2, base_version=7)
