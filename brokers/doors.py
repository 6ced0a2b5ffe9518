"""Who may come in, and whose a session and a learner's id are. Pure.

    a broker without keys    everybody may be whom they say they are
    a broker with keys       a key has a name and a role. HELLO's role must be the key's, a session is for the keys of
                             the name that opened it, and a learner's id is for the name that first used it
    what a relay hands over  its maker's key counts, not the relay's: a HELLO and each OFFER carry a proof of it

A name may have several keys at once, so that one of them can be exchanged for the next. A worker that has a key and no
id is given one, `<name>-<number>`, with a token without which the id is not given again: workers that share a key, as
those of one scaled service do, cannot take each other's place by mistake.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from isles.brokers.membership import Membership
from isles.brokers.sessions import Session, Sessions
from isles.proto.ids import NAME_LENGTH_MAX
from isles.proto.keys import AllowedKey, AllowList, KeyRole
from isles.proto.messages import LEARNERS_MAX, Error, Hello, Proof, Role
from isles.proto.proofs import hello_words

OPENS: Final[Mapping[KeyRole, frozenset[Role]]] = {
    "worker": frozenset({"worker"}),
    "outer": frozenset({"outer"}),
    "operator": frozenset({"operator", "evaluator"}),
    "relay": frozenset({"relay"}),
}
"""What the owner of a key may be."""
AT_HOME: Final[frozenset[Role]] = frozenset({"outer", "relay"})
"""Who talks to the home broker itself: no relay hands anything over for them."""
SHOWN_CHARACTERS: Final = 8
"""Of a public key in a sentence: enough to find it in the allow-list."""
DIGITS_MAX: Final = len(str(LEARNERS_MAX))
"""Of the number in an id that is given."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whose a session is, whoever hands its messages over."""

    key_name: str = ""
    """Empty = a broker without keys."""
    public: str = ""
    """The key (z85) that it has proved."""
    via: str = ""
    """The relay's key name, or without keys its id; empty = it talks to this broker itself."""


@dataclass
class Doors:
    """The allow-list of a broker; None = it has no keys."""

    allowed: AllowList | None = None
    verify: Callable[[Proof, bytes], bool] | None = None
    """Whether a proof is of these words; None = this broker cannot tell."""

    def visitor(self, public: str, hello: Hello) -> Visitor:
        """Whose the session is that a HELLO opens for which there is no `hello_error`."""
        key = self._find(public)
        if key is None or hello.role == "relay" or key.role != "relay" or hello.proof is None:
            return Visitor("" if key is None else key.name, public)
        signer = self._find(hello.proof.public)
        return Visitor("" if signer is None else signer.name, hello.proof.public, via=key.name)

    def key_error(self, public: str) -> Error | None:
        """Why nothing that comes with this key is heard."""
        if self.allowed is None or self.allowed.find(public) is not None:
            return None
        which = f"the key {public[:SHOWN_CHARACTERS]}.. of this process" if public else "a process without a key"
        text = f"{which} is not in the allow-list of this broker: ask its operator for one (isles keys new)"
        return Error(code="denied", text=text)

    def hello_error(self, public: str, hello: Hello, holder: Session | None) -> Error | None:
        """Why this key cannot open what HELLO asks for; `holder` is the session that its incarnation has already."""
        key = self._find(public)
        if key is None:
            return None
        if key.role == "relay" and hello.role != "relay":
            if hello.role in AT_HOME:
                text = f"{hello.role} {hello.id} comes through the relay {key.name}: let it dial the home broker"
                return Error(code="denied", text=text)
            signer = self.signer(hello.proof, hello.role, hello_words(hello))
            if isinstance(signer, str):
                text = f"{hello.role} {hello.id or 'without an id'} comes through the relay {key.name}, but {signer}"
                return Error(code="denied", text=text)
            key = signer
        if hello.role not in OPENS[key.role]:
            what = " or ".join(sorted(OPENS[key.role]))
            text = f"the key {key.name} has the role {key.role}, which opens {what}, not {hello.role}"
            return Error(code="denied", text=f"{text}: give this process a key of its own")
        if hello.role == "relay" and self.verify is None:
            text = "this broker cannot tell who made what a relay hands over: install isles[relay] where it runs"
            return Error(code="denied", text=text)
        if holder is not None and holder.key_name != key.name:
            text = f"{hello.role} {hello.id} is here with another key than {key.name}: give this process another id"
            return Error(code="denied", text=text)
        return None

    def signer(self, proof: Proof | None, role: Role, words: bytes) -> AllowedKey | str:
        """Whose a proof of these words is; or why it is nobody's who may be in this role, in words after `but`."""
        if proof is None:
            return "has no proof of its key: where it starts, name the relay with --relay, not with --broker"
        key = self._find(proof.public)
        if key is None:
            return f"the key {proof.public[:SHOWN_CHARACTERS]}.. that it names is not in the allow-list of this broker"
        if role not in OPENS[key.role]:
            return f"the key {key.name} that it names has the role {key.role}, which does not open {role}"
        if self.verify is None or not self.verify(proof, words):
            return (
                f"its proof does not fit: it was not made with the key {key.name}, or not for this broker's present "
                "key, or what it proves was changed on the way"
            )
        return key

    def is_relayed(self, public: str, session: Session) -> bool:
        """Whether what comes with this key in this session was handed over by a relay."""
        if self.allowed is None:
            return bool(session.via)
        key = self._find(public)
        return key is not None and key.role == "relay" and session.role != "relay"

    def session_error(self, public: str, session: Session) -> Error | None:
        """Why what comes with this key is not heard in this session."""
        key = self._find(public)
        if key is None:
            return None
        if self.is_relayed(public, session):
            if session.via == key.name:
                return None
            text = f"this session was not opened through the relay {key.name}: say HELLO through it"
            return Error(code="unknown-session", text=text)
        if key.name == session.key_name and session.role in OPENS[key.role]:
            return None
        text = f"this session is not for the key {key.name}: say HELLO to open one"
        return Error(code="denied", text=text)

    def is_revoked(self, session: Session) -> bool:
        """Whether the key with which a session was last used opens it no more."""
        error = self.key_error(session.public) or self.session_error(session.public, session)
        return error is not None

    def is_cut_off(self, session: Session) -> bool:
        """Whether the relay through which a session was opened is let in no more."""
        if self.allowed is None or not session.via:
            return False
        return not any(key.role == "relay" for key in self.allowed.of(session.via))

    def lets_in(self, public: str) -> bool:
        """Whether a key stands in the allow-list; True without keys."""
        return self.allowed is None or self._find(public) is not None

    def _find(self, public: str) -> AllowedKey | None:
        return None if self.allowed is None else self.allowed.find(public)


