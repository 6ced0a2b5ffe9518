"""Faults happen when the plan says, to whom it says, and are undone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from isles.ops.chaos.campaign import (
    CLEAR,
    GONE,
    Begun,
    Campaign,
    Corrupt,
    Event,
    Failed,
    FillDisk,
    Finish,
    FreeDisk,
    Freeze,
    Instruction,
    Kill,
    LinkShape,
    Process,
    Reset,
    Seen,
    Shape,
    Stopped,
    Thaw,
    Tick,
)
from isles.ops.chaos.plan import Fault, Plan
from isles.proto.clock import ManualClock

BROKER = Process("broker", "broker", "", 1)
OUTER = Process("outer", "outer", "", 2)
US_0 = Process("us-0", "worker", "us", 3)
US_1 = Process("us-1", "worker", "us", 4)
EU_0 = Process("eu-0", "worker", "eu", 5)
EVERYBODY = (BROKER, OUTER, US_0, US_1, EU_0)


class World:
    """A campaign and the clock that it is told of."""

    def __init__(self, *faults: dict[str, Any], seed: int = 0) -> None:
        plan = Plan(fault=tuple(Fault(**fault) for fault in faults))
        self.campaign = Campaign(plan, random.Random(seed))
        self.clock = ManualClock(100.0)
        self.say(Seen(EVERYBODY))

    def say(self, event: Event) -> list[Instruction]:
        return self.campaign.handle(event, self.clock.now())

    def after(self, seconds: float) -> list[Instruction]:
        self.clock.advance(seconds)
        return self.say(Tick())


def test_nothing_happens_before_the_beginning() -> None:
    world = World({"at": 0.0, "kind": "kill", "process": "us-0"})
    assert world.after(1000.0) == []
    assert world.say(Begun()) == [Kill(1, (US_0,)), Finish()]


def test_faults_happen_in_the_order_of_their_times_whatever_their_order_in_the_plan() -> None:
    world = World({"at": 9.0, "kind": "kill", "process": "us-0"}, {"at": 4.0, "kind": "kill", "role": "outer"})
    assert world.say(Begun()) == []
    assert world.after(3.9) == []
    assert world.after(0.2) == [Kill(1, (OUTER,))]
    assert world.after(5.0) == [Kill(2, (US_0,)), Finish()]


def test_a_frozen_process_thaws_when_its_time_is_over() -> None:
    world = World({"at": 0.0, "kind": "freeze", "process": "eu-0", "seconds": 12.0})
    assert world.say(Begun()) == [Freeze(1, EU_0)]
    assert world.after(11.9) == []
    assert world.after(0.2) == [Thaw(1, EU_0), Finish()]
    injection = world.campaign.injections[1]
    assert (injection.began_at, injection.targets) == (100.0, ("eu-0",))
    assert injection.ended_at == pytest.approx(112.1)


def test_a_process_that_was_frozen_twice_thaws_once_when_both_are_over() -> None:
    world = World(
        {"at": 0.0, "kind": "freeze", "process": "eu-0", "seconds": 10.0},
        {"at": 5.0, "kind": "freeze", "process": "eu-0", "seconds": 10.0},
    )
    world.say(Begun())
    assert world.after(5.0) == [Freeze(2, EU_0)]
    assert world.after(5.0) == []
    assert world.after(5.0) == [Thaw(2, EU_0), Finish()]


def test_a_region_that_is_cut_off_is_healed_whole() -> None:
    world = World({"at": 0.0, "kind": "cut", "region": "us", "seconds": 3.0})
    hole = LinkShape(is_blackhole=True)
    assert world.say(Begun()) == [Shape(1, "us-0", hole), Shape(1, "us-1", hole)]
    assert world.after(3.0) == [Shape(1, "us-0", CLEAR), Shape(1, "us-1", CLEAR), Finish()]


def test_a_link_obeys_its_newest_fault_and_then_the_one_before() -> None:
    world = World(
        {"at": 0.0, "kind": "delay", "process": "us-0", "seconds": 9.0, "delay_seconds": 0.5},
        {"at": 2.0, "kind": "rate", "process": "us-0", "seconds": 3.0, "bytes_per_second": 1000},
    )
    slow, thin = LinkShape(delay_seconds=0.5), LinkShape(bytes_per_second=1000)
    assert world.say(Begun()) == [Shape(1, "us-0", slow)]
    assert world.after(2.0) == [Shape(2, "us-0", thin)]
    assert world.after(3.0) == [Shape(2, "us-0", slow)]
    assert world.after(4.0) == [Shape(1, "us-0", CLEAR), Finish()]


def test_all_processes_are_killed_at_once() -> None:
    world = World({"at": 0.0, "kind": "kill-all"})
    assert world.say(Begun()) == [Kill(1, EVERYBODY), Finish()]


def test_a_network_fault_without_a_name_hits_a_worker() -> None:
    for seed in range(20):
        orders = World({"at": 0.0, "kind": "reset"}, seed=seed).say(Begun())
        assert isinstance(orders[0], Reset)
        assert orders[0].worker in ("us-0", "us-1", "eu-0")


def test_of_the_outers_the_one_that_merges_is_meant() -> None:
    merging = Process("outer-2", "outer", "", 6, is_merging=True)
    for seed in range(9):
        world = World({"at": 0.0, "kind": "kill", "role": "outer"}, seed=seed)
        world.say(Seen((*EVERYBODY, merging)))
        assert world.say(Begun()) == [Kill(1, (merging,)), Finish()]


def test_a_fault_whose_process_is_not_there_is_skipped_and_recorded() -> None:
    world = World({"at": 0.0, "kind": "freeze", "process": "asia-7", "seconds": 5.0})
    assert world.say(Begun()) == [Finish()]
    assert world.campaign.injections[1].failure == GONE


def test_a_fault_that_failed_halfway_is_undone_and_says_why() -> None:
    world = World({"at": 0.0, "kind": "cut", "region": "us", "seconds": 30.0})
    world.say(Begun())
    orders = world.say(Failed(1, "no link"))
    assert orders == [Shape(1, "us-0", CLEAR), Shape(1, "us-1", CLEAR), Finish()]
    assert world.campaign.injections[1].failure == "no link"


def test_the_disk_is_freed_when_the_last_fault_that_filled_it_is_over() -> None:
    world = World(
        {"at": 0.0, "kind": "disk-full", "seconds": 4.0},
        {"at": 1.0, "kind": "disk-full", "seconds": 4.0},
        {"at": 2.0, "kind": "corrupt"},
    )
    assert world.say(Begun()) == [FillDisk(1)]
    assert world.after(1.0) == [FillDisk(2)]
    assert world.after(1.0) == [Corrupt(3)]
    assert world.after(2.0) == []
    assert world.after(1.0) == [FreeDisk(2), Finish()]


def test_everything_is_undone_when_the_run_ends_early_and_nothing_more_happens() -> None:
    world = World(
        {"at": 0.0, "kind": "freeze", "process": "us-0", "seconds": 600.0},
        {"at": 0.0, "kind": "refuse", "process": "eu-0", "seconds": 600.0},
        {"at": 50.0, "kind": "kill-all"},
    )
    world.say(Begun())
    world.clock.advance(1.0)
    assert world.say(Stopped()) == [Thaw(1, US_0), Shape(2, "eu-0", CLEAR), Finish()]
    assert world.after(100.0) == []
    assert set(world.campaign.injections) == {1, 2}


def test_the_same_seed_hits_the_same_processes() -> None:
    faults = [{"at": float(n), "kind": "kill", "role": "worker"} for n in range(12)]
    hit = []
    for seed in (5, 5, 6):
        world = World(*faults, seed=seed)
        world.say(Begun())
        world.after(20.0)
        hit.append([one.targets for one in world.campaign.injections.values()])
    assert hit[0] == hit[1] != hit[2]
