"""The benchmarks of speed and memory, in small: each prints its table and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "row"),
    [
        ("outer_step.py", "together, rda"),
        ("broker.py", "64 MiB and 8 MiB for each open upload"),
        ("learner_memory.py", "hybrid"),
        ("wan/run.py", "Mbit/s"),
    ],
)
def test_a_short_run_prints_its_table(program: str, row: str) -> None:
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / program), "--short"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert row in result.stdout or "nothing was measured" in result.stdout
