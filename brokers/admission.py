"""Coming and going: HELLO, INIT, PROGRESS, SHARDS, LEAVE. Pure."""

from __future__ import annotations

from typing import Final

from isles.brokers import retained, versions
from isles.brokers.doors import Named, Visitor, name_learner
from isles.brokers.quarantine import quarantine_error
from isles.brokers.replies import joined_log, log, reply, respond
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.vocabulary import (
    AbandonUpload,
    Instruction,
    Log,
    MessageArrived,
)
from isles.proto.agreement import RunRecord
from isles.proto.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Alive,
    Done,
    Error,
    Fenced,
    Hello,
    Init,
    Initialised,
    Leave,
    Progress,
    RetryAfter,
    Shards,
    ShardsLeased,
    Welcome,
)

PROTOCOL_MIN: Final = (PROTOCOL_MAJOR, 0)
PROTOCOL_MAX: Final = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
STARTS_COUNTER: Final = "starts"
"""Of each key name: incarnations that the index remembers."""


def take_hello(state: State, arrival: MessageArrived, hello: Hello) -> list[Instruction]:
    """HELLO: lets a process in or says what differs; retires its older incarnations."""
    warned: list[Log] = []
    named = _judge_hello(state, arrival, hello)
    if not isinstance(named, Error) and hello.store and hello.store != state.store:
        named, warned = _take_stranger(state, named.hello)
    if isinstance(named, Error):
        refused = log("warning", "client.refused", role=hello.role, id=hello.id, code=named.code, text=named.text)
        return [*reply(arrival, named), refused, *warned]
    visitor = _visitor(state, arrival, hello)
    key_name = visitor.key_name
    is_given, hello = not hello.id, named.hello
    # Operators only look: any number of them may share a name.
    if hello.role != "operator" and retained.is_retired(state.index, hello.role, hello.id, hello.incarnation):
        text = f"incarnation {hello.incarnation[:8]} was replaced by a newer one"
        refused = log("warning", "client.refused", role=hello.role, id=hello.id, code="fenced", text=text)
        return [*reply(arrival, Fenced()), refused]
    if error := _starts_error(state, hello, key_name):
        refused = log("warning", "client.refused", role=hello.role, id=hello.id, code=error.code, text=error.text)
        return [*reply(arrival, error), refused]
    opened = state.sessions.open(
        hello, arrival.connection, state.now, key_name=key_name, public=visitor.public, via=visitor.via
    )
    if opened is None:
        text = f"{state.settings.sessions_max} sessions are open (sessions_max)"
        if key_name:
            text += f", or {state.settings.sessions_per_key_max} of the key {key_name} (sessions_per_key_max)"
        return reply(arrival, RetryAfter(seconds=state.settings.retry_seconds, reason=text))
    if hello.role != "operator" and retained.make_current(state.index, hello.role, hello.id, hello.incarnation):
        state.index.add_to_counter(f"{STARTS_COUNTER}/{key_name}", 1)
    if hello.role == "outer":
        state.leases.release_older(hello.id, hello.incarnation)
    session, is_new = opened
    session.rejoin, session.is_given = named.rejoin, session.is_given or is_given
    older = state.uploads.drop_older(session.owner, session.incarnation)
    abandoned = [AbandonUpload(upload.transfer, upload.blob) for upload in older]
    if session.role == "worker":
        state.membership.join(
            session.id,
            session.incarnation,
            session.region,
            state.now,
            state.unix,
            key_name=key_name,
            rejoin_sha256=named.rejoin_sha256,
            has_rejoin=not named.rejoin,
        )
    # Whoever waits for a run to begin says HELLO every few seconds.
    joined = [joined_log(session)] if is_new else []
    return [*abandoned, *reply(arrival, _welcome(state, session, hello)), *joined]


def _visitor(state: State, arrival: MessageArrived, hello: Hello) -> Visitor:
    """Whose the session is that HELLO opens."""
    if state.doors.allowed is None:
        return Visitor(via=state.sessions.relay_at(arrival.connection) if hello.role != "relay" else "")
    return state.doors.visitor(arrival.key, hello)


def _starts_error(state: State, hello: Hello, key_name: str) -> Error | None:
    """Why no new incarnation is let in: each leaves entries in the index that are never deleted."""
    num_max = state.settings.starts_per_key_max
    if hello.role == "operator" or state.index.counter(f"{STARTS_COUNTER}/{key_name}") < num_max:
        return None
    if state.index.current_incarnation(hello.role, hello.id) == hello.incarnation:
        return None
    whose = f"the key {key_name}" if key_name else "all processes together"
    text = (
        f"{whose} had {num_max} starts of processes in this run (broker.starts_per_key_max), and each is remembered "
        "for ever: find out what starts again and again, or raise that limit"
    )
    return Error(code="denied", text=text)


def _take_stranger(state: State, hello: Hello) -> tuple[Error, list[Log]]:
    """Somebody whose state is of another store comes here: why it is refused, and what to log about it."""
    if state.record is None:
        run = hello.run or "another one"
        text = (
            f"this broker's store is new, and the state of {hello.role} {hello.id} is of the run {run} in another "
            f"store ({hello.store[:8]}): give this broker the old store, or {hello.id} an empty checkpoint folder"
        )
        return Error(code="run", text=text), []
    run = state.record.run
    text = (
        f"there are two runs with the name {run}: that of this broker, in the store {state.store[:8]}, and that of "
        f"{hello.role} {hello.id}, in the store {hello.store[:8]}; check the address, and give each run its own "
        f"run.id. If the other run is over, give {hello.id} an empty checkpoint folder"
    )
    warned = state.warnings.take_stranger(hello.role, hello.id, run, hello.store, text, state.unix)
    return Error(code="run", text=text), warned


