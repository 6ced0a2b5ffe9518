"""What a learner resumes from is one moment: model, optimizer, data and schedule belong to the same step of one run."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from isles.proto.agreement import Budget
from isles.proto.errors import RefusedError
from isles.proto.logs import ListLogger
from isles.workers.schedule import LearningRateSchedule

SHARD = 3
PATIENCE_SECONDS = 30.0
"""Bound of a wait; nothing passes because of it."""


def train(toy: Any, num_steps: int) -> None:
    """Each inner step takes one more item of the shard."""
    for _ in range(num_steps):
        toy.train(cursor={SHARD: toy.learner.num_steps + 1})


def saved(folder: Path) -> dict[str, Any]:
    lines = (folder / "checkpoint.json").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(lines[1])
    return found


def test_each_checkpoint_has_model_and_data_of_the_same_step(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    folder = tmp_path / "checkpoint"
    ages: list[Path] = []
    with world.make(checkpoint_dir=folder, checkpoint_seconds=0.0) as toy:
        for _ in range(6):
            train(toy, 7)
            toy.learner._writer.wait()
            if (folder / "checkpoint.json").exists():
                ages.append(shutil.copytree(folder, tmp_path / f"age-{len(ages)}"))
    assert ages
    for age in (*ages, folder):
        index = saved(age)
        assert index["cursor"] == {str(SHARD): index["num_steps"]}
        assert index["tokens"] == 10 * index["num_steps"]
        states = [entry for _, entry in index["optimizer_state"]["dict"]]
        assert states
    for age in ages[:2]:
        with world.make(checkpoint_dir=age) as again:
            index = saved(age)
            steps = {float(one["step"]) for one in again.optimizer.state_dict()["state"].values()}
            assert steps == {float(again.learner.num_steps)} == {float(index["num_steps"])}


def test_data_that_a_contribution_was_made_from_is_not_read_again_whatever_the_age_of_the_checkpoint(
    world: Any, tmp_path: Path
) -> None:
    world.start_outer()
    folder, old = tmp_path / "checkpoint", tmp_path / "old"
    with world.make(checkpoint_dir=folder, checkpoint_seconds=0.0, num_shards=1024) as toy:
        toy.train_until(lambda: SHARD in toy.learner.shards)
        train(toy, 5)
        toy.train_until((folder / "checkpoint.json").exists)
        toy.learner._writer.wait()
        shutil.copytree(folder, old)
        train(toy, 30)
    for age in (old, folder, None):
        with world.make(checkpoint_dir=age, num_shards=1024) as again:
            again.train_until(lambda again=again: SHARD in again.learner.shards)
            assert again.learner.shards[SHARD] >= toy.learner.shards[SHARD]


def test_nobody_warms_up_again_not_who_is_restarted_nor_who_comes_late(world: Any, tmp_path: Path) -> None:
    schedule = LearningRateSchedule(peak=1.0, warmup_fraction=0.1)
    world.start_outer()
    folder, old = tmp_path / "checkpoint", tmp_path / "old"
    with world.make(checkpoint_dir=folder, checkpoint_seconds=0.0, budget=Budget(tokens=400)) as toy:
        assert schedule.at(toy.learner.progress) < 0.2
        toy.train_until((folder / "checkpoint.json").exists)
        toy.learner._writer.wait()
        shutil.copytree(folder, old)
        toy.train_until(lambda: toy.learner.progress > 0.3)
    reached = toy.learner.progress
    comers = [("us-0", folder), ("us-0", old), ("us-0", None), ("us-1", None)]
    for name, age in comers:
        with world.make(name, seed=4, checkpoint_dir=age) as comer:
            assert comer.learner.progress >= reached
            assert schedule.at(comer.learner.progress) == pytest.approx(schedule.at(reached), abs=1e-9)


@pytest.mark.parametrize("run", ["toy", "another"])
def test_a_learner_with_a_checkpoint_does_not_begin_a_run_on_a_store_that_was_emptied(
    world: Any, tmp_path: Path, run: str
) -> None:
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path / "checkpoint") as toy:
        toy.train_to(1)
    world.kill_outer()
    world.kill_broker()
    world.folder = tmp_path / "another"
    world.start_broker()
    with pytest.raises(RefusedError, match=r"of the run toy.*the old store.*empty checkpoint folder"):
        world.make(run=run, seed=8, checkpoint_dir=tmp_path / "checkpoint").learner.start()
    status = world.status()
    assert status.run == "", "random weights did not become the model"
    assert not any(one.is_live for one in status.learners)


def test_two_learners_that_were_given_one_folder_do_not_overwrite_each_other(world: Any, tmp_path: Path) -> None:
    log = ListLogger()
    owner, other = world.make("us-0", checkpoint_dir=tmp_path), world.make("us-1", checkpoint_dir=tmp_path, log=log)
    with owner as first, other as second:
        first.train(3)
        first.learner.drain(timeout_seconds=0.0)
        first.learner._writer.wait()
        second.train(2)
        second.learner.drain(timeout_seconds=0.0)
    assert (saved(tmp_path)["learner"], saved(tmp_path)["num_steps"]) == ("us-0", 3)
    [fields] = [fields for _, event, fields in log.records if event == "checkpoint.failed"]
    assert "is of learner us-0, this worker has learner us-1" in fields["text"]
    with world.make("us-0", checkpoint_dir=tmp_path) as again:
        assert again.learner.num_steps == 3
        again.learner.drain(timeout_seconds=0.0)


def test_a_drain_whose_time_is_over_while_a_payload_is_made_still_leaves_all_work_in_the_checkpoint(
    world: Any, tmp_path: Path
) -> None:
    with world.make(checkpoint_dir=tmp_path) as toy:
        released, courier = threading.Event(), toy.learner._running.courier
        submit = courier._worker.submit

        def hold(job: Any) -> Any:
            return submit(lambda: (released.wait(PATIENCE_SECONDS), job())[1])

        courier._worker.submit = hold
        toy.train(9)
        assert toy.learner._running.performer._lent_buffers, "a payload is being made"
        drain = threading.Thread(target=toy.learner.drain, args=(0.0,))
        drain.start()
        released.set()
        drain.join()
    assert (saved(tmp_path)["num_steps"], saved(tmp_path)["tokens"]) == (9, 90)
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path) as again:
        assert again.learner.num_steps == 9
    assert world.status().totals.tokens_merged == 90


def test_a_learner_that_was_frozen_does_not_go_on_with_data_that_others_have_by_now(world: Any) -> None:
    world.kill_broker()
    world.lease_seconds = 0.3
    world.start_broker()
    thawed = threading.Event()
    with world.make("us-0", num_shards=3) as frozen, world.make("us-1", num_shards=3) as heir:
        frozen.train_until(lambda: len(frozen.learner.shards) == 3)
        before, courier = set(frozen.learner.shards), frozen.learner._running.courier
        report = courier._progress

        def freeze() -> Any:
            assert thawed.wait(PATIENCE_SECONDS)
            return report()

        courier._progress = freeze
        while any(one.is_live for one in world.status().learners if one.learner == "us-0"):
            heir.train()
        heir.learner.request_shards(3 + len(before))
        heir.train_until(lambda: before & set(heir.learner.shards))
        thawed.set()
        frozen.train_until(lambda: not set(frozen.learner.shards) & set(heir.learner.shards))
        frozen.train_until(lambda: len(frozen.learner.shards) == 3)
        for toy in (frozen, heir):
            toy.learner.drain(timeout_seconds=0.0)
