"""The training text as 1,024 virtual shards, and a reader of those that a learner holds.

The text is cut into windows of context + 1 bytes of which neighbours share one: the last target of a window is the
first input of the next. The windows are dealt to the shards in turn, so that every shard, and thereby every learner,
reads from everywhere in the text. No byte is copied and no file is written; a shard is arithmetic. The broker leases
shards to learners, each with its *cursor*: the number of windows taken from it since the run began. A cursor alone says
what comes next, so a shard goes from learner to learner without repeating or skipping anything but what its last holder
had not yet handed in.

    pass  = cursor // windows per shard        how often the shard has been read from end to end
    place = cursor %  windows per shard        position in this pass's order, a permutation by (seed, shard, pass)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from isles.proto.errors import UsageError

NUM_SHARDS: Final = 1024
"""Enough that 64 learners hold 16 each, so that every batch mixes many places of the text."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Where the windows of every shard lie; equal for all processes of a run."""

    num_bytes: int
    context: int
    seed: int = 0
    num_shards: int = NUM_SHARDS

    def __post_init__(self) -> None:
        """Refuse a text that is too short.

        Raises:
            UsageError: a shard would not hold one window.
        """
        if self.windows_per_shard < 1:
            needed = self.num_shards * self.context + 1
            raise UsageError(
                f"the corpus has {self.num_bytes} bytes of training text, but {self.num_shards} shards of at least one "
                f"window of {self.context + 1} bytes need {needed}: add text or lower task.context"
            )

    @property
    def windows_per_shard(self) -> int:
        """The same for every shard: a pass is over after this many windows."""
        return (self.num_bytes - 1) // self.context // self.num_shards

    def order(self, shard: int, pass_number: int) -> list[int]:
        """The windows of a shard in the order of one pass: a permutation of range(windows_per_shard).

        Sorts the windows by the raw numbers of a Philox generator. Unlike the shuffles of random libraries, its
        stream is guaranteed to stay the same in future releases of numpy.
        """
        keys = np.random.Philox(np.random.SeedSequence([self.seed, shard, pass_number]))
        return [int(i) for i in np.argsort(keys.random_raw(self.windows_per_shard), kind="stable")]

    def start(self, shard: int, window: int) -> int:
        """Offset in the text of a window's first byte; the window ends context + 1 bytes later."""
        return (window * self.num_shards + shard) * self.context


class ShardReader:
    """Draws batches from the shards that a learner holds; all its state is in `cursors`."""

    def __init__(self, text: Tensor, plan: ShardPlan, batch_size: int, shards: Mapping[int, int] | None = None) -> None:
        """Read windows of `text`, uint8 (plan.num_bytes,), in batches of `batch_size`; `shards` as in `replace`."""
        assert len(text) == plan.num_bytes
        self._text = text
        self._plan = plan
        self._batch_size = batch_size
        self._cursors: dict[int, int] = {}
        self._first_passes: dict[int, int] = {}
        self._turns: deque[int] = deque()
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._spans = torch.arange(plan.context + 1)
        self.replace(shards or {})

    @property
    def cursors(self) -> dict[int, int]:
        """Shard -> windows taken since the run began, of all shards held now; a copy."""
        return dict(self._cursors)

    def replace(self, leased: Mapping[int, int]) -> None:
        """Hold exactly these shards from now on: shard -> cursor, as the broker leased them.

        A shard held before goes on from the larger cursor: the broker knows only what was handed in. Shards go on in
        their turns, new ones queue up behind.

        Raises:
            UsageError: a shard or cursor that the plan does not have.
        """
        for shard, cursor in leased.items():
            if not 0 <= shard < self._plan.num_shards or cursor < 0:
                raise UsageError(
                    f"shard {shard} with cursor {cursor} is none of this run's {self._plan.num_shards} shards: "
                    "the broker and this worker disagree about the data; start them from one release"
                )
        held = self._cursors
        self._cursors = {shard: max(leased[shard], held.get(shard, 0)) for shard in sorted(leased)}
        self._first_passes = {shard: self._first_passes.get(shard, self._pass(shard)) for shard in self._cursors}
        self._orders = {shard: order for shard, order in self._orders.items() if shard in leased}
        kept = [shard for shard in self._turns if shard in leased]
        self._turns = deque(kept + [shard for shard in self._cursors if shard not in held])

    def finished_shards(self) -> dict[int, int]:
        """Those read to the end of a pass since they were leased, with their cursors: to be returned for others."""
        return {shard: self._cursors[shard] for shard in self._cursors if self._pass(shard) > self._first_passes[shard]}

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 (batch size, context), on the CPU: one window of each shard in turn.

        With fewer shards than windows in a batch, shards give several. Finished ones are read again until replaced:
        a learner whose broker is away goes on.

        Raises:
            UsageError: no shard is held.
        """
        if not self._turns:
            raise UsageError("this learner holds no data shard: there are more learners than shards; stop some of them")
        starts = torch.tensor([self._next_start() for _ in range(self._batch_size)])
        windows = self._text[starts.unsqueeze(1) + self._spans].long()  # (B, T + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _next_start(self) -> int:
        """Take one window of the shard whose turn it is."""
        shard = self._turns[0]
        self._turns.rotate(-1)
        pass_number, place = divmod(self._cursors[shard], self._plan.windows_per_shard)
        order = self._orders.get(shard)
        if order is None or order[0] != pass_number:
            order = self._orders[shard] = (pass_number, self._plan.order(shard, pass_number))
        self._cursors[shard] += 1
        return self._plan.start(shard, order[1][place])

    def _pass(self, shard: int) -> int:
        return self._cursors[shard] // self._plan.windows_per_shard


def validation_windows(text: Tensor, num_windows: int, context: int) -> tuple[Tensor, Tensor]:
    """Fixed windows, evenly spaced over the held-out text: inputs and targets, both int64 (windows, context).

    `text` is uint8 (bytes,). Fewer windows come back when the text has no room for so many without overlap, so no
    target is counted twice.

    Raises:
        UsageError: the text is shorter than one window.
    """
    room = (len(text) - 1) // context
    if room < 1:
        raise UsageError(
            f"the held-out text has {len(text)} bytes, fewer than one window of {context + 1}: "
            "add text to the corpus or lower task.context"
        )
    count = min(num_windows, room)
    last = len(text) - context - 1
    starts = torch.tensor([index * last // max(1, count - 1) for index in range(count)])
    windows = text[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
