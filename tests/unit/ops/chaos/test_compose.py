"""A compose project is found, read and checked through Docker; here a script stands in for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.checker import Finding
from isles.ops.chaos.compose import Project, as_of_a_run, container_process
from isles.ops.chaos.measures import FaultRecord, measure
from isles.ops.chaos.targets import birth_of
from isles.ops.main import run
from isles.proto.errors import UsageError

DOCKER = """#!/bin/sh
echo "$@" >> "$FAKE/calls"
cat > "$FAKE/heard"
cat "$FAKE/$1.out" 2>/dev/null
cat "$FAKE/$1.err" >&2 2>/dev/null
exit "$(cat "$FAKE/$1.code" 2>/dev/null || echo 0)"
"""


def container(service: str = "worker-us", number: str = "1", **changes: Any) -> dict[str, Any]:
    labels = {"com.docker.compose.service": service, "com.docker.compose.container-number": number}
    return {
        "Id": f"{service}{number}".encode().hex(),
        "Name": f"/isles-{service}-{number}",
        "Path": "isles",
        "Args": ["worker"],
        "State": {"Running": True, "Pid": os.getpid()},
        "Config": {"Env": ["PATH=/bin", "ISLES_WORKER__REGION=us"], "Labels": labels},
    } | changes


class Docker:
    """What the stand-in says, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def says(self, verb: str, out: str, *, err: str = "", code: int = 0) -> None:
        (self._folder / f"{verb}.out").write_text(out, encoding="utf-8")
        (self._folder / f"{verb}.err").write_text(err, encoding="utf-8")
        (self._folder / f"{verb}.code").write_text(str(code), encoding="utf-8")

    def has(self, *containers: dict[str, Any]) -> None:
        self.says("ps", "\n".join(one["Id"] for one in containers))
        self.says("inspect", json.dumps(list(containers)))

    @property
    def heard(self) -> str:
        """What came in last."""
        return (self._folder / "heard").read_text(encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    program = tmp_path / "docker"
    program.write_text(DOCKER, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    return Docker(tmp_path)


def test_a_container_is_a_process_with_the_name_of_its_service_its_role_and_region() -> None:
    birth = birth_of(os.getpid()) or 0
    assert container_process(container()) == Process("worker-us", "worker", "us", os.getpid(), birth)
    second = container_process(container(number="2"))
    assert second is not None
    assert second.name == "worker-us-2"
    broker = container_process(container("broker", Args=["broker"], Config={"Env": []}))
    assert broker is not None
    assert (broker.name, broker.role, broker.region) == ("isles-broker-1", "broker", "")


def test_containers_that_are_not_ours_or_do_not_run_are_left_alone() -> None:
    gone = container(State={"Running": False, "Pid": 0})
    assert container_process(container(Path="postgres", Args=[])) is None
    assert container_process(gone) is None
    assert container_process({}) is None
    assert container_process(gone, is_ended=True) == Process("worker-us", "worker", "us", 0)


def test_a_project_is_what_docker_says_runs_of_it(docker: Docker) -> None:
    docker.has(container(number="2"), container(), container("db", Path="postgres"))
    assert [process.name for process in Project("isles").find()] == ["worker-us", "worker-us-2"]
    assert "label=com.docker.compose.project=isles" in docker.calls[0]


@pytest.mark.parametrize(("state", "is_there"), [("running", True), ("restarting", True), ("exited", False)])
def test_a_worker_that_is_about_to_be_started_again_is_still_there(state: str, is_there: bool, docker: Docker) -> None:
    docker.has(container("broker", Args=["broker"]), container(State={"Running": False, "Pid": 0, "Status": state}))
    assert Project("isles").has_workers() == is_there


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            'kind = "kill"\nprocess = "us-0"',
            "no process us-0 in the compose project isles: it has broker, worker-us-2",
        ),
        (
            'kind = "freeze"\nrole = "outer"',
            "no outer in the compose project isles: it has broker, worker-us-2",
        ),
        ('kind = "corrupt"', "its kinds are kill, kill-all, freeze"),
    ],
)
def test_a_plan_for_whom_a_project_does_not_have_is_refused_before_anything_happens(
    fault: str, words: str, docker: Docker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = container(number="2", State={"Running": False, "Pid": 0})
    docker.has(container("broker", Args=["broker"]), gone)
    plan = tmp_path / "plan.toml"
    plan.write_text(f"[[fault]]\nat = 0\n{fault}\n", encoding="utf-8")
    assert run(["chaos", str(plan), "--compose", "isles"]) == 2
    assert words in capsys.readouterr().err


def test_a_project_that_does_not_run_and_a_docker_that_fails_are_one_sentence(docker: Docker) -> None:
    docker.says("ps", "")
    with pytest.raises(UsageError, match="no container of the compose project isles is running"):
        Project("isles").find()
    docker.says("ps", "", err="Cannot connect to the\nDocker daemon", code=1)
    with pytest.raises(UsageError, match="docker ps failed: Cannot connect to the Docker daemon"):
        Project("isles").find()


def test_a_machine_without_docker_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="there is no `docker`"):
        Project("isles").find()


