"""What can be read of a run, and figures that others add to it. Pure."""

from __future__ import annotations

from typing import Final

from isles.brokers import retained, versions
from isles.brokers.quarantine import quarantine_infos
from isles.brokers.replies import log, reply, respond
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.status import make_status, make_store_info
from isles.brokers.vocabulary import (
    Instruction,
    MessageArrived,
)
from isles.brokers.warnings import WARNINGS_MAX
from isles.proto.messages import (
    HEADER_BYTES_MAX,
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    Done,
    Error,
    Heads,
    History,
    Report,
    ReportInfo,
)

HISTORY_BYTES_MAX: Final = HEADER_BYTES_MAX // 4
"""Of the versions in one HISTORY: a few answers more cost little, and one of these keeps a broker busy long enough."""

FIGURES_COUNTER: Final = "figures_bytes"
"""Of each key name: bytes of figures in the index."""


def take_ask_version(state: State, session: Session, arrival: MessageArrived, message: AskVersion) -> list[Instruction]:
    """ASK_VERSION: the way to the head, with the asker's own row."""
    row = retained.own_row(state.index, session.id, message.fragment) if session.role == "worker" else None
    answer = versions.version_reply(state.index, message.fragment, message.base_version, row, state.damaged)
    return respond(arrival, answer)


def take_ask_heads(state: State, session: Session, arrival: MessageArrived, _: AskHeads) -> list[Instruction]:
    """ASK_HEADS: all heads and the asker's rows."""
    rows = retained.rows_of(state.index, session.id) if session.role == "worker" else ()
    heads = versions.heads(state.index)
    return reply(arrival, Heads(broker_incarnation=state.incarnation, seq=state.seq, heads=heads, rows=rows))


def take_ask_history(state: State, _: Session, arrival: MessageArrived, message: AskHistory) -> list[Instruction]:
    """ASK_HISTORY: versions with their recipes, fewer than wanted if those are long."""
    found = state.index.versions(message.fragment, message.first, message.num_max, HISTORY_BYTES_MAX)
    return reply(arrival, History(versions=tuple(found)))


def take_report(state: State, session: Session, arrival: MessageArrived, message: Report) -> list[Instruction]:
    """REPORT: stores a figure and tells everybody."""
    counter = f"{FIGURES_COUNTER}/{session.key_name}"
    if state.index.counter(counter) >= state.settings.figures_bytes_per_key_max:
        text = (
            f"{_whose(session)} has reported {state.settings.figures_bytes_per_key_max} bytes of figures "
            "(broker.figures_bytes_per_key_max), and they are kept for ever: raise that limit, or evaluate less often"
        )
        return respond(arrival, Error(code="too-large", text=text))
    info = ReportInfo(
        seq=0,
        name=message.name,
        value=message.value,
        versions=message.versions,
        tokens=message.tokens,
        reporter=session.id,
        unix=state.unix,
    )
    state.index.add_to_counter(counter, state.index.put_report(info))
    said = log("info", "figure.reported", reporter=session.id, name=message.name, value=message.value)
    return [*reply(arrival, Done()), state.hint("report"), said]


def _whose(session: Session) -> str:
    return f"the key {session.key_name}" if session.key_name else "everybody together"


def take_ask_status(state: State, arrival: MessageArrived, message: AskStatus) -> list[Instruction]:
    """ASK_STATUS: what there is to see; needs no session."""
    status = make_status(
        state.index,
        state.record,
        broker_incarnation=state.incarnation,
        uptime_seconds=max(0.0, state.now - state.started_at),
        learners=state.membership.infos(),
        leases=state.leases.infos(state.now),
        tokens_produced=state.membership.tokens_produced,
        reports_after=message.reports_after,
        wants_newest=message.wants_newest,
        warnings=(*state.warnings.infos(), *quarantine_infos(state))[:WARNINGS_MAX],
        unix=state.unix,
        version=state.version,
        limits=state.settings.limits,
        store=make_store_info(state.index, state.settings, state.uploads.disk_free_bytes),
        num_required=state.num_required,
        relays=state.relays.infos(state.now),
    )
    return reply(arrival, status.model_copy(update={"run_record": state.record}) if message.wants_record else status)
