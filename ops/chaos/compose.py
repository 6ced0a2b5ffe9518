"""The processes of a compose project: found through Docker, hit directly, read and checked through Docker again.

A signal goes to the process itself, never through Docker: for Docker, a container that it was asked to kill was stopped
by hand and is not started again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Final

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.checker import Finding
from isles.ops.chaos.logbook import Line, parse, unix_of
from isles.ops.chaos.targets import birth_of, check_machine, role_of
from isles.proto.errors import UsageError

DOCKER_SECONDS: Final = 20.0
"""For Docker to say what runs; a busy one takes seconds."""
CHECK_SECONDS: Final = 300.0
"""For `isles check` in a container: it recomputes all versions that are on tape."""
ANSWER_SECONDS: Final = 60.0
"""For one answer of the broker meanwhile."""
ERROR_CHARACTERS_MAX: Final = 300
"""Of what `docker` complained of: a sentence or two, not the whole of a log."""
CHECKED: Final = frozenset(
    {"contribution.accepted", "contribution.rejected", "round.committed", "learner.joined", "learner.progressed"}
)
"""Events that the checker reads."""
SERVICE: Final = "com.docker.compose.service"
NUMBER: Final = "com.docker.compose.container-number"
PORT: Final = "7700"
"""Where a broker listens whose container does not say otherwise."""


class Project:
    """A compose project on this machine."""

    def __init__(self, name: str) -> None:
        """Raises UsageError where processes cannot be told apart."""
        check_machine()
        self._name = name

    def find(self) -> tuple[Process, ...]:
        """The first process of each container that runs. Raises UsageError if there is none, or Docker fails."""
        found = [container_process(container) for container in self._containers()]
        return tuple(process for process in found if process is not None)

    def find_all(self) -> tuple[Process, ...]:
        """The same of all containers, also of those that stand still at the moment. Raises UsageError likewise."""
        found = [container_process(container, is_ended=True) for container in self._containers("--all")]
        return tuple(process for process in found if process is not None)

    def has_workers(self) -> bool:
        """Whether a worker runs, or is about to be started again. Raises UsageError if Docker fails."""
        found = self._containers("--all")
        states = [(container_process(one, is_ended=True), one["State"].get("Status")) for one in found]
        return any(
            process is not None and process.role == "worker" and state in ("running", "restarting")
            for process, state in states
        )

    def logs(self, since_unix: float = 0.0) -> dict[str, list[Line]]:
        """Process -> its lines of all its starts, or of those since a time. Raises UsageError if Docker fails."""
        since = ["--since", f"{since_unix:.3f}"] if since_unix else []
        logs = {}
        for container in self._containers("--all"):
            process = container_process(container, is_ended=True)
            if process is not None:
                done = _docker("logs", *since, str(container["Id"]))
                found = (parse(line.encode()) for line in (done.stdout + done.stderr).splitlines())
                logs[process.name] = [line for line in found if line is not None]
        return logs

    def check(self) -> list[Finding]:
        """What `isles check` finds, where the store can be reached: in the container of an outer, which can recompute
        versions, or in the broker's. Raises UsageError if it cannot be asked.
        """
        containers: dict[str, dict[str, Any]] = {}
        for container in self._containers():
            process = container_process(container)
            if process is not None:
                containers.setdefault(process.role, container)
        if "outer" in containers:
            container = containers["outer"]
            address = _variables(container).get("ISLES_OUTER__BROKER", "")
        elif "broker" in containers:
            container = containers["broker"]
            address = f"tcp://127.0.0.1:{_variables(container).get('ISLES_BROKER__PORT', PORT)}"
        else:
            raise UsageError(f"neither broker nor outer of the compose project {self._name} is running")
        said = [line for lines in self.logs().values() for line in lines if line["event"] in CHECKED]
        words = ["isles", "check", "--json", "--timeout", f"{ANSWER_SECONDS:g}", "--broker", address, "--log", "-"]
        done = _docker(
            *("exec", "--interactive", str(container["Id"]), *words),
            seconds=CHECK_SECONDS,
            may_fail=True,
            standard_input="".join(json.dumps(line) + "\n" for line in said),
        )
        try:
            found = json.loads(done.stdout)["findings"]
            return [Finding(one["promise"], one["verdict"], one["text"], one.get("at_end", "")) for one in found]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"`{' '.join(words)}` in a container said: {_short(done.stderr)}") from error

    def _containers(self, *options: str) -> list[dict[str, Any]]:
        label = f"label=com.docker.compose.project={self._name}"
        names = _docker("ps", "--quiet", "--no-trunc", "--filter", label, *options).stdout.split()
        if not names:
            raise UsageError(f"no container of the compose project {self._name} is running on this machine")
        found: list[dict[str, Any]] = json.loads(_docker("inspect", *names).stdout)
        return sorted(found, key=lambda container: str(container.get("Name")))


def container_process(container: dict[str, Any], *, is_ended: bool = False) -> Process | None:
    """What `docker inspect` says of a container as a process; None if it is none of ours, or does not run.

    One that does not run is one as well if it `is_ended`. It is named after its service, and from the second container
    of a service on after its number too.
    """
    config, state = container.get("Config") or {}, container.get("State") or {}
    arguments = [str(part) for part in (container.get("Args") or [])]
    role = role_of([str(container.get("Path") or ""), *arguments])
    pid = int(state.get("Pid") or 0)
    if role is None or not (is_ended or (pid and state.get("Running"))):
        return None
    labels = config.get("Labels") or {}
    name, number = str(labels.get(SERVICE) or container.get("Name") or "").lstrip("/"), str(labels.get(NUMBER) or "1")
    region = _variables(container).get("ISLES_WORKER__REGION", "local" if role == "worker" else "")
    return Process(name if number == "1" else f"{name}-{number}", role, region, pid, birth_of(pid) or 0 if pid else 0)


def as_of_a_run(logs: Mapping[str, Sequence[Line]]) -> dict[str, list[Line]]:
    """The same lines as `measure` wants them: with times, with the names of processes instead of the ids that they have
    among themselves, and with what a supervisor would have said of their starts.
    """
    names: dict[tuple[Any, Any], str] = {}
    for name, lines in logs.items():
        for line in lines:
            names[line.get("process"), line.get("id")] = name
            if line.get("process") == "worker" and "learner" in line:
                names["worker", line["learner"]] = name  # its id may be one that the broker gave it
    found = {name: [_renamed(line, names) for line in lines] for name, lines in logs.items()}
    found["up"] = [
        {"event": "child.started", "child": name, "unix": line["unix"]}
        for name, lines in found.items()
        for line in lines
        if line["event"] == "process.started"
    ]
    return found


def _renamed(line: Line, names: Mapping[tuple[Any, Any], str]) -> Line:
    learner = names.get(("worker", line.get("learner")), line.get("learner"))
    outer = names.get(("outer", line.get("outer")), line.get("outer"))
    return {**line, "learner": learner, "outer": outer, "unix": unix_of(line)}


def _variables(container: dict[str, Any]) -> dict[str, str]:
    lines = (container.get("Config") or {}).get("Env") or []
    return dict(str(line).partition("=")[::2] for line in lines)


def _docker(
    *arguments: str, seconds: float = DOCKER_SECONDS, may_fail: bool = False, standard_input: str = ""
) -> subprocess.CompletedProcess[str]:
    program = shutil.which("docker")
    if program is None:
        raise UsageError("there is no `docker` on this machine: --compose needs it; --run-dir does not")
    try:
        done = subprocess.run(
            [program, *arguments],
            input=standard_input,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"docker {arguments[0]} did not answer within {seconds:g} s") from error
    if done.returncode and not may_fail:
        raise UsageError(f"docker {arguments[0]} failed: {_short(done.stderr)}")
    return done


def _short(text: str) -> str:
    return " ".join(text.split())[-ERROR_CHARACTERS_MAX:] or "nothing"
