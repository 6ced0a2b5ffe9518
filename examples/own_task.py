"""A task of one's own: which of two spirals does a point lie on?

isles up --task examples.own_task:make --run-dir runs/spirals --rounds 600 --set task.width=32
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from isles.workers.schedule import LearningRateSchedule

BATCH_SIZE = 64
VALIDATION_POINTS = 2048
SHARD_ITEMS = 1000
"""Batches after which a data shard is given back for another one."""


def make(settings: Mapping[str, bool | int | float | str | None]) -> Spirals:
    """The function to name: takes the section `task` of the settings."""
    return Spirals(width=int(settings.get("width") or 64))


def points(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Noisy points, float32 (count, 2), and which spiral each lies on, float32 (count,)."""
    generator = torch.Generator().manual_seed(seed)
    spiral = torch.randint(2, (count,), generator=generator).float()
    radius = torch.rand(count, generator=generator).sqrt()
    angle = 3 * math.pi * radius + math.pi * spiral
    noise = 0.02 * torch.randn(count, 2, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise, spiral


class SpiralBatches:
    """A batch is made out of the run's seed, its shard and its place there: endless data that no two learners share."""

    def __init__(self, shards: Mapping[int, int], seed: int) -> None:
        self._seed = seed
        self._cursors = dict(shards)
        self._first = dict(shards)

    @property
    def cursors(self) -> dict[int, int]:
        return dict(self._cursors)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        shard = min(self._cursors, key=lambda one: (self._cursors[one], one))
        place = self._cursors[shard]
        self._cursors[shard] += 1
        return points(hash((self._seed, shard, place)) & (2**62 - 1), BATCH_SIZE)

    def replace(self, leased: Mapping[int, int]) -> None:
        self._first = {shard: self._first.get(shard, cursor) for shard, cursor in leased.items()}
        self._cursors = {shard: max(cursor, self._cursors.get(shard, 0)) for shard, cursor in leased.items()}

    def finished_shards(self) -> dict[int, int]:
        return {shard: at for shard, at in self._cursors.items() if at - self._first[shard] >= SHARD_ITEMS}


class Spirals:
    """What `isles.workers.task.Task` asks for."""

    def __init__(self, width: int) -> None:
        self._width = width

    corpus_sha256 = ""
    tokens_per_batch = BATCH_SIZE
    gradient_norm_max = 1.0
    schedule = LearningRateSchedule(peak=3e-3)

    @property
    def settings(self) -> dict[str, bool | int | float | str | None]:
        return {"width": self._width}

    def build_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        width = self._width
        return nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0)
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def batches(self, shards: Mapping[int, int], seed: int) -> SpiralBatches:
        return SpiralBatches(shards, seed)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        device = next(model.parameters()).device
        where, spiral = (values.to(device) for values in batch)
        return functional.binary_cross_entropy_with_logits(model(where), spiral)

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        return float(self.loss(model, points(0, VALIDATION_POINTS)))

    @torch.no_grad()
    def sample(self, model: nn.Module, prompt: str, num_tokens: int, *, temperature: float, seed: int) -> str:
        """`prompt` is a point, such as "0.3 0.1"; says which spiral it lies on."""
        where = torch.tensor([[float(part) for part in prompt.split()]])
        share = float(torch.sigmoid(model(where)))
        return f" lies on spiral {int(share > 0.5)} ({max(share, 1 - share):.0%} sure)"
