"""The command `isles simulate`: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest

from isles.ops import simulate
from isles.ops.main import run
from isles.ops.simulation.fault_world import FaultWorld, Report


def report(seed: int, fault: str = "") -> Report:
    return Report(seed, "ab" * 32, fault, 101, 21, 5002, 9000, 61.5)


def advance(world: FaultWorld) -> Report:
    """Little of a run."""
    for _ in range(20):
        world.advance()
    return report(world.drawn.seed)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Seed -> what goes wrong in it."""
    found: dict[int, str] = {}
    monkeypatch.setattr(FaultWorld, "run", lambda world: report(world.drawn.seed, found.get(world.drawn.seed, "")))
    return found


def simulated(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = run(["simulate", "faults", "--jobs", "1", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.usefixtures("faults")
def test_seeds_in_which_all_is_well_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = simulated(capsys, "--seeds", "3", "--first", "7")
    assert code == 0
    assert "3 seeds in" in said
    assert "303 versions, 63 faults, 15,006 deliveries; 0 failed" in said


def test_a_seed_that_fails_is_printed_with_the_command_that_replays_it(
    faults: dict[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    faults[2] = "a contribution is merged twice"
    code, said = simulated(capsys, "--seeds", "3")
    assert code == 1
    assert "seed 2 of isles" in said
    assert "a contribution is merged twice" in said
    assert "isles simulate faults --seed 2 --trace" in said
    assert "1 failed" in said


def test_each_seed_is_a_line_of_json(faults: dict[int, str], capsys: pytest.CaptureFixture[str]) -> None:
    faults[1] = "oh"
    code, said = simulated(capsys, "--seeds", "2", "--json")
    lines = [json.loads(line) for line in said.splitlines()]
    assert code == 1
    assert [(line["seed"], line["fault"]) for line in lines] == [(0, ""), (1, "oh")]


@pytest.mark.usefixtures("faults")
def test_a_file_is_told_how_far_it_is_and_json_is_nothing_but_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "LINE_SECONDS", 0.0)
    _, said = simulated(capsys, "--seeds", "3")
    assert [line.split(" in ")[0] for line in said.splitlines()] == [
        "so far 1 seeds",
        "so far 2 seeds",
        "so far 3 seeds",
        "3 seeds",
    ]
    _, said = simulated(capsys, "--seeds", "3", "--json")
    assert all(json.loads(line) for line in said.splitlines())


def test_a_trace_tells_the_history_of_one_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FaultWorld, "run", advance)
    code, said = simulated(capsys, "--seed", "4", "--trace")
    assert code == 0
    assert "seed 4: " in said
    assert "broker hears l" in said


@pytest.mark.parametrize("flags", [("--trace",), ("--without", "luck")])
def test_what_makes_no_sense_is_refused_with_a_reason(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = simulated(capsys, *flags)
    assert code == 2
    assert "--seed" in said or "fence" in said


def test_the_replay_is_of_this_code() -> None:
    assert simulate.code_version().startswith("isles ")
