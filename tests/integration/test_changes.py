"""A stopped run goes on with other workers, regions and settings, and loses nothing of what it had."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

CHANGES = {
    "interval_steps": 9, "codec_up": "int8", "codec_down": "bf16", "apply_rule": "overwrite", "merge_rule": "mean",
    "outer_momentum": 0.9, "horizon_versions": 32,
}  # fmt: skip


def test_a_run_goes_on_under_other_settings_with_other_workers_and_rejects_nothing(small_run: Any) -> None:
    process = small_run.begin("--workers=us=2", "--rounds=1000", "--keep-tape")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= 8, "round 8")
    os.kill(small_run.pid("outer"), signal.SIGSTOP)  # from now on contributions stay pending
    small_run.wait_for(process, lambda: num_pending(small_run) == 4, "pending work of both workers in both fragments")
    small_run.kill_everything(process)

    refused = small_run.isles("up", "--run-dir", small_run.run_dir, "--sync.num-fragments=3")
    assert refused.returncode == 2
    assert "the run main has 2 fragments and cannot have 3" in refused.stderr

    flags = [f"--sync.{name.replace('_', '-')}={value}" for name, value in CHANGES.items()]
    before = small_run.count("broker", "round.committed")
    process = small_run.start(*flags, "--workers=us=1,asia=2")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= before + 12, "12 more rounds")
    assert "settings were changed once" in small_run.isles("status", "--run-dir", small_run.run_dir).stdout
    process.send_signal(signal.SIGINT)
    process.communicate()
    summary = json.loads((small_run.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["contributions"]["rejected"] == 0
    assert summary["num_learners"] == 4

    changed = next(one for one in small_run.events("up") if one["event"] == "run.changed")
    assert changed["settings_epoch"] == 1
    assert {key.removeprefix("sync."): after for key, (_, after) in changed["changes"].items()} == CHANGES
    history = small_run.ask("history", small_run.run_dir)
    epochs = [[one["settings_epoch"] for one in part["versions"][1:]] for part in history["fragments"]]
    assert all(one == sorted(one) and set(one) == {0, 1} for one in epochs)
    assert [settings["codec_up"] for settings in history["settings"]] == ["step1.5", "int8"]
    assert history["num_rejected"] == 0
    assert small_run.ask("replay", small_run.run_dir)["is_bit_equal"]
    check_first_merged(history)


def num_pending(run: Any) -> int:
    """Contributions that were accepted and are in no version yet; none is rejected in this run."""
    events = run.events("broker")
    accepted = sum(one["event"] == "contribution.accepted" for one in events)
    return accepted - sum(one["participants"] for one in events if one["event"] == "round.committed")


def check_first_merged(history: dict[str, Any]) -> None:
    """The work of us-1, which did not come back, is in the first versions after the change."""
    later = [one for part in history["fragments"] for one in part["versions"] if one["settings_epoch"] == 1]
    assert any("us-1" in one["participants"] for one in later)


def test_a_run_whose_processes_are_started_by_hand_is_changed_by_a_command(small_run: Any, tmp_path: Path) -> None:
    process = small_run.begin("--workers=us=1", "--rounds=1000")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= 2, "round 2")
    change = ("change", "--store", small_run.store, "--set", "sync.interval_steps=24")
    busy = small_run.isles(*change)
    assert busy.returncode == 2
    assert "another broker is using the store" in busy.stderr
    process.send_signal(signal.SIGINT)
    process.communicate()

    log = tmp_path / "change.jsonl"
    result = small_run.isles(*change, "--log-file", log)
    assert result.stdout == "run main, settings epoch 1: sync.interval_steps 6 -> 24\n"
    assert json.loads(log.read_text())["event"] == "run.changed"
    assert "nothing to change" in small_run.isles(*change).stdout
    process = small_run.start("--rounds=1000")
    small_run.wait_for(process, lambda: small_run.count("us-0", "learner.joined") == 2, "resuming")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert "interval_steps = 24" in (small_run.run_dir / "config.toml").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- given weights


def test_a_run_starts_from_the_weights_of_another(small_runs: Callable[[str], Any]) -> None:
    first, second = small_runs("first"), small_runs("second")
    summary = first.finish(first.begin("--workers=us=1", "--rounds=12"))
    weights = first.run_dir / "model.safetensors"
    init = ("init", "--from", weights, "--run-dir", second.run_dir, *second.task, "--sync.num-fragments=3")
    result = second.isles(*init, "--rounds=6", "--sync.interval-steps=6")
    assert result.returncode == 0, result.stderr
    assert f"train it: isles up --run-dir {second.run_dir}" in result.stdout
    again = second.isles(*init)
    assert again.returncode == 2
    assert "has a run already" in again.stderr
    told = second.finish(second.start("--workers=eu=1"))
    assert told["val_loss_first"] == summary["val_loss_last"]
    assert told["num_fragments"] == 3
    assert told["num_learners"] == 1

    other = second.isles("init", "--from", weights, "--run-dir", second.run_dir.with_name("third"), "--task.width=64")
    assert other.returncode == 2
    assert "has weights of another model: tensor 'blocks.0." in other.stderr
