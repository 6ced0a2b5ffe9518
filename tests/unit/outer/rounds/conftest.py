"""The round machine, driven by events on a clock that moves only when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from isles.outer import orders
from isles.outer.orders import (
    Hinted,
    LeaseGranted,
    Listed,
    Log,
    Merge,
    NewBlobs,
    PayloadScreened,
    Plan,
    SetTimer,
    TimerFired,
)
from isles.outer.rounds import Rounds, State
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.messages import (
    BlobRef,
    Contribution,
    LearnerInfo,
    Listing,
)

BLOBS = NewBlobs(parameters_sha256="1" * 64, optimizer_sha256="3" * 64, update=BlobRef(digest="2" * 64, size_bytes=10))
LIST_SECONDS = 2.0
GRACE_SECONDS = 0.5
SYNC = SyncSettings(quorum=1, grace_min_seconds=GRACE_SECONDS, grace_max_seconds=GRACE_SECONDS)

_Kind = TypeVar("_Kind")


class Bench:
    """Rounds with a clock and a memory of what they ordered last."""

    blobs = BLOBS
    list_seconds = LIST_SECONDS
    grace_seconds = GRACE_SECONDS

    def __init__(self, sync: SyncSettings, make_listing: Callable[..., Listing], num_required: int = 0) -> None:
        self.clock = ManualClock()
        self.rounds = Rounds(0, sync, Budget(rounds=100), list_seconds=LIST_SECONDS, num_required=num_required)
        self.ordered: list[orders.Instruction] = []
        self.logged: list[Log] = []
        self.timer_at: float | None = None
        self.make_listing = make_listing

    def tell(self, event: orders.Event) -> list[orders.Instruction]:
        self.ordered = self.rounds.handle(event, self.clock.now())
        self.logged += [order for order in self.ordered if isinstance(order, Log)]
        for order in self.ordered:
            if isinstance(order, SetTimer):
                self.timer_at = order.at
        return self.ordered

    def look(self, pending: list[Contribution], learners: list[LearnerInfo], version: int = 0, **head: Any) -> None:
        """The store answers a look at it."""
        self.tell(Listed(self.make_listing(pending, learners, version, **head)))

    def hint(self, pending: list[Contribution], learners: list[LearnerInfo], version: int = 0) -> None:
        self.tell(Hinted())
        self.look(pending, learners, version)

    def pass_screen(self, *contributions: Contribution) -> None:
        for contribution in contributions:
            self.tell(PayloadScreened(contribution.id))

    def merge_all(self, rows: list[Contribution], learners: list[LearnerInfo], version: int = 0) -> Plan:
        self.look(rows, learners, version)
        self.pass_screen(*rows)
        return self.one(Merge).plan

    def wait(self, seconds: float) -> list[orders.Instruction]:
        self.clock.advance(seconds)
        return self.tell(TimerFired())

    def one(self, kind: type[_Kind]) -> _Kind:
        [found] = [order for order in self.ordered if isinstance(order, kind)]
        return found

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(order, kind) for order in self.ordered)

    @property
    def state(self) -> State:
        return self.rounds.state

    def log_names(self) -> list[str]:
        return [log.event for log in self.logged]


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(make_listing: Callable[..., Listing]) -> MakeBench:
    def make(*, has_lease: bool = True, num_required: int = 0, **settings: Any) -> Bench:
        bench = Bench(SYNC.model_copy(update=settings), make_listing, num_required)
        if has_lease:
            bench.tell(LeaseGranted(1))
        return bench

    return make


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    return make_bench()


@pytest.fixture
def learners(make_learner: Callable[..., LearnerInfo]) -> list[LearnerInfo]:
    return [make_learner(name) for name in ("a", "b", "c")]


@pytest.fixture
def rows(make_contribution: Callable[..., Contribution]) -> list[Contribution]:
    return [make_contribution(name) for name in ("a", "b", "c")]
