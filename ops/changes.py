"""Changing what a run agreed on while all its processes are stopped: its budget, and how it is synchronised.

The run's record in the store is the truth; a run folder's config.toml follows it. Other `sync` settings begin a new
settings epoch: the record keeps the old ones, by which the versions before can still be recomputed. Contributions that
are pending, and updates that learners still need, stay readable in whatever codec they were made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from isles.brokers.retained import RUN_RECORD, run_record
from isles.brokers.store.store import INDEX_NAME, Store
from isles.proto.agreement import SETTINGS_EPOCHS_MAX, Budget, RunRecord, SyncSettings
from isles.proto.config import Config, RunSettings, Stated
from isles.proto.errors import ConfigError, StoreError

SOURCE: Final = "the run's record"
NUM_FRAGMENTS: Final = "sync.num_fragments"
PRESET: Final = "sync.preset"

Changes = Mapping[str, Sequence[Any]]
"""Dotted key -> the value before and the one after."""


def stated_by(record: RunRecord, asked: Config) -> list[Stated]:
    """What the record says about budget and synchronisation, as flags that come before those that are `asked` for.

    Another preset brings its own settings, so the record's step back for it. Raises ConfigError for another number of
    fragments.
    """
    sync = record.sync.model_dump(mode="json")
    new = asked.sections["sync"].model_dump(mode="json")
    if NUM_FRAGMENTS in asked.stated and new["num_fragments"] != sync["num_fragments"]:
        raise ConfigError(
            f"{asked.stated[NUM_FRAGMENTS].source}: the run {record.run} has {sync['num_fragments']} fragments and "
            f"cannot have {new['num_fragments']}: a model is split once, when its run begins; start another run"
        )
    if PRESET in asked.stated and new["preset"] != sync["preset"]:
        sync = {"num_fragments": sync["num_fragments"]}
    kept = {f"sync.{name}": value for name, value in sync.items()}
    if not {"run.tokens", "run.rounds"} & asked.stated.keys():
        kept |= {f"run.{kind}": value for kind, value in record.budget.model_dump().items() if value is not None}
    return [Stated(key, value, SOURCE, is_text=False) for key, value in kept.items()]


def check_budget(record: RunRecord, asked: Config) -> None:
    """Raises ConfigError if a budget was asked for that is not a larger one of the run's kind."""
    new = asked.section("run", RunSettings).budget
    stated = [asked.stated[key] for key in ("run.tokens", "run.rounds") if key in asked.stated]
    for kind in ("tokens", "rounds") if stated else ():
        before, after = getattr(record.budget, kind), getattr(new, kind)
        if before is not None and after is None:
            raise ConfigError(
                f"{stated[0].source}: the run {record.run} has a budget of {before} {kind}: it can be raised with "
                f"--{kind}, not replaced by one of another kind"
            )
        if before is not None and after < before:
            raise ConfigError(
                f"{stated[0].source}: the run {record.run} has a budget of {before} {kind}, which can be raised but "
                f"not lowered to {after}: start another run"
            )


def changed(record: RunRecord, sync: SyncSettings, budget: Budget) -> RunRecord:
    """The record with other settings; in a new settings epoch if `sync` is another. Raises ConfigError."""
    if sync.num_fragments != record.sync.num_fragments:
        raise ConfigError(f"the run {record.run} cannot have {sync.num_fragments} fragments: a model is split once")
    if sync == record.sync:
        return record.model_copy(update={"budget": budget})
    if len(record.past_sync) >= SETTINGS_EPOCHS_MAX:
        raise ConfigError(f"the settings of the run {record.run} were changed {SETTINGS_EPOCHS_MAX} times, the most")
    past = (*record.past_sync, record.sync)
    return record.model_copy(update={"budget": budget, "sync": sync, "past_sync": past})


def differences(old: RunRecord, new: RunRecord) -> dict[str, list[Any]]:
    """What differs in budget and synchronisation, by dotted key, with the value before and the one after."""
    found: dict[str, list[Any]] = {}
    for section, mine, other in (("sync", old.sync, new.sync), ("run", old.budget, new.budget)):
        before, after = mine.model_dump(mode="json"), other.model_dump(mode="json")
        found |= {f"{section}.{name}": [before[name], after[name]] for name in after if before[name] != after[name]}
    return found


def words(changes: Changes) -> str:
    """The same as a person reads it: `sync.interval_steps 6 -> 12, run.rounds 16 -> 32`."""
    return ", ".join(f"{key} {before} -> {after}" for key, (before, after) in changes.items())


# ------------------------------------------------------------------------------------------------------------ the store


def read_record(store: Path) -> RunRecord | None:
    """The record of a stopped broker's store; None if it has none, or is not there.

    Raises StoreLockedError if a broker is running on the store, StoreError if it cannot be read.
    """
    if not (store / INDEX_NAME).is_file():
        return None
    opened = Store.open(store)
    try:
        return run_record(opened.index)
    except ValueError as error:
        raise StoreError(f"the run record in {store} is damaged: restore the store folder from a copy") from error
    finally:
        opened.close()


def write_record(store: Path, record: RunRecord) -> None:
    """Replaces the record of a stopped broker's store, in one transaction. Raises as `read_record`.

    The learning rate follows a larger budget at once: it is a function of the share of the budget that is reached.
    """
    opened = Store.open(store)
    try:
        with opened.index.transaction():
            opened.index.put_value(RUN_RECORD, record.model_dump_json().encode())
    finally:
        opened.close()
