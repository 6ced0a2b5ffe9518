"""Runs of many seeds, in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from isles.ops.simulation.fault_world import FaultWorld, Report
from isles.ops.simulation.mutations import without


def run_seed(seed: int, missing_rule: str = "") -> Report:
    """The run of one seed, if need be without one of the rules of `isles.ops.simulation.mutations`."""
    with without(missing_rule) if missing_rule else nullcontext(), _without_collections():
        return FaultWorld(seed).run()


def explore(seeds: Iterable[int], *, num_jobs: int, missing_rule: str = "") -> Iterator[Report]:
    """Reports of all seeds, as they come."""
    run = partial(run_seed, missing_rule=missing_rule)
    if num_jobs == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(num_jobs, _prepare_process) as pool:
        yield from pool.imap_unordered(run, seeds)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Looks for garbage in cycles once a run, not hundreds of times: a run makes few of them, and much that stays.

    What was there before is left out: in the process of a test suite that alone would take as long as the run.
    """
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def _prepare_process() -> None:
    """Leaves interrupts to the parent: they end this process, and a traceback of each would say nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
