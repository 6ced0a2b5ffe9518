"""A learner that died comes back with its checkpoint, whatever the checkpoint's age and state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.proto.errors import ConfigError
from isles.proto.logs import ListLogger


def test_a_restarted_learner_goes_on_where_its_checkpoint_left_it(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    folder = tmp_path / "checkpoint"
    first = world.make(checkpoint_dir=folder, checkpoint_seconds=0.0)
    first.learner.start()
    first.train_to(2)
    first.train_until((folder / "checkpoint.json").exists)
    first.learner.close()

    with world.make(seed=5, checkpoint_dir=folder) as second:
        assert 0 < second.learner.num_steps <= first.learner.num_steps
        assert second.optimizer.state_dict()["state"]
        second.train_to(max(first.learner.versions.values()) + 1)
    assert world.status().totals.rejected == 0


def test_a_drained_learner_restarts_without_any_loss(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    log = ListLogger()
    with world.make(checkpoint_dir=tmp_path) as first:
        first.train_until(lambda: first.version >= 2, cursor={7: 3})
    with world.make(seed=9, checkpoint_dir=tmp_path, log=log) as second:
        assert second.learner.num_steps == first.learner.num_steps
        assert second.learner.tokens == first.learner.tokens
        assert torch.equal(second.values, first.values)
        assert "learner.reset" not in log.events()


@pytest.mark.parametrize("rule", ["rebase", "blend"])
def test_a_checkpoint_of_any_age_is_safe(make_world: Any, tmp_path: Path, rule: str) -> None:
    world = make_world(apply_rule=rule)
    folder, ages = tmp_path / "checkpoint", []
    with world.make(checkpoint_dir=folder, checkpoint_seconds=0.0) as first:
        for version in range(1, 5):
            first.train_to(version)
            first.train_until((folder / "checkpoint.json").exists)
            first.learner._writer.wait()
            ages.append(shutil.copytree(folder, tmp_path / f"age-{version}"))
    for age in ages:
        with world.make(checkpoint_dir=age) as again:
            version = again.version
            assert bool(torch.isfinite(again.values).all())
            again.train_to(version + 1)
    status = world.status()
    assert status.totals.rejected == 0
    assert all(count == 0 for count in status.num_pending.values())
    assert status.totals.tokens_merged <= status.totals.tokens_produced


def test_a_checkpoint_that_the_store_has_left_behind_starts_over_from_the_head(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path) as first:
        first.train_to(1)
    with world.make() as elsewhere:
        elsewhere.train_to(max(first.learner.versions.values()) + 1)
    log = ListLogger()
    with world.make(checkpoint_dir=tmp_path, log=log) as third:
        assert third.learner.versions == elsewhere.learner.versions
        assert third.learner.num_steps == first.learner.num_steps
        assert log.events().count("learner.reset") == 2


def test_the_store_wins_when_a_checkpoint_is_damaged(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path) as first:
        first.train_to(1)
    (path,) = tmp_path.glob("checkpoint-*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    log = ListLogger()
    with world.make(checkpoint_dir=tmp_path, log=log) as second:
        assert second.learner.num_steps == 0
        assert second.learner.versions == first.learner.versions
        assert "checkpoint.damaged" in log.events()


def test_a_checkpoint_of_another_learner_is_refused(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path) as first:
        first.train()
    with pytest.raises(ConfigError, match="of learner us-0, this worker has learner us-1"):
        world.make("us-1", checkpoint_dir=tmp_path).learner.start()


def test_a_checkpoint_of_another_inner_optimizer_is_refused(world: Any, tmp_path: Path) -> None:
    world.start_outer()
    with world.make(checkpoint_dir=tmp_path) as first:
        first.train()
    with pytest.raises(ConfigError, match="state of AdamW, this worker trains with SGD"):
        world.make(checkpoint_dir=tmp_path, optimizer=torch.optim.SGD).learner.start()


def test_a_cursor_that_was_handed_in_comes_back_without_a_checkpoint(world: Any) -> None:
    world.start_outer()
    with world.make(num_shards=2) as first:
        first.train_until(lambda: len(first.learner.shards) == 2)
        shard = min(first.learner.shards)
        first.train(10, cursor={shard: 17})
    with world.make(num_shards=1024) as second:
        second.train_until(lambda: shard in second.learner.shards)
        assert second.learner.shards[shard] == 17
