"""What a run agrees on."""

from __future__ import annotations

import pytest

from isles.proto.agreement import Budget, RunRecord, SyncSettings

RECORD = RunRecord(
    run="demo",
    seed=7,
    sync=SyncSettings(interval_steps=24),
    budget=Budget(tokens=1000),
    manifest_digest="0" * 64,
    manifest="",
    task_settings={"width": 64},
)


def test_stated_settings_that_are_the_runs_make_no_difference() -> None:
    assert RECORD.first_difference({"sync.interval_steps": 24, "seed": 7, "task_settings.width": 64}) is None
    assert RECORD.first_difference({}) is None


@pytest.mark.parametrize("key", ["sync.interval_steps", "seed", "budget.tokens", "task_settings.width"])
def test_a_stated_setting_that_is_not_the_runs_is_named(key: str) -> None:
    difference = RECORD.first_difference({key: 25})
    assert difference is not None
    assert key in difference


def test_a_stated_setting_that_the_run_does_not_know_is_named() -> None:
    for key in ("sync.colour", "colour", "seed.x"):
        assert key in (RECORD.first_difference({key: 1}) or "")


def test_a_budget_is_tokens_or_rounds_and_not_both() -> None:
    for both in ({}, {"tokens": 1, "rounds": 1}):
        with pytest.raises(ValueError, match="exactly one"):
            Budget(**both)


def test_progress_is_a_share_of_the_budget_and_never_more_than_all() -> None:
    assert Budget(tokens=200).progress(tokens_merged=50, rounds_committed=9) == 0.25
    assert Budget(rounds=10).progress(tokens_merged=50, rounds_committed=9) == 0.9
    assert Budget(rounds=10).progress(tokens_merged=50, rounds_committed=99) == 1.0


def test_settings_that_contradict_each_other_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="grace_max_seconds"):
        SyncSettings(grace_min_seconds=3, grace_max_seconds=2)
    with pytest.raises(ValueError, match="overlap_steps"):
        SyncSettings(is_deterministic=True, overlap_steps=30, interval_steps=24)
    with pytest.raises(ValueError, match="has_dynamic_interval"):
        SyncSettings(is_deterministic=True, has_dynamic_interval=True)
    with pytest.raises(ValueError, match="colour"):
        SyncSettings(colour="blue")  # type: ignore[call-arg]


def test_a_changed_copy_of_settings_has_a_digest_of_its_own() -> None:
    sync = SyncSettings(quorum=1)
    assert sync.digest == SyncSettings(quorum=1).digest
    assert sync.model_copy(update={"quorum": 2}).digest == SyncSettings(quorum=2).digest != sync.digest


def test_every_setting_is_described() -> None:
    assert all(field.description for field in SyncSettings.model_fields.values())
