"""The books balance under every schedule of faults, and each rule that makes them balance is needed.

A failing seed prints itself; `World(seed, rule).run()` replays it exactly.
"""

from __future__ import annotations

import pytest

from isles.ops.simulation.conservation import LawBrokenError, World
from isles.ops.simulation.mutations import MUTATIONS, OF_DISK_AND_LINKS, without, without_leases
from isles.proto.agreement import ApplyRule

RULES: tuple[ApplyRule, ...] = ("rebase", "overwrite", "blend", "hybrid")
SEEDS_PER_BLOCK = 25
BLOCKS = 12
SEEDS_PER_MUTATION = 400
"""Within so many seeds every missing rule shows; most do within ten."""


def world(seed: int) -> World:
    return World(seed, RULES[seed % 4], num_learners=2 + seed % 2, num_fragments=1 + seed // 4 % 2)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_piece_of_accepted_work_counts_exactly_once(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        world(seed).run()


def test_a_seed_replays_exactly() -> None:
    first, second = world(7), world(7)
    first.run()
    second.run()
    assert first.laws.heads == second.laws.heads
    assert first.laws.merged == second.laws.merged
    assert first.now == second.now


def test_outers_that_crash_recover_from_checkpoints_and_recipes() -> None:
    worlds = [world(seed) for seed in range(SEEDS_PER_BLOCK)]
    for each in worlds:
        each.run()
    assert sum(each.laws.num_checkpoints for each in worlds) > 5
    assert sum(len(each.remade) for each in worlds) > 5


def run_seeds(num_seeds: int) -> None:
    for seed in range(num_seeds):
        world(seed).run()


def test_commits_are_safe_without_leases_which_only_save_work(monkeypatch: pytest.MonkeyPatch) -> None:
    without_leases(monkeypatch.setattr)
    run_seeds(SEEDS_PER_BLOCK)


@pytest.mark.parametrize("rule", sorted(MUTATIONS.keys() - OF_DISK_AND_LINKS))
def test_the_law_breaks_without_a_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isles.ops.simulation.conservation.TURNS_CALM_MAX", 200)
    with without(rule), pytest.raises((LawBrokenError, AssertionError, KeyError)):
        run_seeds(SEEDS_PER_MUTATION)
