"""The example of a task of one's own is a task, and learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.workers.task import Task, load_task


@pytest.fixture
def task(root: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    return load_task("examples.own_task:make", {"width": 16})


def test_the_example_task_gives_equal_models_and_data_for_equal_seeds(task: Task) -> None:
    first, second = (task.build_model(3).state_dict() for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)
    one, other = (task.batches({5: 2}, seed=3).next_batch() for _ in range(2))
    assert one[0].equal(other[0])


def test_the_example_task_moves_its_cursor_and_gives_back_what_it_has_read(task: Task) -> None:
    batches = task.batches({5: 0, 9: 0}, seed=3)
    for _ in range(3):
        batches.next_batch()
    assert batches.cursors == {5: 2, 9: 1}
    assert batches.finished_shards() == {}
    batches.replace({9: 0, 11: 40})
    assert batches.cursors == {9: 1, 11: 40}
    for _ in range(2500):
        batches.next_batch()
    assert set(batches.finished_shards()) == {9, 11}


def test_the_example_task_learns(task: Task) -> None:
    model = task.build_model(3)
    optimizer = task.make_optimizer(model)
    batches = task.batches({1: 0}, seed=3)
    before = task.validation_loss(model)
    for _ in range(300):
        task.loss(model, batches.next_batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.validation_loss(model) < before - 0.05
    assert "spiral" in task.sample(model, "0.3 0.1", 0, temperature=0, seed=0)
