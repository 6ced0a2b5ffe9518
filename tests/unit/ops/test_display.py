"""What a person sees of a run: on a terminal, in a log, and at the end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isles.ops.display import (
    LINE_SECONDS,
    LineDisplay,
    LiveDisplay,
    SilentDisplay,
    View,
    child_state,
    make_display,
    progress_line,
    render,
)
from isles.ops.fault_view import FaultShown, FaultsShown
from isles.ops.log_watch import Warned
from isles.ops.summary import summarise
from isles.ops.summary_view import render_summary
from isles.ops.supervision import Child
from isles.proto.agreement import Budget
from isles.proto.messages import LearnerInfo, ReportInfo, Status, Totals, VersionInfo

TRAINED: dict[str, Any] = {"task": "gpt", "num_fragments": 1}


def report(seq: int, value: float) -> ReportInfo:
    return ReportInfo(seq=seq, name="validation_loss", value=value, versions={0: seq - 1}, reporter="e", unix=1.0)


LEARNER = LearnerInfo(
    learner="us-0",
    region="us",
    incarnation="cd" * 8,
    is_live=True,
    last_seen_unix=1000.0,
    steps=77,
    tokens=9,
    tokens_per_second=4321.0,
    step_seconds=0.25,
)


@pytest.fixture
def view() -> View:
    """Forty seconds into a run."""
    children = {
        "broker": Child("broker", "broker", is_running=True),
        "us-0": Child("us-0", "worker", is_running=True, started_at=10.0, num_restarts=2),
    }
    status = Status(
        run="demo",
        broker_incarnation="ab" * 8,
        uptime_seconds=1,
        progress=0.25,
        num_parameters=1000,
        learners=(LEARNER,),
        fragments=(VersionInfo(fragment=0, version=3, parameters_sha256="0" * 64),),
        totals=Totals(
            rounds_committed=3,
            tokens_merged=250_000,
            tokens_produced=260_000,
            merged=6,
            bytes_up=3000,
            update_bytes=1500,
            participation_mean=2.0,
        ),
    )
    made = View(Path("runs/x"), Budget(tokens=1_000_000), children, {"us-0": "us"}, started_at=10.0)
    made.status, made.status_at, made.unix, made.phase = status, 50.0, 1001.0, "training"
    made.reports = [report(1, 5.5), report(2, 3.25)]
    return made


def text_of(renderable: object, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_shows_progress_loss_participants_bits_and_every_process(view: View) -> None:
    view.note(40.0, "us-0 died (signal 9), started again")
    text = text_of(render(view, 50.0))
    for part in (
        "demo",
        "training",
        "40 s",
        "25.0 %",
        "250 k of 1.00 M",
        "5.500 → 3.250 nats per byte",
        "2.0 participants of 1",
        "4.00 bits up and 4.00 down per parameter",
        "broker",
        "us-0",
        "4,321",
        "1.0 s ago",
        "0:30  us-0 died (signal 9)",
    ):
        assert part in text, part


def test_the_time_that_is_left_is_told_once_the_pace_is_known(view: View) -> None:
    assert view.seconds_left(50.0) is None
    view.progress_at_start = (0.05, 30.0)
    assert view.seconds_left(50.0) == pytest.approx(20 * 0.75 / 0.2)
    assert "1 min 15 s left" in text_of(render(view, 50.0))
    view.progress_at_start = (0.24, 30.0)
    assert view.seconds_left(50.0) is None


def test_the_screen_fits_eighty_columns(view: View) -> None:
    assert max(map(len, text_of(render(view, 50.0), width=80).splitlines())) <= 80


def test_the_screen_before_the_run_began_shows_the_processes(view: View) -> None:
    view.status, view.phase = None, "starting"
    text = text_of(render(view, 12.0))
    assert "starting" in text
    assert "joining" in text


def test_figures_of_a_broker_that_does_not_answer_are_marked(view: View) -> None:
    assert "the broker has not answered for 9.0 s" in text_of(render(view, 59.0))


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "training"),
        ({"started_at": 51.0}, "joining"),
        ({"killed_at": 99.0}, "draining"),
        ({"is_running": False, "restart_at": 54.0}, "starts again in 4 s"),
        ({"is_running": False, "last_code": 0}, "finished"),
        ({"is_running": False, "last_code": 1}, "stopped"),
    ],
)
def test_the_state_of_a_worker_is_told(changes: dict[str, float], state: str) -> None:
    child = Child("us-0", "worker", is_running=True, started_at=40.0)
    for name, value in changes.items():
        setattr(child, name, value)
    assert state in child_state(child, LEARNER, 50.0, 1002.0)


def test_a_line_tells_the_state_of_the_run(view: View) -> None:
    line = progress_line(view)
    assert line.startswith("25.0 %, 250 k tokens, 3 rounds of 2.0, loss 5.500 -> 3.250, 4.00 bits up, 4.00 down")
    assert line.endswith("1 learner live, 2 restarts")
    view.phase = "draining"
    assert progress_line(view).startswith("draining, 25.0 %")


def test_without_a_terminal_a_line_is_printed_now_and_then_and_events_at_once(view: View) -> None:
    console = Console(file=io.StringIO(), width=200)
    display = LineDisplay(console)
    assert isinstance(console.file, io.StringIO)
    display.update(view, 50.0)
    display.update(view, 51.0)
    assert console.file.getvalue().count("\n") == 1
    view.note(52.0, "something happened")
    display.update(view, 52.0)
    display.update(view, 53.0)
    assert console.file.getvalue().splitlines()[1:] == ["  0:42  something happened"]
    display.update(view, 50.0 + LINE_SECONDS)
    assert console.file.getvalue().count("\n") == 3
    display.close()


def test_without_a_terminal_no_event_is_lost_however_many_come_at_once(view: View) -> None:
    console = Console(file=io.StringIO(), width=200)
    display = LineDisplay(console)
    display.update(view, 50.0)
    for number in range(40):
        view.note(51.0, f"learner {number} died")
    display.update(view, 51.0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("died") == 40
    assert text_of(render(view, 51.0)).count("died") == 5


def test_the_last_warning_is_one_line_that_fits_eighty_columns(view: View) -> None:
    assert "warning of" not in text_of(render(view, 50.0))
    view.warn(40.0, Warned("us-0", "warning", "checkpoint.failed: the disk is full"))
    view.warn(45.0, Warned("outer", "error", "process.failed: " + "no room " * 20))
    lines = text_of(render(view, 50.0), width=80).splitlines()
    assert [line for line in lines if "error of outer: process.failed: no room" in line]
    assert not [line for line in lines if "checkpoint.failed" in line]
    assert max(map(len, lines)) <= 80


FROZEN = FaultShown("fault 3 of 12: freeze us-0", 54.0, frozenset({"us-0"}), "frozen", started_before=39.0)
FULL = FaultShown("fault 4 of 12: disk-full", 62.0, frozenset({"broker"}), "disk full")


def line_of(text: str, begin: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip().startswith(begin))


def test_a_fault_is_shown_while_it_lasts_beside_its_process_and_below(view: View) -> None:
    view.faults = FaultsShown(12, 4, next_at=80.0, lasting=(FROZEN, FULL))
    text = text_of(render(view, 50.0), width=80)
    assert "frozen, 4 s" in line_of(text, "us-0")
    assert "disk full, 12 s" in line_of(text, "broker")
    assert line_of(text, "fault 3") == "fault 3 of 12: freeze us-0 (4 s left)"
    assert line_of(text, "fault 4") == "fault 4 of 12: disk-full (12 s left)"
    assert max(map(len, text.splitlines())) <= 80


def test_a_process_that_died_meanwhile_is_not_called_frozen(view: View) -> None:
    view.faults = FaultsShown(12, 3, lasting=(FROZEN,))
    child = view.children["us-0"]
    child.is_running, child.restart_at = False, 52.0
    assert "starts again in 2 s" in line_of(text_of(render(view, 50.0)), "us-0")
    child.is_running, child.restart_at, child.started_at = True, None, 49.9
    assert "frozen" not in line_of(text_of(render(view, 50.0)), "us-0")


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (FaultsShown(12), "12 faults to come, once the first round is committed"),
        (FaultsShown(12, 0, next_at=53.0), "0 of 12 faults so far, the next in 3 s"),
        (FaultsShown(12, 5, next_at=49.0), "5 of 12 faults so far, the next in 0 s"),
        (FaultsShown(1, 1, is_over=True), "1 fault, all over"),
    ],
)
def test_between_two_faults_it_is_told_how_many_there_are(faults: FaultsShown, words: str, view: View) -> None:
    view.faults = faults
    assert words in text_of(render(view, 50.0))


def test_a_run_without_faults_says_nothing_about_them(view: View) -> None:
    assert "fault" not in text_of(render(view, 50.0))


def test_without_a_terminal_warnings_are_told_with_the_next_line(view: View) -> None:
    console = Console(file=io.StringIO(), width=200)
    display = LineDisplay(console)
    display.update(view, 50.0)
    view.warn(51.0, Warned("us-0", "warning", "round.alone"))
    view.warn(52.0, Warned("us-0", "warning", "broker.lost: silent"))
    display.update(view, 53.0)
    display.update(view, 50.0 + LINE_SECONDS)
    display.update(view, 51.0 + 2 * LINE_SECONDS)
    assert isinstance(console.file, io.StringIO)
    told = [line for line in console.file.getvalue().splitlines() if "warning of" in line]
    assert told == ["  0:42  warning of us-0: broker.lost: silent (1 more in the logs)"]


def test_the_place_decides_about_the_display() -> None:
    assert isinstance(make_display(Console(file=io.StringIO()), is_silent=False), LineDisplay)
    assert isinstance(make_display(Console(file=io.StringIO()), is_silent=True), SilentDisplay)
    live = make_display(Console(file=io.StringIO(), force_terminal=True), is_silent=False)
    assert isinstance(live, LiveDisplay)
    live.close()


def test_the_summary_tells_what_came_of_the_run(view: View) -> None:
    assert view.status is not None
    summary = summarise(
        view.status,
        view.reports,
        ended="finished",
        text="the budget is reached",
        wall_seconds=125.0,
        restarts={"us-0": 2},
        **TRAINED,
    )
    text = text_of(render_summary(summary))
    for part in (
        "Finished after 2 min 05 s: the budget is reached.",
        "5.500 → 3.250 nats per byte",
        "250 k merged of 260 k produced",
        "6 merged, 0 rejected, 0 expired",
        "4.00 bits per parameter up",
        "1,000 parameters in 1 fragment",
        "2 (us-0 2)",
    ):
        assert part in text, part


def test_a_loss_has_the_unit_of_what_is_trained(view: View) -> None:
    assert view.status is not None
    view.task = "spirals:make"
    summary = summarise(
        view.status, view.reports, ended="finished", text="", wall_seconds=1.0, restarts={}, task=view.task,
        num_fragments=1,
    )  # fmt: skip
    for text in (text_of(render(view, 50.0)), text_of(render_summary(summary))):
        assert "5.500 → 3.250 " in text
        assert "nats" not in text


def test_buffers_that_are_merged_are_named_beside_the_fragments(view: View) -> None:
    assert view.status is not None
    both = tuple(VersionInfo(fragment=n, version=3, parameters_sha256="0" * 64) for n in range(2))
    status = view.status.model_copy(update={"fragments": both})
    summary = summarise(status, [], ended="finished", text="", wall_seconds=1.0, restarts={}, **TRAINED)
    assert "1,000 parameters in 1 fragment and buffers" in text_of(render_summary(summary))


def test_the_time_of_earlier_starts_is_told_as_such() -> None:
    summary = summarise(None, [], ended="failed", text="no broker", wall_seconds=46.0, starts=2, restarts={}, **TRAINED)
    assert "Failed after 46 s in 2 starts: no broker." in text_of(render_summary(summary))


def test_a_run_that_never_began_has_a_headline_only() -> None:
    summary = summarise(None, [], ended="failed", text="no broker", wall_seconds=1.0, restarts={}, **TRAINED)
    assert text_of(render_summary(summary)).split() == ["Failed", "after", "1.0", "s:", "no", "broker."]
