"""A large model through one whole cycle: every fragment gets a version, and a real learner applies it.

Broker and outer are the processes that an operator starts, `roles.py` has the others. With a quorum of K and no grace
window each version has exactly K contributions. The cycle is measured from the first OFFER to the last version applied
by the learner.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.scale.processes import GIB, STOP_SECONDS, Watch, broker_and_outer, folder_bytes
from benchmarks.scale.synthetic import make_manifest
from isles.ops.children import child_environment

LEASE_SECONDS: Final = 120.0
"""A synthetic learner whose process is busy must stay live, or the quorum would sink."""
MEMORY_BYTES_PER_PARAMETER: Final = 14
"""Of all processes together: the learner's parameters and anchors, and what the outer and the system cache."""
MEMORY_BYTES_BASE: Final = 1 << 30
DISK_BYTES_PER_PARAMETER: Final = 32
"""Version 0, eight payloads, a checkpoint, and the outer's scratch file."""
LOOK_SECONDS: Final = 0.05
"""Between two looks at whether the learner has joined."""


@dataclass
class Cycle:
    """What one whole cycle cost."""

    contributions: int
    seconds: dict[str, float] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    payload_bytes: int = 0
    update_bytes: int = 0
    store_bytes: int = 0
    figures: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------- the experiment


def run_cycle(arguments: argparse.Namespace, contributions: int, scratch: Path) -> Cycle:
    """One broker, one outer, one cycle with so many contributions to each fragment."""
    folder = scratch / f"cycle-{contributions}"
    cycle = Cycle(contributions)
    with cycle.watch as watch:
        broker = ["--learner-lease-seconds", str(LEASE_SECONDS), "--session-idle-seconds", str(2 * LEASE_SECONDS)]
        outer = [*arguments.outer_flags, "--stop-seconds", str(STOP_SECONDS)]
        with broker_and_outer(folder, watch, broker=broker, outer=outer) as address:
            common = _command(arguments, address, contributions, folder)
            cycle.seconds["initialise"] = _result(_start("initialise", common, watch), arguments)["seconds"]
            learner = _start("learner", common, watch)
            try:
                _wait_for_join(folder, learner, arguments)
                contributors = _result(_start("contributors", common, watch), arguments)
                followed = _result(learner, arguments)
            finally:
                learner.kill()
                learner.wait()
            watch.look()
            cycle.store_bytes = folder_bytes(folder / "store")
    _fill(cycle, contributors, followed, folder)
    return cycle


def _fill(cycle: Cycle, contributors: dict[str, Any], followed: dict[str, Any], folder: Path) -> None:
    first = contributors["first_unix"]
    cycle.seconds["join"] = followed["join_seconds"]
    cycle.seconds |= contributors["seconds"]
    cycle.seconds["cycle"] = followed["applied_unix"] - first
    cycle.seconds["after the last offer"] = followed["applied_unix"] - contributors["accepted_unix"]
    cycle.payload_bytes, cycle.update_bytes = contributors["payload_bytes"], contributors["update_bytes"]
    cycle.figures = followed | read_latencies(folder)


def read_latencies(folder: Path) -> dict[str, float]:
    """From the logs, in seconds: median over fragments of last contribution accepted -> committed -> applied."""
    accepted: dict[int, float] = {}
    committed: dict[int, float] = {}
    applied: dict[int, float] = {}
    for line in (folder / "broker.jsonl").read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        if fields["event"] == "contribution.accepted":
            accepted[fields["fragment"]] = _unix(fields)
        elif fields["event"] == "round.committed":
            committed[fields["fragment"]] = _unix(fields)
    for line in (folder / "learner.jsonl").read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        if fields["event"] == "version.applied" and fields["version"] == 1:
            applied[fields["fragment"]] = _unix(fields)
    found = {}
    for name, early, late in (("commit", accepted, committed), ("apply", committed, applied)):
        spans = [late[fragment] - early[fragment] for fragment in early.keys() & late.keys()]
        if spans:
            found[f"{name}_seconds_p50"], found[f"{name}_seconds_max"] = float(np.median(spans)), max(spans)
    return found


def _unix(fields: dict[str, Any]) -> float:
    return datetime.fromisoformat(fields["timestamp"]).timestamp()


def _command(arguments: argparse.Namespace, address: str, contributions: int, folder: Path) -> list[str]:
    return [
        "--broker", address, "--folder", str(folder), "--contributions", str(contributions),
        "--size", str(arguments.size), "--fragments", str(arguments.fragments), "--seed", str(arguments.seed),
        "--timeout-seconds", str(arguments.timeout_seconds),
    ]  # fmt: skip


def _start(role: str, common: list[str], watch: Watch) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("run.py")), "--role", role, *common]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(2))
    watch.add(role, child.pid)
    return child


