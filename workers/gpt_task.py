"""The built-in task: trains `isles.workers.models.gpt` on bytes. The model to copy for a task of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from isles.proto.agreement import Scalar
from isles.proto.errors import UsageError
from isles.workers.data.corpus import Corpus, load_corpus
from isles.workers.data.shards import ShardPlan, ShardReader, validation_windows
from isles.workers.models.gpt import GPT, GPTConfig
from isles.workers.schedule import LearningRateSchedule
from isles.workers.task import TaskSettings

VALIDATION_BATCH: Final = 32
"""Rows per forward pass of a validation: enough for full speed, few enough for small memories."""


class GPTTask:
    """A byte-level GPT and its corpus; the corpus is read when first needed, so sampling needs none."""

    def __init__(self, settings: TaskSettings) -> None:
        self._settings = settings

    @property
    def settings(self) -> Mapping[str, Scalar]:
        return dict(self._settings.model_dump())

    @property
    def corpus_sha256(self) -> str:
        return self._corpus.sha256

    @property
    def tokens_per_batch(self) -> int:
        return self._settings.batch_size * self._settings.context

    @property
    def gradient_norm_max(self) -> float:
        return self._settings.gradient_norm_max

    @property
    def schedule(self) -> LearningRateSchedule:
        return LearningRateSchedule(
            peak=self._settings.learning_rate,
            warmup_fraction=self._settings.warmup_fraction,
            floor_fraction=self._settings.floor_fraction,
        )

    def build_model(self, seed: int) -> GPT:
        settings = self._settings
        config = GPTConfig(settings.layers, settings.width, settings.heads, settings.context)
        return GPT(config, torch.Generator().manual_seed(seed))

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        settings = self._settings
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            fused=True,
        )

    def batches(self, shards: Mapping[int, int], seed: int) -> ShardReader:
        text = self._corpus.training
        plan = ShardPlan(num_bytes=len(text), context=self._settings.context, seed=seed)
        return ShardReader(text, plan, self._settings.batch_size, shards)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Nats per byte; `batch` is inputs and targets, both int64 (B, T) on any device."""
        model = _checked(model)
        device = model.embedding.weight.device
        inputs, targets = batch
        return model.loss(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Mean over `validation_windows` fixed rows of held-out text, in nats per byte."""
        settings = self._settings
        inputs, targets = validation_windows(self._corpus.validation, settings.validation_windows, settings.context)
        total = 0.0
        for first in range(0, len(inputs), VALIDATION_BATCH):
            rows = slice(first, first + VALIDATION_BATCH)
            total += float(self.loss(model, (inputs[rows], targets[rows]))) * len(inputs[rows])
        return total / len(inputs)

    def sample(self, model: nn.Module, prompt: str, num_tokens: int, *, temperature: float, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        text = _checked(model).generate(prompt.encode(), num_tokens, temperature=temperature, generator=generator)
        return text.decode(errors="replace")

    @cached_property
    def _corpus(self) -> Corpus:
        folder = self._settings.corpus
        return load_corpus(Path(folder) if folder else None)


def _checked(model: nn.Module) -> GPT:
    if not isinstance(model, GPT):
        raise UsageError(
            f"the task gpt trains a GPT, not a {type(model).__name__}: build it with the task's build_model"
        )
    return model
