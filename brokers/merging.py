"""What outers say: LEASE, LIST, SETTLE, COMMIT, CHECKPOINT. Pure."""

from __future__ import annotations

from isles.brokers import retained, versions
from isles.brokers.quarantine import take_rejections
from isles.brokers.replies import log, named, reply, respond
from isles.brokers.sessions import Session
from isles.brokers.state import State
from isles.brokers.vocabulary import (
    Instruction,
    MessageArrived,
)
from isles.proto.messages import (
    Checkpoint,
    Commit,
    Committed,
    Done,
    Error,
    Fenced,
    Lease,
    Leased,
    List,
    Settle,
    Settled,
    Stale,
)


def take_lease(state: State, session: Session, arrival: MessageArrived, message: Lease) -> list[Instruction]:
    """LEASE: renews and grants what is free; nothing to who has left, or the next one would wait for it to expire."""
    if session.has_left:
        return reply(arrival, Leased(epochs={}, lease_seconds=state.settings.outer_lease_seconds))
    assert state.record is not None
    wanted = tuple(fragment for fragment in message.fragments if state.num_tensors(fragment))
    epochs, is_new = state.leases.grant(wanted, session.id, session.incarnation, state.now)
    if epochs:
        state.num_required = message.num_required
    leased = Leased(epochs=epochs, lease_seconds=state.settings.outer_lease_seconds)
    if not is_new:
        return reply(arrival, leased)
    said = log("info", "outer.leased", outer=session.id, fragments=sorted(epochs), epoch=max(epochs.values()))
    return [*reply(arrival, leased), said]


def take_list(state: State, _: Session, arrival: MessageArrived, message: List) -> list[Instruction]:
    """LIST: all that one round needs."""
    listing = retained.listing(state.index, message.fragment, state.damaged)
    if listing is None:
        text = f"there is no fragment {message.fragment} in this run"
        return respond(arrival, Error(code="not-found", text=text))
    return reply(arrival, listing.changed(learners=state.membership.infos()))


def take_settle(state: State, session: Session, arrival: MessageArrived, message: Settle) -> list[Instruction]:
    """SETTLE: rejects what failed the screen, if the epoch is the newest."""
    epoch = state.leases.epoch(message.fragment)
    if epoch == 0 or message.epoch != epoch:
        return _fence(session, arrival, message.fragment, epoch)
    rejected = retained.settle(state.index, message)
    hints = [state.hint("settled", fragment=message.fragment, learner=row.id.learner) for row in rejected]
    logs = [log("warning", "contribution.rejected", **named(row.id), reason=row.reason) for row in rejected]
    quarantines = take_rejections(state, rejected, message)
    return [*reply(arrival, Settled(fragment=message.fragment)), *hints, *logs, *quarantines]


def take_commit(state: State, session: Session, arrival: MessageArrived, message: Commit) -> list[Instruction]:
    """COMMIT: the next version, if nothing it stands on has changed."""
    epoch = state.leases.epoch(message.fragment)
    answer = retained.commit(
        state.index,
        message,
        epoch=epoch,
        versions_kept=state.settings.versions_kept,
        unix=state.unix,
        damaged=state.damaged,
    )
    if isinstance(answer, Fenced):
        return _fence(session, arrival, message.fragment, epoch)
    if isinstance(answer, Stale):
        fields = {"base_version": message.base_version, "head": answer.head, "text": answer.reason}
        return [*reply(arrival, answer), log("info", "commit.stale", fragment=message.fragment, **fields)]
    if not isinstance(answer, Committed) or answer.is_repeat:
        return respond(arrival, answer)
    head = state.index.head(message.fragment)
    said = log(
        "info",
        "round.committed",
        fragment=message.fragment,
        version=answer.version,
        participants=len(message.recipe.ingredients),
        fraction=message.recipe.fraction,
        tokens=head.tokens_total if head else 0,
        epoch=message.epoch,
    )
    learners = {ingredient.id.learner for ingredient in message.recipe.ingredients}
    where = {"fragment": answer.fragment, "version": answer.version}
    assert state.record is not None
    warned = state.warnings.take_commit(learners, state.membership.training, where, state.record.sync, state.unix)
    hint = state.hint("version", fragment=answer.fragment, version=answer.version)
    return [*reply(arrival, answer), hint, said, *warned]


def take_checkpoint(state: State, session: Session, arrival: MessageArrived, message: Checkpoint) -> list[Instruction]:
    """CHECKPOINT: the whole state of a version is here, so older ones may go."""
    epoch = state.leases.epoch(message.fragment)
    before = state.index.version(message.fragment, message.version)
    answer = versions.checkpoint(
        state.index, message, epoch=epoch, versions_kept=state.settings.versions_kept, damaged=state.damaged
    )
    if isinstance(answer, Fenced):
        return _fence(session, arrival, message.fragment, epoch)
    if not isinstance(answer, Done) or state.index.version(message.fragment, message.version) == before:
        return respond(arrival, answer)
    num_bytes = sum(blob.size_bytes for blob in versions.state_blobs(message))
    said = log("info", "version.checkpointed", fragment=message.fragment, version=message.version, bytes=num_bytes)
    return [*reply(arrival, answer), said]


def _fence(session: Session, arrival: MessageArrived, fragment: int, epoch: int) -> list[Instruction]:
    if epoch == 0:
        text = f"fragment {fragment} has never been leased: LEASE it first"
        return respond(arrival, Error(code="broken-rule", text=text))
    said = log("warning", "outer.fenced", outer=session.id, fragment=fragment, epoch=epoch)
    return [*reply(arrival, Fenced(epoch=epoch)), said]
