"""Whole runs on a small model, by the command line alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ISLES = Path(sys.executable).with_name("isles")
TASK = (
    "--task.layers=1", "--task.width=32", "--task.heads=1", "--task.context=32", "--task.batch-size=4",
    "--task.validation-windows=8",
)  # fmt: skip
PACE = ("--sync.num-fragments=2", "--sync.interval-steps=6", "--set=evaluator.every_seconds_min=0.5")
RUN_SECONDS = 240
"""Far above what a run takes: a hang ends the test, not the suite."""


class SmallRun:
    """A run folder and its corpus; whatever was started ends with the test."""

    def __init__(self, run_dir: Path, corpus: Path) -> None:
        self.run_dir = run_dir
        self.store = run_dir / "store"
        self.task = (*TASK, f"--task.corpus={corpus}")
        self._started: list[subprocess.Popen[str]] = []

    def isles(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        return subprocess.run(
            [str(part) for part in (ISLES, *arguments)],
            cwd=self.run_dir.parent,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )

    def ask(self, *arguments: object) -> Any:
        """What a command prints as JSON; it must end with 0."""
        result = self.isles(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`isles up` in the folder, under way."""
        command = [ISLES, "up", "--run-dir", self.run_dir, "--step-seconds=0.02", *arguments]
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.run_dir.parent,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """The same for a new run: with the task and its pace."""
        return self.start(*self.task, *PACE, *arguments)

    def finish(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Waits for the end, which must be a good one; the summary."""
        _, err = process.communicate(timeout=RUN_SECONDS)
        assert process.returncode == 0, err
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8"))
        return summary

    def events(self, process: str) -> list[dict[str, Any]]:
        """What a process has logged; a line that is being written is left out."""
        path = self.run_dir / "logs" / f"{process}.jsonl"
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def count(self, process: str, event: str) -> int:
        return sum(one["event"] == event for one in self.events(process))

    def wait_for(self, process: subprocess.Popen[str], is_there: Callable[[], bool], what: str) -> None:
        """Looks again and again, as long as the process runs and the limit permits."""
        for _ in range(10 * RUN_SECONDS):
            if is_there():
                return
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            break
        if not is_there():
            pytest.fail(f"{what} did not happen; `up` {'runs' if process.poll() is None else 'ended'}")

    def pid(self, child: str) -> int:
        """Of the newest start of a process."""
        return next(one["pid"] for one in reversed(self.events("up")) if one.get("child") == child and "pid" in one)

    def kill_everything(self, process: subprocess.Popen[str]) -> None:
        """The supervisor first, so that it starts nothing again."""
        process.kill()
        process.communicate()
        for child in {one["child"] for one in self.events("up") if one["event"] == "child.started"}:
            try:
                os.kill(self.pid(child), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def _environment() -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
    return clean | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture
def small_runs(tmp_path: Path) -> Iterator[Callable[[str], SmallRun]]:
    """Makes run folders by name, all with one small text that is quick to read and easy to learn."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(40):
        lines = [f"line {k} of file {n}: the quick brown fox jumps over the lazy dog\n" for k in range(120)]
        (corpus / f"{n}.txt").write_text("".join(lines), encoding="utf-8")
    made: list[SmallRun] = []

    def make(name: str) -> SmallRun:
        made.append(SmallRun(tmp_path / name, corpus))
        return made[-1]

    yield make
    for run in made:
        run.close()


@pytest.fixture
def small_run(small_runs: Callable[[str], SmallRun]) -> SmallRun:
    """One of them."""
    return small_runs("run")
