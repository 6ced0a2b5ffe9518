"""What a contribution must pass, and how a refusal reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isles.outer.screen import screen_books, screen_payload
from isles.proto.agreement import SyncSettings
from isles.proto.codec import encode
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Contribution

SLICES = (TensorSlice("a.weight", 0, 6, (2, 3)), TensorSlice("b.bias", 6, 10, (4,)))
SYNC = SyncSettings(codec_up="fp32", merge_rule="mean")
Make = Callable[..., Contribution]


@pytest.fixture
def contribution(make_contribution: Make) -> Contribution:
    return make_contribution("eu-1", codec="fp32", norms=(1.0, 2.0), base_version=3)


def payload_with(value: float, place: int) -> bytes:
    vector = np.ones(10, np.float32)
    payload = bytearray(encode("fp32", vector))
    if np.isfinite(value):
        return bytes(payload)
    return _encode_not_finite(value, place)


def _encode_not_finite(value: float, place: int) -> bytes:
    """What no encoder of ours writes: a well-formed fp32 payload with a value that is not finite."""
    from isles.proto.codec.frame import pack
    from isles.proto.codec.table import codec_named

    vector = np.ones(10, np.float32)
    vector[place] = value
    planes = np.ascontiguousarray(vector.view(np.uint8).reshape(-1, 4).T)
    return pack(codec_named("fp32"), num_values=10, scale_exponent=0, raw=planes.tobytes())


def test_a_sound_contribution_passes(contribution: Contribution) -> None:
    assert screen_books(contribution, head_version=3, slices=SLICES, sync=SYNC) == ""
    assert screen_payload(contribution, payload_with(1.0, 0), slices=SLICES, sync=SYNC).reason == ""


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("place", "tensor"), [(0, "a.weight"), (5, "a.weight"), (6, "b.bias"), (9, "b.bias")])
def test_a_value_that_is_not_finite_names_learner_fragment_and_tensor(
    value: float, place: int, tensor: str, contribution: Contribution
) -> None:
    reason = screen_payload(contribution, payload_with(value, place), slices=SLICES, sync=SYNC).reason
    assert "learner eu-1, fragment 0" in reason
    assert f"tensor {tensor} is not finite" in reason


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no payload at all, just some bytes of a stranger",
        encode("fp32", np.ones(9, np.float32)),
        encode("fp32", np.ones(10, np.float32))[:-1],
        encode("int4", np.ones(10, np.float32)),
    ],
    ids=["empty", "garbage", "another length", "cut short", "another codec"],
)
def test_a_payload_that_is_not_the_runs_is_refused_with_a_reason(payload: bytes, contribution: Contribution) -> None:
    reason = screen_payload(contribution, payload, slices=SLICES, sync=SYNC).reason
    assert reason.startswith("learner eu-1, fragment 0: ")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"base_version": 4}, "newer than the head"),
        ({"codec": "int4"}, "codec int4"),
        ({"norms": (1.0,)}, "1 norms"),
        ({"norms": (1.0, float("nan"))}, "b.bias is not finite"),
    ],
)
def test_books_that_cannot_be_right_are_refused(changes: dict[str, Any], word: str, contribution: Contribution) -> None:
    reason = screen_books(contribution.model_copy(update=changes), head_version=3, slices=SLICES, sync=SYNC)
    assert reason.startswith("learner eu-1, fragment 0: ")
    assert word in reason


def test_norms_that_the_payload_denies_are_refused_where_the_merge_needs_them(contribution: Contribution) -> None:
    payload, sync = payload_with(1.0, 0), SyncSettings(codec_up="fp32", merge_rule="rda")
    honest = contribution.model_copy(update={"norms": (6**0.5, 2.0)})
    assert screen_payload(honest, payload, slices=SLICES, sync=sync).reason == ""
    boast = contribution.model_copy(update={"norms": (6**0.5, 200.0)})
    assert "tensor b.bias is said to be 200" in screen_payload(boast, payload, slices=SLICES, sync=sync).reason
    assert screen_payload(boast, payload, slices=SLICES, sync=SYNC).reason == ""


def test_buffers_come_in_a_codec_of_their_own(contribution: Contribution) -> None:
    slices = (TensorSlice("mean", 0, 10, (10,), "buffer_average"),)
    sync = SyncSettings(codec_up="int4", merge_rule="mean")
    one = contribution.model_copy(update={"norms": (1.0,)})
    assert screen_books(one, head_version=3, slices=slices, sync=sync) == ""
    assert screen_payload(one, payload_with(1.0, 0), slices=slices, sync=sync).reason == ""
    assert (
        "the run's is fp32"
        in screen_payload(one, encode("int4", np.ones(10, np.float32)), slices=slices, sync=sync).reason
    )


def test_a_reason_fits_the_wire(contribution: Contribution) -> None:
    slices = (TensorSlice("n" * 256, 0, 10, (10,)),)
    reason = screen_payload(contribution, payload_with(np.nan, 3), slices=slices, sync=SYNC).reason
    assert len(reason) <= 2000


def test_a_contribution_made_under_earlier_settings_of_the_run_passes(contribution: Contribution) -> None:
    sync, past = SyncSettings(codec_up="int4", merge_rule="mean"), (SYNC, SyncSettings(codec_up="int8"))
    assert screen_books(contribution, head_version=3, slices=SLICES, sync=sync, past=past) == ""
    assert screen_payload(contribution, payload_with(1.0, 0), slices=SLICES, sync=sync, past=past).reason == ""


def test_a_codec_that_the_run_never_had_names_those_that_it_had(contribution: Contribution) -> None:
    sync, past = SyncSettings(codec_up="int4", merge_rule="mean"), (SyncSettings(codec_up="int8"),)
    reason = screen_payload(contribution, payload_with(1.0, 0), slices=SLICES, sync=sync, past=past).reason
    assert "its payload is in codec fp32, the run's is int4, and before int8" in reason
    assert "it is in codec fp32" in screen_books(contribution, head_version=3, slices=SLICES, sync=sync, past=past)
