"""What a broker warns of, where people look."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from isles.ops.concerns import concern_lines
from isles.ops.display import View, progress_line
from isles.ops.display import render as render_view
from isles.ops.status import as_json, render
from isles.proto.agreement import Budget
from isles.proto.messages import LearnerInfo, Status, StoreInfo, WarningInfo


def warning(name: str, subject: str = "") -> WarningInfo:
    return WarningInfo(name=name, subject=subject, text=f"what {name} means", since_unix=940.0)


@pytest.fixture
def status() -> Status:
    """A run with one of two learners live, and two warnings."""
    learners = tuple(
        LearnerInfo(learner=name, region="us", incarnation="cd" * 8, is_live=name == "us-0", last_seen_unix=990.0)
        for name in ("us-0", "us-1")
    )
    return Status(
        run="demo", broker_incarnation="ab" * 8, uptime_seconds=75, progress=0.5, learners=learners, unix=1000.0,
        warnings=(warning("round.alone"), warning("learner.outdated", "us-1")),
        store=StoreInfo(stored_bytes=10, disk_free_bytes=20),
    )  # fmt: skip


def test_each_warning_is_a_line_with_its_name_its_subject_its_age_and_what_it_means(status: Status) -> None:
    assert concern_lines(status) == [
        "round.alone for 1 min 00 s: what round.alone means",
        "learner.outdated us-1 for 1 min 00 s: what learner.outdated means",
    ]


def test_rounds_that_wait_for_required_learners_come_first(status: Status) -> None:
    assert concern_lines(status.model_copy(update={"num_required": 1})) == concern_lines(status)
    first = concern_lines(status.model_copy(update={"num_required": 2}))[0]
    assert first == "learners.missing: 1 of 2 required learners are live, rounds wait"
    over = status.model_copy(update={"num_required": 2, "progress": 1.0})
    assert concern_lines(over) == concern_lines(status)  # whoever is done may go


def test_more_warnings_than_there_is_room_for_are_counted(status: Status) -> None:
    many = status.model_copy(update={"warnings": tuple(warning("learner.outdated", f"us-{n}") for n in range(9))})
    lines = concern_lines(many, num_max=4)
    assert len(lines) == 4
    assert lines[-1] == "and 6 warnings more: see `isles status`"


def test_a_run_on_this_machine_shows_them_in_its_display_and_its_lines(status: Status) -> None:
    view = View(Path("runs/demo"), Budget(tokens=1000), {}, {}, started_at=0.0, status=status)
    console = Console(file=io.StringIO(), width=60)
    console.print(render_view(view, 40.0))
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "learner.outdated" in line]
    assert len(lines) == 1
    assert "2 warnings: round.alone for 1 min 00 s, learner.outdated us-1" in progress_line(view)


def test_the_status_shows_them_to_people_and_programs(status: Status) -> None:
    console = Console(file=io.StringIO(), width=100)
    for part in render(status, 1000.0, "tcp://127.0.0.1:7700"):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    assert "learner.outdated us-1" in console.file.getvalue()
    shown = as_json(status, 1000.0)
    assert [one["name"] for one in shown["warnings"]] == ["round.alone", "learner.outdated"]
    assert shown["store"]["disk_free_bytes"] == 20
