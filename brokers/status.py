"""What there is to see of a run: the answer to ASK_STATUS. Pure."""

from __future__ import annotations

from typing import Final

from isles.brokers import retained
from isles.brokers.limits import RoutingSettings
from isles.brokers.store.index import Index
from isles.proto.agreement import RunRecord
from isles.proto.messages import (
    COUNT_MAX,
    HEADER_BYTES_MAX,
    LearnerInfo,
    LeaseInfo,
    Limits,
    RelayInfo,
    Status,
    StoreInfo,
    Totals,
    VersionInfo,
    WarningInfo,
)

REPORTS_MAX: Final = 4096
"""Reports in one answer, as the message permits; the asker goes on after the last one, or asks for the newest."""
REPORTS_BYTES_MAX: Final = HEADER_BYTES_MAX // 4
"""Of those, so that the answer fits a header whatever was reported."""
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
    wants_newest: bool,
    warnings: tuple[WarningInfo, ...],
    unix: float,
    version: str,
    limits: Limits,
    store: StoreInfo,
    num_required: int,
    relays: tuple[RelayInfo, ...],
) -> Status:
    """Reads everything in one transaction of the caller."""
    heads = index.heads()
    progress, trained = 0.0, heads
    if record is not None:
        # A fragment of buffers comes last; it takes part in no mean, since it may never change.
        trained = [head for head in heads if head.fragment < record.sync.num_fragments]
    totals = make_totals(index, trained, tokens_produced)
    if record is not None:
        progress = record.budget.progress(tokens_merged=totals.tokens_merged, rounds_committed=totals.rounds_committed)
    return Status(
        run="" if record is None else record.run,
        broker_incarnation=broker_incarnation,
        uptime_seconds=uptime_seconds,
        progress=progress,
        num_parameters=int(index.value(retained.NUM_PARAMETERS) or b"0"),
        settings_epoch=0 if record is None else len(record.past_sync),
        learners=learners,
        fragments=tuple(heads),
        num_pending=index.num_pending(),
        leases=leases,
        reports=tuple(index.reports(reports_after, REPORTS_MAX, REPORTS_BYTES_MAX, are_newest=wants_newest)),
        totals=totals,
        warnings=warnings,
        unix=max(0.0, unix),
        version=version,
        limits=limits,
        store=store,
        num_required=num_required,
        relays=relays,
    )


def make_store_info(index: Index, settings: RoutingSettings, disk_free_bytes: int) -> StoreInfo:
    """How full the store is."""
    return StoreInfo(
        stored_bytes=index.stored_bytes(),
        stored_bytes_max=settings.stored_bytes_max,
        disk_free_bytes=min(COUNT_MAX, disk_free_bytes),
        disk_free_bytes_min=min(COUNT_MAX, settings.disk_free_bytes_min),
    )


def make_totals(index: Index, heads: list[VersionInfo], tokens_produced: int) -> Totals:
    """The counters of the whole run; `heads` are those of the fragments that tokens and rounds are counted in."""
    sums = index.sums()
    return Totals(
        rounds_committed=sum(head.version for head in heads),
        tokens_merged=_mean_tokens(heads),
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


def _mean_tokens(heads: list[VersionInfo]) -> float:
    return sum(head.tokens_total for head in heads) / len(heads) if heads else 0.0
