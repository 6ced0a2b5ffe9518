from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from isles.proto.errors import ConfigError, UsageError
from isles.workers.task import BUILT_IN, REQUIRED, Task, TaskSettings, is_task_name, load_task, parse_settings

SMALL = {"layers": 1, "width": 16, "heads": 1, "context": 8, "batch_size": 2, "validation_windows": 40}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A single file, large enough for 1,024 shards of a small context."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "book.txt").write_text("to be or not to be, that is the question. " * 500)
    return folder


@pytest.fixture
def task(corpus: Path) -> Task:
    return load_task(BUILT_IN, {**SMALL, "corpus": str(corpus)})


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder, as a person would write one; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_task_of_a_test", raising=False)
    path = tmp_path / "own_task_of_a_test.py"
    path.write_text(
        "from isles.workers.task import load_task\n"
        "def make(settings):\n    return load_task('gpt', {'layers': 1, **settings})\n"
        "def broken(settings):\n    return 1 / 0\n"
        "def nothing(settings):\n    return None\n"
        "number = 3\n"
    )
    return path


def test_settings_and_built_in_task_need_no_tensor_library_until_a_task_is_made() -> None:
    program = "import isles.workers.task, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_model_follows_from_settings_and_seed(task: Task) -> None:
    first, again, other = (task.build_model(seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_two_processes_that_share_settings_share_the_corpus(task: Task) -> None:
    twin = load_task(BUILT_IN, task.settings)
    assert twin.settings == task.settings
    assert twin.corpus_sha256 == task.corpus_sha256
    assert len(task.corpus_sha256) == 64


def test_an_inner_step_with_the_task_lowers_the_loss(task: Task) -> None:
    model = task.build_model(0)
    optimizer = task.make_optimizer(model)
    batches = task.batches(dict.fromkeys(range(16), 0), seed=0)
    before = task.validation_loss(model)
    for _ in range(20):
        loss = task.loss(model, batches.next_batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert task.validation_loss(model) < before - 0.3


def test_a_batch_has_the_tokens_that_the_task_counts(task: Task) -> None:
    inputs, targets = task.batches({0: 0}, seed=0).next_batch()
    assert inputs.numel() == targets.numel() == task.tokens_per_batch == 16


def test_the_validation_loss_is_the_mean_over_all_rows_and_leaves_no_trace(task: Task) -> None:
    model = task.build_model(0)
    assert task.validation_loss(model) == task.validation_loss(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert task.validation_loss(model) == pytest.approx(5.55, abs=0.2)


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].bias.requires_grad_(False)
    groups = load_task(BUILT_IN, SMALL).make_optimizer(model).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.1), (2, 0.0)]


def test_the_schedule_is_that_of_the_settings() -> None:
    schedule = load_task(BUILT_IN, {"learning_rate": 0.5, "warmup_fraction": 0.0, "floor_fraction": 0.5}).schedule
    assert (schedule.at(0.0), schedule.at(1.0)) == (0.5, 0.25)


def test_sampling_needs_no_corpus_and_repeats_with_its_seed() -> None:
    task = load_task(BUILT_IN, {**SMALL, "corpus": "/no/such/folder"})
    model = task.build_model(0)
    texts = [task.sample(model, "déf", 12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_another_model_than_the_tasks_own_is_refused(task: Task) -> None:
    with pytest.raises(UsageError, match="not a Linear"):
        task.validation_loss(nn.Linear(2, 2))


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    task = load_task(BUILT_IN, {**SMALL, "corpus": str(tmp_path / "nowhere")})
    with pytest.raises(UsageError, match="nowhere is no folder"):
        _ = task.corpus_sha256


def test_every_setting_is_explained() -> None:
    assert all(field.description for field in TaskSettings.model_fields.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widht": 3}, "no setting task.widht; there are corpus, layers, width"),
        ({"layers": 0}, "task.layers: "),
        ({"layers": "many"}, "task.layers: "),
        ({"width": 100, "heads": 3}, "make the width a multiple of 6"),
        ({"learning_rate": float("nan")}, "task.learning_rate: "),
        ({"learning_rate": -1.0, "beta1": 1.0}, "task.learning_rate: .*task.beta1: "),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, int | float | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(settings)


@pytest.mark.parametrize("name", ["", "gtp", "a.b", "a:b:c", "a:", ":b", "../x:y", "a-b:c", "a:b()"])
def test_names_that_name_no_task_are_refused(name: str) -> None:
    assert not is_task_name(name)
    with pytest.raises(ConfigError, match="names no task"):
        load_task(name)


def test_a_task_of_ones_own_is_made_by_its_function(own_module: Path) -> None:
    task = load_task("own_task_of_a_test:make", {"context": 8})
    assert task.settings["context"] == 8
    assert task.settings["layers"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_at_all:make", "importing no_such_module_at_all failed with ModuleNotFoundError"),
        ("own_task_of_a_test:absent", r"absent does not exist in .*own_task_of_a_test\.py"),
        ("own_task_of_a_test:number", r"number is no function in .*own_task_of_a_test\.py"),
        ("own_task_of_a_test:broken", "the function failed with ZeroDivisionError: division by zero"),
        ("own_task_of_a_test:nothing", "returned an object of type NoneType that is no task: it has no batches, "),
    ],
)
def test_a_fault_in_a_task_of_ones_own_is_named(own_module: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(name)


def test_a_module_that_does_not_parse_is_named(own_module: Path) -> None:
    own_module.write_text("def make(:\n")
    with pytest.raises(UsageError, match="failed with SyntaxError"):
        load_task("own_task_of_a_test:make")


def test_a_mistaken_setting_in_a_task_of_ones_own_keeps_its_own_message(own_module: Path) -> None:
    with pytest.raises(ConfigError, match=r"no setting task\.colour"):
        load_task("own_task_of_a_test:make", {"colour": "red"})


def test_the_parts_of_a_task_are_known_by_name() -> None:
    assert "validation_loss" in REQUIRED
    assert "tokens_per_batch" in REQUIRED
