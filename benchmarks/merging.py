"""What do the merge rules and the presets make of the same learners, batches and clocks?

    .venv/bin/python -P benchmarks/merging.py [--seeds 1] [--learners 8] [--steps 240] [--only NAME]

Learners of one process train a small byte-level GPT on a clock that is counted in inner steps, not measured: their
step times are spread by 18 %, each step varies by 10 %, a message takes half a step. The arithmetic is the product's
own: accounts, codecs, recipes, merges and outer steps. Each row has equal initial parameters, data, and time.

The figure is the validation loss of the global parameters at the end, in nats per byte, after every learner has handed
in what it had. `participants` is the mean over the rounds before that, `waited` the mean time from the first
contribution of a round to its merge, in inner steps of an average learner.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from isles.outer.accumulators import l2_norm
from isles.outer.grace import grace_seconds
from isles.outer.ledger import make_recipe
from isles.outer.optimizer import FragmentState, make_version
from isles.outer.quorum import num_needed
from isles.outer.schedule import outer_rate
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Averages, BlobRef, Contribution, LearnerInfo
from isles.workers.account import Account
from isles.workers.books import first_clock
from isles.workers.pace import paced_interval
from isles.workers.task import Task, load_task

Vector = npt.NDArray[np.float32]

TASK: Final = {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 4, "learning_rate": 3e-3}
SPREAD: Final = 0.18
"""Of step times: from 1 - SPREAD / 2 to 1 + SPREAD / 2."""
WIDE: Final = 1.2
"""Step times of 0.4 to 1.6."""
JITTER: Final = 0.10
LATENCY: Final = 0.5
"""Of a message one way, in inner steps of an average learner."""
SHARDS_EACH: Final = 32
INTERVAL_STEPS: Final = 24
"""H of every row: the runs are short."""

CASES: Final[dict[str, dict[str, Any]]] = {
    "decoupled": {},
    "decoupled, rda": {"merge_rule": "rda"},
    "decoupled, short grace": {"grace_max_seconds": 1.5},
    "decoupled, short grace, rda": {"grace_max_seconds": 1.5, "merge_rule": "rda"},
    "diloco": {"preset": "diloco"},
    "streaming": {"preset": "streaming"},
    "streaming, exact books": {"preset": "streaming", "books": "exact"},
    "local-sgd": {"preset": "local-sgd"},
    "async": {"preset": "async"},
    "async, staleness 0.5": {"preset": "async", "staleness_exponent": 0.5},
    "local-sgd, wide": {"preset": "local-sgd"},
    "local-sgd, wide, dynamic": {"preset": "local-sgd", "has_dynamic_interval": True},
    "local-sgd, wide, no cues": {"preset": "local-sgd", "has_cues": False},
    "local-sgd, wide, no cues, dynamic": {"preset": "local-sgd", "has_cues": False, "has_dynamic_interval": True},
}
"""Row -> its settings; in a `wide` one step times are spread by WIDE."""


@dataclass
class Open:
    """A contribution under way, and what its payload decodes to."""

    contribution: Contribution
    decoded: Vector


@dataclass
class Learner:
    """One learner: its model, its clock, and its books of every fragment."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Any
    step_time: float
    interval_steps: int
    accounts: list[Account[Vector]]
    clocks: list[int]
    bases: list[int]
    steps: list[int]
    opened: dict[int, Open] = field(default_factory=dict)
    arrived: dict[int, tuple[int, Vector, bool]] = field(default_factory=dict)
    """Fragment -> newest version, its values, whether the open contribution is in it."""
    cues: set[int] = field(default_factory=set)
    num_drawn: int = 0


@dataclass
class Round:
    """The pending contributions of one fragment, and when they will be merged."""

    pending: dict[str, Open] = field(default_factory=dict)
    version: int = 0
    opened_at: float = 0.0
    merge_at: float | None = None


