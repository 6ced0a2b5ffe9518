"""Finding the processes of a run, and sending them signals.

Under `isles up` they are in its log; of a compose project Docker knows them. A signal goes to the process itself, never
through Docker: for Docker, a container that it was asked to kill was stopped by hand and is not started again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.logbook import LogReader
from isles.ops.chaos.plan import Role
from isles.ops.run_folder import RunFolder
from isles.proto.errors import UsageError

PROCESSES: Final = Path("/proc/self")
DOCKER_SECONDS: Final = 20.0
"""For Docker to say what runs; a busy one takes seconds."""
ROLE_OF_COMMAND: Final[dict[str, Role]] = {
    "broker": "broker", "outer": "outer", "worker": "worker", "evaluate": "evaluator"
}  # fmt: skip
BIRTH_FIELD: Final = 19
"""Of /proc/PID/stat after the name in brackets: start time, in clock ticks since the machine started."""


class Targets(Protocol):
    """The processes of a run."""

    def find(self) -> tuple[Process, ...]:
        """Those that run now. Raises UsageError if that cannot be found out."""


class FolderTargets:
    """The processes of a running `isles up`, from its log."""

    def __init__(self, folder: RunFolder, regions: dict[str, str]) -> None:
        """`regions` is worker -> region. Raises UsageError where processes cannot be told apart."""
        _check_machine()
        self._log = LogReader(folder.log("up"))
        self._broker_log = LogReader(folder.log("broker"))
        self._merging = ""
        self._regions = regions
        self._pids: dict[str, int] = {}

    def find(self) -> tuple[Process, ...]:
        for line in self._log.read():
            child, pid = line.get("child"), line.get("pid")
            if line.get("event") == "process.started":
                self._pids.clear()  # another start of `isles up`: the processes of the one before are gone
            if line.get("event") == "child.started" and isinstance(child, str) and isinstance(pid, int):
                self._pids[child] = pid
        for line in self._broker_log.read():
            if line.get("event") == "outer.leased":
                self._merging = str(line.get("outer"))
        found = (self._process(name, pid) for name, pid in self._pids.items())
        return tuple(process for process in found if process is not None)

    def _process(self, name: str, pid: int) -> Process | None:
        words = command_line(pid)
        role = _role(words)
        birth = birth_of(pid)
        if role is None or birth is None:
            return None
        return Process(name, role, self._regions.get(name, ""), pid, birth, is_merging=name == self._merging)


class ComposeTargets:
    """The processes of a compose project, from Docker: the first process of each container."""

    def __init__(self, project: str) -> None:
        """Raises UsageError where processes cannot be told apart."""
        _check_machine()
        self._project = project

    def find(self) -> tuple[Process, ...]:
        label = f"label=com.docker.compose.project={self._project}"
        names = _docker("ps", "--quiet", "--no-trunc", "--filter", label).split()
        if not names:
            raise UsageError(f"no container of the compose project {self._project} is running on this machine")
        found = []
        for container in json.loads(_docker("inspect", *names)):
            process = container_process(container)
            if process is not None:
                found.append(process)
        return tuple(found)


def container_process(container: dict[str, Any]) -> Process | None:
    """What `docker inspect` says of a container as a process; None if it is none of ours, or does not run."""
    config, state = container.get("Config") or {}, container.get("State") or {}
    arguments = [str(part) for part in (container.get("Args") or [])]
    role = _role([str(container.get("Path") or ""), *arguments])
    pid = int(state.get("Pid") or 0)
    if role is None or not pid or not state.get("Running"):
        return None
    variables = dict(str(line).partition("=")[::2] for line in config.get("Env") or [])
    region = variables.get("ISLES_WORKER__REGION", "local" if role == "worker" else "")
    return Process(str(container.get("Name") or "").lstrip("/"), role, region, pid, birth_of(pid) or 0)


def send_signal(process: Process, number: signal.Signals) -> None:
    """Raises UsageError if the process is gone, is another one by now, or may not be touched."""
    birth = birth_of(process.pid)
    if birth is None or (process.birth and birth != process.birth):
        raise UsageError(f"{process.name} (pid {process.pid}) had ended already")
    try:
        os.kill(process.pid, number)
    except ProcessLookupError as error:
        raise UsageError(f"{process.name} (pid {process.pid}) had ended already") from error
    except PermissionError as error:
        raise UsageError(
            f"{process.name} (pid {process.pid}) belongs to another user: run this as the user that runs the run, or "
            "as root for containers"
        ) from error


def birth_of(pid: int) -> int | None:
    """When a process began, in ticks of its machine; None if it has ended, even if nobody has taken note of it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if len(fields) <= BIRTH_FIELD or fields[0] in "ZX" else int(fields[BIRTH_FIELD])


def command_line(pid: int) -> list[str]:
    """The words of a process's command; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _check_machine() -> None:
    if not PROCESSES.is_dir():
        raise UsageError(
            f"faults on purpose need Linux: without {PROCESSES} a signal could reach the wrong process; use a container"
        )


def _role(words: list[str]) -> Role | None:
    """`... isles ROLE ...`: the word after the program."""
    for program, command in pairwise(words):
        if Path(program).name == "isles" and command in ROLE_OF_COMMAND:
            return ROLE_OF_COMMAND[command]
    return None


def _docker(*arguments: str) -> str:
    program = shutil.which("docker")
    if program is None:
        raise UsageError("there is no `docker` on this machine: --compose needs it; --run-dir does not")
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=DOCKER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"docker {arguments[0]} did not answer within {DOCKER_SECONDS:g} s") from error
    if done.returncode:
        raise UsageError(f"docker {arguments[0]} failed: {' '.join(done.stderr.split())[:300]}")
    return done.stdout
