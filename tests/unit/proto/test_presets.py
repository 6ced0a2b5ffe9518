"""Presets: other defaults of the synchronisation settings, and nothing more."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.messages import Init, pack, unpack
from isles.proto.presets import PRESETS, QUORUM_MAX, Preset

NAMES: tuple[Preset, ...] = get_args(Preset)
UNIVERSAL = {"interval_steps", "codec_up", "codec_down", "preset"}
"""What no preset decides: it depends on the length of the run and on its links."""


def resolved(preset: Preset, **stated: Any) -> SyncSettings:
    return SyncSettings.model_validate({"preset": preset, **stated})


@pytest.mark.parametrize("preset", NAMES)
def test_a_preset_gives_known_settings_and_values_that_they_may_have(preset: Preset) -> None:
    sync = resolved(preset)
    assert {name: getattr(sync, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert not PRESETS[preset].keys() & UNIVERSAL
    assert PRESETS[preset].keys() <= SyncSettings.model_fields.keys()


def test_every_preset_has_a_table_and_every_table_is_a_preset() -> None:
    assert set(PRESETS) == set(NAMES)


def test_without_a_preset_the_defaults_are_the_projects_own() -> None:
    assert SyncSettings() == resolved("decoupled")
    assert PRESETS["decoupled"] == {}


@pytest.mark.parametrize("preset", NAMES)
def test_a_stated_setting_wins_even_if_it_is_the_usual_default(preset: Preset) -> None:
    usual = SyncSettings()
    for name in PRESETS[preset]:
        assert getattr(resolved(preset, **{name: getattr(usual, name)}), name) == getattr(usual, name)


@pytest.mark.parametrize("preset", ["diloco", "streaming", "local-sgd"])
def test_synchronous_methods_wait_for_everybody(preset: Preset) -> None:
    assert resolved(preset).quorum == QUORUM_MAX


def test_an_unknown_preset_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"(?s)preset.*local-sgd"):
        SyncSettings.model_validate({"preset": "fedavg"})


@pytest.mark.parametrize("preset", NAMES)
def test_a_record_holds_the_resolved_values_on_the_wire_and_in_the_store(preset: Preset) -> None:
    """A default that is left out would come back as the preset's."""
    usual = SyncSettings()
    sync = resolved(preset, **{name: getattr(usual, name) for name in PRESETS[preset]})
    record = RunRecord(run="demo", seed=1, sync=sync, budget=Budget(rounds=1), manifest_digest="0" * 64, manifest="")
    init = Init(run_record=record, versions=())
    assert unpack(pack(init)) == init
    assert RunRecord.model_validate_json(record.model_dump_json()) == record
    assert sync.model_dump(exclude_defaults=True).keys() == SyncSettings.model_fields.keys()
