"""The processes of a comparison: started by role, told to stop, killed, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.peers.plan import Plan
from isles.ops.children import THREAD_VARIABLES, child_environment

DISTRIBUTIONS: Final = ("torchft", "hivemind", "flwr")
PROGRAM: Final = Path(__file__).with_name("run.py")
LOOK_SECONDS: Final = 0.05
START_SECONDS_MAX: Final = 600.0
"""Longest wait for a process to load what it needs: far above what it takes on an idle machine."""
STOP_SECONDS: Final = 60.0
"""Longest wait for a process that was told to stop."""
REASON_CHARACTERS_MAX: Final = 160


class UnavailableError(Exception):
    """A peer cannot be measured here; the text says why in one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a learner's record; `extra` is what only its system notes."""

    step: int
    at: float
    wall: float
    cpu: float
    others_cpu: float
    sent: int
    received: int
    extra: Mapping[str, Any]


def version_of(distribution: str) -> str:
    """The installed version. Raises UnavailableError if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise UnavailableError(f"{distribution} is not installed here: pip install -e '.[train,bench]'") from error


def print_versions() -> None:
    """One line: which peers are installed."""
    versions = []
    for name in DISTRIBUTIONS:
        try:
            versions.append(f"{name} {version_of(name)}")
        except UnavailableError:
            versions.append(f"{name} not installed")
    print(f"peers: {', '.join(versions)}", flush=True)


class Process:
    """One process of a comparison, in a session of its own, with a file for what it prints."""

    def __init__(self, role: str, plan: Plan, folder: Path) -> None:
        self.name, self.plan = plan.name, plan
        self._error = folder / f"{plan.name}.err"
        environment = child_environment(2) | dict.fromkeys(THREAD_VARIABLES, "1")
        # Gloo binds to the address of the host's name, Flower reports to its makers: neither is wanted here.
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "FLWR_TELEMETRY_ENABLED": "0"}
        with self._error.open("ab") as error, (folder / f"{plan.name}.out").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), "--role", role, "--plan", plan.text()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=error,
                env=environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Ends it and its children with -9."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tell(self, word: str) -> None:
        """Gives the order "go" or "stop"."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{word}\n".encode())
            self._process.stdin.flush()

    def wait(self, timeout_seconds: float) -> None:
        """Returns when it has ended well. Raises UnavailableError if it has not, or not in time."""
        try:
            code = self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"{self.name} did not end within {timeout_seconds:g} s; {self.last_words()}"
            ) from error
        if code != 0:
            raise UnavailableError(f"{self.name} ended with {code}: {self.last_words()}")

    def rows(self) -> list[Row]:
        """The record so far."""
        path = Path(self.plan.record)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [_row(json.loads(line)) for line in lines if line.endswith("\n")]

    def wait_for(self, is_reached: Callable[[list[Row]], bool], timeout_seconds: float) -> list[Row]:
        """The record once it is so. Raises UnavailableError if the process ends before, or not in time."""
        deadline = time.monotonic() + timeout_seconds
        while not is_reached(rows := self.rows()):
            if self.exit_code is not None:
                raise UnavailableError(f"{self.name} ended with {self.exit_code}: {self.last_words()}")
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self.name} is not that far after {timeout_seconds:g} s; {self.last_words()}")
            time.sleep(LOOK_SECONDS)
        return rows

    def printed(self, text: str) -> str:
        """The last line on standard error with this in it; nothing if there is none."""
        return next((line[:REASON_CHARACTERS_MAX] for line in reversed(self._errors()) if text in line), "")

    def last_words(self) -> str:
        lines = self._errors()
        return lines[-1].strip()[:REASON_CHARACTERS_MAX] if lines else "it said nothing"

    def _errors(self) -> list[str]:
        return self._error.read_text(encoding="utf-8", errors="replace").strip().splitlines()


class Group:
    """All processes of one run of one system; whatever still runs at the end is killed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()

    def start(self, role: str, plan: Plan) -> Process:
        self.processes.append(Process(role, plan, self.folder))
        return self.processes[-1]

    def record(self, name: str) -> str:
        """Where the record of the process of this name goes."""
        return str(self.folder / f"{name}.jsonl")

    def read_address(self, process: Process, timeout_seconds: float = START_SECONDS_MAX) -> str:
        """What a process that others dial has written down with `write_address`."""
        rows = process.wait_for(bool, timeout_seconds)
        return str(rows[0].extra["address"])


def write_address(plan: Plan, address: str) -> None:
    """For processes that others dial: says where, in the record."""
    line = json.dumps({"step": 0, "address": address})
    Path(plan.record).write_text(f"{line}\n", encoding="utf-8")


def _row(line: dict[str, Any]) -> Row:
    common = {field.name: line.pop(field.name, 0) for field in fields(Row) if field.name != "extra"}
    return Row(**common, extra=line)
