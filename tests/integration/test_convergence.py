"""The benchmark of convergence: its arithmetic, and that a stopped campaign goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "convergence" / "run.py"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(PROGRAM), "--short", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)


def test_a_difference_is_the_mean_over_the_seeds_that_both_have() -> None:
    from benchmarks.convergence.results import difference

    found = difference({1: 2.02, 2: 2.0, 3: 9.0}, {1: 2.0, 2: 2.0, 4: 1.0})
    assert found is not None
    assert (found.percent, found.num_seeds) == (pytest.approx(0.5), 2)
    assert found.standard_error == pytest.approx(0.5)
    assert str(found) == "+0.50 ± 0.50 %"


def test_one_seed_has_no_standard_error_and_none_no_difference() -> None:
    from benchmarks.convergence.results import difference

    assert str(difference({1: 2.02}, {1: 2.0})) == "+1.00 %"
    assert difference({1: 2.0}, {2: 2.0}) is None


def test_a_run_that_diverged_is_kept_and_said(tmp_path: Path) -> None:
    from benchmarks.convergence.results import Results, Run, difference

    results = Results({"num_learners": 2})
    results.add(Run("one", 1, float("inf")))
    results.save(tmp_path / "runs.json")
    kept = Results.load(tmp_path / "runs.json", {"num_learners": 2})
    assert kept.runs == results.runs
    assert str(difference(kept.losses("one"), {1: 2.0})) == "diverges"


def test_runs_of_another_size_are_refused(tmp_path: Path) -> None:
    from benchmarks.convergence.results import Results

    Results({"num_learners": 2}).save(tmp_path / "runs.json")
    with pytest.raises(SystemExit, match="name another file or equal sizes"):
        Results.load(tmp_path / "runs.json", {"num_learners": 8})


def test_every_row_has_a_name_of_its_own_and_a_reference_in_its_group() -> None:
    from benchmarks.convergence.cases import CASES

    names = [(case.group, case.name) for case in CASES]
    assert len(set(names)) == len(names)
    assert {(case.group, case.reference) for case in CASES if case.reference} <= set(names)


def test_gradients_of_many_learners_are_those_of_each_alone() -> None:
    import torch

    from benchmarks.convergence.fleet import Fleet
    from isles.proto.manifest import Manifest, TensorSpec
    from isles.workers.task import load_task

    task = load_task("gpt", {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 2})
    shapes = {name: tuple(one.shape) for name, one in task.build_model(1).named_parameters()}
    specs = [TensorSpec(name, shape, "float32", "parameter") for name, shape in shapes.items()]
    fleet = Fleet(task, Manifest.build(specs, {}, 2), seed=1, num_members=3)
    batches = [task.batches({shard: 0}, seed=1).next_batch() for shard in range(3)]
    fleet.fragments_of(1)[0][:] += 0.01
    fleet.begin(1, batches[1])
    fleet.begin(2, batches[2])
    fleet.end(2)
    for member in (1, 2):
        alone = task.build_model(1)
        alone.load_state_dict(fleet.models[member].state_dict())
        task.loss(alone, batches[member]).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), task.gradient_norm_max)
        for one, other in zip(alone.parameters(), fleet.models[member].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert all(not one.grad.any() for one in fleet.models[0].parameters())


@pytest.mark.soak
def test_what_a_file_has_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    first = run("--json", str(file), "--only", "one dies and returns, mean")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("CPU seconds") == 2
    assert len(json.loads(file.read_text(encoding="utf-8"))["runs"]) == 2
    again = run("--json", str(file), "--only", "one dies and returns, mean")
    assert again.returncode == 0, again.stderr
    assert "CPU seconds" not in again.stdout
    assert "one dies and returns, mean | " in again.stdout
