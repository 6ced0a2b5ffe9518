"""Recipes of existing stores name the settings of their run by a digest: it must come out the same for ever."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.agreement import SETTINGS_ALWAYS_IN_DIGEST, RunRecord, SyncSettings
from isles.proto.presets import PRESETS

EVERY_VALUE: dict[str, Any] = {
    "preset": "decoupled",
    "interval_steps": 48,
    "has_dynamic_interval": False,
    "num_fragments": 4,
    "codec_up": "int4",
    "codec_down": "int4",
    "apply_rule": "rebase",
    "blend_alpha": 0.5,
    "books": "exact",
    "quorum": 1,
    "overlap_steps": 4.0,
    "grace_share": 0.9,
    "grace_min_seconds": 0.0,
    "grace_max_seconds": 10.0,
    "has_cues": True,
    "merge_rule": "mean",
    "staleness_exponent": 0.0,
    "outer_learning_rate": 0.7,
    "outer_schedule": "constant",
    "outer_warmup_share": 0.0,
    "outer_final_share": 0.1,
    "outer_momentum": 0.5,
    "has_fractional_steps": True,
    "horizon_versions": 64,
    "is_deterministic": False,
}
"""Each setting that the digest always covers, with a value. Never changed: a setting that is added goes below."""

GOLDEN: dict[str, dict[str, Any]] = {
    "4abf05aa91a2ea570d00d76be8c0aaac19903bd16e26f3e690b7ae5bc9b7fbdd": EVERY_VALUE,
    "bb96787351109869b48d8a77f2095e88f07996d3d5d82af65c19ca9de9d10718": EVERY_VALUE
    | {
        "preset": "streaming",
        "apply_rule": "blend",
        "books": "published",
        "quorum": 100_000,
        "outer_learning_rate": 0.4,
        "outer_momentum": 0.9,
    },
}
"""Digest -> the settings of a run. Lines are added, never changed."""

NEUTRAL: dict[str, Any] = {}
"""Each other setting -> its default, under which a run does what it did without it. Lines are added, never changed."""


class NewerSettings(SyncSettings):
    """The settings of some later build."""

    colour: str = "none"
    weight: float = 1.0


@pytest.mark.parametrize("digest", GOLDEN)
def test_the_digest_of_given_settings_never_changes(digest: str) -> None:
    assert SyncSettings(**GOLDEN[digest]).digest == digest


def test_the_settings_that_the_digest_always_covers_are_a_closed_list() -> None:
    assert EVERY_VALUE.keys() == SETTINGS_ALWAYS_IN_DIGEST
    assert SyncSettings.model_fields.keys() >= SETTINGS_ALWAYS_IN_DIGEST


def test_every_other_setting_keeps_the_default_that_runs_without_it_are_read_with() -> None:
    fields = SyncSettings.model_fields
    assert {name: fields[name].get_default() for name in fields if name not in SETTINGS_ALWAYS_IN_DIGEST} == NEUTRAL


def test_no_preset_decides_a_setting_that_older_runs_were_begun_without() -> None:
    assert [name for preset in PRESETS.values() for name in preset if name not in SETTINGS_ALWAYS_IN_DIGEST] == []


@pytest.mark.parametrize("digest", GOLDEN)
def test_a_setting_that_is_added_changes_only_the_digest_of_those_who_use_it(digest: str) -> None:
    stated = GOLDEN[digest]
    assert NewerSettings(**stated).digest == digest
    assert NewerSettings(**stated, colour="none", weight=1).digest == digest
    used = {NewerSettings(**stated, colour="red").digest, NewerSettings(**stated, weight=0.5).digest}
    assert len({digest, *used}) == 3


@pytest.mark.parametrize("name", sorted(SETTINGS_ALWAYS_IN_DIGEST))
def test_every_setting_that_is_always_covered_changes_the_digest(name: str) -> None:
    other = SyncSettings.model_construct(**EVERY_VALUE | {name: None})
    assert other.digest not in GOLDEN


def test_a_record_that_was_written_before_a_setting_was_added_still_knows_its_recipes() -> None:
    record = RunRecord.model_validate(
        {
            "run": "demo",
            "seed": 1,
            "sync": EVERY_VALUE,
            "budget": {"rounds": 1},
            "manifest_digest": "0" * 64,
            "manifest": "",
        }
    )
    [digest, *_] = GOLDEN
    assert record.settings_epoch_of(digest) == 0
