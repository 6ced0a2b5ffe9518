"""One run of one row: from its settings to its figures."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import torch

from benchmarks.convergence.cases import Case, Size
from benchmarks.convergence.results import Run
from benchmarks.convergence.world import SHARDS_EACH, Outage, World
from isles.proto.errors import NonFiniteError, RangeError
from isles.workers.task import Task, load_task

NICENESS: Final = 10
"""At least: a campaign takes hours, and whoever else works on the machine comes first."""


def settle() -> None:
    """For a process that measures and does nothing else."""
    os.nice(max(0, NICENESS - os.nice(0)))
    torch.set_num_threads(1)


def measure(case: Case, seed: int, size: Size, stated: Mapping[str, Any]) -> Run:
    """Trains once."""
    begun = time.process_time()
    task = _task(tuple(sorted(size.task.items())))
    key = case.key(stated)
    if case.rate_factor is not None:
        loss = data_parallel(task, size, seed=seed, rate_factor=case.rate_factor)
        return Run(key=key, seed=seed, loss=loss, cpu_seconds=time.process_time() - begun)
    world = World(
        task,
        case.sync(stated),
        num_learners=size.num_learners,
        num_steps=size.num_steps,
        seed=seed,
        spread=case.spread,
        outage=None if case.outage is None else Outage(*case.outage),
    )
    try:
        loss = world.run()
    except (NonFiniteError, RangeError):
        loss = math.inf
    return Run(
        key=key,
        seed=seed,
        loss=loss,
        bits_up=world.up.bits,
        bits_down=world.down.bits,
        num_rounds=len(world.participants),
        participants=statistics.fmean(world.participants) if world.participants else None,
        waited=statistics.fmean(world.waits) if world.waits else None,
        cpu_seconds=time.process_time() - begun,
    )


def data_parallel(task: Task, size: Size, *, seed: int, rate_factor: float) -> float:
    """The loss of one model that takes a step on all learners' batches together: gradients averaged in every step."""
    model = task.build_model(seed)
    optimizer = task.make_optimizer(model)
    readers = [
        task.batches({SHARDS_EACH * number + shard: 0 for shard in range(SHARDS_EACH)}, seed)
        for number in range(size.num_learners)
    ]
    for step in range(size.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_factor * task.schedule.at(step / size.num_steps)
        batches = [reader.next_batch() for reader in readers]
        task.loss(model, tuple(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.gradient_norm_max)
        optimizer.step()
        optimizer.zero_grad()
    return task.validation_loss(model)


@lru_cache(maxsize=1)
def _task(settings: tuple[tuple[str, int | float], ...]) -> Task:
    """Kept: its corpus takes seconds to read."""
    return load_task("gpt", dict(settings))
