"""Learners and an outer of one process, on a clock that is counted in inner steps and never measured.

The learners' step times are spread, each step varies, a message takes half a step. Everything that decides and all the
arithmetic is the product's own: accounts, codecs, recipes, merges, outer steps, quorum and grace. What is left out is
what moves bytes and keeps them.

A run ends after a number of inner steps of all learners together, so that runs of one size have equal tokens whatever
the speeds. Learning rates follow the share of them that is done.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.convergence.fleet import Fleet
from isles.outer.accumulators import l2_norm
from isles.outer.grace import grace_seconds
from isles.outer.ledger import make_recipe
from isles.outer.optimizer import FragmentState, make_version
from isles.outer.quorum import has_everyone, has_quorum, live_learners
from isles.outer.schedule import outer_rate
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Averages, BlobRef, Contribution, LearnerInfo
from isles.workers.account import Account
from isles.workers.books import first_clock
from isles.workers.pace import paced_interval
from isles.workers.task import Task

Vector = npt.NDArray[np.float32]

JITTER: Final = 0.10
LATENCY: Final = 0.5
"""Of a message one way, in inner steps of an average learner."""
LEASE: Final = 8.0
"""How long rounds still count a learner that is dead, in the same unit."""
SHARDS_EACH: Final = 32


@dataclass(frozen=True)
class Outage:
    """One learner is killed, and comes back without a checkpoint; times as shares of the run's."""

    dies_at: float
    returns_at: float
    learner: int = 0


@dataclass
class Open:
    """A contribution under way, and what its payload decodes to."""

    contribution: Contribution
    decoded: Vector


@dataclass
class Learner:
    """One learner: its clock, and its books of every fragment."""

    member: int
    """Its row of the fleet."""
    theta: list[Vector]
    """Its live parameters by fragment; what is written into them is in its model."""
    optimizer: torch.optim.Optimizer
    batches: Any
    jitter: random.Random
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
    life: int = 0
    """Steps of an earlier one never end."""
    is_up: bool = True
    is_live: bool = True
    """As the broker sees it: until its lease ends."""

    @property
    def name(self) -> str:
        return f"l{self.member}"


@dataclass
class Round:
    """The pending contributions of one fragment, and when they will be merged."""

    pending: dict[str, Open] = field(default_factory=dict)
    version: int = 0
    opened_at: float = 0.0
    merge_at: float | None = None


@dataclass
class Traffic:
    """Encoded payloads of one direction, headers included."""

    num_bytes: int = 0
    num_values: int = 0

    def add(self, num_bytes: int, num_values: int) -> None:
        self.num_bytes += num_bytes
        self.num_values += num_values

    @property
    def bits(self) -> float:
        """Per parameter."""
        return 8 * self.num_bytes / max(1, self.num_values)


