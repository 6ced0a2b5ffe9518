"""Which settings make every late contribution cue everybody again. Session and rounds are the real ones.

A cued learner hands in at its next step boundary. A round that has ended by then gives the contribution to the next
one, which cues all others, whose contributions come too late again: every fragment has a round with every step then,
whatever the interval.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, Final, get_args

import pytest

from isles.ops.simulation.timeline import Timeline
from isles.outer import orders as outer_orders
from isles.outer.rounds import Rounds
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    Accepted,
    BlobRef,
    Committed,
    Contribution,
    Head,
    LearnerInfo,
    Listing,
    Row,
    VersionInfo,
)
from isles.proto.presets import QUORUM_MAX, Preset
from isles.proto.timeouts import cue_doubt
from isles.workers import orders
from isles.workers.session import Session

INCARNATION: Final = "ab" * 8
STEP_SECONDS: Final = 1.0
MESSAGE_SECONDS: Final = 0.05
TRANSFER_SECONDS: Final = 0.3
MERGE_SECONDS: Final = 0.3
NUM_LEARNERS: Final = 4
SPREAD: Final = 0.1
"""Of their speeds, so that they are in any phase to one another."""
NUM_CYCLES: Final = 20


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Fragment:
    """The store's part of one fragment, with the rounds of an outer."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.world = number, world
        self.head = VersionInfo(fragment=number, version=0, parameters_sha256=digest("0"))
        self.pending: dict[str, Contribution] = {}
        self.rows: dict[str, Row] = {}
        self.num_merged = 0
        self.rounds = Rounds(number, world.sync, Budget(tokens=1 << 40))

    def tell(self, event: outer_orders.Event) -> None:
        for order in self.rounds.handle(event, self.world.timeline.now):
            self.perform(order)

    def perform(self, order: outer_orders.Instruction) -> None:
        later = self.world.later
        match order:
            case outer_orders.List():
                pending = tuple(sorted(self.pending.values(), key=lambda one: one.id))
                later(0.0, self.tell, outer_orders.Listed(Listing(head=self.head, pending=pending, learners=INFOS)))
            case outer_orders.FetchPayloads(contributions):
                for one in contributions:
                    later(0.0, self.tell, outer_orders.PayloadScreened(one.id))
            case outer_orders.Merge(plan):
                blob = BlobRef(digest=digest("update"), size_bytes=1)
                blobs = outer_orders.NewBlobs(digest("1"), digest("2"), blob)
                later(MERGE_SECONDS, self.tell, outer_orders.Merged(plan, blobs))
            case outer_orders.Commit(plan):
                self.commit(plan)
            case outer_orders.SetTimer(at):
                self.world.timeline.plan(at, self.tell, outer_orders.TimerFired())

    def take(self, contribution: Contribution) -> None:
        learner = contribution.id.learner
        self.pending[learner] = contribution
        self.rows[learner] = Row(id=contribution.id, state="pending")
        self.world.learners[learner].handle(Accepted(id=contribution.id), self.world.timeline.now)
        for other, session in self.world.learners.items():
            if other != learner:
                self.world.later(MESSAGE_SECONDS, session.handle, orders.Cued(self.number, self.head.version), 0.0)
        self.tell(outer_orders.Hinted())

    def commit(self, plan: outer_orders.Plan) -> None:
        version = self.head.version + 1
        self.head = VersionInfo(
            fragment=self.number, version=version, parameters_sha256=digest("1"), recipe=plan.recipe
        )
        for one in plan.contributions:
            del self.pending[one.id.learner]
            self.rows[one.id.learner] = Row(id=one.id, state="merged", settled_in=version)
        self.num_merged += len(plan.contributions)
        for learner in self.world.learners:
            self.world.later(MESSAGE_SECONDS + TRANSFER_SECONDS, self.publish, learner, version)
        self.tell(Committed(fragment=self.number, version=version))

    def publish(self, learner: str, version: int) -> None:
        self.world.learners[learner].handle(
            orders.VersionArrived(self.number, version, self.rows.get(learner)), self.world.timeline.now
        )


