"""The command `isles plan`: what it prints, and how it ends."""

from __future__ import annotations

import json

import numpy as np
import pytest

from isles.ops.main import run
from isles.ops.plan.codec_bits import bits_of
from isles.ops.plan.command import parse_size
from isles.proto.codec import encode
from isles.proto.errors import UsageError


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = run(["plan", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_without_options_it_plans_the_published_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = planned(capsys)
    assert code == 0
    assert "5.00 G parameters at 8 sites" in said
    assert "198" in said
    assert "0.84" in said
    assert "Published for this model and 8 sites: 198 against 0.84 Gbit/s." in said


def test_links_that_are_too_thin_are_said_with_the_h_and_p_that_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = planned(capsys, "--codec-up", "int4", "--up-gbit", "0.2", "--num-fragments", "4")
    assert "H = 24 is too short for these links: H = 111 keeps every one below 80 %" in said
    assert "it takes P = " in said


def test_a_round_trip_that_is_too_long_is_not_mended_by_any_p(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = planned(capsys, "--overlap-steps", "0.05")
    assert "no P is enough, raise tau" in said


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = planned(capsys, "--json", "--parameters", "350M", "--sites", "3", "--bits-up", "1.5")
    plan = json.loads(said)
    assert code == 0
    assert plan["settings"]["parameters"] == 350_000_000
    assert [(one["link"], one["direction"]) for one in plan["links"]] == [
        ("each site", "up"), ("each site", "down"), ("the broker", "in"), ("the broker", "out"),
    ]  # fmt: skip
    assert plan["links"][0]["gbit"] == pytest.approx(350e6 * 1.5 / 24 / 1e9, abs=1e-6)
    assert {one["process"]: one["count"] for one in plan["processes"]} == {"broker": 1, "outer": 1, "learner": 3}
    assert plan["needs"].keys() >= {"interval_steps", "num_fragments", "outer_cores"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--parameters", "many"), "write it as 350M, 5B"),
        (("--sites", "0"), "must be a whole number from 1 to 1024"),
        (("--codec-up", "zip"), "codec_up"),
        (("--plot", "figure.pdf"), "ends with .png or .svg"),
        (("--plot", "no/such/folder/figure.png"), "there is no folder"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = planned(capsys, *flags)
    assert code == 2
    assert words in said
    assert len(said.splitlines()) == 1


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("5B", "350M", "1.3T", "12", "0.5k")] == [
        5 * 10**9, 350 * 10**6, 1_300_000_000_000, 12, 500,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        parse_size("5e9 or so")


def test_the_bits_of_each_codec_are_those_of_gaussian_values() -> None:
    values = np.random.default_rng(0).standard_normal(200 * 960).astype(np.float32) * np.float32(1e-3)
    for codec in ("fp32", "bf16", "int8", "int4", "step0.5", "step1.1", "step1.5", "step1.9", "step2.5"):
        bits = 8 * len(encode(codec, values)) / values.size
        assert bits_of(codec) == pytest.approx(bits, rel=0.05, abs=0.02), codec
