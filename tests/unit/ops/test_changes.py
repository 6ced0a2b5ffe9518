"""A stopped run can be given a larger budget and other settings, and nothing that would make it another run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isles.brokers.retained import RUN_RECORD
from isles.brokers.store.store import Store
from isles.ops.changes import (
    changed,
    check_budget,
    differences,
    read_record,
    stated_by,
    words,
    write_record,
)
from isles.proto.agreement import SETTINGS_EPOCHS_MAX, Budget, RunRecord, SyncSettings
from isles.proto.config import Config, RunSettings, Stated, resolve
from isles.proto.errors import ConfigError, StoreError, StoreLockedError

MODELS = {"run": RunSettings, "sync": SyncSettings}
RECORD = RunRecord(
    run="demo",
    seed=1,
    sync=SyncSettings(interval_steps=6, num_fragments=2),
    budget=Budget(rounds=16),
    manifest_digest="0" * 64,
    manifest="{}",
)


def ask(**settings: Any) -> Config:
    """What somebody asks for on the command line; dots are double underscores."""
    flags = [Stated(key.replace("__", "."), str(value), f"the flag --{key}") for key, value in settings.items()]
    return resolve(MODELS, flags=flags)


def settings_after(asked: Config, record: RunRecord = RECORD) -> Config:
    return resolve(MODELS, flags=[*stated_by(record, asked), *asked.stated.values()])


def sync_after(asked: Config) -> SyncSettings:
    return settings_after(asked).section("sync", SyncSettings)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A stopped broker's store."""
    opened = Store.open(tmp_path / "store")
    with opened.index.transaction():
        opened.index.put_value(RUN_RECORD, RECORD.model_dump_json().encode())
    opened.close()
    return tmp_path / "store"


# -------------------------------------------------------------------------------------------------- what is asked for


def test_what_is_not_asked_for_stays_as_the_record_has_it() -> None:
    config = settings_after(ask())
    assert config.section("sync", SyncSettings) == RECORD.sync
    assert config.section("run", RunSettings).budget == RECORD.budget


def test_single_settings_are_replaced_and_the_others_stay() -> None:
    assert sync_after(ask(sync__codec_up="int8")) == RECORD.sync.model_copy(update={"codec_up": "int8"})


def test_another_preset_brings_its_settings_but_no_other_number_of_fragments() -> None:
    wanted = SyncSettings(preset="diloco", num_fragments=2, interval_steps=9)
    assert sync_after(ask(sync__preset="diloco", sync__interval_steps=9)) == wanted


def test_the_same_preset_again_changes_nothing() -> None:
    assert sync_after(ask(sync__preset="decoupled")) == RECORD.sync


def test_another_number_of_fragments_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync__num_fragments: the run demo has 2 fragments and cannot have 3"):
        stated_by(RECORD, ask(sync__num_fragments=3))


def test_the_same_number_of_fragments_may_be_said_again() -> None:
    assert sync_after(ask(sync__num_fragments=2)) == RECORD.sync


@pytest.mark.parametrize("rounds", [16, 17])
def test_an_equal_or_larger_budget_is_permitted(rounds: int) -> None:
    check_budget(RECORD, ask(run__rounds=rounds))
    assert settings_after(ask(run__rounds=rounds)).section("run", RunSettings).budget == Budget(rounds=rounds)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"run__rounds": 15}, "raised but not lowered to 15"),
        ({"run__tokens": 500}, "not replaced by one of another kind"),
    ],
)
def test_another_budget_is_refused(settings: Mapping[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        check_budget(RECORD, ask(**settings))


# --------------------------------------------------------------------------------------------------------- the record


def test_other_settings_begin_a_settings_epoch_and_the_old_ones_are_kept() -> None:
    new = SyncSettings(interval_steps=9, num_fragments=2)
    record = changed(RECORD, new, RECORD.budget)
    assert (record.sync, record.past_sync) == (new, (RECORD.sync,))
    assert record.settings_epoch_of(RECORD.sync.digest) == 0
    assert record.settings_epoch_of(new.digest) == 1


def test_settings_that_come_back_are_the_newest_epoch_of_theirs() -> None:
    new = SyncSettings(interval_steps=9, num_fragments=2)
    record = changed(changed(RECORD, new, RECORD.budget), RECORD.sync, RECORD.budget)
    assert record.settings_epoch_of(RECORD.sync.digest) == 2
    assert record.sync_of(new.digest) == new


def test_a_larger_budget_alone_begins_no_settings_epoch() -> None:
    record = changed(RECORD, RECORD.sync, Budget(rounds=32))
    assert record == RECORD.model_copy(update={"budget": Budget(rounds=32)})


def test_settings_can_be_changed_a_thousand_times_and_no_more() -> None:
    record = RECORD.model_copy(update={"past_sync": (RECORD.sync,) * SETTINGS_EPOCHS_MAX})
    with pytest.raises(ConfigError, match="were changed 1000 times"):
        changed(record, SyncSettings(num_fragments=2), RECORD.budget)


def test_a_record_never_gets_another_number_of_fragments() -> None:
    with pytest.raises(ConfigError, match="cannot have 3 fragments"):
        changed(RECORD, SyncSettings(num_fragments=3), RECORD.budget)


def test_changes_are_told_with_what_was_and_what_is() -> None:
    new = changed(RECORD, SyncSettings(interval_steps=9, num_fragments=2, codec_up="int8"), Budget(rounds=32))
    found = differences(RECORD, new)
    assert words(found) == "sync.interval_steps 6 -> 9, sync.codec_up step1.5 -> int8, run.rounds 16 -> 32"
    assert differences(RECORD, RECORD) == {}


# ---------------------------------------------------------------------------------------------------------- the store


def test_the_record_in_the_store_is_replaced(store: Path) -> None:
    new = changed(RECORD, SyncSettings(num_fragments=2), Budget(rounds=32))
    write_record(store, new)
    assert read_record(store) == new


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none") is None
    assert read_record(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_running_brokers_store_is_not_touched(store: Path) -> None:
    opened = Store.open(store)
    try:
        with pytest.raises(StoreLockedError):
            write_record(store, RECORD)
    finally:
        opened.close()


def test_a_damaged_record_is_one_sentence(store: Path) -> None:
    opened = Store.open(store)
    with opened.index.transaction():
        opened.index.put_value(RUN_RECORD, b"{")
    opened.close()
    with pytest.raises(StoreError, match=r"the run record in .* is damaged"):
        read_record(store)
