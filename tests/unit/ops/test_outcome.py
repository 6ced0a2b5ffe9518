"""What a person is told to do next suits the run that has just ended."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from isles.ops.outcome import next_steps
from isles.ops.run_folder import RunFolder
from isles.proto.agreement import Budget


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("gpt", ["--prompt", "def "]),
        ("examples.own_task:make", ["--task", "examples.own_task:make", "--prompt", "..."]),
    ],
)
def test_trained_parameters_are_tried_with_the_task_that_trained_them(
    task: str, words: list[str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "a run")
    steps = dict(next_steps(folder, "finished", task, Budget(tokens=100)))
    command = shlex.split(steps["try them"])
    assert command[-len(words) :] == words
    assert command[command.index("--run-dir") + 1] == str(folder.path)
    assert steps["train longer"].endswith("--tokens 200")


def test_a_run_that_is_not_finished_is_gone_on_with(tmp_path: Path) -> None:
    steps = dict(next_steps(RunFolder(tmp_path), "interrupted", "gpt", Budget(rounds=3)))
    assert "try them" not in steps
    assert steps["go on"].endswith(f"up --run-dir {tmp_path}")
