"""The benchmark of hostile learners, in small: a stranger with a worker's key joins, lies, and is told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "hostile_demo.py"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_learner_that_lies_is_found_out_and_the_run_ends_as_without_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM), "--short", "--only", "finite", "--keep", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=870, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    honest, absent, hostile = rows[1:]
    assert honest.startswith("| none |")
    assert absent.startswith("| absent |")
    assert "| 0 | 0 | 0 |" in honest, "nothing rejected, nothing clipped"
    assert hostile.startswith("| not finite |")
    assert "| finite " in hostile
    assert "nothing of the others rejected" in result.stdout
