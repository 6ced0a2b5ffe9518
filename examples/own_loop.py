"""A training loop of one's own, and the five lines that make it one of many learners.

isles broker & isles outer &
python examples/own_loop.py anna & python examples/own_loop.py bert
"""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from isles.proto.agreement import Budget, SyncSettings
from isles.workers.learner import Learner

BATCH_SIZE = 256


def main(name: str, broker: str, tokens: int) -> float:
    """Learns a wave from points that only this learner has seen; returns the last error."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    own_data = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sync, budget = SyncSettings(num_fragments=3), Budget(tokens=tokens)
    error = torch.tensor(math.nan)

    learner = Learner(model, optimizer, broker=broker, learner=name, sync=sync, budget=budget,
                      checkpoint_dir=Path("checkpoints", name))  # fmt: skip
    with learner:
        while not learner.has_enough:
            x = 2 * math.pi * torch.rand(BATCH_SIZE, 1, generator=own_data)
            error = functional.mse_loss(model(x), x.sin())
            error.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=BATCH_SIZE)
    return error.item()


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    last = main(given.get(0, "anna"), given.get(1, "tcp://127.0.0.1:7700"), int(given.get(2, 1_000_000)))
    print(f"error {last:.5f}")
