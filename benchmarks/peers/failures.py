"""What a learner loses when its peer, or what both meet at, is killed with -9."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.plan import Plan
from benchmarks.peers.processes import LOOK_SECONDS, Process, Row, UnavailableError
from benchmarks.peers.systems import System, isles, learners, plan_of, torchft
from benchmarks.peers.with_isles import BrokerAndOuter

SIZE: Final = "1.06 M"
PACE_SECONDS: Final = 0.1
COMMITS_MIN: Final = 8
"""So many synchronisations of a part of the model go before the kill."""
EXIT_SECONDS_MAX: Final = 150.0
"""How long a learner whose call does not return is watched."""
LOST_STEPS_MAX: Final = 0.5
"""What a disturbed machine may add to a loss of 0 steps."""
PEER: Final = "peer"
MEETING: Final = "meeting"


@dataclass(frozen=True, slots=True)
class Loss:
    """What the kill cost the survivor, and what became of it."""

    seconds: float
    """Time in calls of its system, beyond what those take in as long before the kill."""
    steps: float
    """The same in inner steps."""
    longest: float
    """Longest time in the calls of one inner step after the kill, in seconds."""
    discarded: float
    """Inner steps whose work was thrown away."""
    outcome: str


def compare_failures(arguments: argparse.Namespace, scratch: Path) -> bool:
    """Prints the table; whether isles lost nothing."""
    plan = plan_of(arguments, SIZE, PACE_SECONDS, num_steps=0)
    own = isles(arguments.codecs[0])
    cases = [(own, PEER, "the other learner"), (own, MEETING, f"broker, outer for {arguments.down:g} s")]
    if not arguments.short:
        theirs = torchft("whole", replicas=1)
        cases += [(theirs, PEER, "the other learner"), (theirs, MEETING, "the lighthouse")]
    print(f"\nWhat a learner of two loses by a kill -9; {SIZE} parameters, an inner step takes {plan.pace_seconds:g} s")
    print(f"{'':<28}{'killed':<24}{'lost s':>8}{'steps':>8}{'longest call s':>16}{'discarded':>11}   the survivor")
    is_reached = True
    for number, (system, killed, text) in enumerate(cases):
        head = f"{system.name:<28}{text:<24}"
        try:
            loss = measure(system, plan, killed, arguments, scratch / f"failure-{number}")
        except UnavailableError as reason:
            if not system.distribution:
                raise
            print(f"{head} not measured: {reason}", flush=True)
            continue
        print(
            f"{head}{max(0.0, loss.seconds):>8.3f}{max(0.0, loss.steps):>8.2f}{loss.longest:>16.3f}"
            f"{loss.discarded:>11.0f}   {loss.outcome}",
            flush=True,
        )
        is_reached &= bool(system.distribution) or (loss.steps <= LOST_STEPS_MAX and loss.discarded == 0)
    print("bar: isles loses 0 steps, of its time and of its work")
    return is_reached


def measure(system: System, plan: Plan, killed: str, arguments: argparse.Namespace, folder: Path) -> Loss:
    """One run: kills in the middle of an interval, watches the survivor, and has it hand in what it has if it can."""
    with learners(system, plan, folder) as (processes, meeting):
        survivor = processes[0]
        survivor.wait_for(lambda rows: _is_ready(rows, plan), EXIT_SECONDS_MAX)
        killed_at = time.monotonic()
        (processes[1] if killed == PEER else meeting).kill()
        if isinstance(meeting, BrokerAndOuter) and not meeting.is_running:
            time.sleep(arguments.down)
            meeting.start()
        _watch(survivor, killed_at, killed_at + arguments.watch)
        if survivor.exit_code is not None or survivor.rows()[-1].at < killed_at + arguments.watch:
            return loss_of_ended(survivor.rows(), plan, killed_at, survivor.exit_code)
        running = [process for process in processes if process.exit_code is None]
        for process in running:
            process.tell("stop")
        if not isinstance(meeting, BrokerAndOuter):
            return loss_of(survivor.rows(), plan, killed_at, "goes on")
        for process in running:
            process.wait(EXIT_SECONDS_MAX)
        is_drained = all(process.rows()[-1].extra["is_drained"] for process in running)
        return loss_of(survivor.rows(), plan, killed_at, f"goes on, {'all' if is_drained else 'NOT all'} is merged")


def _is_ready(rows: list[Row], plan: Plan) -> bool:
    """Both are there, and the survivor stands in the middle of an interval."""
    if rows[-1].extra.get("commits", 0) < COMMITS_MIN:
        return False
    is_alone = rows[-1].extra.get("participants", 2) < 2
    return not is_alone and rows[-1].step % plan.interval == plan.interval // 2


def _watch(survivor: Process, killed_at: float, until: float) -> None:
    """Until it has gone on for long enough, or has ended, or has not come back from a call."""
    while survivor.exit_code is None and time.monotonic() < killed_at + EXIT_SECONDS_MAX:
        if survivor.rows()[-1].at >= until:
            return
        time.sleep(LOOK_SECONDS)


def loss_of(rows: list[Row], plan: Plan, killed_at: float, outcome: str) -> Loss:
    """Compares the time in the system's calls after the kill with that before it."""
    rows = [row for row in rows if not row.extra.get("is_last")]
    before = [row for row in rows if row.at <= killed_at][-2 * plan.interval :]
    after = [row for row in rows if killed_at < row.at]
    usual = sum(row.wall for row in before[1:]) / (before[-1].at - before[0].at)
    step_seconds = statistics.median(last.at - first.at for first, last in itertools.pairwise(before))
    if not after:
        return Loss(0.0, 0.0, 0.0, 0.0, outcome)
    seconds = sum(row.wall for row in after) - usual * (after[-1].at - killed_at)
    return Loss(
        seconds, seconds / step_seconds, max(row.wall for row in after), _discarded(before, after, plan), outcome
    )


def loss_of_ended(rows: list[Row], plan: Plan, killed_at: float, code: int | None) -> Loss:
    """Of a survivor that has just ended, or never came back: its last call, and what it had not synchronised yet."""
    now, last = time.monotonic(), rows[-1]
    seconds = now - last.at
    what = "is still in its call" if code is None else f"ends with code {code}"
    unsynchronised = last.step % plan.interval + 1
    return Loss(seconds, seconds / plan.pace_seconds, seconds, unsynchronised, f"{what} after {now - killed_at:.1f} s")


def _discarded(before: list[Row], after: list[Row], plan: Plan) -> float:
    """isles says it itself; of torchft, the intervals whose end brought no commit."""
    if "discarded" in after[-1].extra:
        return float(after[-1].extra["discarded"] - before[-1].extra["discarded"])
    ends = sum(row.step % plan.interval == 0 for row in after)
    return float(plan.interval * (ends - (after[-1].extra["commits"] - before[-1].extra["commits"])))
