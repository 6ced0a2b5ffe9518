"""Two learners, a broker and an outer, each of which dies and comes back at moments that a seed decides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_killed_the_books_balance(world: Any, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    world.start_outer()
    names = ("us-0", "eu-0")
    started: list[Any] = []

    def start(name: str) -> Any:
        toy = world.make(name, checkpoint_dir=tmp_path / name, checkpoint_seconds=0.0, seed=draw.randrange(9))
        toy.learner.start()
        started.append(toy)
        return toy

    toys = {name: start(name) for name in names}
    for event in draw.choices(("broker", "outer", "learner", "nothing"), k=12):
        for name in names:
            toys[name].train(draw.randrange(1, 12))
        if event == "broker":
            world.kill_broker()
            toys[draw.choice(names)].train(draw.randrange(1, 12))
            world.start_broker()
        elif event == "outer":
            world.kill_outer()
            toys[draw.choice(names)].train(draw.randrange(1, 12))
            world.start_outer()
        elif event == "learner":
            name = draw.choice(names)
            toys[name].learner.close()
            toys[name] = start(name)
    for toy in toys.values():
        toy.train_to(max(toy.learner.versions.values()) + 1)
    for toy in toys.values():
        assert toy.learner.drain()
        toy.learner.close()
        assert bool(torch.isfinite(toy.values).all())
    status = world.status()
    assert (status.totals.rejected, status.totals.expired) == (0, 0)
    assert all(count == 0 for count in status.num_pending.values())
    assert 0 < status.totals.tokens_merged <= sum(toy.num_tokens for toy in started)
    for fragment in range(2):
        assert len(world.digests(fragment)) == status.fragments[fragment].version + 1
