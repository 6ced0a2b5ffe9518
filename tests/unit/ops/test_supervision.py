"""Children are kept alive, refusals end the run, and the end goes through its stages in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from isles.ops.supervision import (
    BACKOFF_SECONDS,
    CRASHES_MAX,
    FAILED_DRAIN_SECONDS,
    HEALTHY_SECONDS,
    REFUSALS_MAX,
    ChildExited,
    Conclude,
    Concluded,
    End,
    Event,
    Instruction,
    Interrupted,
    Kill,
    Observed,
    Start,
    Supervision,
    Terminate,
    Tick,
)
from isles.proto.errors import QuarantinedError, StoreFullError

CHILDREN = (
    ("broker", "broker"),
    ("outer", "outer"),
    ("evaluator", "evaluator"),
    ("us-0", "worker"),
    ("eu-0", "worker"),
)
DRAIN_SECONDS = 60.0


class World:
    """A supervision and a clock that moves when told to."""

    def __init__(self, *, stall_seconds: float = 0.0) -> None:
        self.now = 100.0
        self.supervision = Supervision.of(CHILDREN, drain_seconds=DRAIN_SECONDS, stall_seconds=stall_seconds)
        self.orders: list[Instruction] = self.supervision.start(self.now)

    def handle(self, event: Event) -> list[Instruction]:
        orders = self.supervision.handle(event, self.now)
        self.orders += orders
        return orders

    def wait(self, seconds: float) -> list[Instruction]:
        self.now += seconds
        return self.handle(Tick())

    def exits(self, child: str, code: int) -> list[Instruction]:
        return self.handle(ChildExited(child, code))

    def observes(self, progress: float, rounds: int = 1) -> list[Instruction]:
        return self.handle(Observed(progress, rounds, self.now))

    def finish_training(self) -> list[Instruction]:
        self.observes(1.0)
        self.exits("us-0", 0)
        return self.exits("eu-0", 0)


@pytest.fixture
def world() -> World:
    return World()


def names(orders: Sequence[Instruction], kind: type[Start | Terminate | Kill]) -> list[str]:
    return [order.child for order in orders if isinstance(order, kind)]


def ends(orders: Sequence[Instruction]) -> list[End]:
    return [order for order in orders if isinstance(order, End)]


def test_everything_is_started_broker_first(world: World) -> None:
    assert names(world.orders, Start) == [name for name, _ in CHILDREN]


def test_a_child_that_dies_is_restarted_at_once(world: World) -> None:
    world.wait(HEALTHY_SECONDS)
    assert world.exits("us-0", -9) == [Start("us-0")]
    assert world.supervision.num_restarts == 1


def test_deaths_in_a_row_are_answered_later_and_later(world: World) -> None:
    for delay in BACKOFF_SECONDS:
        orders = world.exits("outer", 1)
        if delay:
            assert orders == []
            assert world.wait(delay * 0.99) == []
            assert world.wait(delay * 0.01) == [Start("outer")]
        else:
            assert orders == [Start("outer")]


def test_ten_healthy_seconds_make_the_next_restart_immediate_again(world: World) -> None:
    world.exits("outer", 1)
    world.exits("outer", 1)
    world.wait(BACKOFF_SECONDS[1])
    world.wait(HEALTHY_SECONDS)
    assert world.exits("outer", 1) == [Start("outer")]


def test_a_child_that_dies_at_once_again_and_again_ends_the_run_with_a_sentence(world: World) -> None:
    for _ in range(CRASHES_MAX):
        orders = world.exits("outer", 1)
        while world.supervision.status is None and not world.supervision.children["outer"].is_running:
            world.wait(1.0)
    assert world.supervision.status == "failed"
    assert "outer died" in world.supervision.text
    assert names(orders, Terminate) == ["us-0", "eu-0"]


def test_a_broker_that_has_no_room_on_its_disk_is_tried_for_as_long_as_it_takes(world: World) -> None:
    for _ in range(3 * CRASHES_MAX):
        world.exits("broker", StoreFullError.exit_code)
        world.wait(BACKOFF_SECONDS[-1])
        assert world.supervision.children["broker"].is_running
    world.wait(HEALTHY_SECONDS)
    assert world.exits("broker", 1) == [Start("broker")], "once there was room it is like any other"


def test_a_quarantined_worker_costs_the_others_nothing(world: World) -> None:
    for _ in range(3 * CRASHES_MAX):
        world.exits("us-0", QuarantinedError.exit_code)
        world.observes(0.5, rounds=world.supervision.rounds + 1)
        world.wait(BACKOFF_SECONDS[-1])
        assert world.supervision.children["us-0"].is_running, "it is tried for as long as the run takes"
        world.exits("us-0", QuarantinedError.exit_code)
        world.wait(BACKOFF_SECONDS[-1])
    world.exits("us-0", QuarantinedError.exit_code)
    world.exits("us-0", QuarantinedError.exit_code)
    world.observes(1.0)
    world.exits("eu-0", 0)
    assert world.supervision.status == "finished", "and not waited for at the end"


@pytest.mark.parametrize("code", [2, 3, 4, 6])
def test_a_refused_child_is_tried_a_few_times_only(world: World, code: int) -> None:
    for _ in range(REFUSALS_MAX):
        assert world.supervision.status is None
        world.exits("us-0", code)
        world.wait(BACKOFF_SECONDS[-1] / 2)
    assert world.supervision.status == "failed"
    assert f"us-0 cannot run (exit code {code}" in world.supervision.text


def test_a_worker_that_was_asked_to_leave_by_somebody_else_is_started_again(world: World) -> None:
    world.wait(HEALTHY_SECONDS)
    assert world.exits("us-0", 0) == []
    world.now += 1
    assert world.observes(0.5) == [Start("us-0")]


def test_a_worker_is_not_judged_by_what_was_asked_before_it_ended(world: World) -> None:
    world.wait(HEALTHY_SECONDS)
    world.exits("us-0", 0)
    assert world.handle(Observed(0.99, 7, world.now - 0.5)) == []


def test_workers_that_ended_do_not_end_the_run_before_the_broker_says_it_is_complete(world: World) -> None:
    world.exits("us-0", 0)
    world.exits("eu-0", 0)
    assert world.supervision.status is None
    world.now += 1
    assert world.observes(1.0)[0] == Terminate("evaluator")


def test_a_finished_run_ends_in_order(world: World) -> None:
    assert world.finish_training() == [Terminate("evaluator")]
    assert world.exits("evaluator", 0) == [Conclude()]
    assert world.handle(Concluded()) == [Terminate("outer")]
    assert world.exits("outer", 0) == [Terminate("broker")]
    assert world.exits("broker", 0) == [End("finished", "the budget is reached")]
    assert ends(world.orders)[0].exit_code == 0
    assert world.supervision.num_restarts == 0


def test_the_broker_is_still_restarted_while_others_stop(world: World) -> None:
    world.wait(HEALTHY_SECONDS)
    world.handle(Interrupted())
    assert world.exits("broker", -9) == [Start("broker")]


def test_an_interrupt_drains_the_workers_first(world: World) -> None:
    assert world.handle(Interrupted()) == [Terminate("us-0"), Terminate("eu-0")]
    assert world.exits("us-0", 0) == []
    assert world.exits("eu-0", 0) == [Terminate("evaluator")]
    world.exits("evaluator", 0)
    world.handle(Concluded())
    world.exits("outer", 0)
    (end,) = ends(world.exits("broker", 0))
    assert end.exit_code == 130


def test_a_worker_that_died_before_the_interrupt_is_not_started_for_it(world: World) -> None:
    world.exits("us-0", 1)
    world.exits("us-0", 1)
    world.handle(Interrupted())
    world.wait(BACKOFF_SECONDS[-1])
    assert names(world.orders, Start).count("us-0") == 2


def test_a_worker_that_does_not_drain_in_time_is_killed(world: World) -> None:
    world.handle(Interrupted())
    assert world.wait(DRAIN_SECONDS * 0.9) == []
    assert world.wait(DRAIN_SECONDS * 0.1) == [Kill("us-0"), Kill("eu-0")]
    world.exits("us-0", -9)
    assert world.exits("eu-0", -9) == [Terminate("evaluator")]


def test_a_second_interrupt_kills_everything_at_once(world: World) -> None:
    world.handle(Interrupted())
    orders = world.handle(Interrupted())
    assert names(orders, Kill) == [name for name, _ in CHILDREN]
    assert ends(orders)[0].exit_code == 130


def test_a_worker_that_never_notices_the_end_is_asked_and_then_killed(world: World) -> None:
    world.observes(1.0)
    world.exits("us-0", 0)
    assert world.wait(DRAIN_SECONDS) == [Terminate("eu-0")]
    assert world.wait(DRAIN_SECONDS) == [Kill("eu-0")]
    assert world.exits("eu-0", -9) == [Terminate("evaluator")]
    assert world.supervision.status == "finished"


def test_a_run_without_new_rounds_ends_after_the_stall_time() -> None:
    world = World(stall_seconds=300.0)
    world.observes(0.1, rounds=3)
    world.now += 299
    assert world.observes(0.1, rounds=3) == []
    assert names(world.wait(1), Terminate) == ["us-0", "eu-0"]
    assert world.supervision.text == "no round was committed for 300 s"


def test_a_run_that_nobody_begins_is_given_up_sooner_and_names_the_last_warning() -> None:
    world = World(stall_seconds=300.0)
    world.supervision.last_warning = "last warning of us-0: no corpus"
    assert world.wait(99) == []
    world.wait(1)
    assert world.supervision.text == "nobody began the run in 100 s; last warning of us-0: no corpus"


def test_a_new_round_resets_the_stall_time() -> None:
    world = World(stall_seconds=300.0)
    for rounds in range(5):
        world.now += 299
        world.observes(0.1, rounds=rounds)
    assert world.supervision.status is None


def test_a_failed_run_does_not_wait_long_for_anybody(world: World) -> None:
    for _ in range(REFUSALS_MAX):
        world.exits("outer", 2)
        world.wait(BACKOFF_SECONDS[2])
    assert names(world.wait(FAILED_DRAIN_SECONDS), Kill) == ["us-0", "eu-0"]


def test_results_that_cannot_be_written_make_the_run_fail(world: World) -> None:
    world.finish_training()
    world.exits("evaluator", 0)
    world.handle(Concluded(fault="the disk is full"))
    world.exits("outer", 0)
    (end,) = ends(world.exits("broker", 0))
    assert (end.status, end.text, end.exit_code) == ("failed", "the disk is full", 1)


def test_nothing_is_ordered_after_the_end(world: World) -> None:
    world.handle(Interrupted())
    world.handle(Interrupted())
    assert world.exits("broker", -9) == []
    assert world.wait(1e6) == []


def test_no_way_of_dying_leaves_the_run_waiting_for_ever(world: World) -> None:
    """Whatever a child does, killing is the last word."""
    world.handle(Interrupted())
    for _ in range(40):
        orders = world.wait(DRAIN_SECONDS)
        for name in names(orders, Kill):
            world.exits(name, -9)
        if Conclude() in world.orders and not ends(world.orders):
            world.handle(Concluded(fault="nobody answered"))
        if ends(world.orders):
            break
    assert ends(world.orders) == [End("interrupted", "stopped as asked; nobody answered")]
