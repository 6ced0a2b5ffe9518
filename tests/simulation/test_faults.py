"""Nothing is lost in a world where anything may vanish, and each rule that makes it so is needed.

A failing seed prints the command that replays it.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from isles.ops.main import run
from isles.ops.simulate import code_version
from isles.ops.simulation.exploration import run_seed
from isles.ops.simulation.fault_world import DELIVERIES_MIN, VERSIONS_MIN, FaultWorld, Report
from isles.ops.simulation.faults import BLOWS, FAULTS_MIN, KINDS, TRAITS, WEATHERS, Faults
from isles.ops.simulation.mutations import MUTATIONS

SEEDS_PER_BLOCK = 5
BLOCKS = 20
SOAK_SEEDS = 3_000
SEEDS_PER_MUTATION = 60
"""Within so many seeds every missing rule shows."""
QUICK_SEEDS = {
    "fence": 1,
    "ids-at-restart": 2,
    "comparison-at-restart": 0,
    "permanent-row": 3,
    "row-in-version": 0,
    "states-in-commit": 5,
    "settle": 8,
    "reset": 5,
    "live-quorum": 14,
    "one-open": 0,
    "subtract-when-applied": 0,
    "payloads-till-checkpoint": 0,
    "payloads-of-versions": 0,
    "checkpoint-till-later": 0,
    "fsync": 2,
    "folder-fsync": 2,
    "digests": 8,
    "lost-payloads": 24,
    "upload-credit": 6,
    "download-credit": 9,
}
"""Missing rule -> a seed in which it showed early, to be tried first."""


def check(reports: Iterable[Report]) -> None:
    for report in reports:
        assert not report.fault, f"{report.fault}: isles simulate faults --seed {report.seed} --trace"
        assert report.num_versions >= VERSIONS_MIN
        assert report.num_faults >= FAULTS_MIN
        assert report.num_deliveries >= DELIVERIES_MIN


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_run_loses_nothing_whatever_happens_to_it(block: int) -> None:
    check(map(run_seed, range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK)))


@pytest.mark.soak
@pytest.mark.parametrize("block", range(SOAK_SEEDS // 100))
def test_thousands_of_runs_lose_nothing(block: int) -> None:
    first = 10_000 + block * 100
    check(map(run_seed, range(first, first + 100)))


def test_a_seed_makes_the_same_history_in_every_process() -> None:
    command = [sys.executable, "-P", "-c", "from isles.ops.simulation.exploration import run_seed as r; print(r(5))"]
    printed = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert printed == {f"{run_seed(5)}\n"}


def test_the_printed_command_replays_a_failure_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "faults", "--seed", "0", "--without", "payloads-of-versions"]) == 1
    said = capsys.readouterr().out
    assert f"seed 0 of {code_version()} fails" in said
    [words] = re.findall("replay it with: isles (.*)", said)
    code = f"import sys; from isles.ops.main import run; sys.exit(run({words.split()}))"
    command = [sys.executable, "-P", "-c", code]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert replayed.returncode == 1
    first, again = (re.findall("fails after .*\n.*", text) for text in (said, replayed.stdout))
    assert first == again != []


def test_two_seeds_make_two_histories() -> None:
    worlds = [FaultWorld(seed) for seed in (1, 2)]
    for world in worlds:
        for _ in range(200):
            world.advance()
    assert len({world.timeline.digest for world in worlds}) == 2


def test_each_seed_leaves_some_kinds_of_faults_out_and_each_kind_is_left_out_by_some_seed() -> None:
    drawn = [Faults.draw(random.Random(seed)).kinds for seed in range(100)]
    assert all(0 < len(kinds) < len(KINDS) for kinds in drawn)
    assert set.union(*map(set, drawn)) == set(KINDS)
    assert not frozenset.intersection(*drawn)
    assert set(KINDS) == {*WEATHERS, *BLOWS, *TRAITS}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_run_without_a_rule_breaks_a_law(rule: str) -> None:
    seeds = (QUICK_SEEDS[rule], *range(SEEDS_PER_MUTATION))
    assert any(run_seed(seed, rule).fault for seed in seeds)
