"""What synchronising the whole model once adds to the training thread: isles against torchft, in turns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.plan import WIDTHS, Plan
from benchmarks.peers.processes import Row, UnavailableError
from benchmarks.peers.systems import System, intervals, isles, plan_of, run, syncs_of_isles, torchft

COST_RATIO_MAX: Final = 0.1
"""Share of torchft's cost of a synchronisation that one of isles may have."""
PACE_SECONDS: Final = {"1.06 M": 0.05, "9.46 M": 0.4}
"""Inner steps that leave two slow cores time for broker, outer and both learners."""
MILLI: Final = 1e3


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one synchronisation of the whole model by one learner, in seconds."""

    wall: float
    """Time that the training thread spent in it."""
    cpu: float
    """Processor time of that thread in it."""
    others_cpu: float
    """Processor time of all other threads of the process between two synchronisations."""


def compare_costs(arguments: argparse.Namespace, scratch: Path) -> bool:
    """Prints the table; whether the bar is reached against whatever could be measured."""
    print("\nWhat one synchronisation of the whole model adds to the training thread")
    print(
        f"2 learners, H = {arguments.interval}, medians of {arguments.syncs} synchronisations a run and of "
        f"{arguments.repeats} runs, which take turns"
    )
    print(
        f"{'parameters':<12}{'':<28}{'wall ms':>9}{'CPU ms':>9}{'other threads ms':>18}   isles / it (least-greatest)"
    )
    is_reached = True
    for size in arguments.sizes:
        systems = [isles(arguments.codecs[0])]
        if not arguments.short:
            systems += [torchft("whole"), torchft("streaming")]
        costs, reasons = _measure_in_turns(systems, size, arguments, scratch)
        is_reached &= _print_costs(size, systems, costs, reasons)
    print(f"bar: at most {COST_RATIO_MAX} of torchft's wall time")
    return is_reached


def _measure_in_turns(
    systems: Sequence[System], size: str, arguments: argparse.Namespace, scratch: Path
) -> tuple[dict[str, list[Cost]], dict[str, str]]:
    """Name -> a cost for each repeat; name -> why there is none."""
    costs: dict[str, list[Cost]] = {system.name: [] for system in systems}
    reasons: dict[str, str] = {}
    for number in range(arguments.repeats):
        for place, system in enumerate(systems):
            if system.name in reasons:
                continue
            try:
                costs[system.name].append(
                    _measure(system, size, arguments, scratch / f"cost-{WIDTHS[size]}-{number}-{place}")
                )
            except UnavailableError as reason:
                if not system.distribution:
                    raise
                reasons[system.name] = str(reason)
    return costs, reasons


def _measure(system: System, size: str, arguments: argparse.Namespace, folder: Path) -> Cost:
    """One run."""
    plan = plan_of(arguments, size, PACE_SECONDS[size])
    records = run(system, plan, folder)
    return (cost_of_peer if system.distribution else cost_of_isles)(records, plan, arguments.warmup)


def cost_of_peer(records: Sequence[list[Row]], plan: Plan, skipped: int) -> Cost:
    """Of learners that wait for each other: the one that came last has only the synchronisation to wait for.

    So the lesser time of both is taken of each synchronisation, which leaves out what the slower learner costs.
    """
    each = [intervals(rows, plan, skipped) for rows in records]
    wall = [min(sum(row.wall for row in rows) for rows in pair) for pair in zip(*each, strict=True)]
    cpu = [sum(row.cpu for row in rows) for learner in each for rows in learner]
    return Cost(statistics.median(wall), statistics.median(cpu), _others_cpu(each))


def cost_of_isles(records: Sequence[list[Row]], plan: Plan, skipped: int) -> Cost:
    """Of learners that never wait: all that `step` took in an interval, by the synchronisations in one."""
    each = [intervals(rows, plan, skipped) for rows in records]
    syncs = syncs_of_isles(records, plan, skipped)
    wall = statistics.median(sum(row.wall for row in rows) for learner in each for rows in learner)
    cpu = statistics.median(sum(row.cpu for row in rows) for learner in each for rows in learner)
    return Cost(wall / syncs, cpu / syncs, _others_cpu(each) / syncs)


def _others_cpu(each: Sequence[list[list[Row]]]) -> float:
    """Of one interval, mean of all."""
    spent = [rows[-1].others_cpu - rows[0].others_cpu for learner in each for rows in learner]
    return statistics.mean(spent)


def _print_costs(size: str, systems: Sequence[System], costs: dict[str, list[Cost]], reasons: dict[str, str]) -> bool:
    """One line for each system; isles is the first of them."""
    own = costs[systems[0].name]
    is_reached = True
    for system in systems:
        head = f"{size if system is systems[0] else '':<12}{system.name:<28}"
        if system.name in reasons:
            print(f"{head} not measured: {reasons[system.name]}")
            continue
        measured = costs[system.name]
        wall, cpu, others = (
            MILLI * statistics.median(values)
            for values in zip(*((one.wall, one.cpu, one.others_cpu) for one in measured), strict=True)
        )
        line = f"{head}{wall:>9.2f}{cpu:>9.2f}{others:>18.1f}"
        if system.distribution:
            ratios = [ours.wall / theirs.wall for ours, theirs in zip(own, measured, strict=True)]
            is_reached &= statistics.median(ratios) <= COST_RATIO_MAX
            line += f"   {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        print(line, flush=True)
    return is_reached
