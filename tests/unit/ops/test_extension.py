"""A stopped run can be given a larger budget of the same kind, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.brokers.retained import RUN_RECORD, run_record
from isles.brokers.store.store import Store
from isles.ops.extension import check_extension, extend_store
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.errors import ConfigError, StoreLockedError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a run of 100 tokens."""
    folder = tmp_path / "store"
    record = RunRecord(
        run="demo", seed=1, sync=SyncSettings(), budget=Budget(tokens=100), manifest_digest="0" * 64, manifest="{}"
    )
    opened = Store.open(folder)
    with opened.index.transaction():
        opened.index.put_value(RUN_RECORD, record.model_dump_json().encode())
    opened.close()
    return folder


def read(folder: Path) -> RunRecord:
    opened = Store.open(folder)
    try:
        record = run_record(opened.index)
    finally:
        opened.close()
    assert record is not None
    return record


def test_the_run_record_gets_the_larger_budget_and_keeps_the_rest(store: Path) -> None:
    before = read(store)
    extend_store(store, Budget(tokens=250))
    after = read(store)
    assert after.budget == Budget(tokens=250)
    assert after.model_copy(update={"budget": before.budget}) == before


def test_a_store_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    extend_store(tmp_path / "none", Budget(tokens=1))
    assert not (tmp_path / "none").exists()


def test_a_running_brokers_store_is_not_touched(store: Path) -> None:
    opened = Store.open(store)
    try:
        with pytest.raises(StoreLockedError):
            extend_store(store, Budget(tokens=250))
    finally:
        opened.close()


@pytest.mark.parametrize("new", [Budget(tokens=100), Budget(tokens=101)])
def test_an_equal_or_larger_budget_is_permitted(new: Budget, tmp_path: Path) -> None:
    check_extension(Budget(tokens=100), new, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        (Budget(tokens=100), Budget(tokens=99), "raised but not lowered to 99"),
        (Budget(rounds=9), Budget(rounds=8), "raised but not lowered to 8"),
        (Budget(tokens=100), Budget(rounds=500), "not replaced by one of another kind"),
    ],
)
def test_another_budget_is_refused(old: Budget, new: Budget, part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=part):
        check_extension(old, new, tmp_path)
