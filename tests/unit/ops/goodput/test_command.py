"""The command `isles simulate goodput`: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest

from isles.ops.main import run

SMALL = ("--chips", "30k,60k", "--learners", "2,4", "--days", "2")


def simulated(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = run(["simulate", "goodput", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_table_has_a_row_for_each_system_and_a_column_for_each_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = simulated(capsys, *SMALL)
    assert code == 0
    rows = [line for line in said.splitlines() if line.strip()]
    assert rows[0].split() == ["goodput", "%", "30", "k", "60", "k"]
    assert [row.strip().partition("  ")[0] for row in rows[2:]] == [
        "data parallel, not elastic", "data parallel, elastic", "decoupled, M = 2", "decoupled, M = 4",
    ]  # fmt: skip


def test_programs_get_a_list_with_one_object_for_each_system_and_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = simulated(capsys, *SMALL, "--json")
    found = json.loads(said)
    assert code == 0
    assert all(one.keys() == {"system", "learners", "chips", "goodput", "uptime"} for one in found)
    assert {one["system"] for one in found} == {"data-parallel", "elastic", "decoupled"}
    assert {(one["learners"], one["chips"]) for one in found if one["system"] == "decoupled"} == {
        (2, 30_000), (4, 30_000), (2, 60_000), (4, 60_000),
    }  # fmt: skip
    assert all(0 < one["goodput"] <= 1 and 0 < one["uptime"] <= 1 for one in found)


def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [simulated(capsys, *SMALL, "--json", "--seed", seed)[1] for seed in ("5", "5", "6")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_rounds_are_told_if_they_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = simulated(capsys, *SMALL, "--rounds", "--system", "decoupled", "--json")
    assert all({"participation", "rounds_per_hour", "merge_seconds", "lost", "merging"} <= one.keys()
               for one in json.loads(said))  # fmt: skip
    _, said = simulated(capsys, *SMALL, "--rounds")
    assert "in a round %" in said


def test_a_setting_is_varied_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--chips", "60k", "--learners", "4", "--days", "2", "--vary", "quorum=1,4", "--json")
    _, said = simulated(capsys, *flags)
    found = json.loads(said)
    assert [one["quorum"] for one in found] == [1, 4]
    assert found[0]["goodput"] == found[1]["goodput"]
    assert found[0]["participation"] < found[1]["participation"]


def test_what_was_published_stands_beside(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = simulated(capsys, "--chips", "150k", "--learners", "16", "--days", "2", "--compare")
    assert "| 99" in said
    assert "3 figures differ by" in said


def test_a_small_fleet_is_also_simulated_event_by_event(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--chips", "1k", "--learners", "2", "--days", "0.1", "--chip-failure-years", "0.002", "--json")
    slow, fast = (json.loads(simulated(capsys, *flags, *more)[1]) for more in (("--events",), ()))
    assert [one["goodput"] for one in slow] == pytest.approx([one["goodput"] for one in fast], abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--chips", "a lot"), "is no list of chips"),
        (("--learners", "0"), "is no list of learners"),
        (("--chips", "10", "--learners", "16"), "16 learners cannot share 10 chips"),
        (("--vary", "luck=1,2"), "the settings are"),
        (("--vary", "quorum=0,1"), "--vary quorum=0"),
        (("--chip-failure-years", "-1"), "must be a number above 0"),
        (("--chip-failure-years", "0.00001"), "failures are to be expected"),
        (("--events",), "at most 200,000 chips"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = simulated(capsys, *flags)
    assert code == 2
    assert words in said
    assert len(said.splitlines()) == 1
