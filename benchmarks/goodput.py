"""Does the goodput simulation foresee what a real run with faults reaches?

    .venv/bin/python -P benchmarks/goodput.py [FOLDER] [--short]

FOLDER is what `benchmarks/campaign.py --keep FOLDER` left: the same training without and with faults, both with their
reports. Without FOLDER a campaign is run first, which takes half an hour; with --short it takes two minutes and only
shows that this works.

The prediction knows which fault hit whom and when, how long a worker took from its death until it trained again (the
median over single deaths, and that over the death of all), and the settings of the run. What the faults did to training
it does not know: that is simulated, event by event, and compared with the merged tokens per second that were measured.

Ends with 0 if prediction and measurement are at most three points apart, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

import numpy as np

from benchmarks.measure.host import announce
from isles.ops.goodput.outcome import Outcome
from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.trace import Floats, Stop, Trace
from isles.ops.goodput.world import World

POINTS_MAX = 3.0
NEVER_YEARS = 1e6
"""Between two failures of a chip: all faults of a campaign are its plan's."""
MESSAGE_SECONDS, TRANSFER_SECONDS, SYNC_SECONDS = 0.005, 0.03, 0.05
"""On one machine, for a fragment of 33,000 values; they matter for the participation and hardly for the goodput."""
LENGTHS_TRIED = 8
"""The run is as long as its work takes, and so are the faults that hit it: a few rounds of each settle both."""


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of a run, and its settings."""
    report = json.loads((folder / "chaos.json").read_text(encoding="utf-8"))
    return report, tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))


def workers_of(settings: dict[str, Any]) -> list[str]:
    counts = dict(part.split("=") for part in settings["up"]["workers"].split(","))
    return [f"{region}-{n}" for region, count in counts.items() for n in range(int(count))]


def relaunch_seconds(report: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Kind of death -> median seconds from it until a process of these trains, or serves, again."""
    found: dict[str, list[float]] = {"kill": [], "kill-all": []}
    for restart in report["restarts"]:
        deaths = [
            fault
            for fault in report["faults"]
            if fault["kind"] in found and restart["child"] in fault["targets"] and not fault["failure"]
            and fault["began_unix"] <= restart["started_unix"]
        ]  # fmt: skip
        loading, joined = restart["loading_seconds"], restart["joined_seconds"]
        if restart["child"] in names and deaths and loading is not None:
            began = max(deaths, key=lambda fault: fault["began_unix"])
            since = restart["started_unix"] - began["began_unix"] + loading + (joined or 0.0)
            found[began["kind"]].append(since)
    every = [seconds for kind in found.values() for seconds in kind] or [0.0]
    return {kind: median(seconds or every) for kind, seconds in found.items()}


def stops_of(report: dict[str, Any], workers: Sequence[str], began: float) -> tuple[Stop, ...]:
    """When which worker stands still, if only the faults and the usual time of a relaunch are known."""
    seconds = relaunch_seconds(report, workers)
    stops: list[Stop] = []
    for fault in report["faults"]:
        at = fault["began_unix"] - began
        for learner in (workers.index(name) for name in fault["targets"] if name in workers):
            if fault["failure"] or fault["kind"] not in ("kill", "kill-all", "freeze"):
                continue
            before = [
                n for n, one in enumerate(stops) if one.learner == learner and one.start <= at < one.start + one.seconds
            ]
            if fault["kind"] == "freeze" and before:  # it was being relaunched: that takes so much longer
                one = stops[before[-1]]
                stops[before[-1]] = Stop(learner, one.start, one.seconds + fault["seconds"], one.loses_memory)
            elif fault["kind"] == "freeze":
                stops.append(Stop(learner, at, fault["seconds"], loses_memory=False))
            else:
                stops.append(Stop(learner, at, seconds[fault["kind"]]))
    return tuple(sorted(stops, key=lambda stop: stop.start))


