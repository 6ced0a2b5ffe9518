"""What a run folder settles, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.ops import main
from isles.ops.options import load_config
from isles.ops.run_folder import RunFolder
from isles.ops.settings import UpSettings, section_models
from isles.ops.up import _merge
from isles.proto.config import Config, RunSettings, Stated


def asked_for(**run_or_up: str) -> Config:
    stated = [Stated(name.replace("__", "."), value, f"the flag {name}") for name, value in run_or_up.items()]
    return load_config(section_models(), file=None, stated=stated)


def test_a_run_that_no_worker_has_begun_may_still_train_something_else(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        mistaken = asked_for(run__task="my:mistake", run__rounds="5", up__workers="one=1", task__size="3")
        folder.config.write_text(mistaken.to_toml())
        config = _merge(folder, asked_for(run__task="gpt", run__tokens="100"), None)
    assert config.section("run", RunSettings).task == "gpt"
    assert config.section("run", RunSettings).budget.tokens == 100
    assert config.section("up", UpSettings).workers == "one=1", "what does not belong to the run is kept"


@pytest.mark.parametrize(
    "refused",
    [
        ("--chaos", "no-such-plan.toml"),
        ("--chaos", "broken.toml"),
        ("--chaos", "foreign.toml"),
        ("--set", "broker.learner_lease_seconds=0.001"),
        ("--set", "broker.disk_free_bytes_min=1000000000000000"),
    ],
)
def test_a_start_that_is_refused_leaves_no_folder_behind(
    refused: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.toml").write_text("faults = 7")
    (tmp_path / "foreign.toml").write_text('[[fault]]\nat = 5.0\nkind = "kill"\nprocess = "nobody-of-this-run"\n')
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code = main.run(["up", "--run-dir", "runs/mine", "--rounds", "1", *refused])
    assert code == 2, capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