class World:
    """All learners and the outer, on one counted clock."""

    def __init__(
        self, task: Task, sync: SyncSettings, *, num_learners: int, num_steps: int, seed: int, spread: float
    ) -> None:
        self.task, self.sync, self.num_steps = task, sync, num_steps
        self.random = random.Random(seed)
        self.learners: list[Learner] = []
        model = task.build_model(seed)
        specs = [
            TensorSpec(name, tuple(p.shape), "float32", "embedding" if name.startswith("embedding") else "parameter")
            for name, p in model.named_parameters()
        ]
        self.manifest = Manifest.build(specs, {}, sync.num_fragments)
        fragments = range(sync.num_fragments)
        self.states = [FragmentState(self.gather(model, fragment)) for fragment in fragments]
        self.rounds = [Round() for _ in fragments]
        self.participants: list[int] = []
        self.waits: list[float] = []
        self.events: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self.numbers = count()
        self.grace = grace_seconds(Averages(step_seconds=1.0, sync_seconds=2 * LATENCY), sync)
        for number in range(num_learners):
            step_time = 1 + spread * (number / max(1, num_learners - 1) - 0.5)
            self.learners.append(self.make_learner(number, seed, step_time))
            self.at(self.next_step(self.learners[-1]), "step", self.learners[-1])

    def make_learner(self, number: int, seed: int, step_time: float) -> Learner:
        model = self.task.build_model(seed)
        fragments = range(self.sync.num_fragments)
        interval = self.sync.interval_steps
        if self.sync.has_dynamic_interval:
            interval = paced_interval(interval, typical_seconds=1.0, own_seconds=step_time)
        return Learner(
            name=f"l{number}",
            model=model,
            optimizer=self.task.make_optimizer(model),
            batches=self.task.batches({SHARDS_EACH * number + shard: 0 for shard in range(SHARDS_EACH)}, seed),
            step_time=step_time,
            interval_steps=interval,
            accounts=[Account.under(self.sync, state.parameters) for state in self.states],
            clocks=[first_clock(one, self.sync.num_fragments, interval) for one in fragments],
            bases=[0 for _ in fragments],
            steps=[0 for _ in fragments],
        )

    # ------------------------------------------------------------------------------------------------------- the model

    def slots(self, model: torch.nn.Module, fragment: int) -> Iterator[tuple[torch.Tensor, slice]]:
        parameters = dict(model.named_parameters())
        for one in self.manifest.slices(fragment):
            yield parameters[one.name].detach(), slice(one.start, one.stop)

    def gather(self, model: torch.nn.Module, fragment: int) -> Vector:
        return np.concatenate([tensor.numpy().reshape(-1) for tensor, _ in self.slots(model, fragment)])

    def scatter(self, model: torch.nn.Module, fragment: int, values: Vector) -> None:
        for tensor, span in self.slots(model, fragment):
            tensor.copy_(torch.from_numpy(values[span]).view(tensor.shape))

    # ------------------------------------------------------------------------------------------------------- the clock

    def at(self, when: float, what: str, *details: Any) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what, details))

    def next_step(self, learner: Learner) -> float:
        return learner.step_time * self.random.uniform(1 - JITTER, 1 + JITTER)

    def run(self) -> float:
        """The loss at the end."""
        while self.events:
            now, _, what, details = heapq.heappop(self.events)
            if now >= self.num_steps and what == "step":
                continue
            getattr(self, f"on_{what}")(now, *details)
        self.drain()
        model = self.task.build_model(0)
        for fragment, state in enumerate(self.states):
            self.scatter(model, fragment, state.parameters)
        return self.task.validation_loss(model)

    # ------------------------------------------------------------------------------------------------------ a learner

    def on_step(self, now: float, learner: Learner) -> None:
        for group in learner.optimizer.param_groups:
            group["lr"] = self.task.schedule.at(now / self.num_steps)
        self.task.loss(learner.model, learner.batches.next_batch()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learner.model.parameters(), self.task.gradient_norm_max)
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        for fragment in range(self.sync.num_fragments):
            learner.clocks[fragment] += 1
            learner.steps[fragment] += 1
        for fragment in sorted(learner.arrived):
            self.apply(learner, fragment)
        for fragment in range(self.sync.num_fragments):
            is_due = learner.clocks[fragment] >= learner.interval_steps or fragment in learner.cues
            if is_due and fragment not in learner.opened:
                self.at(now + LATENCY, "arrival", self.contribute(learner, fragment))
        self.at(now + self.next_step(learner), "step", learner)

    def apply(self, learner: Learner, fragment: int) -> None:
        version, values, is_in = learner.arrived.pop(fragment)
        opened = learner.opened.pop(fragment) if is_in else None
        theta = self.gather(learner.model, fragment)
        decoded = opened.decoded if opened is not None else None
        change = learner.accounts[fragment].apply(values, decoded, lambda: theta)
        self.scatter(learner.model, fragment, change.of(theta))
        learner.bases[fragment] = version
        if opened is not None:
            learner.steps[fragment] -= opened.contribution.steps

    def contribute(self, learner: Learner, fragment: int) -> Open:
        unmerged = learner.accounts[fragment].contribution(self.gather(learner.model, fragment))
        payload = encode(self.sync.codec_up, unmerged)
        slices = self.manifest.slices(fragment)
        learner.num_drawn += 1
        contribution = Contribution(
            id=ContributionId(learner.name, fragment, "ab" * 8, learner.num_drawn),
            base_version=learner.bases[fragment],
            blob=BlobRef(digest="0" * 64, size_bytes=len(payload)),
            codec=self.sync.codec_up,
            tokens=learner.steps[fragment] * self.task.tokens_per_batch,
            steps=learner.steps[fragment],
            seconds=learner.steps[fragment] * learner.step_time,
            norms=tuple(l2_norm(unmerged[one.start : one.stop]) for one in slices),
        )
        learner.opened[fragment] = Open(contribution, decode(payload, num_values=unmerged.size))
        learner.clocks[fragment] = 0
        learner.cues.discard(fragment)
        return learner.opened[fragment]

    def on_cue(self, now: float, fragment: int, version: int) -> None:
        for learner in self.learners:
            if learner.bases[fragment] <= version and fragment not in learner.opened:
                learner.cues.add(fragment)

    def on_version(
        self, now: float, fragment: int, version: int, values: Vector, ids: frozenset[ContributionId]
    ) -> None:
        for learner in self.learners:
            opened = learner.opened.get(fragment)
            was_in = fragment in learner.arrived and learner.arrived[fragment][2]
            is_in = was_in or (opened is not None and opened.contribution.id in ids)
            learner.arrived[fragment] = (version, values, is_in)
            learner.cues.discard(fragment)

    # ------------------------------------------------------------------------------------------------------- the outer

    def on_arrival(self, now: float, opened: Open) -> None:
        contribution = opened.contribution
        fragment = contribution.id.fragment
        one = self.rounds[fragment]
        one.opened_at = one.opened_at if one.pending else now
        one.pending[contribution.id.learner] = opened
        if self.sync.has_cues and len(one.pending) == 1:
            self.at(now + LATENCY, "cue", fragment, one.version)
        if len(one.pending) == len(self.learners):
            self.merge(now, fragment)
        elif one.merge_at is None and len(one.pending) >= num_needed(self.sync.quorum, len(self.learners)):
            one.merge_at = now + self.grace
            self.at(one.merge_at, "grace_end", fragment, one.version)

    def on_grace_end(self, now: float, fragment: int, version: int) -> None:
        if self.rounds[fragment].version == version:
            self.merge(now, fragment)

    def merge(self, now: float, fragment: int) -> None:
        one = self.rounds[fragment]
        merged = sorted(one.pending.values(), key=lambda opened: opened.contribution.id)
        recipe = make_recipe(
            [opened.contribution for opened in merged],
            [self.info_of(learner) for learner in self.learners],
            self.sync,
            head_version=one.version,
            learning_rate=outer_rate(self.sync, min(1.0, now / self.num_steps)),
            averages=Averages(),
            grace_seconds=self.grace,
            waited_seconds=0.0,
        )
        deltas = (opened.decoded for opened in merged)
        made = make_version(self.states[fragment], deltas, recipe, self.sync, self.manifest.slices(fragment))
        self.states[fragment] = made.state
        one.version, one.merge_at, one.pending = one.version + 1, None, {}
        self.participants.append(len(merged))
        self.waits.append(now - one.opened_at)
        ids = frozenset(opened.contribution.id for opened in merged)
        self.at(now + LATENCY, "version", fragment, one.version, made.state.parameters, ids)

    def info_of(self, learner: Learner) -> LearnerInfo:
        rate = self.task.tokens_per_batch / learner.step_time
        return LearnerInfo(
            learner=learner.name,
            region="eu",
            incarnation="ab" * 8,
            is_live=True,
            last_seen_unix=0.0,
            tokens=1,
            tokens_per_second=rate,
            step_seconds=learner.step_time,
        )

    def drain(self) -> None:
        """What every learner still has, as one last full round of each fragment."""
        num_rounds = len(self.participants)
        for fragment in range(self.sync.num_fragments):
            for learner in self.learners:
                if fragment in learner.arrived:
                    self.apply(learner, fragment)
                if learner.steps[fragment] and fragment not in learner.opened:
                    self.rounds[fragment].pending[learner.name] = self.contribute(learner, fragment)
            if self.rounds[fragment].pending:
                self.merge(float(self.num_steps), fragment)
        del self.participants[num_rounds:], self.waits[num_rounds:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--short", action="store_true", help="two learners, few steps: only shows that this works")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, from seed 1 on")
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--steps", type=int, default=240, help="inner steps of an average learner")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a sync setting of every row")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.learners, arguments.steps, arguments.seeds = 2, 60, 1
    torch.set_num_threads(1)
    task = load_task("gpt", TASK)
    stated = dict(text.split("=", maxsplit=1) for text in arguments.set)
    print(f"{arguments.learners} learners, {arguments.steps} inner steps, seeds 1..{arguments.seeds}\n")
    print("| row | rounds | participants | waited | loss | each seed | CPU seconds |\n|---|---|---|---|---|---|---|")
    for name, settings in CASES.items():
        if arguments.only not in name:
            continue
        sync = SyncSettings.model_validate({"interval_steps": INTERVAL_STEPS, **settings, **stated})
        spread = WIDE if "wide" in name else SPREAD
        begun = time.process_time()
        worlds = [
            World(task, sync, num_learners=arguments.learners, num_steps=arguments.steps, seed=seed, spread=spread)
            for seed in range(1, arguments.seeds + 1)
        ]
        losses = [world.run() for world in worlds]
        rounds = [one for world in worlds for one in world.participants]
        waits = [one for world in worlds for one in world.waits]
        each = " ".join(f"{loss:.3f}" for loss in losses)
        print(
            f"| {name} | {len(rounds) // len(worlds)} | {statistics.fmean(rounds):.1f} | "
            f"{statistics.fmean(waits):.1f} | "
            f"{statistics.fmean(losses):.3f} | {each} | {time.process_time() - begun:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
