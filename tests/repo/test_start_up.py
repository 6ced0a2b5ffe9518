"""What a command loads before it knows what it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BARE_PROGRAM = """
import sys
sys.modules |= dict.fromkeys(["numpy", "safetensors", "torch", "zstandard"])
from isles.ops.main import run
sys.exit(run(sys.argv[1:]))
"""
"""As on a machine where only what a broker needs is installed."""

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


@pytest.mark.parametrize(
    "command", ["broker", "evaluate", "export", "outer", "plan", "sample", "simulate", "status", "up", "worker"]
)
def test_arguments_are_parsed_before_a_tensor_library_is_loaded(command: str) -> None:
    assert {"numpy", "safetensors", "torch"}.isdisjoint(modules_loaded_by_command(command, "--help"))


@pytest.mark.parametrize(("command", "library"), [("evaluate", "torch"), ("outer", "numpy"), ("worker", "torch")])
def test_where_only_a_broker_is_installed_a_process_that_needs_more_says_at_once_what_to_install(
    tmp_path: Path, command: str, library: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", BARE_PROGRAM, command], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 2
    assert f"this command needs {library}, which is not installed here" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