# ------------------------------------------------------------------------------------------------------- learners' ids


@dataclass(frozen=True, slots=True)
class Named:
    """The HELLO of a worker with the id that it has or gets, and what it needs to come back with an id it got."""

    hello: Hello
    rejoin: str = ""
    """To be told; empty if its id was not given, or is taken again with its token."""
    rejoin_sha256: str = ""
    """To be kept instead of it."""


def name_learner(
    hello: Hello, key_name: str, learners: Membership, sessions: Sessions, token: str, *, learners_per_key_max: int
) -> Named | Error:
    """Whose id a worker's HELLO may take, and which one it gets if it has none; `token` is random and unused.

    A repeated HELLO of one incarnation gets the same answer: the answer before may have been lost.
    """
    if hello.id:
        return _own_name(hello, key_name, learners, learners_per_key_max)
    if not key_name:
        text = "a worker without an id: this broker has no keys and gives no ids; name this learner with --id"
        return Error(code="denied", text=text)
    session = sessions.find_given(key_name, hello.incarnation)
    name = learners.unheard_of(key_name, hello.incarnation) if session is None else session.id
    if session is not None and session.rejoin:
        return Named(hello.model_copy(update={"id": name}), session.rejoin, hash_token(session.rejoin))
    if session is not None or (name == "" and learners.knows_incarnation(hello.incarnation)):
        text = f"incarnation {hello.incarnation[:8]} has an id already: say HELLO with it and its rejoin token"
        return Error(code="denied", text=text)
    if not name:
        if error := _room_error(key_name, learners, learners_per_key_max):
            return error
        name = _next_name(key_name, learners)
    return Named(hello.model_copy(update={"id": name}), token, hash_token(token))


def _own_name(hello: Hello, key_name: str, learners: Membership, learners_per_key_max: int) -> Named | Error:
    holder = learners.holder(hello.id)
    if holder is None:
        if error := _room_error(key_name, learners, learners_per_key_max):
            return error
        # A store that was emptied meanwhile: the id is taken along, with its token.
        return Named(hello, rejoin_sha256=hash_token(hello.rejoin) if hello.rejoin and key_name else "")
    if not key_name:
        return Named(hello)
    if holder.key_name not in ("", key_name):
        text = f"learner {hello.id} belongs to another key than {key_name}: choose another id"
        return Error(code="denied", text=text)
    if holder.rejoin_sha256 and not hmac.compare_digest(hash_token(hello.rejoin), holder.rejoin_sha256):
        text = (
            f"the id {hello.id} was given to another worker with the key {key_name}, and is only taken again with its "
            "rejoin token, which lies in the checkpoint folder of that worker: give this one another id, or, if its id "
            "was given, an empty checkpoint folder"
        )
        return Error(code="denied", text=text)
    return Named(hello, rejoin_sha256=holder.rejoin_sha256)


def _room_error(key_name: str, learners: Membership, learners_per_key_max: int) -> Error | None:
    """Learners are kept for ever, and every round is told of all."""
    if learners.num_learners >= LEARNERS_MAX:
        text = f"this run has had {LEARNERS_MAX} learners, more cannot be counted: use the ids of some that are gone"
        return Error(code="denied", text=text)
    if key_name and learners.num_learners_of(key_name) >= learners_per_key_max:
        text = (
            f"the key {key_name} has had {learners_per_key_max} learners (broker.learners_per_key_max): keep the "
            "checkpoint folders of its workers, so that they take their ids again, or raise that limit"
        )
        return Error(code="denied", text=text)
    return None


def _next_name(key_name: str, learners: Membership) -> str:
    base = key_name[: NAME_LENGTH_MAX - DIGITS_MAX - 1].rstrip("._-")
    return next(name for number in range(1, LEARNERS_MAX + 2) if learners.holder(name := f"{base}-{number}") is None)


def hash_token(token: str) -> str:
    """What is kept of a rejoin token: who reads the store cannot rejoin with it."""
    return hashlib.sha256(token.encode()).hexdigest()
