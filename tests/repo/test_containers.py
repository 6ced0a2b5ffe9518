"""What the images and the compose file promise, as far as their text shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isles.outer.settings import OuterSettings
from isles.workers.settings import EvaluatorSettings, WorkerSettings


@pytest.fixture
def dockerfile(root: Path) -> str:
    return (root / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture
def compose(root: Path) -> str:
    return (root / "docker-compose.yml").read_text(encoding="utf-8")


def stage(dockerfile: str, name: str) -> str:
    """The lines of one build stage."""
    stages = re.split(r"^FROM ", dockerfile, flags=re.MULTILINE)
    return next(text for text in stages if re.match(rf"\S+ AS {name}\n", text))


def test_an_old_engine_can_build_the_images(dockerfile: str) -> None:
    assert re.search(r"^# *syntax *=|<<-?['\"]?[A-Z]+|COPY --link", dockerfile, re.MULTILINE | re.IGNORECASE) is None


def test_the_base_image_can_be_chosen(dockerfile: str) -> None:
    assert "ARG PYTHON_IMAGE=python:3.12-slim\n" in dockerfile


def test_only_the_training_image_is_built_from_the_training_requirements(dockerfile: str) -> None:
    assert "train.txt" not in stage(dockerfile, "build-broker")
    assert "--from=build-broker" in stage(dockerfile, "broker")
    assert "-r train.txt" in stage(dockerfile, "build-train")


def test_no_process_runs_as_root_or_behind_a_shell(dockerfile: str) -> None:
    assert "USER isles\n" in stage(dockerfile, "process")
    assert 'ENTRYPOINT ["isles"]\n' in stage(dockerfile, "process")


def test_no_variable_of_the_compose_file_must_be_set(compose: str) -> None:
    assert all(":-" in name for name in re.findall(r"\$\{([^}]*)\}", compose))
    assert re.search(r"\$[A-Za-z]", compose) is None


def test_the_broker_publishes_no_port_to_the_host(compose: str) -> None:
    assert re.search(r"^\s+ports:", compose, re.MULTILINE) is None


def test_a_container_gets_more_time_to_end_than_its_process_takes(compose: str) -> None:
    graces = [int(seconds) for seconds in re.findall(r"stop_grace_period: (\d+)s", compose)]
    times = [
        WorkerSettings().drain_timeout_seconds,
        OuterSettings().stop_seconds,
        EvaluatorSettings().final_timeout_seconds,
    ]
    assert len(graces) == 2  # the broker's, which waits for nobody, and that of all others
    assert graces[0] >= max(times) + 10


def test_every_service_has_a_memory_limit_and_a_restart_policy(compose: str) -> None:
    assert compose.count("mem_limit:") == compose.count("restart:") == 5  # the two regions share theirs


def test_a_process_sees_its_own_key_and_cannot_change_it(compose: str) -> None:
    services = re.split(r"^  (?=[a-z-]+:\n)", compose[compose.index("\nservices:") :], flags=re.MULTILINE)
    for name in ("outer", "worker-us", "worker-eu", "evaluator"):
        service = next(text for text in services if text.startswith(f"{name}:"))
        assert re.findall(r'"(keys-[^"]*)"', service) == [f"keys-{name}:/keys:ro"]
        assert f"/keys/{name}.key" in service
        assert re.search(rf"- {name}=\w+:/keys/{name}\n", compose) is not None
