"""The models of all learners in one process, with their parameters stacked so that gradients of many are one pass.

A learner's parameters stand still from the begin of an inner step to its end, when the step is taken. So the gradients
of all steps that are under way can be found together as soon as one of them ends, and nothing is computed that would
not be computed one by one: each learner has its own parameters, its own batch and its own norm to clip. What is saved
is the price of starting an operation, most of the time of a model as small as this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from isles.proto.manifest import Manifest
from isles.workers.task import Task

Vector = npt.NDArray[np.float32]

NORM_FLOOR: Final = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm."""


class Loss(torch.nn.Module):
    """The task's loss as a module, so that it can be called with other parameters than its own."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.task.loss(self.model, batch)
        return loss


class Fleet:
    """Equal models with stacked parameters: `models[i]` lives in row i of `values`, its gradients in `gradients`.

    A row has the fragments one after the other, each as `manifest` lays it out. The model must have no buffers that a
    step changes, its batches must be tuples of tensors that are equal in shape.
    """

    def __init__(self, task: Task, manifest: Manifest, *, seed: int, num_members: int) -> None:
        self.task = task
        self.models = [task.build_model(seed) for _ in range(num_members)]
        self.loss = Loss(task, task.build_model(seed))
        self.places: dict[str, tuple[slice, torch.Size]] = {}
        """Parameter -> where it lies in a row, and its shape."""
        self.spans: list[slice] = []
        """Fragment -> where it lies in a row."""
        shapes = {name: one.shape for name, one in self.loss.model.named_parameters()}
        size = 0
        for fragment in range(len(manifest.fragments)):
            slices = manifest.slices(fragment)
            self.spans.append(slice(size, size + slices[-1].stop))
            for one in slices:
                self.places[one.name] = slice(size + one.start, size + one.stop), shapes[one.name]
            size += slices[-1].stop
        self.values = torch.zeros(num_members, size)
        self.gradients = torch.zeros_like(self.values)
        self.batches: dict[int, Sequence[torch.Tensor]] = {}
        """Member -> the batch of its step under way."""
        self.begun: dict[int, Sequence[torch.Tensor]] = {}
        """The same, of those steps whose gradient is not known yet."""
        for model, values, gradients in zip(self.models, self.values, self.gradients, strict=True):
            self._settle(model, values, gradients)

    def _settle(self, model: torch.nn.Module, values: torch.Tensor, gradients: torch.Tensor) -> None:
        """Moves a model's parameters into its row."""
        for name, parameter in model.named_parameters():
            span, shape = self.places[name]
            values[span] = parameter.detach().reshape(-1)
            parameter.data = values[span].view(shape)
            parameter.grad = gradients[span].view(shape)

    def fragments_of(self, member: int) -> list[Vector]:
        """A member's parameters by fragment, each float32 [n]; what is written into them is in its model."""
        row = self.values[member].numpy()
        return [row[span] for span in self.spans]

    def begin(self, member: int, batch: Sequence[torch.Tensor]) -> None:
        """An inner step begins; if the member's parameters change before it ends, it must begin again."""
        self.batches[member] = self.begun[member] = batch

    def begin_again(self, member: int) -> None:
        """With the same batch, from other parameters."""
        self.begun[member] = self.batches[member]

    def forget(self, member: int) -> None:
        """The step under way will never end."""
        self.begun.pop(member, None)

    def end(self, member: int) -> None:
        """Has the gradient of the member's step in its model, clipped as the task says."""
        if member in self.begun:
            self._compute(sorted(self.begun))
            self.begun.clear()

    def _compute(self, members: list[int]) -> None:
        rows = self.values if len(members) == len(self.models) else self.values[members]
        leaves = {
            f"model.{name}": rows[:, span].view(len(members), *shape).detach().requires_grad_()
            for name, (span, shape) in self.places.items()
        }
        batch = [torch.stack(list(parts)) for parts in zip(*(self.begun[one] for one in members), strict=True)]
        found = torch.autograd.grad(self._losses(leaves, batch).sum(), list(leaves.values()))
        factors = self._clip_factors(found)
        for (span, shape), gradient in zip(self.places.values(), found, strict=True):
            self.gradients[members, span] = gradient.reshape(len(members), prod(shape)) * factors

    def _losses(self, parameters: dict[str, torch.Tensor], batch: Iterable[torch.Tensor]) -> torch.Tensor:
        def loss(one: dict[str, torch.Tensor], *rows: torch.Tensor) -> Any:
            return torch.func.functional_call(self.loss, one, rows)

        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no rule for a batch of models on every build
            losses: torch.Tensor = torch.func.vmap(loss)(parameters, *batch)
        return losses

    def _clip_factors(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """[members, 1]: what each member's gradient is multiplied by so that its norm is within the task's limit."""
        squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
        limit = self.task.gradient_norm_max
        factors = (limit / (squares.sqrt() + NORM_FLOOR)).clamp(max=1.0) if limit else torch.ones_like(squares)
        return factors.unsqueeze(1)
