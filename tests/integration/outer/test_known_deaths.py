"""Nobody waits out a timeout for a death that is known."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.agreement import SyncSettings
from isles.proto.messages import Done, Leave

LIST_SECONDS = 2.0
"""The outer's default: longest time between two looks at who is there."""


@pytest.fixture
def sync() -> SyncSettings:
    return SyncSettings(
        num_fragments=2, codec_up="fp32", codec_down="int4", merge_rule="mean", quorum=2, grace_max_seconds=0.1
    )


def test_a_round_stops_waiting_for_a_learner_when_it_has_left(world: Any, learners: Any) -> None:
    first, second = learners
    world.outer("outer")
    first.contribute(world.delta(1))
    world.run(3.0)
    first.progress()
    second.progress()
    assert first.head() == 0, "a quorum of two"
    second.ask(Leave(), Done)
    left_at = world.clock.now()
    world.until(lambda: first.head() == 1)
    assert world.clock.now() - left_at < LIST_SECONDS + 1.0


def test_a_round_waits_no_longer_than_a_lease_for_a_learner_that_says_nothing_any_more(
    world: Any, learners: Any
) -> None:
    first, _ = learners
    world.outer("outer")
    first.contribute(world.delta(1))

    def is_merged() -> bool:
        first.progress()
        return bool(first.head() == 1)

    silent_at = world.clock.now()
    world.until(is_merged)
    assert world.clock.now() - silent_at < 10.0 + LIST_SECONDS + 1.0


def test_rows_of_the_dead_are_merged_without_them(world: Any, learners: Any) -> None:
    first, second = learners
    first.contribute(world.delta(1))
    second.contribute(world.delta(2))
    for learner in learners:
        learner.ask(Leave(), Done)
    world.outer("outer")
    begun_at = world.clock.now()
    reader = world.outside("operator", "reader", "ef" * 8)
    world.until(lambda: reader.head() == 1)
    assert world.clock.now() - begun_at < LIST_SECONDS + 1.0


def test_an_outer_that_was_killed_and_started_again_under_its_name_merges_at_once(world: Any, learners: Any) -> None:
    first, second = learners
    world.outer("outer")
    first.contribute(world.delta(1))
    second.contribute(world.delta(2))
    world.until(lambda: first.head() == 1)
    world.outers.clear()
    first.contribute(world.delta(3), base_version=1)
    second.contribute(world.delta(4), base_version=1)
    world.outer("outer", incarnation="ee" * 8)
    started_at = world.clock.now()
    world.until(lambda: first.head() == 2)
    assert world.clock.now() - started_at < 1.0, "far less than a lease"


def test_a_restarted_learner_is_counted_once_and_at_once(world: Any, learners: Any) -> None:
    first, second = learners
    world.outer("outer")
    first.contribute(world.delta(1))
    again = world.outside("worker", second.name, "cd" * 8)
    again.ask(Leave(), Done)
    left_at = world.clock.now()
    world.until(lambda: first.head() == 1)
    assert world.clock.now() - left_at < LIST_SECONDS + 1.0
