"""Giving a run a larger budget while all its processes are stopped."""

from __future__ import annotations

from pathlib import Path

from isles.brokers.retained import RUN_RECORD, run_record
from isles.brokers.store.store import Store
from isles.proto.agreement import Budget
from isles.proto.errors import ConfigError


def check_extension(old: Budget, new: Budget, folder: Path) -> None:
    """Raises ConfigError unless `new` is a larger budget of the same kind."""
    for kind in ("tokens", "rounds"):
        before, after = getattr(old, kind), getattr(new, kind)
        if before is not None and after is None:
            raise ConfigError(
                f"the run in {folder} has a budget of {before} {kind}: it can be raised with --{kind}, not replaced by "
                "one of another kind"
            )
        if before is not None and after < before:
            raise ConfigError(
                f"the run in {folder} has a budget of {before} {kind}, which can be raised but not lowered to {after}: "
                "start another run with another --run-dir"
            )


def extend_store(store: Path, budget: Budget) -> None:
    """Writes the budget into the run record of a stopped broker's store; does nothing if it is there already.

    The learning rate follows at once: it is a function of the share of the budget that is reached, which is now
    smaller. Raises StoreLockedError if a broker is running on the store, StoreError if it cannot be read.
    """
    if not store.is_dir():
        return
    opened = Store.open(store)
    try:
        with opened.index.transaction():
            record = run_record(opened.index)
            if record is not None and record.budget != budget:
                changed = record.model_copy(update={"budget": budget})
                opened.index.put_value(RUN_RECORD, changed.model_dump_json().encode())
    finally:
        opened.close()
