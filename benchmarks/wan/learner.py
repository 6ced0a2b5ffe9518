"""One learner at its site, by one of four methods: a training loop whose inner steps last equally long by the clock.

    alone           no synchronisation at all
    data-parallel   gradients averaged over all learners in every step, by gloo
    diloco          every H steps the learners average their deltas, by gloo, and each takes the same outer step
    isles           a `Learner`

A step computes a real gradient and lets the inner optimizer take its step; a sleep fills this up to the pace. Whatever
the method does beside that comes on top, and all of it counts. So the figure does not depend on how fast this machine
computes, as long as it computes a step within the pace. Orders come as lines of standard input, "measure STEPS
WARM-UP"; answers are lines of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.wan.links import DEVICE, address
from isles.proto.agreement import Budget, SyncSettings
from isles.workers.learner import Learner

METHODS: Final = ("alone", "data-parallel", "diloco", "isles")
INPUTS: Final = 512
BATCH_SIZE: Final = 16
"""Items of a step; the figures are counted in them."""
PORT: Final = 7799
"""Of the store by which gloo's processes find each other, at the first site."""
GLOO_SECONDS: Final = 600.0
OUTER_LEARNING_RATE: Final = 0.7
OUTER_MOMENTUM: Final = 0.9
"""Of DiLoCo, as published."""


def make_model(num_layers: int, seed: int) -> nn.Module:
    """A perceptron of `num_layers` square layers: 262,656 parameters each."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(INPUTS, INPUTS), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Method(Protocol):
    """What is done beside training, at the end of each step."""

    def after_backward(self) -> None:
        """Between the gradient and the inner optimizer."""

    def after_step(self) -> None:
        """After the inner optimizer."""

    def meet(self) -> None:
        """Waits until everybody is here, if the method can."""

    def versions(self) -> int:
        """Versions of fragments that this learner has applied."""

    def close(self) -> None:
        """Ends it."""


class Alone:
    """No synchronisation."""

    def after_backward(self) -> None:
        """Nothing to do."""

    def after_step(self) -> None:
        """Nothing to do."""

    def meet(self) -> None:
        """Nobody to wait for."""

    def versions(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to end."""


class Gloo(Alone):
    """Learners that talk to each other directly."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{address(0)}:{PORT}",
            rank=arguments.site,
            world_size=arguments.learners,
            timeout=timedelta(seconds=GLOO_SECONDS),
        )
        self._num_learners = arguments.learners

    def average(self, vector: Tensor) -> Tensor:
        """The mean of all learners' vectors, in place."""
        dist.all_reduce(vector)
        return vector.div_(self._num_learners)

    def meet(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class DataParallel(Gloo):
    """Gradients as one vector: fewer round trips than one for each tensor."""

    def __init__(self, arguments: argparse.Namespace, model: nn.Module) -> None:
        super().__init__(arguments)
        self._parameters = list(model.parameters())

    def after_backward(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        averaged = self.average(torch.cat([one.view(-1) for one in gradients]))
        for gradient, part in zip(gradients, averaged.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class DiLoCo(Gloo):
    """The outer step is the same everywhere, so only deltas travel."""

    def __init__(self, arguments: argparse.Namespace, model: nn.Module) -> None:
        super().__init__(arguments)
        self._parameters = list(model.parameters())
        self._interval_steps = arguments.interval_steps
        self._num_steps = self._num_rounds = 0
        self._anchor = nn.Parameter(self._flat())
        self._outer = torch.optim.SGD([self._anchor], lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().view(-1) for parameter in self._parameters])

    @torch.no_grad()
    def after_step(self) -> None:
        self._num_steps += 1
        if self._num_steps % self._interval_steps:
            return
        self._anchor.grad = self.average(self._anchor.detach() - self._flat())
        self._outer.step()
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, self._anchor.detach().split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
        self._num_rounds += 1

    def versions(self) -> int:
        return self._num_rounds


class Isles(Alone):
    """A `Learner` of a run that the first one starts."""

    def __init__(self, arguments: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._learner = Learner(
            model,
            optimizer,
            broker=arguments.broker,
            key=Path(arguments.key),
            learner=f"l{arguments.site}",
            sync=SyncSettings(interval_steps=arguments.interval_steps),
            budget=Budget(tokens=10**12),
            seed=arguments.seed,
        )
        self._learner.start()

    def after_step(self) -> None:
        self._learner.step(tokens=BATCH_SIZE)

    def versions(self) -> int:
        return sum(self._learner.versions.values())

    def close(self) -> None:
        self._learner.close()


class Loop:
    """The training loop of one learner."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._pace_seconds = arguments.pace_seconds
        self._model = make_model(arguments.layers, arguments.seed)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._generator = torch.Generator().manual_seed(arguments.seed + arguments.site)
        self._target = torch.randn(INPUTS, INPUTS, generator=torch.Generator().manual_seed(arguments.seed))
        self._seconds_beside = 0.0
        """Spent on what is not training."""
        self.num_late = 0
        """Steps that took longer to compute than the pace."""
        match arguments.method:
            case "alone":
                self.method: Method = Alone()
            case "data-parallel":
                self.method = DataParallel(arguments, self._model)
            case "diloco":
                self.method = DiLoCo(arguments, self._model)
            case _:
                self.method = Isles(arguments, self._model, self._optimizer)

    def step(self) -> None:
        """Computing, and waiting, take the pace; what the method does comes on top of it."""
        begun, beside = time.monotonic(), self._seconds_beside
        inputs = torch.randn(BATCH_SIZE, INPUTS, generator=self._generator)
        nn.functional.mse_loss(self._model(inputs), inputs @ self._target).backward()
        self._beside(self.method.after_backward)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._beside(self.method.after_step)
        left = self._pace_seconds + self._seconds_beside - beside - (time.monotonic() - begun)
        if left > 0:
            time.sleep(left)
        else:
            self.num_late += 1

    def _beside(self, call: Callable[[], None]) -> None:
        begun = time.monotonic()
        call()
        self._seconds_beside += time.monotonic() - begun

    def measure(self, num_steps: int, num_warm_up: int) -> dict[str, Any]:
        """Takes so many steps after some others; what came of them."""
        for _ in range(num_warm_up):
            self.step()
        self.method.meet()
        self.num_late = 0
        versions, cpu, begun = self.method.versions(), time.process_time(), time.monotonic()
        for _ in range(num_steps):
            self.step()
        seconds = time.monotonic() - begun
        return {
            "items": BATCH_SIZE * num_steps,
            "seconds": seconds,
            "versions": self.method.versions() - versions,
            "late_share": self.num_late / num_steps,
            "cpu_share": (time.process_time() - cpu) / seconds,
        }


def serve(arguments: argparse.Namespace) -> None:
    """The whole program of a learner's process: does what it is told until standard input ends."""
    torch.set_num_threads(1)
    loop = Loop(arguments)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        _, num_steps, num_warm_up = line.split()
        print(json.dumps(loop.measure(int(num_steps), int(num_warm_up))), flush=True)
    loop.method.close()
