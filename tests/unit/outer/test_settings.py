"""What an outer can be told, and what it is called."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from isles.outer.conduct import USUAL, Limits
from isles.outer.outer import make_hello
from isles.outer.settings import OuterSettings, default_name
from isles.proto.ids import is_name


def test_every_setting_has_a_default_and_a_description() -> None:
    OuterSettings()  # nothing must be given
    assert all(field.description for field in OuterSettings.model_fields.values())


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"broker": "broker.example"}, "tcp://HOST:PORT"),
        ({"id": "No Name"}, "is no name"),
        ({"run": "-"}, "is no name"),
        ({"lost_seconds": 1.0, "list_seconds": 2.0}, "raise the first"),
        ({"quorum": 3}, "quorum"),
        ({"clip_factor": 1.5}, "0 or at least 2"),
        ({"clip_factor": 5.0, "reject_factor": 4.0}, "the second is the larger"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        OuterSettings(**fields)


def test_each_limit_can_be_lifted() -> None:
    settings = OuterSettings(clip_factor=0, reject_factor=0, weight_factor=0, claim_factor=0, opposition_max=1)
    assert settings.limits == Limits(0.0, 0.0, 0.0, 0.0, 1.0)
    assert OuterSettings().limits == USUAL


@pytest.mark.parametrize("host", ["gpu-7", "GPU-7.cluster.example", "-", "", "x" * 300, "a" * 50 + "-", "räk.de"])
def test_a_name_is_made_of_any_host(host: str) -> None:
    assert is_name(default_name(host, "0123456789abcdef"))


def test_two_outers_without_names_never_have_the_same() -> None:
    first, second = make_hello(OuterSettings()), make_hello(OuterSettings())
    assert first.id != second.id
    assert first.incarnation != second.incarnation


def test_an_outer_with_a_name_keeps_it_over_restarts() -> None:
    settings = OuterSettings(id="merger", region="eu", run="trial")
    hello = make_hello(settings)
    assert (hello.role, hello.id, hello.region, hello.run) == ("outer", "merger", "eu", "trial")
