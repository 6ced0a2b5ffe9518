"""A stop is heard in every wait of a learner, and is nobody's error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from isles.proto.errors import UnreachableError

PATIENCE_SECONDS = 30.0
"""Bound of a wait; nothing passes because of it."""
LOOKS_MAX = 200
"""Far more looks at whether to stop than a start takes."""


class StopAfter:
    """Says so from the n-th look on."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks

    def __call__(self) -> bool:
        self.num_left -= 1
        return self.num_left < 0


def live_ones(world: Any) -> set[str]:
    return {one.learner for one in world.status().learners if one.is_live}


def has_started(toy: Any) -> bool:
    try:
        toy.learner.start()
    except UnreachableError as error:
        if "stopped before" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_stop_in_any_wait_of_a_start_ends_it_and_nobody_waits_for_the_learner(world: Any, is_begun: bool) -> None:
    world.kill_broker()
    world.lease_seconds = 0.3
    world.start_broker()
    if is_begun:
        with world.make() as first:
            first.train()
            first.learner.drain(timeout_seconds=0.0)
    for num_looks in range(LOOKS_MAX):
        toy = world.make(f"eu-{num_looks}", should_stop=StopAfter(num_looks), join_timeout_seconds=3600.0)
        if has_started(toy):
            break
    else:
        pytest.fail("it never started")
    assert num_looks > 2, "there were waits to be ended"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while live_ones(world) - {toy.name}:  # who stopped before the answer to its HELLO came is live for its lease
        assert time.monotonic() < deadline
    toy.learner.close()


def test_a_stop_ends_the_wait_of_a_deterministic_run_for_a_version_that_does_not_come(
    make_world: Callable[..., Any],
) -> None:
    world = make_world(is_deterministic=True, overlap_steps=2.0)
    stop = threading.Event()
    toy = world.make(should_stop=stop.is_set)
    with toy:
        toy.train(2)
        world.kill_outer()
        thread = threading.Thread(target=toy.train, args=(20,))
        thread.start()
        waiting = toy.learner._running.performer
        while not waiting._awaited:
            assert thread.is_alive()
            thread.join(0.01)
        stop.set()
        thread.join()
        assert toy.learner.num_steps == 22
        assert not toy.learner.drain(timeout_seconds=0.1)
