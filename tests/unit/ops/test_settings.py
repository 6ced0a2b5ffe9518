"""The operator's own settings, and that every section can be had without a tensor library."""

from __future__ import annotations

import pytest

from isles.ops.settings import SECTIONS, UpSettings, parse_workers, section_models
from isles.proto.config import FreeSettings


def test_workers_are_numbered_within_their_region() -> None:
    assert UpSettings(workers="us=2, eu=1").worker_ids == {"us-0": "us", "us-1": "us", "eu-0": "eu"}


def test_a_region_without_workers_is_left_out() -> None:
    assert parse_workers("us=0,eu=1") == {"eu": 1}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "write it as region=count"),
        ("us", "write it as region=count"),
        ("us=-1", "write it as region=count"),
        ("US=1", "write it as region=count"),
        ("us=1,us=2", "names the region us twice"),
        ("us=0", "from 1 to 256"),
        ("us=257", "from 1 to 256"),
        ("../us=1", "write it as region=count"),
    ],
)
def test_a_wrong_list_of_workers_is_refused_with_the_right_form(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        UpSettings(workers=text)


def test_every_section_has_a_description_for_each_setting() -> None:
    for name, model in section_models().items():
        for field, info in model.model_fields.items():
            assert info.description, f"{name}.{field}"


def test_all_sections_are_frozen_and_refuse_unknown_keys() -> None:
    for model in section_models().values():
        assert model.model_config.get("frozen")
        assert model.model_config.get("extra") == "forbid"


def test_only_a_task_of_ones_own_takes_any_key() -> None:
    models = section_models(has_own_task=True)
    assert models["task"] is FreeSettings
    assert set(models) == set(SECTIONS)
