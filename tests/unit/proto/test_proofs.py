"""Proofs: right exactly for the words, the maker and the broker that they were made for."""

from __future__ import annotations

import hashlib
import hmac
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.proto.errors import ConfigError
from isles.proto.ids import ContributionId
from isles.proto.key_files import generate_pair
from isles.proto.keys import KEY_LENGTH, ClientKey, KeyPair, is_key, key_bytes
from isles.proto.messages import BlobRef, Contribution, Hello, Message, Offer, pack, unpack
from isles.proto.proofs import Prover, Verifier, hello_words, offer_words

STORE = "5a" * 16
HOME, NEXT, OTHER = (generate_pair() for _ in range(3))
CONTRIBUTION = Contribution(
    id=ContributionId("us-1", 3, "a1" * 8, 7),
    base_version=5,
    blob=BlobRef(digest="d0" * 32, size_bytes=1000),
    codec="int4",
    tokens=100,
    steps=10,
    seconds=1.5,
    norms=(1.0, 0.25),
    cursor={9: 4, 2: 3},
)
HELLO = Hello(role="worker", id="us-1", incarnation="a1" * 8, region="us")
OFFER = Offer(contribution=CONTRIBUTION)


def make_key(*broker: KeyPair) -> ClientKey:
    pair = generate_pair()
    return ClientKey(
        name="us-1",
        role="worker",
        public=pair.public,
        secret=pair.secret,
        broker=tuple(one.public for one in broker),
    )


KEY = make_key(HOME)


def prove(key: ClientKey, message: Message, store: str) -> Any:
    return Prover(key).prove(message, store)


def words_of(message: Message, store: str = STORE) -> bytes:
    return hello_words(message) if isinstance(message, Hello) else offer_words(message, store)


@pytest.mark.parametrize("message", [HELLO, OFFER], ids=["hello", "offer"])
def test_a_proof_is_right_after_the_way_over_the_wire(message: Message) -> None:
    arrived: Any = unpack(pack(prove(KEY, message, STORE)))
    assert arrived.proof.public == KEY.public
    assert Verifier(HOME).verify(arrived.proof, words_of(arrived))


@pytest.mark.parametrize("message", [HELLO, OFFER], ids=["hello", "offer"])
def test_another_broker_takes_it_for_wrong(message: Message) -> None:
    proved = prove(KEY, message, STORE)
    assert not Verifier(OTHER).verify(proved.proof, words_of(proved))


@pytest.mark.parametrize("pair", [HOME, NEXT])
def test_while_the_key_of_the_broker_is_changed_both_take_it(pair: KeyPair) -> None:
    proved = prove(make_key(HOME, NEXT), OFFER, STORE)
    assert len(proved.proof.tags) == 2
    assert Verifier(pair).verify(proved.proof, words_of(proved))


def test_who_knows_only_public_keys_makes_none() -> None:
    thief = prove(make_key(HOME), OFFER, STORE)
    assert not Verifier(HOME).verify(thief.proof.changed(public=KEY.public), words_of(OFFER))


def changed(**fields: Any) -> Offer:
    return Offer(contribution=CONTRIBUTION.changed(**fields))


@pytest.mark.parametrize(
    "other",
    [
        changed(id=CONTRIBUTION.id._replace(learner="us-2")),
        changed(id=CONTRIBUTION.id._replace(fragment=4)),
        changed(id=CONTRIBUTION.id._replace(incarnation="b2" * 8)),
        changed(id=CONTRIBUTION.id._replace(number=8)),
        changed(base_version=4),
        changed(blob=BlobRef(digest="d1" * 32, size_bytes=1000)),
        changed(blob=BlobRef(digest="d0" * 32, size_bytes=1001)),
        changed(codec="int8"),
        changed(tokens=101),
        changed(steps=11),
        changed(seconds=1.25),
        changed(norms=(1.0,)),
        changed(norms=(1.0, 0.5)),
        changed(cursor={9: 4}),
        changed(cursor={9: 4, 2: 4}),
    ],
)
def test_no_field_of_a_contribution_can_be_changed(other: Offer) -> None:
    proof = prove(KEY, OFFER, STORE).proof
    assert not Verifier(HOME).verify(proof, words_of(other))


