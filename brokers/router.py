"""The broker's core: what is answered to whom. Pure.

`handle` takes one event and returns instructions. Its caller wraps it in a transaction of the index and performs the
instructions only after that transaction is durable, so nothing is answered that a crash could take back.

    who may come in            doors; quarantine
    who may say what           here, in VERBS
    the books                  retained, versions
    what each message does     admission, contributing, fetching, merging, reading
    leases and transfers       membership, leases, uploads, downloads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from isles.brokers import retained
from isles.brokers.admission import take_hello, take_init, take_leave, take_progress, take_shards
from isles.brokers.contributing import (
    chunk_written,
    take_chunk,
    take_offer,
    take_upload,
    upload_durable,
    upload_failed,
)
from isles.brokers.fetching import chunk_read, read_failed, take_credit, take_fetch
from isles.brokers.leaving import take_allow_list
from isles.brokers.limits import RoutingSettings
from isles.brokers.merging import take_checkpoint, take_commit, take_lease, take_list, take_settle
from isles.brokers.quarantine import SHUT, is_quarantined, quarantine_error, take_pardon
from isles.brokers.reading import take_ask_heads, take_ask_history, take_ask_status, take_ask_version, take_report
from isles.brokers.relayed import PASSED, take_relay_beat
from isles.brokers.replies import joined_log, log, refusal_log, refuse, reply
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.status import BYTES_DOWN_COUNTER
from isles.brokers.store.index import Index
from isles.brokers.vocabulary import (
    AbandonUpload,
    AllowListChanged,
    ChunkRead,
    ChunkWritten,
    DeleteBlob,
    Event,
    GarbageArrived,
    Instruction,
    Log,
    MessageArrived,
    ReadFailed,
    Tick,
    UploadDurable,
    UploadFailed,
)
from isles.proto.keys import AllowList
from isles.proto.messages import (
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    Channel,
    Checkpoint,
    Chunk,
    Commit,
    Credit,
    Error,
    Fenced,
    Fetch,
    Hello,
    Init,
    Lease,
    Leave,
    List,
    Message,
    Offer,
    Pardon,
    Progress,
    Proof,
    RelayBeat,
    Report,
    Role,
    Settle,
    Shards,
    Upload,
)


@dataclass(frozen=True)
class Verb:
    """Who may say a message, on which channel, and what is done about it."""

    roles: frozenset[Role]
    act: Callable[[State, Session, MessageArrived, Any], list[Instruction]]
    channel: Channel = Channel.CONTROL
    needs_run: bool = True


_WORKER: Final[frozenset[Role]] = frozenset({"worker"})
_OUTER: Final[frozenset[Role]] = frozenset({"outer"})
_ONLOOKER: Final[frozenset[Role]] = frozenset({"evaluator", "operator"})
_ANYBODY: Final[frozenset[Role]] = _WORKER | _OUTER | _ONLOOKER
_OPERATOR: Final[frozenset[Role]] = frozenset({"operator"})
_STARTER: Final[frozenset[Role]] = _WORKER | {"operator"}
"""A run is started by its first worker, or by whoever has weights to begin with."""
_RELAY: Final[frozenset[Role]] = frozenset({"relay"})
"""Hands over what others made, and fetches for them."""

VERBS: Final[dict[type[Message], Verb]] = {
    Init: Verb(_STARTER, take_init, needs_run=False),
    Progress: Verb(_ANYBODY, take_progress, needs_run=False),
    Leave: Verb(_ANYBODY | _RELAY, take_leave, needs_run=False),
    Shards: Verb(_WORKER, take_shards, needs_run=False),
    Offer: Verb(_WORKER | _RELAY, take_offer),
    Upload: Verb(_STARTER | _OUTER | _RELAY, take_upload, needs_run=False),
    Chunk: Verb(_STARTER | _OUTER | _RELAY, take_chunk, Channel.BULK, needs_run=False),
    Fetch: Verb(_ANYBODY | _RELAY, take_fetch, Channel.BULK),
    Credit: Verb(_ANYBODY | _RELAY, take_credit, Channel.BULK),
    AskVersion: Verb(_ANYBODY, take_ask_version),
    AskHeads: Verb(_ANYBODY, take_ask_heads, needs_run=False),
    AskHistory: Verb(_ANYBODY, take_ask_history),
    Report: Verb(_ONLOOKER, take_report),
    Lease: Verb(_OUTER, take_lease),
    List: Verb(_OUTER, take_list),
    Settle: Verb(_OUTER, take_settle),
    Commit: Verb(_OUTER, take_commit),
    Checkpoint: Verb(_OUTER, take_checkpoint),
    Pardon: Verb(_OPERATOR, take_pardon, needs_run=False),
    RelayBeat: Verb(_RELAY, take_relay_beat, needs_run=False),
}
"""Everything that needs a session; HELLO and ASK_STATUS do not, only a key where keys are needed."""


class Router:
    """One broker process's core."""

    def __init__(
        self,
        index: Index,
        settings: RoutingSettings,
        incarnation: str,
        draw_token: Callable[[], str],
        now: float,
        unix: float,
        version: str = "",
        allowed: AllowList | None = None,
        verify: Callable[[Proof, bytes], bool] | None = None,
    ) -> None:
        """`incarnation` is random per start of the process; `draw_token` draws names of sessions that nobody can guess.

        `now` is monotonic, `unix` what gets stored, both in seconds; `version` is that of isles, `allowed` whom
        it lets in, None = it has no keys; `verify` says whether a proof is of some words, None = it cannot tell.
        """
        self.state = State(index, settings, incarnation, draw_token, now, unix, version=version)
        self.state.doors.verify = verify
        self._flushed_at = now
        take_allow_list(self.state, AllowListChanged(allowed))

    def handle(self, event: Event, now: float, unix: float) -> list[Instruction]:
        """Takes one event, inside a transaction of the index."""
        self.state.now, self.state.unix = now, unix
        match event:
            case MessageArrived():
                return self._hear(event)
            case GarbageArrived():
                error = self.state.doors.key_error(event.key)
                return refuse(event, error or Error(code="bad-message", text=event.text))
            case AllowListChanged():
                return take_allow_list(self.state, event)
            case ChunkWritten():
                return chunk_written(self.state, event)
            case UploadDurable():
                return upload_durable(self.state, event)
            case UploadFailed():
                return upload_failed(self.state, event)
            case ChunkRead():
                return chunk_read(self.state, event)
            case ReadFailed():
                return read_failed(self.state, event)
            case Tick():
                return self._tick(event)

    def _hear(self, arrival: MessageArrived) -> list[Instruction]:
        state, message = self.state, arrival.message
        if error := state.doors.key_error(arrival.key):
            return refuse(arrival, error)
        if isinstance(message, Hello) and arrival.channel is Channel.CONTROL:
            return take_hello(state, arrival, message)
        if isinstance(message, AskStatus) and arrival.channel is Channel.CONTROL:
            return take_ask_status(state, arrival, message)
        session = state.sessions.get(message.session)
        if session is None:
            text = "this broker does not know the session; was it restarted? Say HELLO"
            return refuse(arrival, Error(code="unknown-session", text=text), level="info")
        if error := state.doors.session_error(arrival.key, session):
            return refuse(arrival, error)
        is_relayed = state.doors.is_relayed(arrival.key, session)
        name = type(message).__name__
        if is_relayed and type(message) not in PASSED:
            text = f"no relay may pass {name} in the session of {session.role} {session.id}"
            return refuse(arrival, Error(code="bad-message", text=text))
        if session.rejoin:
            state.membership.confirm(session.id)
        state.sessions.hear(session, arrival.channel, arrival.connection, state.now, arrival.key, is_relayed=is_relayed)
        verb = VERBS.get(type(message))
        if verb is None or verb.channel is not arrival.channel or session.role not in verb.roles:
            text = f"{session.role} {session.id} may not send {name} on the {arrival.channel} channel"
            return refuse(arrival, Error(code="bad-message", text=text))
        if retained.is_retired(state.index, session.role, session.id, session.incarnation):
            text = f"{session.role} {session.id} has a newer incarnation than {session.incarnation[:8]}"
            return [*reply(arrival, Fenced()), refusal_log("fenced", text, level="info")]
        is_shut = session.role == "worker" and type(message) in SHUT
        if is_shut and (error := quarantine_error(state, session.id)):
            return refuse(arrival, error)
        if verb.needs_run and state.record is None:
            text = f"{name}: this run has no parameters yet; wait for the first worker's INIT"
            return reply(arrival, Error(code="not-initialised", text=text))
        return [*self._renew(session), *verb.act(state, session, arrival, message)]

    def _renew(self, session: Session) -> list[Instruction]:
        """Whatever a worker says shows that it lives."""
        state = self.state
        if session.role != "worker" or session.has_left or is_quarantined(state, session.id):
            return []
        return [joined_log(session)] if state.membership.hear(session.id, state.now, state.unix) else []

    def _tick(self, event: Tick) -> list[Instruction]:
        state = self.state
        settings, now = state.settings, state.now
        state.uploads.disk_free_bytes = event.disk_free_bytes
        instructions: list[Instruction] = [
            log("warning", "learner.expired", learner=expiry.learner, silent_seconds=round(expiry.silent_seconds, 1))
            for expiry in state.membership.expire(now)
        ]
        state.sessions.forget_idle(now - settings.session_idle_seconds)
        state.downloads.drop_idle(now - settings.upload_idle_seconds)
        instructions += state.downloads.serve()
        state.offers.forget(now)
        idle = state.uploads.drop_idle(now - settings.upload_idle_seconds)
        instructions += [AbandonUpload(upload.transfer, upload.blob) for upload in idle]
        if now - self._flushed_at >= settings.flush_seconds:
            self._flushed_at = now
            self.flush()
            instructions += self._sweep()
            instructions += self._look(event)
        if now - state.hinted_at >= settings.beat_seconds:
            instructions.append(state.hint("beat"))
        return instructions

    def flush(self) -> None:
        """Writes the counters that are kept in memory for a moment; also when the process ends."""
        self.state.membership.flush()
        if self.state.bytes_down:
            self.state.index.add_to_counter(BYTES_DOWN_COUNTER, self.state.bytes_down)
            self.state.bytes_down = 0

    def _look(self, event: Tick) -> list[Log]:
        """Notices what nobody says."""
        state = self.state
        return state.warnings.look(
            disk_free_bytes=event.disk_free_bytes,
            stored_bytes=state.index.stored_bytes(),
            live=state.membership.live,
            unix=state.unix,
        )

    def _sweep(self) -> list[Instruction]:
        """Gives up blobs that nothing refers to, but for those that are just being sent again, or still fetched.

        Whoever fetches slower than the run goes on would otherwise begin anew each time.
        """
        state = self.state
        unused = state.index.unused_blobs()
        since = {blob.digest: state.unused_since.get(blob.digest, state.started_at) for blob, _ in unused}
        state.unused_since = since
        state.unused.keep(since)
        overdue = state.now - state.settings.unused_blob_seconds
        doomed = [
            blob
            for blob, was_used in unused
            if (was_used or since[blob.digest] <= overdue)
            and not state.uploads.is_open(blob.digest)
            and not state.downloads.is_open(blob.digest)
        ]
        for blob in doomed:
            state.index.delete_blob(blob.digest)
        return [DeleteBlob(blob) for blob in doomed]
