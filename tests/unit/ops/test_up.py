"""What a run folder settles, and when."""

from __future__ import annotations

from pathlib import Path

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
