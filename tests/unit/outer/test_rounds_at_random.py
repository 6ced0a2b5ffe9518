"""The round machine against a small store, under random schedules of loss, delay and rivals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from isles.outer import orders
from isles.outer.rounds import Rounds, State
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.messages import (
    BlobRef,
    Committed,
    Contribution,
    Fenced,
    LearnerInfo,
    Listing,
    Message,
    Settled,
    Stale,
    VersionInfo,
)

NUM_LEARNERS = 4
BLOBS = orders.NewBlobs(
    parameters_sha256="1" * 64, optimizer_sha256="3" * 64, update=BlobRef(digest="2" * 64, size_bytes=10)
)


@dataclass
class FakeStore:
    """Head, rows and epoch of one fragment, and the rules of LIST, SETTLE and COMMIT."""

    head: VersionInfo
    epoch: int = 1
    pending: dict[str, Contribution] = field(default_factory=dict)
    merged: list[Contribution] = field(default_factory=list)
    rejected: list[Contribution] = field(default_factory=list)
    learners: list[LearnerInfo] = field(default_factory=list)

    def list(self) -> Listing:
        pending = tuple(sorted(self.pending.values(), key=lambda contribution: contribution.id))
        return Listing(head=self.head, pending=pending, learners=tuple(self.learners))

    def settle(self, order: orders.Settle) -> Message:
        if order.epoch != self.epoch:
            return Fenced(epoch=self.epoch)
        for rejection in order.rejections:
            row = self.pending.get(rejection.id.learner)
            if row is not None and row.id == rejection.id:
                self.rejected.append(self.pending.pop(rejection.id.learner))
        return Settled(fragment=0)

    def commit(self, plan: orders.Plan) -> Message:
        if plan.epoch < self.epoch:
            return Fenced(epoch=self.epoch)
        if self.head.version != plan.head.version:
            return Stale(fragment=0, head=self.head.version)
        if any(self.pending.get(row.id.learner) != row for row in plan.contributions):
            return Stale(fragment=0, head=self.head.version, reason="row")
        for row in plan.contributions:
            self.merged.append(self.pending.pop(row.id.learner))
        self.head = self.head.model_copy(update={"version": self.head.version + 1, "recipe": plan.recipe})
        return Committed(fragment=0, version=self.head.version)


class Schedule:
    """One seed: the rounds, the store, what is under way between them, and what chance does to it."""

    def __init__(self, seed: int, store: FakeStore, make_contribution: Callable[..., Contribution]) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.make_contribution = make_contribution
        self.now = 0.0
        self.timer_at: float | None = None
        self.number = 0
        self.poisoned: set[str] = set()
        self.under_way: list[orders.Event] = []
        quorum = self.random.randint(1, NUM_LEARNERS + 1)
        self.rounds = Rounds(0, SyncSettings(quorum=quorum, grace_max_seconds=0.3), Budget(rounds=100))
        self.tell(orders.LeaseGranted(1))

    def tell(self, event: orders.Event) -> None:
        for order in self.rounds.handle(event, self.now):
            match order:
                case orders.List():
                    self.under_way.append(orders.Listed(self.store.list()))
                case orders.FetchPayloads():
                    for row in order.contributions:
                        reason = "poison" if str(row.id) in self.poisoned else ""
                        self.under_way.append(orders.PayloadScreened(row.id, reason))
                case orders.Settle():
                    self.under_way.append(self.store.settle(order))  # type: ignore[arg-type]
                case orders.Merge():
                    assert self.rounds.state is State.MERGING
                    assert not any(str(row.id) in self.poisoned for row in order.plan.contributions)
                    self.under_way.append(orders.Merged(order.plan, BLOBS))
                case orders.Commit():
                    self.under_way.append(self.store.commit(order.plan))  # type: ignore[arg-type]
                case orders.SetTimer():
                    self.timer_at = order.at

    def contribute(self, learner: str, *, may_be_poison: bool = True) -> None:
        if learner in self.store.pending:
            return
        self.number += 1
        row = self.make_contribution(learner, self.number, base_version=self.store.head.version)
        self.store.pending[learner] = row
        if may_be_poison and self.random.random() < 0.3:
            self.poisoned.add(str(row.id))
        if self.random.random() < 0.7:
            self.tell(orders.Hinted())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.timer_at is not None and self.now >= self.timer_at:
            self.timer_at = None
            self.tell(orders.TimerFired())

    def rival(self) -> None:
        """Another outer is quicker: with this epoch, or with a newer one."""
        if self.random.random() < 0.5:
            self.store.epoch += 1
        for learner in list(self.store.pending):
            if self.random.random() < 0.5:
                self.store.merged.append(self.store.pending.pop(learner))
        self.store.head = self.store.head.model_copy(update={"version": self.store.head.version + 1})

    def liveness(self) -> None:
        changed = self.random.randrange(NUM_LEARNERS)
        info = self.store.learners[changed]
        fields = {"is_live": self.random.random() < 0.7, "is_draining": self.random.random() < 0.2}
        self.store.learners[changed] = info.model_copy(update=fields)

    def step(self) -> None:
        match self.random.randrange(12):
            case 0 | 1:
                self.contribute(f"l{self.random.randrange(NUM_LEARNERS)}")
            case 2 | 3:
                self.pass_time(self.random.choice([0.01, 0.1, 1.0, 3.0]))
            case 4 if self.random.random() < 0.2:
                self.rival()
            case 5 if self.random.random() < 0.3:
                self.liveness()
            case 6 if self.random.random() < 0.1:
                self.tell(orders.Rejoined())
            case 7 if self.random.random() < 0.2:
                self.tell(orders.LeaseLost())
            case 8:
                self.tell(orders.LeaseGranted(self.store.epoch))
            case _ if self.under_way:
                self.tell(self.under_way.pop(self.random.randrange(len(self.under_way))))

    def calm_down(self) -> None:
        """The learners drain, nothing is lost any more, and time passes."""
        self.store.learners = [info.model_copy(update={"is_draining": True}) for info in self.store.learners]
        for _ in range(200):
            if self.rounds.is_standing_by:
                self.tell(orders.LeaseGranted(self.store.epoch))
            while self.under_way:
                self.tell(self.under_way.pop(0))
            self.pass_time(0.5)


@pytest.fixture
def make_schedule(
    make_contribution: Callable[..., Contribution],
    make_learner: Callable[..., LearnerInfo],
    make_head: Callable[..., VersionInfo],
) -> Callable[[int], Schedule]:
    def make(seed: int) -> Schedule:
        learners = [make_learner(f"l{number}") for number in range(NUM_LEARNERS)]
        return Schedule(seed, FakeStore(make_head(), learners=learners), make_contribution)

    return make


@pytest.mark.parametrize("first_seed", range(0, 300, 30))
def test_no_schedule_ends_with_a_stuck_round(first_seed: int, make_schedule: Callable[[int], Schedule]) -> None:
    for seed in range(first_seed, first_seed + 30):
        schedule = make_schedule(seed)
        for _ in range(150):
            schedule.step()
        for learner in range(NUM_LEARNERS):
            schedule.contribute(f"l{learner}", may_be_poison=False)
        schedule.calm_down()
        store = schedule.store
        assert not store.pending, f"seed {seed}: {schedule.rounds.state}, {list(store.pending)}"
        settled = [*store.merged, *store.rejected]
        assert len({row.id for row in settled}) == len(settled) == schedule.number, f"seed {seed}"