def _result(child: subprocess.Popen[str], arguments: argparse.Namespace) -> dict[str, Any]:
    try:
        output, _ = child.communicate(timeout=2 * arguments.timeout_seconds)
    except subprocess.TimeoutExpired as error:
        child.kill()
        raise SystemExit(f"a process of the benchmark took over {2 * arguments.timeout_seconds:g} s") from error
    if child.returncode != 0:
        raise SystemExit(f"a process of the benchmark ended with {child.returncode}: its own message stands above")
    found: dict[str, Any] = json.loads(output)
    return found


def _wait_for_join(folder: Path, learner: subprocess.Popen[str], arguments: argparse.Namespace) -> None:
    deadline = time.monotonic() + arguments.timeout_seconds
    while not (folder / "joined").exists():
        if learner.poll() is not None:
            raise SystemExit(f"the learner ended with {learner.returncode}: its own message stands above")
        if time.monotonic() >= deadline:
            raise SystemExit(f"the learner had not joined after {arguments.timeout_seconds:g} s")
        time.sleep(LOOK_SECONDS)


def check_room(arguments: argparse.Namespace, scratch: Path) -> None:
    """Ends the process with a sentence if this machine has too little memory or disk for the model."""
    memory_needed = MEMORY_BYTES_PER_PARAMETER * arguments.size + MEMORY_BYTES_BASE
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    if available < memory_needed:
        raise SystemExit(
            f"{arguments.size} parameters take about {memory_needed / GIB:.1f} GiB of memory, this machine has "
            f"{available / GIB:.1f} GiB available: give --size a smaller number"
        )
    disk_needed = DISK_BYTES_PER_PARAMETER * arguments.size
    if shutil.disk_usage(scratch).free < disk_needed:
        raise SystemExit(
            f"{arguments.size} parameters take about {disk_needed / GIB:.1f} GiB in {scratch}: name a folder on a "
            "larger disk with --scratch"
        )


def compare_cycles(arguments: argparse.Namespace, scratch: Path) -> bool:
    """One cycle for each number of contributions, and the table; whether the bar for memory was kept."""
    check_room(arguments, scratch)
    num_values = make_manifest(arguments.size, arguments.fragments).num_values
    cycles = []
    for contributions in arguments.contributions_each:
        cycles.append(run_cycle(arguments, contributions, scratch))
        if not arguments.keep:
            shutil.rmtree(scratch / f"cycle-{contributions}", ignore_errors=True)
    print(f"\nmodel: {num_values} parameters in {arguments.fragments} fragments, seed {arguments.seed}")
    _print_rows(cycles)
    peak = max(cost.peak_bytes for cycle in cycles for cost in cycle.watch.costs.values())
    print(f"largest process: {peak / GIB:.2f} GiB (bar: {arguments.memory_gib:g})")
    return bool(peak <= arguments.memory_gib * GIB)


def _print_rows(cycles: list[Cycle]) -> None:
    def row(name: str, values: list[str]) -> None:
        print(f"{name:<44}" + "".join(f"{value:>12}" for value in values))

    row("contributions to each fragment", [str(cycle.contributions) for cycle in cycles])
    for name in ("initialise", "join", "cycle", "after the last offer"):
        row(f"wall seconds: {name}", [f"{cycle.seconds[name]:.1f}" for cycle in cycles])
    for name in ("generate", "encode", "send"):
        row(f"wall seconds, sum: {name}", [f"{cycle.seconds[name]:.1f}" for cycle in cycles])
    for name in ("commit_seconds_p50", "commit_seconds_max", "apply_seconds_p50", "apply_seconds_max"):
        row(name.replace("_", " "), [f"{cycle.figures.get(name, float('nan')):.2f}" for cycle in cycles])
    row("seconds in step()", [f"{cycle.figures['blocked_seconds']:.1f}" for cycle in cycles])
    row("MB up", [f"{cycle.payload_bytes / 1e6:.0f}" for cycle in cycles])
    row("MB of updates", [f"{cycle.update_bytes / 1e6:.0f}" for cycle in cycles])
    row("MB in the store", [f"{cycle.store_bytes / 1e6:.0f}" for cycle in cycles])
    for role in ("broker", "outer", "learner", "contributors", "initialise"):
        row(f"peak GiB: {role}", [f"{cycle.watch.costs[role].peak_bytes / GIB:.2f}" for cycle in cycles])
        row(f"CPU seconds: {role}", [f"{cycle.watch.costs[role].cpu_seconds:.1f}" for cycle in cycles])
    row("peak GiB: all at one time", [f"{cycle.watch.total_peak_bytes / GIB:.2f}" for cycle in cycles])
    row("largest |live - version| after rebase", [f"{cycle.figures['difference']:.1e}" for cycle in cycles])