class World:
    """All learners and the outer, on one counted clock."""

    def __init__(
        self,
        task: Task,
        sync: SyncSettings,
        *,
        num_learners: int,
        num_steps: int,
        seed: int,
        spread: float,
        outage: Outage | None = None,
    ) -> None:
        self.task, self.sync, self.seed = task, sync, seed
        self.num_steps_all = num_learners * num_steps
        self.num_done = 0.0
        """Inner steps of all learners, less those whose work was lost."""
        model = task.build_model(seed)
        specs = [
            TensorSpec(name, tuple(p.shape), "float32", "embedding" if name.startswith("embedding") else "parameter")
            for name, p in model.named_parameters()
        ]
        self.manifest = Manifest.build(specs, {}, sync.num_fragments)
        self.fragments = range(sync.num_fragments)
        self.fleet = Fleet(task, self.manifest, seed=seed, num_members=num_learners)
        self.states = [FragmentState(values.copy()) for values in self.fleet.fragments_of(0)]
        self.rounds = [Round() for _ in self.fragments]
        self.participants: list[int] = []
        self.waits: list[float] = []
        self.up, self.down = Traffic(), Traffic()
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.grace = grace_seconds(Averages(step_seconds=1.0, sync_seconds=2 * LATENCY), sync)
        times = [1 + spread * (number / max(1, num_learners - 1) - 0.5) for number in range(num_learners)]
        self.learners = [self.make_learner(number, step_time) for number, step_time in enumerate(times)]
        for learner in self.learners:
            self.begin_step(0.0, learner)
        if outage is not None:
            learner = self.learners[outage.learner]
            self.at(outage.dies_at * num_steps, self.on_death, learner)
            self.at(outage.returns_at * num_steps, self.on_return, learner)

    def make_learner(self, number: int, step_time: float) -> Learner:
        interval = self.sync.interval_steps
        if self.sync.has_dynamic_interval:
            interval = paced_interval(interval, typical_seconds=1.0, own_seconds=step_time)
        return Learner(
            member=number,
            theta=self.fleet.fragments_of(number),
            optimizer=self.task.make_optimizer(self.fleet.models[number]),
            batches=self.task.batches({SHARDS_EACH * number + shard: 0 for shard in range(SHARDS_EACH)}, self.seed),
            jitter=random.Random(1000 * self.seed + number),
            step_time=step_time,
            interval_steps=interval,
            accounts=[Account.under(self.sync, state.parameters) for state in self.states],
            clocks=[first_clock(one, self.sync.num_fragments, interval) for one in self.fragments],
            bases=[0 for _ in self.fragments],
            steps=[0 for _ in self.fragments],
        )

    # ------------------------------------------------------------------------------------------------------- the clock

    def at(self, when: float, what: Callable[..., None], *details: Any) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what, details))

    @property
    def progress(self) -> float:
        return min(1.0, self.num_done / self.num_steps_all)

    def run(self) -> float:
        """The loss at the end: that of the global parameters, after all learners have handed in what they have."""
        now = 0.0
        while self.events:
            now, _, what, details = heapq.heappop(self.events)
            what(now, *details)
        self.drain(now)
        model = self.task.build_model(0)
        parameters = dict(model.named_parameters())
        for fragment, state in enumerate(self.states):
            for one in self.manifest.slices(fragment):
                values = torch.from_numpy(state.parameters[one.start : one.stop])
                parameters[one.name].detach().copy_(values.view(one.shape))
        return self.task.validation_loss(model)

    # ------------------------------------------------------------------------------------------------------- a learner

    def begin_step(self, now: float, learner: Learner) -> None:
        self.fleet.begin(learner.member, learner.batches.next_batch())
        seconds = learner.step_time * learner.jitter.uniform(1 - JITTER, 1 + JITTER)
        self.at(now + seconds, self.on_step, learner, learner.life)

    def on_step(self, now: float, learner: Learner, life: int) -> None:
        if life != learner.life or self.num_done >= self.num_steps_all:
            return
        self.fleet.end(learner.member)
        for group in learner.optimizer.param_groups:
            group["lr"] = self.task.schedule.at(self.progress)
        learner.optimizer.step()
        self.num_done += 1
        for fragment in self.fragments:
            learner.clocks[fragment] += 1
            learner.steps[fragment] += 1
        for fragment in sorted(learner.arrived):
            self.apply(learner, fragment)
        for fragment in self.fragments:
            is_due = learner.clocks[fragment] >= learner.interval_steps or fragment in learner.cues
            if is_due and fragment not in learner.opened:
                self.at(now + LATENCY, self.on_arrival, self.contribute(learner, fragment))
        self.begin_step(now, learner)

    def apply(self, learner: Learner, fragment: int) -> None:
        version, values, is_in = learner.arrived.pop(fragment)
        opened = learner.opened.pop(fragment) if is_in else None
        theta = learner.theta[fragment].copy()
        decoded = opened.decoded if opened is not None else None
        change = learner.accounts[fragment].apply(values, decoded, lambda: theta)
        learner.theta[fragment][:] = change.of(theta)
        learner.bases[fragment] = version
        if opened is not None:
            learner.steps[fragment] -= opened.contribution.steps

    def contribute(self, learner: Learner, fragment: int) -> Open:
        unmerged = learner.accounts[fragment].contribution(learner.theta[fragment])
        payload = encode(self.sync.codec_up, unmerged)
        self.up.add(len(payload), unmerged.size)
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
            if learner.is_up and learner.bases[fragment] <= version and fragment not in learner.opened:
                learner.cues.add(fragment)

    def on_version(
        self, now: float, fragment: int, version: int, values: Vector, ids: frozenset[ContributionId]
    ) -> None:
        for learner in self.learners:
            if not learner.is_up or version <= learner.bases[fragment]:
                continue
            opened = learner.opened.get(fragment)
            was_in = fragment in learner.arrived and learner.arrived[fragment][2]
            is_in = was_in or (opened is not None and opened.contribution.id in ids)
            learner.arrived[fragment] = (version, values, is_in)
            learner.cues.discard(fragment)

    # -------------------------------------------------------------------------------------------------------- a death

    def on_death(self, now: float, learner: Learner) -> None:
        """Its work is lost but for what it has sent, and is done again by the others."""
        self.fleet.forget(learner.member)
        sent = [learner.opened[one].contribution.steps if one in learner.opened else 0 for one in self.fragments]
        self.num_done -= sum(had - out for had, out in zip(learner.steps, sent, strict=True)) / len(self.fragments)
        learner.life += 1
        learner.is_up = False
        self.at(now + LEASE, self.on_lease_end, learner, learner.life)

    def on_lease_end(self, now: float, learner: Learner, life: int) -> None:
        if life != learner.life:
            return
        learner.is_live = False
        for fragment, one in enumerate(self.rounds):
            if one.pending:
                self.consider(now, fragment)

    def on_return(self, now: float, learner: Learner) -> None:
        """From the head, with a new inner optimizer."""
        pending = [one for one in self.fragments if learner.name in self.rounds[one].pending]
        assert not pending, "an outage lasts longer than any round"
        fresh = self.make_learner(learner.member, learner.step_time)
        learner.optimizer, learner.accounts, learner.clocks = fresh.optimizer, fresh.accounts, fresh.clocks
        learner.bases, learner.steps = [one.version for one in self.rounds], fresh.steps
        learner.opened, learner.arrived, learner.cues = {}, {}, set()
        for theta, state in zip(learner.theta, self.states, strict=True):
            theta[:] = state.parameters
        learner.life += 1
        learner.is_up = learner.is_live = True
        self.begin_step(now, learner)

    # ------------------------------------------------------------------------------------------------------- the outer

    def on_arrival(self, now: float, opened: Open) -> None:
        contribution = opened.contribution
        fragment = contribution.id.fragment
        one = self.rounds[fragment]
        one.opened_at = one.opened_at if one.pending else now
        one.pending[contribution.id.learner] = opened
        if self.sync.has_cues and len(one.pending) == 1:
            self.at(now + LATENCY, self.on_cue, fragment, one.version)
        self.consider(now, fragment)

    def consider(self, now: float, fragment: int) -> None:
        """Merges what is pending, if nobody is left to wait for, or later, if there is a quorum."""
        one = self.rounds[fragment]
        live = live_learners([self.info_of(learner) for learner in self.learners])
        if has_everyone(one.pending, live):
            self.merge(now, fragment)
        elif one.merge_at is None and has_quorum(one.pending, live, self.sync.quorum):
            one.merge_at = now + self.grace
            self.at(one.merge_at, self.on_grace_end, fragment, one.version)

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
            learning_rate=outer_rate(self.sync, self.progress),
            averages=Averages(),
            grace_seconds=self.grace,
            waited_seconds=0.0,
        )
        deltas = (opened.decoded for opened in merged)
        made = make_version(self.states[fragment], deltas, recipe, self.sync, self.manifest.slices(fragment))
        self.states[fragment] = made.state
        self.down.add(len(made.update), made.state.parameters.size)
        one.version, one.merge_at, one.pending = one.version + 1, None, {}
        self.participants.append(len(merged))
        self.waits.append(now - one.opened_at)
        ids = frozenset(opened.contribution.id for opened in merged)
        self.at(now + LATENCY, self.on_version, fragment, one.version, made.state.parameters, ids)

    def info_of(self, learner: Learner) -> LearnerInfo:
        rate = self.task.tokens_per_batch / learner.step_time
        return LearnerInfo(
            learner=learner.name,
            region="eu",
            incarnation="ab" * 8,
            is_live=learner.is_live,
            last_seen_unix=0.0,
            tokens=1,
            tokens_per_second=rate,
            step_seconds=learner.step_time,
        )

    def drain(self, now: float) -> None:
        """What every learner still has, as one last full round of each fragment, which no mean counts."""
        num_rounds = len(self.participants)
        for fragment in self.fragments:
            for learner in self.learners:
                if not learner.is_up:
                    continue
                if fragment in learner.arrived:
                    self.apply(learner, fragment)
                if learner.steps[fragment] and fragment not in learner.opened:
                    self.rounds[fragment].pending[learner.name] = self.contribute(learner, fragment)
            if self.rounds[fragment].pending:
                self.merge(now, fragment)
        del self.participants[num_rounds:], self.waits[num_rounds:]
