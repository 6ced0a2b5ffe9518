"""The measured processes: a broker and an outer as an operator starts them, and what they cost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from isles.ops.children import ChildProcess, child_environment

SAMPLE_SECONDS: Final = 0.2
"""Between two looks at /proc; the peak is the kernel's own, only the sum over processes is sampled."""
STOP_SECONDS: Final = 600.0
"""An outer that stops may have a large state to write down first."""
START_SECONDS: Final = 60.0
"""Longest wait until a broker listens."""
GIB: Final = 1 << 30


@dataclass
class Cost:
    """What one process has cost so far."""

    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    """Largest resident memory: VmHWM."""
    resident_bytes: int = 0


@dataclass
class Watch:
    """A thread that looks at /proc now and then, so that the figures of a process outlive it."""

    costs: dict[str, Cost] = field(default_factory=dict)
    total_peak_bytes: int = 0
    """Largest sum of the resident memory of all processes at one time."""
    _pids: dict[str, int] = field(default_factory=dict)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(10 * SAMPLE_SECONDS)

    def add(self, name: str, pid: int) -> None:
        self._pids[name] = pid
        self.costs.setdefault(name, Cost())

    def pid(self, name: str) -> int:
        return self._pids[name]

    def look(self) -> None:
        """Reads everything now."""
        for name, pid in list(self._pids.items()):
            cost = read_cost(pid)
            if cost is None:
                self.costs[name].resident_bytes = 0
                continue
            cost.peak_bytes = max(cost.peak_bytes, self.costs[name].peak_bytes)
            self.costs[name] = cost
        total = sum(cost.resident_bytes for cost in self.costs.values())
        self.total_peak_bytes = max(self.total_peak_bytes, total)

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.look()


def read_cost(pid: int) -> Cost | None:
    """CPU time and memory of a process; None once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    sizes = {line.partition(":")[0]: line.partition(":")[2] for line in status.splitlines()}
    if "VmHWM" not in sizes:
        return None
    peak, resident = (1024 * int(sizes[key].split()[0]) for key in ("VmHWM", "VmRSS"))
    return Cost((int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"), peak, resident)


@contextmanager
def broker_and_outer(
    folder: Path, watch: Watch, *, broker: Sequence[str] = (), outer: Sequence[str] = ()
) -> Iterator[str]:
    """A broker with an empty store and an outer, with these further flags; gives the broker's address."""
    folder.mkdir(parents=True)
    children: dict[str, ChildProcess] = {}

    def start(role: str, *own: str) -> None:
        log = ["--log-file", str(folder / f"{role}.jsonl"), "--log-level", "debug", "--exit-with-parent"]
        environment = child_environment(2)
        children[role] = ChildProcess([role, *own, *log], output=folder / f"{role}.err", environment=environment)
        watch.add(role, children[role].pid)

    try:
        start("broker", "--store", str(folder / "store"), "--port", "0", *broker)
        address = wait_for_address(folder, children["broker"])
        start("outer", "--broker", address, *outer)
        yield address
        for role, child in children.items():
            if child.poll() is not None:
                raise SystemExit(f"the {role} ended with {child.poll()}: {tail(folder, role)}")
    finally:
        for child in reversed(children.values()):
            if child.poll() is None:
                child.terminate()
            child.wait(STOP_SECONDS)
            child.close()


def wait_for_address(folder: Path, broker: ChildProcess) -> str:
    """Where the broker listens, as it writes it down itself."""
    path, deadline = folder / "store" / "address", time.monotonic() + START_SECONDS
    while not path.exists():
        if broker.poll() is not None or time.monotonic() >= deadline:
            raise SystemExit(f"the broker did not start within {START_SECONDS:g} s: {tail(folder, 'broker')}")
        time.sleep(SAMPLE_SECONDS)
    return path.read_text(encoding="ascii").strip()


def tail(folder: Path, role: str) -> str:
    """The last lines of what a process said."""
    texts = [folder / f"{role}.jsonl", folder / f"{role}.err"]
    lines = [line for path in texts if path.exists() for line in path.read_text(encoding="utf-8").splitlines()[-2:]]
    return " | ".join(lines) or "it said nothing"


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder that others change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
