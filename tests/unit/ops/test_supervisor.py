"""What the supervisor tells of learners that come and go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.ops.display import SilentDisplay, View
from isles.ops.fault_view import FaultsShown
from isles.ops.run_folder import RunFolder, State
from isles.ops.supervision import Supervision
from isles.ops.supervisor import Signals, Supervisor
from isles.proto.agreement import Budget
from isles.proto.clock import ManualClock
from isles.proto.logs import ListLogger
from isles.proto.messages import LearnerInfo, Status


class House:
    """A supervisor of one worker that was started at second 100; nothing runs."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(100.0)
        supervision = Supervision.of([("us-0", "worker")], drain_seconds=1.0, stall_seconds=0.0)
        supervision.start(self.clock.now())
        self.view = View(folder, Budget(rounds=1), supervision.children, {"us-0": "us"}, started_at=100.0)
        watch: Any = SimpleNamespace(status=None, status_at=None, reports=[])
        self.supervisor = Supervisor(
            supervision,
            {"us-0": []},
            {},
            folder=RunFolder(folder),
            state=State(),
            watch=watch,
            view=self.view,
            display=SilentDisplay(),
            logger=ListLogger(),
            clock=self.clock,
            signals=Signals(),
            faults=self,
        )
        self.told = ["fault 1 of 2: kill us-0"]

    def news(self) -> list[str]:
        told, self.told = self.told, []
        return told

    def shown(self) -> FaultsShown:
        return FaultsShown(2, 1, next_at=200.0)

    def sees(self, *, seen_at: float, is_live: bool = True, learner: str = "us-0") -> list[str]:
        """The notes about a learner that the broker last heard at this second."""
        info = LearnerInfo(
            learner=learner,
            region="us",
            incarnation="cd" * 8,
            is_live=is_live,
            last_seen_unix=self.clock.unix() - self.clock.now() + seen_at,
            steps=0,
            tokens=0,
            tokens_per_second=0.0,
            step_seconds=0.0,
        )
        self.view.events.clear()
        status = Status(run="r", broker_incarnation="ab" * 8, uptime_seconds=1, progress=0.0, learners=(info,))
        self.supervisor._note_changes(status)
        return [text for _, text in self.view.events]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_the_lease_of_an_earlier_start_is_no_join(house: House) -> None:
    house.clock.advance(1.0)
    assert house.sees(seen_at=99.0) == []
    assert house.sees(seen_at=99.0, is_live=False) == []
    house.clock.advance(4.0)
    assert house.sees(seen_at=104.0) == ["us-0 joined"]
    assert house.sees(seen_at=104.0) == []
    assert house.sees(seen_at=104.0, is_live=False) == ["us-0 is gone"]


def test_a_worker_that_ended_by_itself_has_finished(house: House) -> None:
    house.clock.advance(5.0)
    assert house.sees(seen_at=104.0) == ["us-0 joined"]
    house.supervisor._supervision.children["us-0"].is_done = True
    assert house.sees(seen_at=104.0, is_live=False) == ["us-0 has finished"]


def test_a_worker_that_somebody_else_started_is_told_of_too(house: House) -> None:
    house.clock.advance(1.0)
    assert house.sees(seen_at=99.0, learner="guest") == []
    assert house.sees(seen_at=100.5, learner="guest") == ["guest joined"]


def test_a_worker_that_is_restarted_within_its_lease_has_not_gone(house: House) -> None:
    house.clock.advance(10.0)
    assert house.sees(seen_at=109.0) == ["us-0 joined"]
    house.supervisor._supervision.children["us-0"].started_at = 110.0
    assert house.sees(seen_at=109.0) == []


def test_faults_are_noted_once_when_they_happen_and_shown_as_they_stand(house: House) -> None:
    house.supervisor._show()
    house.supervisor._show()
    assert [text for _, text in house.view.events] == ["fault 1 of 2: kill us-0"]
    assert house.view.faults == FaultsShown(2, 1, next_at=200.0)
