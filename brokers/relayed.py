"""What relays hand over, and what they ask for themselves. Pure.

A relay is trusted to pass on what it is given, and to keep what it took. It is not trusted to say who made something:
each OFFER carries a proof of its learner's key, and what may be said in the sessions of others is little.

Two codes end whoever is told them about a session of its own, `denied` and FENCED. About an offer, a relay is told
`broken-rule` and `retired` instead.
"""

from __future__ import annotations

from typing import Final

from isles.brokers.quarantine import quarantine_error
from isles.brokers.replies import reply
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.vocabulary import Instruction, MessageArrived
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    AskHeads,
    AskHistory,
    AskVersion,
    Error,
    Fenced,
    Init,
    KeyInfo,
    Leave,
    Message,
    Offer,
    Progress,
    RelayAlive,
    RelayBeat,
    Report,
    Role,
    Shards,
)
from isles.proto.proofs import offer_words

PASSED: Final[frozenset[type[Message]]] = frozenset(
    {Init, Progress, Leave, Shards, AskVersion, AskHeads, AskHistory, Report}
)
"""What a relay may pass in a session that was opened through it. Payloads and what goes with them it sends in its own
session, and a pardon is said to the home broker itself."""


def offer_error(state: State, offer: Offer) -> Error | None:
    """Why an OFFER that a relay hands over is not taken."""
    name, membership = offer.contribution.id, state.membership
    holder = membership.holder(name.learner)
    if holder is None:
        text = f"contribution {name} is of a learner that this run has never seen"
        return Error(code="broken-rule", text=text)
    if state.doors.allowed is not None:
        signer = state.doors.signer(offer.proof, "worker", offer_words(offer, state.store))
        if isinstance(signer, str):
            return Error(code="broken-rule", text=f"contribution {name} comes through a relay, but {signer}")
        if signer.name != holder.key_name:
            text = f"contribution {name} was made with the key {signer.name}, and its learner belongs to another key"
            return Error(code="broken-rule", text=text)
    if not membership.is_current(name.learner, name.incarnation):
        return _retired(name)
    return quarantine_error(state, name.learner)


def for_offerer(role: Role, name: ContributionId, answer: Message) -> Message:
    """An answer to an OFFER as whoever made it understands it."""
    return _retired(name) if role == "relay" and isinstance(answer, Fenced) else answer


def _retired(name: ContributionId) -> Error:
    text = f"contribution {name} is of an incarnation that is not its learner's present one"
    return Error(code="retired", text=text)


def take_relay_beat(state: State, session: Session, arrival: MessageArrived, message: RelayBeat) -> list[Instruction]:
    """RELAY_BEAT: what a relay tells of itself; the answer brings the allow-list if it has another one."""
    state.relays.hear(session.id, message.facts, state.now, state.unix)
    allowed = state.doors.allowed
    if allowed is None:
        return reply(arrival, RelayAlive(keys=() if message.keys_sha256 else None))
    keys = None
    if message.keys_sha256 != allowed.sha256:
        keys = tuple(KeyInfo(name=key.name, role=key.role, public=key.public) for key in allowed)
    return reply(arrival, RelayAlive(keys_sha256=allowed.sha256, keys=keys))