def test_every_field_of_a_contribution_is_in_the_words() -> None:
    tried = {"id", "base_version", "blob", "codec", "tokens", "steps", "seconds", "norms", "cursor"}
    assert set(Contribution.model_fields) == tried, (
        "a new field belongs into the words, or is to be left out on purpose"
    )


def test_an_offer_is_of_one_store() -> None:
    proof = prove(KEY, OFFER, STORE).proof
    assert not Verifier(HOME).verify(proof, words_of(OFFER, "00" * 16))


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "evaluator"},
        {"id": "us-2"},
        {"incarnation": "b2" * 8},
        {"store": STORE},
        {"rejoin": "77" * 16},
        {"manifest_digest": "ff" * 32},
    ],
)
def test_what_a_hello_says_of_its_maker_cannot_be_changed(fields: dict[str, Any]) -> None:
    proof = prove(KEY, HELLO, "").proof
    assert not Verifier(HOME).verify(proof, words_of(HELLO.changed(**fields)))


def test_what_a_relay_has_to_change_is_not_proved() -> None:
    proof = prove(KEY, HELLO, "").proof
    assert Verifier(HOME).verify(proof, words_of(HELLO.addressed(request=1 << 40)))
    proof = prove(KEY, OFFER, STORE).proof
    assert Verifier(HOME).verify(proof, words_of(OFFER.addressed(request=9, session="ab" * 8)))


def test_the_order_of_a_cursor_does_not_matter_and_whole_numbers_are_seconds() -> None:
    one = prove(KEY, changed(cursor={2: 3, 9: 4}, seconds=2), STORE)
    assert Verifier(HOME).verify(one.proof, words_of(changed(cursor={9: 4, 2: 3}, seconds=2.0)))


def test_other_messages_stay_as_they_are() -> None:
    from isles.proto.messages import Leave

    assert prove(KEY, Leave(), STORE) == Leave()


def test_a_point_that_everybody_shares_a_key_with_proves_nothing() -> None:
    zeros = "0" * KEY_LENGTH
    assert is_key(zeros)
    words = words_of(HELLO)
    for shared in (b"\0" * 32, b""):
        tag = hmac.digest(shared, words, "sha256").hex()
        proof = prove(KEY, HELLO, "").proof.changed(public=zeros, tags=(tag,))
        assert not Verifier(HOME).verify(proof, words)
    with pytest.raises(ConfigError, match="that is none"):
        Prover(make_key(KeyPair(public=zeros, secret=zeros)))


def test_the_words_are_these_bytes() -> None:
    """What they are is part of the wire: whoever changes them makes proofs that older brokers refuse."""
    digests = [hashlib.sha256(words_of(message)).hexdigest() for message in (HELLO, OFFER)]
    assert digests == [
        "d7ea41439f01ca09dfaf094b6c8cd822554de6f30089e39916494fb0a14257a9",
        "9c0b1eeb1f7f07a0b72d7e170303cc80ad7957096ac80953426b6176d2e3e185",
    ]


def test_a_tag_is_an_hmac_under_the_key_that_crypto_box_agrees_on(nacl_box: Callable[[str, str], bytes]) -> None:
    [tag] = prove(KEY, HELLO, "").proof.tags
    shared = nacl_box(HOME.public, KEY.secret)
    assert tag == hmac.new(shared, words_of(HELLO), "sha256").hexdigest()


@pytest.fixture
def nacl_box() -> Callable[[str, str], bytes]:
    """The key of another implementation's interface."""
    from nacl.public import Box, PrivateKey, PublicKey

    return lambda public, secret: Box(PrivateKey(key_bytes(secret)), PublicKey(key_bytes(public))).shared_key()


@given(st.binary(min_size=32, max_size=32))
def test_keys_are_read_as_zeromq_reads_them(data: bytes) -> None:
    from zmq.utils import z85

    assert key_bytes(z85.encode(data).decode()) == data


def test_without_pynacl_one_sentence_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['nacl'] = sys.modules['nacl.bindings'] = None\n"
        "from isles.proto.proofs import Verifier, is_available\n"
        "from isles.proto.key_files import generate_pair\n"
        "print(is_available())\n"
        "try: Verifier(generate_pair())\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "False",
        "ConfigError relays with keys need PyNaCl, which is not installed here: pip install 'isles[relay]'",
    ]
