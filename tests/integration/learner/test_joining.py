"""How learners get into a run, and who is not let in."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from isles.proto.agreement import Budget, SyncSettings
from isles.proto.errors import ManifestError, ManifestMismatchError, RefusedError, UnreachableError
from isles.workers import joining


def test_a_fresh_learner_never_overwrites_an_existing_run(world: Any) -> None:
    world.start_outer()
    with world.make(seed=1) as first:
        first.train_to(1)
    before = world.digests(0)
    with world.make("us-1", seed=2, sync=SyncSettings(num_fragments=1), budget=Budget(rounds=5)) as late:
        assert late.learner.record == first.learner.record
        assert late.learner.versions == {fragment: len(world.digests(fragment)) - 1 for fragment in range(2)}
        assert not torch.equal(late.values, world.make(seed=2).values)
    assert world.digests(0) == before


def test_of_many_that_start_at_once_one_gives_the_weights_and_all_begin_alike(world: Any) -> None:
    toys = [world.make(f"us-{index}", seed=index) for index in range(4)]
    threads = [threading.Thread(target=toy.learner.start) for toy in toys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(toy.values, toys[0].values) for toy in toys)
    for toy in toys:
        toy.learner.close()


def test_a_learner_without_run_settings_waits_for_somebody_who_starts_the_run(world: Any) -> None:
    waiting = world.make("us-1", seed=3, run="", sync=None, budget=None)
    thread = threading.Thread(target=waiting.learner.start)
    thread.start()
    first = world.make()
    first.learner.start()
    thread.join()
    assert waiting.learner.record == first.learner.record
    assert torch.equal(waiting.values, first.values)
    waiting.learner.close()
    first.learner.close()


def test_a_run_that_nobody_starts_ends_the_wait_with_what_to_do(world: Any) -> None:
    with pytest.raises(UnreachableError, match="no run yet"):
        world.make(run="", sync=None, budget=None, join_timeout_seconds=0.2).learner.start()


def test_without_a_broker_joining_ends_with_what_to_check(world: Any) -> None:
    world.kill_broker()
    with pytest.raises(UnreachableError, match="is it running there"):
        world.make(join_timeout_seconds=0.1).learner.start()


def test_a_learner_that_is_asked_to_stop_does_not_wait_for_a_broker_that_is_away(world: Any) -> None:
    world.kill_broker()
    with pytest.raises(UnreachableError, match="stopped before"):
        world.make(join_timeout_seconds=3600.0, should_stop=lambda: True).learner.start()


def test_a_learner_that_is_asked_to_stop_does_not_wait_for_a_run_nor_is_it_waited_for(world: Any) -> None:
    stop = threading.Event()
    waiting = world.make(run="", sync=None, budget=None, join_timeout_seconds=3600.0, should_stop=stop.is_set)
    failed: list[UnreachableError] = []

    def start() -> None:
        try:
            waiting.learner.start()
        except UnreachableError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    deadline = time.monotonic() + 60.0
    while not world.status().learners:
        assert time.monotonic() < deadline, "it was not let in"
    stop.set()
    thread.join()
    assert "stopped before" in str(failed[0])
    assert not any(one.is_live for one in world.status().learners)


def test_another_model_is_refused_with_the_tensor_that_differs(world: Any) -> None:
    first = world.make()
    first.learner.start()
    with pytest.raises(ManifestMismatchError, match=r"'0\.bias' has shape"):
        world.make("us-1", width=9).learner.start()
    first.learner.close()


def test_a_learner_that_is_not_let_in_is_not_waited_for(world: Any) -> None:
    first = world.make()
    first.learner.start()
    with pytest.raises(ManifestMismatchError):
        world.make("us-1", width=9).learner.start()
    assert {learner.learner: learner.is_live for learner in world.status().learners} == {"us-0": True, "us-1": False}
    first.learner.close()


def test_a_learner_whose_first_version_came_too_late_and_that_is_refused_is_not_waited_for(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.make()

    def come_too_late(*_: object) -> str:
        monkeypatch.undo()
        first.learner.start()
        return ""

    monkeypatch.setattr(joining, "offer_first_version", come_too_late)
    with pytest.raises(RefusedError, match=r"sync\.interval_steps"):
        world.make("us-1", stated={"sync.interval_steps": 99}).learner.start()
    assert {learner.learner: learner.is_live for learner in world.status().learners} == {"us-0": True, "us-1": False}
    first.learner.close()


def test_another_run_is_refused(world: Any) -> None:
    first = world.make()
    first.learner.start()
    with pytest.raises(RefusedError, match="run"):
        world.make("us-1", run="other").learner.start()
    first.learner.close()


def test_a_stated_setting_that_is_not_the_runs_is_refused_by_name(world: Any) -> None:
    first = world.make()
    first.learner.start()
    with pytest.raises(RefusedError, match=r"sync\.interval_steps"):
        world.make("us-1", stated={"sync.interval_steps": 99}).learner.start()
    first.learner.close()


def test_a_model_of_another_type_is_refused_with_the_tensor_that_differs(world: Any) -> None:
    first = world.make()
    first.learner.start()
    with pytest.raises(ManifestMismatchError, match=r"'0\.bias' has dtype bfloat16 in the own .* float32"):
        world.make("us-1", dtype=torch.bfloat16).learner.start()
    first.learner.close()


def test_a_model_that_cannot_be_synchronised_is_refused_before_anything_is_said(world: Any) -> None:
    with pytest.raises(ManifestError, match="no values yet"):
        world.make(model=torch.nn.Linear(4, 1, device="meta")).learner.start()
    assert world.status().run == ""
