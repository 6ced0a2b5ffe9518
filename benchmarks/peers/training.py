"""What each learner of each system does here: inner steps of one MLP at a pace, and a line of record for each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.orders import Orders
from benchmarks.peers.plan import BATCH_SIZE, NUM_CLASSES, NUM_LAYERS, Plan
from benchmarks.peers.sockets import SocketBytes

WAIT_SECONDS: Final = 0.2


class Added:
    """Time that a system has taken of the training thread since it was last asked."""

    def __init__(self) -> None:
        self.wall = self.cpu = self._begun = self._begun_cpu = 0.0

    def begin(self, *_: object) -> None:
        """Counts from now, in seconds of the wall clock and of this thread's processor time."""
        self._begun, self._begun_cpu = time.perf_counter(), time.thread_time()

    def end(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._begun
        self.cpu += time.thread_time() - self._begun_cpu

    def take(self) -> tuple[float, float]:
        taken, self.wall, self.cpu = (self.wall, self.cpu), 0.0, 0.0
        return taken


class Loop:
    """One learner's training loop, without what synchronises it. Every learner begins with the same parameters."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed)
        self.plan = plan
        layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(plan.width, plan.width), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(plan.width, NUM_CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.added = Added()
        self.num_steps = 0
        self._teacher = torch.randn(plan.width, NUM_CLASSES, generator=torch.Generator().manual_seed(plan.seed))
        self._data = torch.Generator().manual_seed(1000 * plan.seed + plan.index)
        self._sockets = SocketBytes() if plan.counts_bytes else None
        self._file: IO[str] = Path(plan.record).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 # until the end

    @property
    def is_over(self) -> bool:
        return 0 < self.plan.num_steps <= self.num_steps

    def wait_for_start(self, orders: Orders) -> None:
        """Says that this learner is ready, and waits until all are."""
        self.write()
        while not orders.go.wait(WAIT_SECONDS) and not orders.stop.is_set():
            pass

    def inner_step(self, synchronise: Callable[[], object] | None = None) -> None:
        """Forward, backward, the inner optimizer and what synchronises after it; then sleeps until the pace is kept."""
        begun = time.perf_counter()
        inputs = torch.randn(BATCH_SIZE, self.plan.width, generator=self._data)
        labels = (inputs @ self._teacher).argmax(1)
        functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if synchronise is not None:
            self.added.begin()
            synchronise()
            self.added.end()
        self.num_steps += 1
        time.sleep(max(0.0, self.plan.pace_seconds - (time.perf_counter() - begun)))

    def write(self, **fields: object) -> None:
        """One line: which step, when it was over, what the system took of it, and what has passed the sockets so far.

        `wall` and `cpu` are seconds of this step; `others_cpu` (seconds of this process's other threads), `sent` and
        `received` (bytes, of this process and its children) grow.
        """
        wall, cpu = self.added.take()
        line: dict[str, object] = {"step": self.num_steps, "at": time.monotonic(), "wall": wall, "cpu": cpu}
        line["others_cpu"] = time.process_time() - time.thread_time()
        if self._sockets is not None:
            self._sockets.look()
            line |= {"sent": self._sockets.sent, "received": self._sockets.received}
        self._file.write(json.dumps(line | fields) + "\n")