def test_logs_are_read_from_both_streams_and_what_is_no_line_of_ours_is_left_out(docker: Docker) -> None:
    docker.has(container(State={"Running": False, "Pid": 0}))
    docker.says("logs", '{"event": "a"}\nTraceback\n', err='{"event": "b"}\n')
    assert Project("isles").logs(5.0) == {"worker-us": [{"event": "a"}, {"event": "b"}]}
    assert docker.calls[0].endswith("--all")
    assert docker.calls[-1].startswith("logs --since 5.000 ")


@pytest.mark.parametrize("code", [0, 1])
def test_a_project_is_checked_in_the_container_of_an_outer(code: int, docker: Docker) -> None:
    outer = container("outer", Args=["outer"], Config={"Env": ["ISLES_OUTER__BROKER=tcp://broker:7700"]})
    docker.has(container("broker", Args=["broker"]), outer)
    found = {"findings": [{"promise": "p", "verdict": "holds", "text": "t"}]}
    docker.says("exec", json.dumps(found), err="a warning", code=code)
    docker.says("logs", '{"event": "round.committed"}\n{"event": "broker.started"}\n')
    assert Project("isles").check() == [Finding("p", "holds", "t")]
    asked = "isles check --json --timeout 60 --broker tcp://broker:7700 --log -"
    assert docker.calls[-1] == f"exec --interactive {outer['Id']} {asked}"
    assert [json.loads(one)["event"] for one in docker.heard.splitlines()] == ["round.committed"] * 2


def test_without_an_outer_the_broker_is_asked_at_its_own_port(docker: Docker) -> None:
    docker.has(container("broker", Args=["broker"], Config={"Env": ["ISLES_BROKER__PORT=7711"]}))
    docker.says("exec", "", err="isles: no broker answered", code=5)
    with pytest.raises(UsageError, match="in a container said: isles: no broker answered"):
        Project("isles").check()
    assert "--broker tcp://127.0.0.1:7711 " in docker.calls[-1]


def test_a_project_without_a_broker_cannot_be_checked(docker: Docker) -> None:
    docker.has(container())
    with pytest.raises(UsageError, match="neither broker nor outer"):
        Project("isles").check()


def line(unix: int, event: str, process: str, name: str, **fields: Any) -> dict[str, Any]:
    return {
        "timestamp": f"1970-01-01T00:00:{unix:02d}Z", "event": event, "process": process, "id": name, **fields
    }  # fmt: skip


def test_restarts_survivors_and_fail_overs_of_a_project_are_measured_from_its_logs() -> None:
    """The lines of all starts of a container are in one log; a learner there is called as the broker has named it."""
    steps = [
        line(at, "learner.progressed", "worker", "4f2a", steps=2 * at)
        for at in range(1, 30)
    ]  # fmt: skip
    logs = {
        "broker": [
            line(1, "outer.leased", "broker", "broker", outer="77aa"),
            line(9, "outer.leased", "broker", "broker", outer="77aa"),
            line(10, "round.committed", "broker", "broker", fragment=0, tokens=9.0),
            line(16, "contribution.accepted", "broker", "broker", learner="w-7"),
        ],
        "outer": [line(1, "process.started", "outer", "77aa")],
        "worker-us": steps,
        "worker-us-2": [
            line(1, "process.started", "worker", "beef"),
            line(12, "process.started", "worker", "beef"),
            line(14, "process.loaded", "worker", "beef"),
            line(15, "learner.joined", "worker", "beef", learner="w-7"),
        ],
    }
    faults = [
        FaultRecord(number=1, kind="kill", targets=("outer",), began_unix=5.0, ended_unix=5.0),
        FaultRecord(number=2, kind="kill", targets=("worker-us-2",), began_unix=11.0, ended_unix=11.0),
    ]
    found = measure(as_of_a_run(logs), faults)
    (restart,) = found.restarts
    assert (restart.child, restart.loading_seconds, restart.joined_seconds) == ("worker-us-2", 2.0, 1.0)
    assert restart.accepted_seconds == 2.0
    (fail_over,) = found.fail_overs
    assert (fail_over.outer, fail_over.leased_seconds, fail_over.committed_seconds) == ("outer", 4.0, 5.0)
    assert [one.learner for one in found.effects[1].survivors] == ["worker-us"]
