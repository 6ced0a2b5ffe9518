"""Hints are only faster: who hears none of them gets where it should all the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from isles.workers import courier, joining


@pytest.fixture
def deaf_world(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Nobody hears a hint, not the first ones after subscribing and no later one; all who look again do so soon."""
    world.transport.publish = lambda header: None
    monkeypatch.setattr(courier, "REFRESH_SECONDS", 0.1)
    monkeypatch.setattr(joining, "LOOK_AGAIN_SECONDS", 0.1)
    return world


def test_without_any_hint_learners_find_the_run_each_other_and_all_versions(deaf_world: Any) -> None:
    waiting = deaf_world.make("us-1", run="", sync=None, budget=None)
    thread = threading.Thread(target=waiting.learner.start)
    thread.start()
    deaf_world.start_outer()
    with deaf_world.make() as first:
        thread.join()
        first.train_to(2)
        waiting.train_to(first.version)
        waiting.learner.drain()
        waiting.learner.close()
    totals = deaf_world.status().totals
    assert totals.tokens_merged == totals.tokens_produced


def test_without_any_hint_a_verdict_reaches_its_learner(deaf_world: Any) -> None:
    with deaf_world.make() as toy:
        toy.train_until(lambda: deaf_world.reject_pending(0, "too odd for this test") == 1)
        toy.train_until(lambda: toy.learner._running.session.books[0].open is None)
        deaf_world.start_outer()
        toy.train_to(1)
    assert deaf_world.status().totals.rejected == 1