def _welcome(state: State, session: Session, hello: Hello) -> Welcome:
    is_worker = session.role == "worker"
    return Welcome(
        new_session=session.token,
        protocol=_common_protocol(hello) or (0, 0),
        broker_incarnation=state.incarnation,
        seq=state.seq,
        limits=state.settings.limits,
        run_record=state.record,
        heads=versions.heads(state.index),
        rows=retained.rows_of(state.index, session.id) if is_worker else (),
        shards=state.membership.shards_of(session.id) if is_worker else {},
        store=state.store,
        learner=session.id if is_worker else "",
        rejoin=session.rejoin,
    )


def _judge_hello(state: State, arrival: MessageArrived, hello: Hello) -> Named | Error:
    """The HELLO with the id that its process has or gets; or why it cannot take part."""
    holder = state.sessions.find(hello.role, hello.id, hello.incarnation)
    if error := state.doors.hello_error(arrival.key, hello, holder) or _hello_fault(hello, state.record):
        return error
    if hello.role != "worker":
        text = f"only a worker may come without an id, a process with the role {hello.role} needs one"
        return Named(hello) if hello.id else Error(code="bad-message", text=text)
    named = name_learner(
        hello,
        _visitor(state, arrival, hello).key_name,
        state.membership,
        state.sessions,
        state.draw_token() if not hello.id else "",
        learners_per_key_max=state.settings.learners_per_key_max,
    )
    if isinstance(named, Error):
        return named
    return quarantine_error(state, named.hello.id) or named


def take_init(state: State, session: Session, arrival: MessageArrived, message: Init) -> list[Instruction]:
    """INIT: makes the run, if it is the first."""
    initialiser = f"{session.id}/{session.incarnation}"
    is_new = state.record is None
    answer = retained.init(state.index, message, initialiser=initialiser, unix=state.unix)
    if not (is_new and isinstance(answer, Initialised)):
        return respond(arrival, answer)
    return [
        *reply(arrival, answer),
        state.hint("initialised", learner=session.id),
        log(
            "info",
            "run.initialised",
            run=message.run_record.run,
            learner=session.id,
            num_fragments=len(message.versions),
            num_parameters=int(state.index.value(retained.NUM_PARAMETERS) or b"0"),
        ),
    ]


def take_progress(state: State, session: Session, arrival: MessageArrived, message: Progress) -> list[Instruction]:
    """PROGRESS: a learner's counters; whoever sends it shows that it lives."""
    membership, has_lost_shards = state.membership, False
    if session.role == "worker":
        membership.progress(session.id, message, state.now)
        has_lost_shards = membership.has_lost_shards(session.id)
    typical = membership.typical_step_seconds
    return reply(arrival, Alive(typical_step_seconds=typical, has_lost_shards=has_lost_shards))


def take_leave(state: State, session: Session, arrival: MessageArrived, _: Leave) -> list[Instruction]:
    """LEAVE: gives the leases of who goes back at once. A repeated one is answered alike."""
    if session.has_left:
        return reply(arrival, Done())
    session.has_left = True
    if session.role == "worker":
        state.membership.leave(session.id)
    if session.role == "outer":
        state.leases.release(session.id, session.incarnation)
    if session.role == "relay":
        state.relays.leave(session.id)
    return [*reply(arrival, Done()), log("info", "client.left", role=session.role, id=session.id)]


def take_shards(state: State, session: Session, arrival: MessageArrived, message: Shards) -> list[Instruction]:
    """SHARDS: takes data shards back and lends others; nothing to who has left, since nobody would ever free it."""
    if session.has_left:
        return reply(arrival, ShardsLeased(shards={}))
    held = state.membership.lease_shards(session.id, message.num_wanted, message.returned)
    said = log("info", "shards.leased", learner=session.id, num_shards=len(held))
    return [*reply(arrival, ShardsLeased(shards=held)), said]


def _common_protocol(hello: Hello) -> tuple[int, int] | None:
    """The highest version that both sides speak."""
    newest = min(PROTOCOL_MAX, hello.protocol_max)
    return newest if newest >= max(PROTOCOL_MIN, hello.protocol_min) else None


def _hello_fault(hello: Hello, record: RunRecord | None) -> Error | None:
    """Why this process cannot take part, naming the first thing that differs; None if it can."""
    if _common_protocol(hello) is None:
        return Error(
            code="protocol",
            text=f"this broker speaks protocol {_range(PROTOCOL_MIN, PROTOCOL_MAX)}, {hello.role} {hello.id} speaks "
            f"{_range(hello.protocol_min, hello.protocol_max)}: install the same isles on both",
        )
    if record is None:
        return None
    if hello.run and hello.run != record.run:
        text = f"this broker serves run {record.run}, {hello.role} {hello.id} wants {hello.run}: check the address"
        return Error(code="run", text=text)
    if hello.manifest_digest and hello.manifest_digest != record.manifest_digest:
        return Error(
            code="manifest",
            text=f"the model of {hello.role} {hello.id} has manifest {hello.manifest_digest[:12]}, that of run "
            f"{record.run} has {record.manifest_digest[:12]}: build the model from the run's task and settings",
        )
    if difference := record.first_difference(dict(hello.stated)):
        return Error(code="settings", text=difference[: retained.TEXT_MAX])
    return None


def _range(low: tuple[int, int], high: tuple[int, int]) -> str:
    return f"{low[0]}.{low[1]}" if low == high else f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
