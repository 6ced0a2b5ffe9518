"""Finding the processes of a run, and sending them signals.

Under `isles up` they are in its log; those of a compose project are in `isles.ops.chaos.compose`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.logbook import LogReader
from isles.ops.chaos.plan import Role
from isles.ops.run_folder import RunFolder
from isles.proto.errors import UsageError

PROCESSES: Final = Path("/proc/self")
ROLE_OF_COMMAND: Final[dict[str, Role]] = {
    "broker": "broker", "outer": "outer", "worker": "worker", "evaluate": "evaluator"
}  # fmt: skip
BIRTH_FIELD: Final = 19
"""Of /proc/PID/stat after the name in brackets: start time, in clock ticks since the machine started."""

THAW: Final = ("/bin/sh", "-c", 'read -r _; kill -CONT "$1"', "thaw")
"""Waits for the end of its standard input, then thaws the process whose id follows."""


class Targets(Protocol):
    """The processes of a run."""

    def find(self) -> tuple[Process, ...]:
        """Those that run now. Raises UsageError if that cannot be found out."""


class FolderTargets:
    """The processes of a running `isles up`, from its log."""

    def __init__(self, folder: RunFolder, regions: dict[str, str]) -> None:
        """`regions` is worker -> region. Raises UsageError where processes cannot be told apart."""
        check_machine()
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
        role = role_of(words)
        if role == "broker" and name != "broker":
            return None  # a relay: `isles broker` too, and not what a fault of the broker means
        birth = birth_of(pid)
        if role is None or birth is None:
            return None
        return Process(name, role, self._regions.get(name, ""), pid, birth, is_merging=name == self._merging)


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


class ThawGuard:
    """Lets a process go on when whoever froze it is done, or dies: nobody else would, and it would keep its store.

    Raises UsageError where no guard can be started; then nothing should be frozen.
    """

    def __init__(self, process: Process) -> None:
        """Starts it, in a session of its own: what ends a whole terminal or process group must not end it."""
        try:
            self._shell = subprocess.Popen(
                [*THAW, str(process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"{process.name} was not frozen, since nothing could thaw it ({THAW[0]}: {error.strerror})"
            ) from error

    def close(self) -> None:
        """Thaws the process; idempotent."""
        self._shell.communicate()


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


def check_machine() -> None:
    """Raises UsageError where processes cannot be told apart."""
    if not PROCESSES.is_dir():
        raise UsageError(
            f"faults on purpose need Linux: without {PROCESSES} a signal could reach the wrong process; use a container"
        )


def role_of(words: list[str]) -> Role | None:
    """`... isles ROLE ...`: the word after the program."""
    for program, command in pairwise(words):
        if Path(program).name == "isles" and command in ROLE_OF_COMMAND:
            return ROLE_OF_COMMAND[command]
    return None
