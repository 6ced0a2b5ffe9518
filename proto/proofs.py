"""Proofs: who made a HELLO or an OFFER that a relay hands over to the home broker. Pure.

    words   what is proved: a msgpack array of everything that must not be changed on the way
    tag     HMAC-SHA256 of the words, under the key that the maker's CURVE pair and the broker's have in common:
            X25519 of one's secret half and the other's public half

Only the home broker can verify a tag, and nobody else needs to. A proof may be shown again: ids and incarnations, which
are in the words, are used once. PyNaCl, which computes the common key, is loaded only where there is something to
prove.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

import msgpack

from isles.proto.errors import ConfigError
from isles.proto.keys import ALLOWED_MAX, ClientKey, KeyPair, key_bytes
from isles.proto.messages import Hello, Message, Offer, Proof

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO_WORDS: Final = "isles hello 1"
OFFER_WORDS: Final = "isles offer 1"
"""What words begin with: the kind of message, and the form of the words, so that none stand for two things."""


def hello_words(hello: Hello) -> bytes:
    """What the proof of a HELLO is of."""
    packed: bytes = msgpack.packb(
        (HELLO_WORDS, hello.role, hello.id, hello.incarnation, hello.store, hello.rejoin, hello.manifest_digest)
    )
    return packed


def offer_words(offer: Offer, store: str) -> bytes:
    """What the proof of an OFFER is of; `store` as WELCOME named it, so that it is of no other run."""
    contribution = offer.contribution
    packed: bytes = msgpack.packb(
        (
            OFFER_WORDS,
            store,
            *contribution.id,
            contribution.base_version,
            contribution.blob.digest,
            contribution.blob.size_bytes,
            contribution.codec,
            contribution.tokens,
            contribution.steps,
            float(contribution.seconds),
            [float(norm) for norm in contribution.norms],
            sorted(contribution.cursor.items()),
        )
    )
    return packed


class Prover:
    """What one process proves its HELLOs and OFFERs with."""

    def __init__(self, key: ClientKey) -> None:
        """Raises ConfigError without PyNaCl, or for a public key in the file that is none."""
        common = _load()
        self._public = key.public
        secret = key_bytes(key.secret)
        shared = [common(key_bytes(public), secret) for public in key.broker]
        if None in shared:
            raise ConfigError(f"the key of {key.role} {key.name} lists a public key of its broker that is none")
        self._shared = tuple(one for one in shared if one is not None)

    def prove(self, message: Message, store: str) -> Message:
        """A HELLO or an OFFER with a proof for each key that its broker may have; others need none, and stay as is.

        `store` is the one that this process's state is of.
        """
        if isinstance(message, Hello):
            words = hello_words(message)
        elif isinstance(message, Offer):
            words = offer_words(message, store)
        else:
            return message
        return message.changed(proof=Proof(public=self._public, tags=tuple(_tag(key, words) for key in self._shared)))


class Verifier:
    """Tells, for the owner of one key pair, whether a proof that was made for it is right."""

    def __init__(self, pair: KeyPair) -> None:
        """Raises ConfigError without PyNaCl."""
        self._common = _load()
        self._secret = key_bytes(pair.secret)
        self._shared: dict[str, bytes | None] = {}

    def verify(self, proof: Proof, words: bytes) -> bool:
        """Whether the owner of `proof.public`, a key (z85) that stands in the allow-list, has proved these words."""
        if proof.public not in self._shared:
            if len(self._shared) >= ALLOWED_MAX:
                self._shared.clear()
            self._shared[proof.public] = self._common(key_bytes(proof.public), self._secret)
        shared = self._shared[proof.public]
        if shared is None:
            return False
        right = _tag(shared, words)
        return any(hmac.compare_digest(tag, right) for tag in proof.tags)


def is_available() -> bool:
    """Whether PyNaCl is installed."""
    try:
        _load()
    except ConfigError:
        return False
    return True


def _tag(shared: bytes, words: bytes) -> str:
    return hmac.digest(shared, words, "sha256").hex()


def _load() -> Callable[[bytes, bytes], bytes | None]:
    """What makes the common key, 32 bytes, of a public and a secret one; None of a public key that is none."""
    try:
        from nacl.bindings import crypto_box_beforenm
        from nacl.exceptions import CryptoError
    except ImportError:
        raise ConfigError(
            "relays with keys need PyNaCl, which is not installed here: pip install 'isles[relay]'"
        ) from None

    def common(public: bytes, secret: bytes) -> bytes | None:
        try:
            return crypto_box_beforenm(public, secret)
        except CryptoError:  # a point of low order: anybody could compute the same
            return None

    return common
