"""The benchmark of scale, in small: the same processes, and digests that agree at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "scale" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(PROGRAM), "--short", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_synthetic_model_goes_through_a_whole_cycle_and_is_what_the_store_says(tmp_path: Path) -> None:
    result = run("--only", "model", "--scratch", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "largest process" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_synthetic_learners_keep_their_pace_on_one_broker(tmp_path: Path) -> None:
    result = run("--only", "learners", "--scratch", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "commit latency p99" in result.stdout