class World:
    """Learners of one speed, in any phase, around a store whose links and merges take their time."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.timeline = Timeline()
        self.sync = SyncSettings(**{"interval_steps": 12, "num_fragments": 3, "quorum": 1, **settings})
        chance = random.Random(seed)
        self.learners = {name: Session(self.sync, name, INCARNATION) for name in NAMES}
        self.fragments = [Fragment(number, self) for number in range(self.sync.num_fragments)]
        for session in self.learners.values():
            session.handle(orders.Welcomed([Head(fragment=one.number, version=0) for one in self.fragments], []), 0.0)
            for one in self.fragments:
                session.handle(orders.VersionArrived(one.number, 0, None), 0.0)
            session.handle(orders.Boundary(), 0.0)
            seconds = STEP_SECONDS * chance.uniform(1 - SPREAD, 1 + SPREAD)
            self.later(chance.random() * seconds, self.step, session, seconds)
        for one in self.fragments:
            one.tell(outer_orders.LeaseGranted(1))

    def later(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        self.timeline.plan(self.timeline.now + seconds, call, *arguments)

    def step(self, session: Session, seconds: float) -> None:
        self.later(seconds, self.step, session, seconds)
        for order in session.handle(orders.StepTaken(10, seconds), self.timeline.now):
            if isinstance(order, orders.TakeAccount):
                session.handle(orders.PayloadEncoded(order.id), self.timeline.now)
                self.later(TRANSFER_SECONDS, self.fragments[order.fragment].take, contribution_of(order))

    def run(self) -> tuple[float, float]:
        """Rounds of a fragment in each interval, and the share of the learners that were in one."""
        self.timeline.advance_to(NUM_CYCLES * self.sync.interval_steps * STEP_SECONDS)
        num_rounds = sum(one.head.version for one in self.fragments)
        num_merged = sum(one.num_merged for one in self.fragments)
        return num_rounds / (NUM_CYCLES * len(self.fragments)), num_merged / (num_rounds * NUM_LEARNERS)


NAMES: Final = tuple(f"l{number}" for number in range(NUM_LEARNERS))
INFOS: Final = tuple(
    LearnerInfo(
        learner=name,
        region="eu",
        incarnation=INCARNATION,
        is_live=True,
        last_seen_unix=1.0,
        tokens_per_second=10.0,
        step_seconds=STEP_SECONDS,
    )
    for name in NAMES
)


def contribution_of(order: orders.TakeAccount) -> Contribution:
    name: ContributionId = order.id
    return Contribution(
        id=name,
        base_version=order.base_version,
        blob=BlobRef(digest=digest(str(name)), size_bytes=1),
        codec="int4",
        tokens=order.tokens,
        steps=order.steps,
        seconds=order.seconds,
        norms=(1.0,),
    )


SEEDS = pytest.mark.parametrize("seed", range(3))
STORMY: Final[tuple[dict[str, Any], ...]] = (
    {"overlap_steps": 1.0},
    {"overlap_steps": 1.0, "interval_steps": 24},
    {"overlap_steps": 1.0, "quorum": 2},
    {"overlap_steps": 3.0, "grace_share": 0.3},
    {"grace_max_seconds": 0.0},
)
CALM: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"overlap_steps": 2.0},
    {"overlap_steps": 3.0, "interval_steps": 2},
    {"overlap_steps": 1.0, "grace_min_seconds": 1.5},
    {"overlap_steps": 1.0, "quorum": QUORUM_MAX},
)


@SEEDS
@pytest.mark.parametrize("settings", STORMY, ids=str)
def test_a_window_shorter_than_a_step_makes_many_rounds_of_few_and_is_doubted(
    settings: dict[str, Any], seed: int
) -> None:
    world = World(seed, **settings)
    num_rounds, share = world.run()
    assert num_rounds > 2
    assert share < 0.8
    assert cue_doubt(world.sync)


@SEEDS
@pytest.mark.parametrize("settings", CALM, ids=str)
def test_a_window_of_a_step_and_an_exchange_holds_everybody_once_in_an_interval(
    settings: dict[str, Any], seed: int
) -> None:
    world = World(seed, **settings)
    num_rounds, share = world.run()
    assert num_rounds < 1.2
    assert share > 0.95
    assert cue_doubt(world.sync) == ""


def test_without_cues_nobody_is_called_again() -> None:
    world = World(0, overlap_steps=1.0, has_cues=False)
    num_rounds, _ = world.run()
    assert num_rounds <= NUM_LEARNERS
    assert cue_doubt(world.sync) == ""


@pytest.mark.parametrize("preset", get_args(Preset))
def test_no_preset_is_doubted(preset: Preset) -> None:
    assert cue_doubt(SyncSettings(preset=preset)) == ""
