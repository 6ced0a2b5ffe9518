"""How a relay and its home broker hear that the other is there, and whom the relay is to let in. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from isles.brokers.quotas import shares_of
from isles.brokers.relay.state import RelayState
from isles.brokers.relay.vocabulary import Instruction, KeepKeys, Recheck
from isles.brokers.replies import log
from isles.brokers.sessions import Session
from isles.proto.client import Answered
from isles.proto.keys import AllowedKey, AllowList
from isles.proto.messages import Channel, Error, RelayAlive, RelayBeat, RelayFacts

LOST_SECONDS: Final = 5.0
"""Of silence, after which the link counts as lost: five beats, and more where beats are rarer."""
LOST_BEATS: Final = 3


@dataclass
class Beats:
    """When this relay beat, and when it was heard."""

    started_at: float
    asked_at: float | None = None
    round_trip_seconds: float = 0.0
    lost_at: float | None = None
    """Since when the home broker is silent, once that was said."""


def beat(state: RelayState, beats: Beats) -> list[Instruction]:
    """Says that this relay is there, if it is time to; and once that the home broker is not."""
    link = state.links.clients[0]
    orders: list[Instruction] = []
    is_due = beats.asked_at is None or state.now - beats.asked_at >= link.limits.heartbeat_seconds
    if link.session and is_due and not link.is_asking(RelayBeat):
        beats.asked_at = state.now
        asked = link.ask(RelayBeat(facts=facts_of(state, beats), keys_sha256=state.keys_sha256), state.now)
        orders += state.links.split(0, asked)[0]
    heard_at = beats.started_at if link.heard_at is None else link.heard_at
    silent_seconds = state.now - heard_at
    if beats.lost_at is None and silent_seconds > max(LOST_SECONDS, LOST_BEATS * link.limits.heartbeat_seconds):
        beats.lost_at = heard_at
        orders.append(log("warning", "link.lost", silent_seconds=round(silent_seconds, 1), **_waiting(state)))
    return orders


def heard(state: RelayState, beats: Beats) -> list[Instruction]:
    """The home broker said something on the first link."""
    state.links.clients[0].heard_at = state.now
    if beats.lost_at is None:
        return []
    seconds, beats.lost_at = state.now - beats.lost_at, None
    return [log("info", "link.restored", seconds=round(seconds, 1), **_waiting(state))]


def _waiting(state: RelayState) -> dict[str, int]:
    return {"num_waiting": state.outbox.num_waiting, "waiting_bytes": state.outbox.waiting_bytes}


def facts_of(state: RelayState, beats: Beats) -> RelayFacts:
    """What the home broker is told of this relay."""
    return RelayFacts(
        region=state.settings.region,
        num_clients=sum(not session.has_left for session in state.sessions),
        num_waiting=state.outbox.num_waiting,
        waiting_bytes=state.outbox.waiting_bytes,
        waiting_bytes_max=state.outbox.bytes_max,
        cache_bytes=state.cache.num_bytes,
        cache_bytes_max=state.cache.bytes_max,
        round_trip_seconds=beats.round_trip_seconds,
        bytes_up=state.links.bytes_up,
        bytes_down=state.links.bytes_down,
    )


def beat_answered(state: RelayState, beats: Beats, news: Answered) -> list[Instruction]:
    """RELAY_ALIVE: the home broker heard the beat, and says whom it lets in if that has changed."""
    if beats.asked_at is not None:
        beats.round_trip_seconds = max(0.0, state.now - beats.asked_at)
    alive = news.reply
    if not isinstance(alive, RelayAlive) or alive.keys is None or not state.has_keys:
        return []
    before = state.doors.allowed
    if not take_keys(state, alive):
        text = "the home broker's allow-list contradicts itself; the one before goes on to hold"
        return [log("error", "keys.unreadable", text=text)]
    allowed = state.doors.allowed
    assert allowed is not None
    is_somebody_gone = any(allowed.find(key.public) is None for key in before or ())
    said = log("info", "keys.changed", num_keys=len(allowed.keys), num_names=len({key.name for key in allowed}))
    orders: list[Instruction] = [KeepKeys(alive.addressed(request=0)), said]
    for session in state.sessions:
        if state.doors.is_revoked(session):
            orders += _end(state, session)
    return [*orders, *([Recheck()] if is_somebody_gone else []), *state.downloads.serve()]


def take_keys(state: RelayState, alive: RelayAlive) -> bool:
    """Lets in from now on whom the home broker lets in; False if what it says is no allow-list."""
    try:
        keys = tuple(AllowedKey(name=key.name, role=key.role, public=key.public) for key in alive.keys or ())
        allowed = AllowList(keys=keys)
    except ValidationError:
        return False
    state.doors.allowed, state.keys_sha256 = allowed, alive.keys_sha256
    state.share_memory(shares_of(allowed))
    return True


def _end(state: RelayState, session: Session) -> list[Instruction]:
    """Whoever is let in no more is told so and is out; what is in the outbox of it the home broker will judge."""
    state.sessions.end(session)
    state.drop_session(session.token)
    dropped = state.uploads.drop_where(lambda upload: upload.session == session.token)
    text = f"the key {session.key_name} of {session.role} {session.id} is not in the allow-list any more"
    told = state.send(session, Channel.CONTROL, Error(code="denied", text=text))
    said = log("warning", "client.revoked", role=session.role, id=session.id, key=session.key_name)
    return [*state.abandon(dropped), *told, said]
