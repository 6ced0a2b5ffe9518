"""Whom the broker no longer lets in has to go: sessions of keys taken off the allow-list end at once. Pure.

Whoever came through a relay that is let in no more is not to blame: their sessions end, too, without a word, and they
say HELLO again by another way.
"""

from __future__ import annotations

from isles.brokers.replies import log
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.vocabulary import AbandonUpload, AllowListChanged, Instruction, Send
from isles.proto.messages import Channel, Error


def take_allow_list(state: State, event: AllowListChanged) -> list[Instruction]:
    """Takes another allow-list; whoever is in a session that its key opens no longer is told so and is out."""
    state.doors.allowed = event.allowed
    state.share_memory(event.allowed)
    if event.allowed is None:
        return []
    instructions: list[Instruction] = []
    for session in state.sessions:
        if state.doors.is_revoked(session):
            instructions += _end(state, session)
        elif state.doors.is_cut_off(session):
            state.sessions.end(session)
    unsigned = state.uploads.drop_where(lambda one: bool(one.signer) and not state.doors.lets_in(one.signer))
    instructions += [AbandonUpload(upload.transfer, upload.blob) for upload in unsigned]
    return [*instructions, *state.downloads.serve()]


def _end(state: State, session: Session) -> list[Instruction]:
    """What it held is free for others. What was accepted of it stays accepted."""
    state.sessions.end(session)
    state.downloads.drop_session(session.token)
    dropped = state.uploads.drop_where(lambda upload: upload.session == session.token)
    if session.role == "worker" and state.membership.is_current(session.id, session.incarnation):
        state.membership.leave(session.id)
    if session.role == "outer":
        state.leases.release(session.id, session.incarnation)
    if session.role == "relay":
        state.relays.leave(session.id)
    text = f"the key {session.key_name} of {session.role} {session.id} is not in the allow-list any more"
    told = [
        Send(Channel.CONTROL, connection, Error(code="denied", text=text))
        for channel, connection in session.connections.items()
        if channel is Channel.CONTROL and not session.via  # a relay would take it for a word about itself
    ]
    said = log("warning", "client.revoked", role=session.role, id=session.id, key=session.key_name)
    return [*(AbandonUpload(upload.transfer, upload.blob) for upload in dropped), *told, said]
