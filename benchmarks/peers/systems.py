"""The systems that are compared, and one run of any of them: two learners of the same MLP on this machine."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.plan import WIDTHS, Plan
from benchmarks.peers.processes import START_SECONDS_MAX, Group, Process, Row, UnavailableError, version_of
from benchmarks.peers.with_isles import BrokerAndOuter, codec_text

NUM_LEARNERS: Final = 2
RUN_SECONDS_MAX: Final = 1800.0
"""Far above what either takes on an idle machine."""


@dataclass(frozen=True, slots=True)
class System:
    """One system in one way to use it."""

    name: str
    role: str
    """Of its learners."""
    distribution: str = ""
    """What has to be installed; nothing for isles."""
    meeting_role: str = ""
    """Of the process that its learners are told of; isles brings a broker and an outer itself."""
    options: Mapping[str, str] = field(default_factory=dict)
    complaint: str = ""
    """What its learners print when a synchronisation was not complete, though it did not fail."""


def isles(codec: str = "") -> System:
    """isles with this codec, UP/DOWN; nothing = the project's."""
    options = {"codec": codec}
    return System(f"isles, {codec_text(options)}", "isles", options=options)


def torchft(mode: str, replicas: int = NUM_LEARNERS) -> System:
    """torchft; nothing is synchronised before `replicas` are there."""
    name = {"whole": "torchft, DiLoCo", "streaming": "torchft, streaming DiLoCo"}[mode]
    return System(name, "torchft", "torchft", "torchft-lighthouse", {"mode": mode, "replicas": str(replicas)})


HIVEMIND: Final = System("hivemind, 8 bit", "hivemind", "hivemind", "hivemind-table", complaint="Averaging: received")
FLOWER: Final = System("Flower, FedAvg", "flower", "flwr", "flower-server")


@contextmanager
def learners(system: System, plan: Plan, folder: Path) -> Iterator[tuple[list[Process], Process | BrokerAndOuter]]:
    """Two learners under way, and what they meet at; ends them all. Raises UnavailableError if that cannot be had."""
    plan = replace(plan, options={**plan.options, **system.options})
    with Group(folder) as group:
        if system.meeting_role:
            version_of(system.distribution)
            meeting = group.start(
                system.meeting_role, replace(plan, name="meeting", record=group.record("meeting"), counts_bytes=False)
            )
            yield _start(group, system, replace(plan, address=group.read_address(meeting))), meeting
        else:
            with BrokerAndOuter(folder) as broker_and_outer:
                yield _start(group, system, replace(plan, address=str(broker_and_outer.address))), broker_and_outer


def _start(group: Group, system: System, plan: Plan) -> list[Process]:
    """Both learners, which begin once both are ready."""
    names = [f"learner-{index}" for index in range(NUM_LEARNERS)]
    processes = [
        group.start(system.role, replace(plan, name=name, index=index, record=group.record(name)))
        for index, name in enumerate(names)
    ]
    for process in processes:
        process.wait_for(bool, START_SECONDS_MAX)
    for process in processes:
        process.tell("go")
    return processes


def run(system: System, plan: Plan, folder: Path) -> list[list[Row]]:
    """Both learners to the end of the plan; their records."""
    with learners(system, plan, folder) as (processes, _):
        for process in processes:
            process.wait(RUN_SECONDS_MAX)
            if system.complaint and (line := process.printed(system.complaint)):
                raise UnavailableError(f"its synchronisations are not complete: {line}")
        records = [process.rows() for process in processes]
    for rows in records:
        _check(rows, plan)
    return records


def _check(rows: list[Row], plan: Plan) -> None:
    """A synchronisation that did not take place costs nothing. Raises UnavailableError if there were any such."""
    wanted = (plan.num_steps - 1) // plan.interval - 1
    found = window(rows, plan, 0)[-1].extra["commits"]
    if found < wanted:
        raise UnavailableError(f"of {wanted} synchronisations only {found} took place")


def window(rows: list[Row], plan: Plan, skipped: int) -> list[Row]:
    """The rows after the first intervals, up to the end of the plan.

    An interval ends with the first inner step after a synchronisation, so that whatever a system does between two
    inner steps lies within it.
    """
    first = skipped * plan.interval + 1
    return [row for row in rows if first <= row.step <= plan.num_steps and not row.extra.get("is_last")]


def intervals(rows: list[Row], plan: Plan, skipped: int) -> list[list[Row]]:
    """The rows of each whole interval in the window."""
    measured = window(rows, plan, skipped)[1:]
    count = len(measured) // plan.interval
    return [measured[number * plan.interval : (number + 1) * plan.interval] for number in range(count)]


def syncs_of_isles(records: Sequence[list[Row]], plan: Plan, skipped: int) -> float:
    """How often isles synchronised the whole model in an interval: contributions of each fragment; near 1."""
    from isles.proto.agreement import SyncSettings

    found = []
    for rows in records:
        measured = window(rows, plan, skipped)
        contributions = measured[-1].extra["contributions"] - measured[0].extra["contributions"]
        steps = measured[-1].step - measured[0].step
        found.append(contributions / SyncSettings().num_fragments * plan.interval / steps)
    return float(statistics.mean(found))


def plan_of(arguments: argparse.Namespace, size: str, pace_seconds: float, **more: Any) -> Plan:
    """The plan of both learners, less what tells one from the other."""
    steps = (arguments.warmup + arguments.syncs) * arguments.interval + 1
    given = {"num_steps": steps, "pace_seconds": arguments.pace or pace_seconds, **more}
    return Plan("", 0, WIDTHS[size], "", seed=arguments.seed, interval=arguments.interval, **given)
