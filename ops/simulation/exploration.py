"""Runs of many seeds, in processes of their own."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial

from isles.ops.simulation.fault_world import FaultWorld, Report
from isles.ops.simulation.mutations import without


def run_seed(seed: int, missing_rule: str = "") -> Report:
    """The run of one seed, if need be without one of the rules of `isles.ops.simulation.mutations`."""
    with without(missing_rule) if missing_rule else nullcontext():
        return FaultWorld(seed).run()


def explore(seeds: Iterable[int], *, num_jobs: int, missing_rule: str = "") -> Iterator[Report]:
    """Reports of all seeds, as they come."""
    run = partial(run_seed, missing_rule=missing_rule)
    if num_jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs, _leave_interrupts_to_the_parent) as pool:
        yield from pool.imap_unordered(run, seeds)


def _leave_interrupts_to_the_parent() -> None:
    """It ends this process; a traceback of each would say nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
