"""The example of a training loop of one's own runs as the guide says, with real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.ops.run_folder import choose_address

ISLES = [sys.executable, "-P", "-m", "isles.ops.main"]
END_SECONDS = 20.0
RUN_SECONDS = 100.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A broker and an outer, as somebody would start them by hand."""
    address = choose_address("")
    port = str(address.control_port)
    commands = [["broker", "--store", "store", "--port", port], ["outer", "--broker", str(address)]]
    processes = [
        subprocess.Popen([*ISLES, *command], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    yield str(address)
    for process in reversed(processes):
        process.terminate()
    try:
        codes = [process.wait(END_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0]


@pytest.mark.slow
def test_the_example_loop_finishes_with_two_learners(address: str, root: Path, tmp_path: Path) -> None:
    program = [sys.executable, str(root / "examples" / "own_loop.py")]
    learners = [
        subprocess.Popen([*program, name, address, "400000"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for name in ("anna", "bert")
    ]
    try:
        printed = [learner.communicate(timeout=RUN_SECONDS)[0] for learner in learners]
    finally:
        for learner in learners:
            learner.kill()
    assert [learner.returncode for learner in learners] == [0, 0]
    assert all(float(text.removeprefix("error ")) < 0.5 for text in printed)
