"""The shell does what the campaign orders, and says what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from isles.ops.chaos import runner
from isles.ops.chaos.campaign import Process
from isles.ops.chaos.plan import Fault, Plan
from isles.ops.chaos.runner import Runner
from isles.proto.clock import ManualClock
from isles.proto.errors import UsageError
from isles.proto.logs import ListLogger


class Room:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fill(self) -> int:
        self.calls.append("fill")
        return 5

    def free(self) -> None:
        self.calls.append("free")


class Guard:
    """Notes whom it guards."""

    guarded: ClassVar[list[int]] = []

    def __init__(self, process: Process) -> None:
        self._pid = process.pid
        self.guarded.append(self._pid)

    def close(self) -> None:
        self.guarded.remove(self._pid)


class World:
    """One process, one clock that moves with every sleep, and the signals that were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.logger = ListLogger()
        self.sent: list[tuple[float, str, str]] = []
        self.gone: set[str] = set()
        monkeypatch.setattr("isles.ops.chaos.runner.time.sleep", self.clock.advance)
        monkeypatch.setattr(runner, "send_signal", self.send)
        monkeypatch.setattr(Guard, "guarded", [])
        monkeypatch.setattr(runner, "ThawGuard", Guard)

    def send(self, process: Process, number: Any) -> None:
        if process.name in self.gone:
            raise UsageError(f"{process.name} had ended already")
        if number.name == "SIGSTOP":
            assert process.pid in Guard.guarded
        self.sent.append((round(self.clock.now(), 1), process.name, number.name))

    def find(self) -> tuple[Process, ...]:
        return (Process("us-0", "worker", "us", 1),)

    def runner(self, *faults: dict[str, Any], **tools: Any) -> Runner:
        plan = Plan(fault=tuple(Fault(**fault) for fault in faults))
        return Runner(plan, self, logger=self.logger, clock=self.clock, **tools)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_plan_is_carried_out_and_recorded(world: World) -> None:
    found = world.runner({"at": 1.0, "kind": "freeze", "process": "us-0", "seconds": 2.0}, {"at": 4.0, "kind": "kill"})
    found.run(lambda: world.clock.now() >= 5)
    assert [(name, number) for _, name, number in world.sent] == [
        ("us-0", "SIGSTOP"), ("us-0", "SIGCONT"), ("us-0", "SIGKILL")
    ]  # fmt: skip
    assert [at for at, _, _ in world.sent] == pytest.approx([6.0, 8.0, 9.0], abs=0.15)
    assert world.logger.events() == ["fault.injected", "fault.ended", "fault.injected"]
    freeze, kill = found.records()
    assert freeze.ended_unix - freeze.began_unix == pytest.approx(2.0, abs=0.1)
    assert kill.began_unix > 1_700_000_000


def test_each_fault_is_told_when_it_happens_and_shown_while_it_lasts(world: World) -> None:
    told: list[tuple[float, str]] = []
    found = world.runner(
        {"at": 1.0, "kind": "freeze", "process": "us-0", "seconds": 2.0},
        {"at": 2.0, "kind": "corrupt"},
        {"at": 4.0, "kind": "kill"},
        tell=lambda text: told.append((world.clock.now(), text.partition(" on this machine's disk")[0])),
    )
    shown = {}

    def is_ending() -> bool:
        shown[round(world.clock.now(), 1)] = found.shown
        return False

    found.run(lambda: True, is_ending)
    assert [text for _, text in told] == [
        "the time of the plan begins: 3 faults within 4.0 s",
        "fault 1 of 3: freeze us-0 for 2 s",
        "fault 2 of 3 is left out: corrupt: the store is not",
        "fault 3 of 3: kill us-0",
        "the faults are over, 3 in all",
    ]
    assert [at for at, _ in told] == pytest.approx([0.0, 1.0, 2.0, 4.0, 4.0], abs=0.15)
    (frozen,) = shown[1.5].lasting
    assert (frozen.text, frozen.processes, frozen.state) == ("fault 1 of 3: freeze us-0", {"us-0"}, "frozen")
    assert frozen.ends_at == pytest.approx(3.0, abs=0.15)
    assert (shown[1.5].num_begun, shown[1.5].next_at) == (1, pytest.approx(2.0, abs=0.15))
    assert shown[3.5].lasting == ()
    assert (found.shown.is_over, found.shown.next_at) == (True, None)


def test_a_run_that_ends_is_left_as_it_was(world: World) -> None:
    found = world.runner({"at": 0.0, "kind": "freeze", "seconds": 1000.0}, {"at": 50.0, "kind": "kill"})
    found.run(lambda: True, lambda: world.clock.now() >= 3)
    assert [number for _, _, number in world.sent] == ["SIGSTOP", "SIGCONT"]
    assert len(found.records()) == 1


def test_an_interrupted_campaign_leaves_nothing_frozen(world: World) -> None:
    def interrupt() -> bool:
        if world.clock.now() >= 3:
            raise KeyboardInterrupt
        return False

    found = world.runner({"at": 0.0, "kind": "freeze", "seconds": 1000.0})
    with pytest.raises(KeyboardInterrupt):
        found.run(lambda: True, interrupt)
    assert [number for _, _, number in world.sent] == ["SIGSTOP", "SIGCONT"]


def test_a_process_that_is_gone_makes_a_fault_that_was_skipped(world: World) -> None:
    world.gone.add("us-0")
    found = world.runner({"at": 0.0, "kind": "kill"})
    found.run(lambda: True)
    assert found.records()[0].failure == "us-0 had ended already"
    assert world.logger.events() == ["fault.skipped"]


def test_what_there_are_no_means_for_is_skipped_with_a_sentence(world: World) -> None:
    found = world.runner({"at": 0.0, "kind": "reset"}, {"at": 0.0, "kind": "corrupt"}, {"at": 0.0, "kind": "disk-full"})
    found.run(lambda: True)
    network, blob, disk = (record.failure for record in found.records())
    assert "isles up --chaos PLAN" in network
    assert "name --run-dir" in blob
    assert "name --run-dir" in disk


def test_room_is_taken_and_given_back_and_a_blob_is_damaged(world: World, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / ("c" * 64)).write_bytes(b"abc")
    room = Room()
    found = world.runner(
        {"at": 0.0, "kind": "disk-full", "seconds": 1.0}, {"at": 2.0, "kind": "corrupt"}, store=tmp_path, room=room
    )
    found.run(lambda: True)
    assert room.calls == ["fill", "free"]
    assert found.damaged == ["c" * 64]
    assert found.records()[0].detail == "5 bytes were taken"


def test_whoever_is_frozen_has_one_guard_until_it_goes_on_or_is_gone(world: World) -> None:
    freeze = {"kind": "freeze", "process": "us-0", "seconds": 3.0}
    world.runner({"at": 0.0, **freeze}, {"at": 1.0, **freeze}).run(lambda: True)
    assert [number for _, _, number in world.sent].count("SIGCONT") == 1
    assert Guard.guarded == []
    world.gone.add("us-0")
    found = world.runner({"at": 0.0, **freeze})
    found.run(lambda: True)
    assert found.records()[0].failure == "us-0 had ended already"
    assert Guard.guarded == []
