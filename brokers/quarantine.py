"""Who keeps sending what the outer's screen rejects is not heard for a while. Pure.

Counted are rejections in a row: one merged contribution begins the row anew. What was handed in before the last one
that counted does not count again, since one mishap spoils the open contributions to several fragments at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from isles.brokers.replies import log, reply, respond
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.store.index import Standing, StoredRow
from isles.brokers.vocabulary import AbandonUpload, Instruction, MessageArrived
from isles.proto.messages import Done, Error, Message, Offer, Pardon, Settle, Shards, Upload, WarningInfo

REASON_MAX: Final = 1000
"""Characters of the outer's reason that a sentence repeats."""
LOST: Final = "lost"
"""Kind of a rejection that is not the learner's fault: the store has its payload no longer."""
SHUT: Final[frozenset[type[Message]]] = frozenset({Offer, Shards, Upload})
"""What a quarantined learner may not say; it may go on to look."""


def take_rejections(state: State, rows: Iterable[StoredRow], message: Settle) -> list[Instruction]:
    """Counts contributions that were just rejected, in the same transaction, and begins quarantines."""
    lost = {rejection.id for rejection in message.rejections if rejection.kind == LOST}
    instructions: list[Instruction] = []
    for row in rows:
        if row.id not in lost:
            instructions += _take_rejection(state, row)
    return instructions


def _take_rejection(state: State, row: StoredRow) -> list[Instruction]:
    settings, learner = state.settings, row.id.learner
    before = state.index.standing(learner)
    if before is None or not settings.quarantine_rejections:
        return []
    is_in_a_row = before.num_rejected > 0
    if is_in_a_row and before.incarnation == row.id.incarnation and row.id.number <= before.number:
        return []
    num_rejected = before.num_rejected + 1
    until = before.until_unix
    is_too_many = num_rejected >= settings.quarantine_rejections
    if is_too_many:
        until = state.unix + settings.quarantine_seconds
    number = state.index.highest_answered(learner, row.id.incarnation)
    state.index.put_standing(learner, Standing(num_rejected, row.reason, until, row.id.incarnation, number))
    return _begin(state, learner, num_rejected, row.reason) if is_too_many else []


def _begin(state: State, learner: str, num_rejected: int, reason: str) -> list[Instruction]:
    """From now on the learner holds no shards, no round waits for it, and what it was sending is dropped."""
    seconds = state.settings.quarantine_seconds
    state.quarantined[learner] = state.unix + seconds
    if state.membership.holder(learner) is not None:
        state.membership.leave(learner)
    dropped = state.uploads.drop_where(lambda upload: upload.learner == learner)
    said = log(
        "warning",
        "learner.quarantined",
        learner=learner,
        num_rejected=num_rejected,
        seconds=seconds,
        reason=reason[:REASON_MAX],
    )
    return [*(AbandonUpload(upload.transfer, upload.blob) for upload in dropped), said]


def is_quarantined(state: State, learner: str) -> bool:
    """Whether a learner is in quarantine at this moment."""
    return state.unix < state.quarantined.get(learner, 0.0)


def quarantine_error(state: State, learner: str) -> Error | None:
    """What a learner in quarantine is told; None if it is in none."""
    if not is_quarantined(state, learner):
        return None
    return Error(code="quarantined", text=_reason_text(state, learner))


def quarantine_infos(state: State) -> tuple[WarningInfo, ...]:
    """The quarantines that last, as whoever asks for the status is shown them."""
    lasting = {learner: until for learner, until in state.quarantined.items() if state.unix < until}
    return tuple(
        WarningInfo(
            name="learner.quarantined",
            subject=learner,
            text=_reason_text(state, learner),
            since_unix=max(0.0, until - state.settings.quarantine_seconds),
        )
        for learner, until in sorted(lasting.items(), key=lambda one: one[1])
    )


def _reason_text(state: State, learner: str) -> str:
    standing = state.index.standing(learner) or Standing()
    minutes = (state.quarantined[learner] - state.unix) / 60
    return (
        f"{standing.num_rejected} contributions of learner {learner} in a row were rejected, the last because "
        f"{standing.reason[:REASON_MAX]}: mend its training or its data, and start it again in {minutes:.0f} min, or "
        f"after the operator's `isles pardon {learner}`"
    )


def take_pardon(state: State, session: Session, arrival: MessageArrived, message: Pardon) -> list[Instruction]:
    """PARDON: ends a quarantine, and the row of rejections that led to it."""
    if state.index.standing(message.learner) is None:
        text = f"this run has no learner {message.learner}: see isles status for their names"
        return respond(arrival, Error(code="not-found", text=text))
    state.index.put_standing(message.learner, Standing())
    if state.quarantined.pop(message.learner, None) is None:
        return reply(arrival, Done())
    return [*reply(arrival, Done()), log("info", "learner.pardoned", learner=message.learner, operator=session.id)]