def broker_outages(report: dict[str, Any], began: float) -> Floats:
    """When there is no broker: its deaths, until it serves again, and its freezes."""
    seconds = relaunch_seconds(report, ["broker"])
    found: list[tuple[float, float]] = []
    for fault in report["faults"]:
        if "broker" in fault["targets"] and fault["kind"] in ("kill", "kill-all", "freeze") and not fault["failure"]:
            at = fault["began_unix"] - began
            length = fault["seconds"] if fault["kind"] == "freeze" else seconds[fault["kind"]]
            if not found or at > found[-1][1]:
                found.append((at, at + length))
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def scenario_of(settings: dict[str, Any], num_workers: int, seconds: float) -> Scenario:
    sync, worker, broker = settings["sync"], settings["worker"], settings["broker"]
    return Scenario(
        chips=num_workers,
        learners=num_workers,
        days=seconds / 86_400,
        chip_failure_years=NEVER_YEARS,
        slice_chips=1,
        checkpoint_seconds=worker["checkpoint_seconds"],
        step_seconds=worker["step_seconds"],
        interval_steps=sync["interval_steps"],
        num_fragments=sync["num_fragments"],
        quorum=sync["quorum"],
        overlap_steps=sync["overlap_steps"],
        grace_share=sync["grace_share"],
        grace_min_seconds=sync["grace_min_seconds"],
        grace_max_seconds=sync["grace_max_seconds"],
        has_cues=sync["has_cues"],
        message_seconds=MESSAGE_SECONDS,
        transfer_seconds=TRANSFER_SECONDS,
        sync_seconds=SYNC_SECONDS,
        learner_lease_seconds=broker["learner_lease_seconds"],
    )


def predict(report: dict[str, Any], settings: dict[str, Any], calm_seconds: float) -> tuple[Outcome, float]:
    """The simulated run, and how long it takes for what the calm one does in `calm_seconds`."""
    workers = workers_of(settings)
    began = min(fault["began_unix"] for fault in report["faults"]) - report["plan"]["fault"][0]["at"]
    stops, outages = stops_of(report, workers, began), broker_outages(report, began)
    seconds = calm_seconds
    outcome = None
    for _ in range(LENGTHS_TRIED):
        scenario = scenario_of(settings, len(workers), seconds)
        nothing = np.empty(0)
        trace = Trace(
            seconds=scenario.seconds,
            times=nothing,
            chips=np.empty(0, dtype=np.int64),
            returns=nothing,
            stops=tuple(stop for stop in stops if stop.start < seconds),
            broker_outages=outages[outages[:, 0] < seconds],
        )
        outcome = World(scenario, trace, "decoupled").run()
        seconds = calm_seconds / outcome.goodput
    assert outcome is not None
    return outcome, seconds


def compare(folder: Path) -> int:
    calm, _ = read(folder / "calm")
    disturbed, settings = read(folder / "disturbed")
    summary = json.loads((folder / "disturbed" / "summary.json").read_text(encoding="utf-8"))
    calm_seconds = summary["tokens_merged"] / calm["goodput"]["whole"]
    outcome, seconds = predict(disturbed, settings, calm_seconds)
    measured = disturbed["goodput"]["whole"] / calm["goodput"]["whole"]
    difference = 100 * (outcome.goodput - measured)
    happened = [fault for fault in disturbed["faults"] if not fault["failure"]]
    workers = workers_of(settings)
    relaunch = relaunch_seconds(disturbed, workers)
    print(f"{len(happened)} faults; a worker trains again {relaunch['kill']:.1f} s after its own death, "
          f"{relaunch['kill-all']:.1f} s after that of all")  # fmt: skip
    print(f"{'':<28}{'predicted':>12}{'measured':>12}")
    print(f"{'goodput, share of the calm':<28}{outcome.goodput:>12.3f}{measured:>12.3f}")
    assert outcome.rounds is not None
    participation = summary["participation_mean"] / len(workers)
    print(f"{'participation':<28}{outcome.rounds.participation:>12.3f}{participation:>12.3f}")
    trained_seconds = summary["tokens_merged"] / disturbed["goodput"]["whole"]
    per_hour = 3600 * summary["rounds_committed"] / trained_seconds
    print(f"{'rounds in an hour':<28}{outcome.rounds.per_hour:>12.0f}{per_hour:>12.0f}")
    print(f"{'seconds of training':<28}{seconds:>12.0f}{trained_seconds:>12.0f}")
    print(f"{'work lost with a memory':<28}{outcome.lost:>12.4f}")
    print(f"predicted - measured: {difference:+.1f} points; at most {POINTS_MAX:g} are allowed")
    return 0 if abs(difference) <= POINTS_MAX else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="what a campaign left; none = run one")
    parser.add_argument("--short", action="store_true", help="a short campaign: only shows that this works")
    arguments = parser.parse_args()
    announce()
    if arguments.folder is not None:
        return compare(arguments.folder)
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-P", str(Path(__file__).with_name("campaign.py")), "--keep", temporary]
        subprocess.run([*command, *(["--short"] if arguments.short else [])], check=False)
        code = compare(Path(temporary))
        return 0 if arguments.short else code


if __name__ == "__main__":
    sys.exit(main())
