"""What a command loads before it knows what it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from isles.ops.main import run
code = run(sys.argv[1:])
print(*sys.modules, file=sys.stderr, sep="\\n")
sys.exit(code)
"""


def modules_loaded_by_command(*arguments: str) -> set[str]:
    """Run a command in an interpreter of its own; return every module that it loaded."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    return set(result.stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_first_screen_loads_nothing_of_weight(arguments: list[str]) -> None:
    loaded = modules_loaded_by_command(*arguments)
    assert {"numpy", "pydantic", "rich", "sqlite3", "structlog", "torch", "zmq", "zstandard"}.isdisjoint(loaded)


@pytest.mark.parametrize("command", ["broker", "evaluate", "export", "outer", "sample", "status", "up", "worker"])
def test_arguments_are_parsed_before_a_tensor_library_is_loaded(command: str) -> None:
    assert {"numpy", "safetensors", "torch"}.isdisjoint(modules_loaded_by_command(command, "--help"))
