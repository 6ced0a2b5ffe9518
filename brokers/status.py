"""What there is to see of a run: the answer to ASK_STATUS. Pure."""

from __future__ import annotations

from typing import Final

from isles.brokers import retained
from isles.brokers.store.index import Index
from isles.proto.agreement import RunRecord
from isles.proto.messages import LearnerInfo, LeaseInfo, Status, Totals, VersionInfo

REPORTS_MAX: Final = 4096
"""Reports in one answer, as the message permits; the asker goes on after the last one."""
BYTES_DOWN_COUNTER: Final = "bytes_down"


def make_status(
    index: Index,
    record: RunRecord | None,
    *,
    broker_incarnation: str,
    uptime_seconds: float,
    learners: tuple[LearnerInfo, ...],
    leases: tuple[LeaseInfo, ...],
    tokens_produced: int,
    reports_after: int,
) -> Status:
    """Reads everything in one transaction of the caller."""
    heads = index.heads()
    totals = make_totals(index, heads, tokens_produced)
    progress = 0.0
    if record is not None:
        progress = record.budget.progress(tokens_merged=totals.tokens_merged, rounds_committed=totals.rounds_committed)
    return Status(
        run="" if record is None else record.run,
        broker_incarnation=broker_incarnation,
        uptime_seconds=uptime_seconds,
        progress=progress,
        num_parameters=int(index.value(retained.NUM_PARAMETERS) or b"0"),
        learners=learners,
        fragments=tuple(_without_ingredients(head) for head in heads),
        num_pending=index.num_pending(),
        leases=leases,
        reports=tuple(index.reports(reports_after, REPORTS_MAX)),
        totals=totals,
    )


def make_totals(index: Index, heads: list[VersionInfo], tokens_produced: int) -> Totals:
    """The counters of the whole run."""
    sums = index.sums()
    return Totals(
        rounds_committed=sums.rounds,
        tokens_merged=sum(head.tokens_total for head in heads) / len(heads) if heads else 0.0,
        tokens_produced=tokens_produced,
        merged=sums.participants,
        rejected=index.counter(retained.REJECTED_COUNTER),
        expired=index.counter(retained.EXPIRED_COUNTER),
        participation_mean=sums.participants / sums.rounds if sums.rounds else 0.0,
        fraction_mean=sums.fraction / sums.rounds if sums.rounds else 0.0,
        staleness_mean=sums.staleness / sums.participants if sums.participants else 0.0,
        bytes_up=index.counter(retained.BYTES_UP_COUNTER),
        bytes_down=index.counter(BYTES_DOWN_COUNTER),
        update_bytes=sums.update_bytes,
    )


def _without_ingredients(head: VersionInfo) -> VersionInfo:
    """A head with the figures of its recipe but not its list, which may be long; HISTORY has it."""
    if head.recipe is None:
        return head
    return head.model_copy(update={"recipe": head.recipe.model_copy(update={"ingredients": ()})})
