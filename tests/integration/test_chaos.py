"""Real processes, real faults, one of each kind: the run goes on, and the checker finds nothing broken."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from isles.ops.chaos.plan import KINDS, MOMENTARY_KINDS

if TYPE_CHECKING:
    from tests.integration.conftest import SmallRun

RUN_SECONDS: Final = 240
"""Far above what a run takes: a hang ends the test, not the suite."""

LEASES = (
    "--set=broker.heartbeat_seconds=0.5", "--set=broker.learner_lease_seconds=2", "--set=broker.outer_lease_seconds=2"
)  # fmt: skip
FLAGS = ("--workers=us=1,eu=1", "--rounds=100000", "--no-has-evaluator", *LEASES)
BEYOND_THE_LEASE = 4.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_SECONDS)]


def write_plan(path: Path, *faults: dict[str, Any]) -> Path:
    lines = ["seed = 1"]
    for fault in faults:
        lines += ["[[fault]]", *(f"{key} = {json.dumps(value)}" for key, value in fault.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def unkept(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in report["findings"] if one["verdict"] != "holds"]


def disturb(run: SmallRun, kind: str, *flags: str, **fault: Any) -> dict[str, Any]:
    """A run that is disturbed once, goes on until everybody has contributed again, and ends; its report."""
    plan = write_plan(run.run_dir.with_name("plan.toml"), {"at": 1.0, "kind": kind, **fault})
    process = run.begin(*FLAGS, *flags, f"--chaos={plan}")
    last = "fault.ended" if "seconds" in fault else "fault.injected"
    run.wait_for(process, lambda: run.count("chaos", last) + run.count("chaos", "fault.skipped") > 0, "the fault")
    seen = len(run.events("broker"))

    def is_well() -> bool:
        later = run.events("broker")[seen:]
        learners = {one["learner"] for one in later if one["event"] == "contribution.accepted"}
        return {"us-0", "eu-0"} <= learners and sum(one["event"] == "round.committed" for one in later) >= 4

    run.wait_for(process, is_well, "a round of everybody after the fault")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 130, out + err
    report: dict[str, Any] = json.loads((run.run_dir / "chaos.json").read_text(encoding="utf-8"))
    assert unkept(report) == []
    assert report["is_kept"]
    assert "every accepted contribution" in out
    assert f"fault 1 of 1: {kind}" in out
    (record,) = report["faults"]
    assert record["failure"] == ""
    return report


@pytest.mark.soak
def test_a_killed_worker_comes_back_and_the_other_goes_on(small_run: SmallRun) -> None:
    report = disturb(small_run, "kill", process="us-0")
    (restart,) = report["restarts"]
    assert restart["child"] == "us-0"
    assert restart["accepted_seconds"] > 0
    assert report["effects"][0]["tokens_merged"] > 0


@pytest.mark.soak
def test_a_worker_that_was_frozen_beyond_its_lease_expires_and_contributes_again(small_run: SmallRun) -> None:
    report = disturb(small_run, "freeze", process="us-0", seconds=BEYOND_THE_LEASE)
    assert "us-0" in [one["learner"] for one in small_run.events("broker") if one["event"] == "learner.expired"]
    assert report["restarts"] == []


def test_an_outer_that_was_frozen_beyond_its_lease_costs_nothing_but_time(small_run: SmallRun) -> None:
    report = disturb(small_run, "freeze", role="outer", seconds=BEYOND_THE_LEASE)
    assert report["restarts"] == []


@pytest.mark.soak
def test_a_killed_broker_costs_nobody_its_work(small_run: SmallRun) -> None:
    report = disturb(small_run, "kill", process="broker")
    assert [one["child"] for one in report["restarts"]] == ["broker"]
    assert small_run.count("us-0", "learner.reset") == small_run.count("eu-0", "learner.reset") == 0


@pytest.mark.soak
def test_a_run_goes_on_after_all_its_processes_were_killed_at_once(small_run: SmallRun) -> None:
    report = disturb(small_run, "kill-all")
    assert {one["child"] for one in report["restarts"]} == {"broker", "outer", "us-0", "eu-0"}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param("delay", {"process": "us-0", "seconds": 2.0, "delay_seconds": 0.3}, marks=pytest.mark.soak),
        pytest.param("rate", {"process": "us-0", "seconds": 2.0, "bytes_per_second": 20_000}, marks=pytest.mark.soak),
        pytest.param("blackhole", {"process": "us-0", "seconds": BEYOND_THE_LEASE}, marks=pytest.mark.soak),
        pytest.param("refuse", {"process": "us-0", "seconds": 2.0}, marks=pytest.mark.soak),
        pytest.param("reset", {"process": "us-0"}, marks=pytest.mark.soak),
        ("cut", {"region": "eu", "seconds": BEYOND_THE_LEASE}),
    ],
)
def test_a_bad_network_costs_time_and_nothing_else(small_run: SmallRun, kind: str, fault: dict[str, Any]) -> None:
    report = disturb(small_run, kind, **fault)
    assert report["restarts"] == []
    assert small_run.count("us-0", "learner.reset") == small_run.count("eu-0", "learner.reset") == 0


def test_a_broker_without_room_lets_everybody_wait_and_loses_nothing(small_run: SmallRun) -> None:
    disturb(small_run, "disk-full", seconds=8.0)
    refused = [one.get("code") for one in small_run.events("broker") if one["event"] == "message.refused"]
    assert "retry-after" in refused


@pytest.mark.soak
def test_a_corrupted_payload_does_not_stop_the_run(small_run: SmallRun) -> None:
    report = disturb(small_run, "corrupt")
    assert len(report["damaged_on_purpose"]) == 1


def test_chaos_comes_to_a_run_from_outside_and_says_what_it_cannot_do(small_run: SmallRun, tmp_path: Path) -> None:
    process = small_run.begin(*FLAGS, "--outers=2", "--log-level=debug")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= 4, "round 4")
    holder = next(one["outer"] for one in small_run.events("broker") if one["event"] == "outer.leased")
    plan = write_plan(
        tmp_path / "plan.toml",
        {"at": 0.0, "kind": "kill", "process": holder},
        {"at": 0.5, "kind": "kill", "process": "us-0"},
    )
    report = small_run.ask("chaos", plan, "--run-dir", small_run.run_dir)
    assert unkept(report) == [], "all can be told while the run goes on"
    assert [one["targets"] for one in report["faults"]] == [[holder], ["us-0"]]
    assert report["fail_overs"][0]["heir"] in {"outer", "outer-2"}
    assert report["fail_overs"][0]["committed_seconds"] > 0

    links = write_plan(tmp_path / "links.toml", {"at": 0.0, "kind": "reset"})
    refused = small_run.isles("chaos", links, "--run-dir", small_run.run_dir)
    assert (refused.returncode, "isles up --chaos PLAN" in refused.stderr) == (2, True)
    nobody = write_plan(tmp_path / "nobody.toml", {"at": 0.0, "kind": "kill", "process": "us-7"})
    unknown = small_run.isles("chaos", nobody, "--run-dir", small_run.run_dir)
    assert unknown.returncode == 2
    assert "it has broker, outer, outer-2, us-0, eu-0" in unknown.stderr
    found = small_run.ask("check", small_run.run_dir, "--no-replay")
    assert [one["promise"] for one in unkept(found)] == ["the tape replays bit by bit"]
    assert (found["is_going_on"], any(one["at_end"] for one in found["findings"])) == (True, True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=RUN_SECONDS)
    gone = small_run.isles("chaos", plan, "--run-dir", small_run.run_dir)
    assert (gone.returncode, "no `isles up` is running" in gone.stderr) == (2, True)


def test_a_new_run_whose_plan_names_a_region_that_it_has_not_does_not_start(small_run: SmallRun) -> None:
    plan = write_plan(small_run.run_dir.with_name("plan.toml"), {"at": 0.0, "kind": "cut", "region": "asia"})
    refused = small_run.isles("up", "--run-dir", small_run.run_dir, *FLAGS, f"--chaos={plan}")
    assert refused.returncode == 2
    assert "there is no region asia" in refused.stderr
    assert "it has eu, us" in refused.stderr
    assert small_run.events("up") == []


@pytest.mark.soak
def test_a_plan_of_every_kind_completes_or_ends_at_a_payload_that_it_damaged(small_run: SmallRun) -> None:
    of_worker: dict[str, Any] = {"process": "us-0", "seconds": 3.0}
    whom: dict[str, dict[str, Any]] = {
        "cut": {"region": "eu", "seconds": 3.0},
        "disk-full": {"seconds": 3.0},
        "kill": {"process": "us-0"},
    }
    faults = [
        {"at": 5.0 * n, "kind": kind, **whom.get(kind, {} if kind in MOMENTARY_KINDS else of_worker)}
        for n, kind in enumerate([*sorted(KINDS.keys() - {"kill-all"}), "kill-all"])
    ]
    plan = write_plan(small_run.run_dir.with_name("plan.toml"), *faults)
    process = small_run.begin(*FLAGS, f"--chaos={plan}")

    def is_over() -> bool:
        begun = small_run.count("chaos", "fault.injected") + small_run.count("chaos", "fault.skipped")
        return process.poll() is not None or begun == len(faults)

    small_run.wait_for(process, is_over, "all faults")
    seen = small_run.count("broker", "round.committed")
    goes_on = lambda: process.poll() is not None or small_run.count("broker", "round.committed") >= seen + 4  # noqa: E731
    small_run.wait_for(process, goes_on, "rounds after the last fault")
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=RUN_SECONDS)
    report = json.loads((small_run.run_dir / "chaos.json").read_text(encoding="utf-8"))
    assert report["is_kept"], out + err
    assert [one["failure"] for one in report["faults"]] == [""] * len(report["faults"])
    is_lost = any(digest[:12] in err for digest in report["damaged_on_purpose"])
    assert process.returncode == (1 if is_lost else 130), out + err


@pytest.mark.soak
def test_a_damaged_payload_that_a_new_outer_needs_ends_the_run_with_one_sentence(small_run: SmallRun) -> None:
    process = small_run.begin(*FLAGS)
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= 4, "round 4")
    for path in (small_run.run_dir / "store" / "blobs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    starts = [one["pid"] for one in small_run.events("up") if one.get("child") == "outer"]
    os.kill(starts[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1, out + err
    (sentence,) = [line for line in err.splitlines() if line.startswith("isles: ")]
    assert "outer cannot run (exit code 6, 3 times)" in sentence
    assert "cannot be merged any more" in sentence
    assert small_run.count("outer", "recovery.failed") <= 12, "three outers look twice at two fragments"


def test_a_machine_that_crashed_resumes_at_what_was_acknowledged_and_a_lie_is_found(small_run: SmallRun) -> None:
    process = small_run.begin(*FLAGS)
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= 8, "round 8")
    small_run.kill_everything(process)
    before = {one["version"] for one in small_run.events("broker") if one["event"] == "round.committed"}
    process = small_run.start()
    small_run.wait_for(process, lambda: small_run.count("up", "process.started") == 2, "the second start")
    rounds = small_run.count("broker", "round.committed")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") >= rounds + 4, "new rounds")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=RUN_SECONDS)
    found = small_run.ask("check", small_run.run_dir)
    assert unkept(found) == []
    assert max(one["version"] for one in small_run.events("broker") if one["event"] == "round.committed") > max(before)

    accepted = next(one for one in small_run.events("broker") if one["event"] == "contribution.accepted")
    with (small_run.run_dir / "logs" / "broker.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**accepted, "number": 12345}) + "\n")
    lie = small_run.isles("check", small_run.run_dir, "--json", "--no-replay")
    assert lie.returncode == 1
    (broken,) = [one for one in json.loads(lie.stdout)["findings"] if one["verdict"] == "broken"]
    assert "12345 was accepted and then lost" in broken["text"]
