"""Whole runs with real processes and sockets: to the end, resumed, extended, interrupted, broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ISLES = Path(sys.executable).with_name("isles")
SMALL = (
    "--task.layers=1", "--task.width=32", "--task.heads=1", "--task.context=32", "--task.batch-size=4",
    "--task.validation-windows=8", "--sync.num-fragments=2", "--sync.interval-steps=6", "--step-seconds=0.02",
    "--set=evaluator.every_seconds_min=0.5",
)  # fmt: skip
RUN_SECONDS = 240
"""Far above what a run takes: a hang ends the test, not the suite."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_SECONDS)]

Up = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A small text of repeating lines, quick to read and easy to learn."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for n in range(40):
        lines = [f"line {k} of file {n}: the quick brown fox jumps over the lazy dog\n" for k in range(120)]
        (folder / f"{n}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def up(tmp_path: Path, corpus: Path) -> Iterator[Up]:
    """Starts `isles up` on a small model; whatever is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, folder: str = "run") -> subprocess.Popen[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        command = [ISLES, "up", "--run-dir", tmp_path / folder, f"--task.corpus={corpus}", *SMALL, *arguments]
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=tmp_path,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert "Traceback" not in err
    return process.returncode, out, err


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary


def events_of(run_dir: Path, process: str) -> list[dict[str, Any]]:
    """What a process has logged; a line that is being written is left out."""
    path = run_dir / "logs" / f"{process}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(process: subprocess.Popen[str], is_there: Callable[[], bool], what: str) -> None:
    """Looks again and again, as long as the process runs and the limit permits."""
    for _ in range(10 * RUN_SECONDS):
        if is_there():
            return
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    if not is_there():
        pytest.fail(f"{what} did not happen; `up` {'runs' if process.poll() is None else 'ended'}")


def has_event(run_dir: Path, process: str, event: str) -> bool:
    return any(one["event"] == event for one in events_of(run_dir, process))


def pids(run_dir: Path) -> dict[str, int]:
    return {one["child"]: one["pid"] for one in events_of(run_dir, "up") if one["event"] == "child.started"}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parameters_of(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------------ to the very end


def test_a_run_goes_to_its_end_is_told_again_and_can_be_extended_and_sampled(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    code, out, err = finish(up("--workers=us=2,eu=1", "--rounds=16"))
    assert code == 0, err
    assert "Finished after" in out
    summary = summary_of(run_dir)
    assert summary["status"] == "finished"
    assert summary["rounds_committed"] >= 16
    assert summary["tokens_merged"] >= 0.98 * summary["tokens_produced"] > 0
    assert summary["val_loss_first"] > 5 > summary["val_loss_last"]
    assert summary["contributions"]["rejected"] == summary["restarts"] == 0
    assert 1 < summary["bits_per_parameter_up"] < 2
    assert summary["participation_mean"] >= 1
    assert len(summary["corpus_sha256"]) == 64
    assert {path.stem for path in (run_dir / "logs").iterdir()} >= {
        "up",
        "broker",
        "outer",
        "evaluator",
        "us-0",
        "eu-0",
    }
    assert "interval_steps = 6" in (run_dir / "config.toml").read_text(encoding="utf-8")
    assert not any(is_alive(pid) for pid in pids(run_dir).values())

    code, out, err = finish(up("--json"))
    assert (code, json.loads(out)) == (0, summary), err

    code, out, err = finish(up("--rounds=80", "--json"))
    longer = json.loads(out)
    assert code == 0, err
    assert longer["rounds_committed"] >= 80
    assert longer["tokens_merged"] > summary["tokens_merged"]
    assert longer["wall_seconds"] > summary["wall_seconds"]
    assert longer["val_loss_first"] == summary["val_loss_first"]

    text = subprocess.run(
        [ISLES, "sample", "--run-dir", run_dir, "--prompt", "line", "--num-tokens", "20", "--device", "cpu"],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip
    assert text.startswith("line")
    exported = tmp_path / "again.safetensors"
    subprocess.run(
        [ISLES, "export", "--run-dir", run_dir, "--output", exported], capture_output=True, check=True, timeout=120
    )
    assert exported.read_bytes() == parameters_of(run_dir)


def test_two_deterministic_runs_of_one_seed_have_equal_parameters(up: Up, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        arguments = ("--deterministic", "--workers=one=1", "--rounds=8", "--step-seconds=0", "--seed=7")
        code, _, err = finish(up(*arguments, folder=folder))
        assert code == 0, err
    assert parameters_of(tmp_path / "first") == parameters_of(tmp_path / "second")


# -------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_an_interrupted_run_drains_exits_with_130_and_goes_on_later(
    up: Up, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=2", "--rounds=100000")
    everything = {"broker": "round.committed", "us-0": "learner.joined", "us-1": "learner.joined"}
    wait_for(process, lambda: all(has_event(run_dir, *one) for one in everything.items()), "a round, and all joined")
    process.send_signal(number)
    code, out, err = finish(process)
    assert code == 130, err
    assert "Interrupted after" in out
    first = summary_of(run_dir)
    assert first["status"] == "interrupted"
    assert first["tokens_merged"] >= 0.98 * first["tokens_produced"] > 0
    assert (run_dir / "model.safetensors").is_file()
    assert all(has_event(run_dir, worker, "learner.drained") for worker in ("us-0", "us-1"))

    process = up("--workers=us=2", "--rounds=100000")
    wait_for(process, lambda: progressed(run_dir), "a round after the resumption")
    process.send_signal(number)
    finish(process)
    again = summary_of(run_dir)
    assert again["rounds_committed"] > first["rounds_committed"]
    assert again["val_loss_first"] == first["val_loss_first"]


def progressed(run_dir: Path) -> bool:
    """Whether a round was committed since the newest start of the broker."""
    names = [one["event"] for one in events_of(run_dir, "broker")]
    starts = [n for n, name in enumerate(names) if name == "broker.started"]
    return len(starts) > 1 and "round.committed" in names[starts[-1] :]


def test_a_second_interrupt_stops_at_once_and_leaves_no_process(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=1", "--rounds=100000")
    wait_for(process, lambda: has_event(run_dir, "us-0", "learner.joined"), "joining")
    os.kill(pids(run_dir)["us-0"], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    wait_for(process, lambda: has_event(run_dir, "up", "run.stopping"), "draining")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "stopped at once" in summary_of(run_dir)["text"]
    assert not any(is_alive(pid) for pid in pids(run_dir).values())


def test_a_killed_supervisor_leaves_no_orphans_and_the_run_can_be_resumed(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=1", "--rounds=12")
    wait_for(process, lambda: has_event(run_dir, "broker", "round.committed"), "the first round")
    process.kill()
    process.communicate()
    children = pids(run_dir)
    code, _, err = finish(up("--workers=us=1", "--rounds=12"))
    assert code == 0, err
    assert summary_of(run_dir)["rounds_committed"] >= 12
    assert not any(is_alive(pid) for pid in children.values())


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_each_process_may_be_killed_and_the_run_completes(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=2", "--rounds=40")
    for n, victim in enumerate(("us-0", "broker", "outer", "evaluator"), 1):
        wait_for(process, lambda n=n: count_rounds(run_dir) >= 6 * n, f"round {6 * n}")  # type: ignore[misc]
        os.kill(pids(run_dir)[victim], signal.SIGKILL)
    wait_for(process, lambda: count_rounds(run_dir) >= 30, "round 30")
    for pid in pids(run_dir).values():
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    summary = summary_of(run_dir)
    assert summary["restarts_by_process"] == {"us-0": 2, "us-1": 1, "broker": 2, "outer": 2, "evaluator": 2}
    assert summary["contributions"]["rejected"] == 0
    committed = [
        (one["fragment"], one["version"]) for one in events_of(run_dir, "broker") if one["event"] == "round.committed"
    ]
    assert len(set(committed)) == len(committed) <= summary["rounds_committed"]


def test_a_relay_for_each_region_carries_the_run_and_may_be_killed(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=1,eu=1", "--relays", "--rounds=24")
    wait_for(process, lambda: count_rounds(run_dir) >= 6, "round 6")
    os.kill(pids(run_dir)["relay-us"], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err
    summary = summary_of(run_dir)
    assert summary["restarts_by_process"]["relay-us"] == 1
    assert summary["contributions"]["rejected"] == 0
    assert {one["learner"] for one in events_of(run_dir, "broker") if one["event"] == "contribution.accepted"} == {
        "us-0", "eu-0"
    }  # fmt: skip


def test_faults_on_purpose_and_relays_are_refused_together(up: Up) -> None:
    code, _, err = finish(up("--workers=us=1", "--relays", "--chaos", "random"))
    assert code == 2
    assert "up.relays and --chaos do not go together" in err


def test_a_worker_started_by_hand_with_the_runs_settings_joins_where_the_run_is(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=1", "--rounds=100000")
    wait_for(process, lambda: count_rounds(run_dir) >= 4, "round 4")
    log = run_dir / "logs" / "late.jsonl"
    command = [ISLES, "worker", "--config", run_dir / "config.toml", "--id", "late", "--region", "asia"]
    with subprocess.Popen([str(part) for part in (*command, "--log-file", log)]) as late:
        try:
            wait_for(process, lambda: has_event(run_dir, "late", "learner.joined"), "joining")
            joined = next(one for one in events_of(run_dir, "late") if one["event"] == "learner.joined")
            assert sum(joined["versions"].values()) >= 4
            late.send_signal(signal.SIGTERM)
            assert late.wait(RUN_SECONDS) == 0
        finally:
            late.kill()
    assert has_event(run_dir, "late", "learner.drained")
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert summary_of(run_dir)["num_learners"] == 2


def count_rounds(run_dir: Path) -> int:
    return sum(one["event"] == "round.committed" for one in events_of(run_dir, "broker"))


def test_a_second_up_in_the_same_folder_is_refused_in_one_sentence(up: Up, tmp_path: Path) -> None:
    process = up("--workers=us=1", "--rounds=100000")
    wait_for(process, lambda: has_event(tmp_path / "run", "up", "child.started"), "the start")
    code, _, err = finish(up("--workers=us=1"))
    assert code == 2
    assert "another `isles up` is running" in err
    assert err.count("\n") == 1


def test_a_run_whose_workers_cannot_start_ends_with_their_own_words(up: Up, tmp_path: Path) -> None:
    (tmp_path / "hapless.py").write_text("raise RuntimeError('no such luck')\ndef task(settings): ...\n")
    code, _, err = finish(up("--workers=us=1", "--task=hapless:task", "--rounds=4"))
    assert code == 1
    sentence = err.strip().splitlines()[-1]
    assert "cannot run (exit code 2, 3 times)" in sentence
    assert "no such luck" in sentence
    assert summary_of(tmp_path / "run")["status"] == "failed"


def test_a_run_keeps_what_was_agreed_and_names_what_would_change_it(up: Up, tmp_path: Path) -> None:
    process = up("--workers=us=1", "--rounds=100000")
    wait_for(process, lambda: has_event(tmp_path / "run", "broker", "run.initialised"), "the start")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    finish(process)
    code, _, err = finish(up("--seed=3"))
    assert code == 2
    assert "the flag --seed: run.seed is 1 in the run of" in err


@pytest.mark.soak
def test_a_frozen_outer_is_replaced_and_stands_by_when_it_wakes(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=2", "--tokens=300000")
    wait_for(process, lambda: has_event(run_dir, "outer", "round.merged"), "a first round")
    second = start_outer(run_dir, "second")
    try:
        wait_for(process, lambda: has_event(run_dir, "second", "outer.standing_by"), "the second outer's standing by")
        frozen = pids(run_dir)["outer"]
        os.kill(frozen, signal.SIGSTOP)
        wait_for(process, lambda: has_event(run_dir, "second", "round.merged"), "a round of the second outer")
        os.kill(frozen, signal.SIGCONT)
        wait_for(process, lambda: has_event(run_dir, "outer", "outer.standing_by"), "the first outer's standing by")
        code, _, err = finish(process)
    finally:
        second.kill()
        second.wait()
    assert code == 0, err
    summary = summary_of(run_dir)
    assert summary["tokens_merged"] >= 0.98 * summary["tokens_produced"] > 0
    assert summary["contributions"]["rejected"] == summary["restarts"] == 0


def test_an_outer_that_is_killed_is_replaced_by_one_that_computes_its_state_anew(up: Up, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = up("--workers=us=2", "--tokens=300000")
    wait_for(process, lambda: has_event(run_dir, "outer", "round.merged"), "a first round")
    others = [start_outer(run_dir, name) for name in ("second", "third")]
    try:
        wait_for(process, lambda: has_event(run_dir, "second", "outer.standing_by"), "the second outer's standing by")
        wait_for(process, lambda: has_event(run_dir, "third", "outer.standing_by"), "the third outer's standing by")
        frozen = pids(run_dir)["outer"]  # `up` would start it again if it died, so it only sleeps
        os.kill(frozen, signal.SIGSTOP)
        is_next = wait_for_one(process, run_dir, ("second", "third"), "round.merged")
        killed, heir = (("second", "third"), ("third", "second"))[is_next]
        others[is_next].kill()
        wait_for(process, lambda: has_event(run_dir, heir, "round.merged"), f"a round of the {heir} outer")
        os.kill(frozen, signal.SIGCONT)
        code, _, err = finish(process)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert code == 0, err
    assert not has_event(run_dir, killed, "process.stopped")
    recovered = [one for one in events_of(run_dir, heir) if one["event"] == "state.recovered"]
    assert sum(one["num_versions"] for one in recovered) > 0
    summary = summary_of(run_dir)
    assert summary["tokens_merged"] >= 0.98 * summary["tokens_produced"] > 0
    assert summary["contributions"]["rejected"] == summary["restarts"] == 0


def start_outer(run_dir: Path, name: str) -> subprocess.Popen[bytes]:
    flags = ("--config", run_dir / "config.toml", "--id", name, "--log-file", run_dir / "logs" / f"{name}.jsonl")
    return subprocess.Popen([str(part) for part in (ISLES, "outer", *flags)], stdin=subprocess.DEVNULL)


def wait_for_one(process: subprocess.Popen[str], run_dir: Path, names: tuple[str, ...], event: str) -> int:
    """The index of the first of some processes that says something."""
    wait_for(process, lambda: any(has_event(run_dir, name, event) for name in names), f"{event} of {names}")
    return next(index for index, name in enumerate(names) if has_event(run_dir, name, event))
