"""Processes are found by name, and a signal reaches the process that was meant or nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from isles.ops.chaos import targets
from isles.ops.chaos.campaign import Process
from isles.ops.chaos.targets import FolderTargets, birth_of, send_signal
from isles.ops.run_folder import RunFolder
from isles.proto.errors import UsageError


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line looks like `isles worker`, and that waits to be killed."""
    script = tmp_path / "isles"
    script.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n", encoding="utf-8")
    command = [sys.executable, str(script), "worker", "--id", "us-0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def say(folder: RunFolder, *lines: dict[str, object]) -> None:
    folder.logs.mkdir(parents=True, exist_ok=True)
    with folder.log("up").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_the_processes_of_a_run_folder_are_those_that_run(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    say(
        folder,
        {"event": "process.started"},
        {"event": "child.started", "child": "broker", "pid": os.getpid()},  # no `isles broker`: pids are used again
        {"event": "child.started", "child": "us-0", "pid": sleeper.pid},
    )
    folder_targets = FolderTargets(folder, {"us-0": "us"})
    (found,) = folder_targets.find()
    assert (found.name, found.role, found.region, found.pid) == ("us-0", "worker", "us", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert folder_targets.find() == ()


def test_a_relay_is_not_taken_for_the_broker(tmp_path: Path) -> None:
    script = tmp_path / "isles"
    script.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n", encoding="utf-8")
    command = [sys.executable, str(script), "broker"]
    folder = RunFolder(tmp_path / "run")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        say(folder, *({"event": "child.started", "child": name, "pid": process.pid} for name in ("broker", "relay-us")))
        assert [one.name for one in FolderTargets(folder, {}).find()] == ["broker"]
        process.kill()


def test_processes_of_an_earlier_start_are_nobodys(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    say(folder, {"event": "child.started", "child": "us-0", "pid": sleeper.pid}, {"event": "process.started"})
    assert FolderTargets(folder, {}).find() == ()


def test_a_signal_is_not_sent_to_another_process_of_the_same_number(sleeper: subprocess.Popen[bytes]) -> None:
    birth = birth_of(sleeper.pid)
    assert birth is not None
    with pytest.raises(UsageError, match="had ended already"):
        send_signal(Process("us-0", "worker", "us", sleeper.pid, birth - 1), signal.SIGKILL)
    assert sleeper.poll() is None
    send_signal(Process("us-0", "worker", "us", sleeper.pid, birth), signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL
    with pytest.raises(UsageError, match="had ended already"):
        send_signal(Process("us-0", "worker", "us", sleeper.pid, birth), signal.SIGKILL)


def test_a_machine_that_cannot_tell_processes_apart_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("isles.ops.chaos.targets.PROCESSES", tmp_path / "nothing")
    with pytest.raises(UsageError, match="need Linux"):
        FolderTargets(RunFolder(tmp_path), {})


def test_the_outer_that_has_the_lease_is_known(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    say(folder, {"event": "child.started", "child": "us-0", "pid": sleeper.pid})
    targets = FolderTargets(folder, {})
    assert [process.is_merging for process in targets.find()] == [False]
    folder.log("broker").write_text('{"event": "outer.leased", "outer": "us-0"}\n', encoding="utf-8")
    assert [process.is_merging for process in targets.find()] == [True]


FREEZER: Final = """
import os, signal, sys
from isles.ops.chaos.campaign import Process
from isles.ops.chaos.targets import ThawGuard, send_signal

frozen = Process("us-0", "worker", "us", int(sys.argv[1]))
guard = ThawGuard(frozen)
send_signal(frozen, signal.SIGSTOP)
sys.stdin.readline()
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
guard.close()
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_frozen_process_goes_on_when_whoever_froze_it_is_done_or_killed(
    sleeper: subprocess.Popen[bytes], end: str
) -> None:
    command = [sys.executable, "-c", FREEZER, str(sleeper.pid), end]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as freezer:
        _, status = os.waitpid(sleeper.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        freezer.communicate(b"\n")
    assert freezer.returncode == (-signal.SIGKILL if end == "killed" else 0)
    _, status = os.waitpid(sleeper.pid, os.WCONTINUED)
    assert os.WIFCONTINUED(status)


def test_nobody_is_frozen_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "THAW", ("/nowhere/sh",))
    with pytest.raises(UsageError, match="us-0 was not frozen"):
        targets.ThawGuard(Process("us-0", "worker", "us", os.getpid()))
