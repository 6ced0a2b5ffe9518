"""Does a run go on, whatever dies? The same run without and with a fault every few seconds.

    .venv/bin/python -P benchmarks/campaign.py [--minutes 10] [--every 10] [--seed 1] [--keep DIR] [--short]

Four paced workers in two regions, two outers, a broker and an evaluator share this machine; together they keep little
more than one core busy, so that a death does not make the others faster. Both runs end at the same merged tokens. In
the second, processes are killed and frozen beyond their leases, links are delayed, reset and cut, and once all
processes are killed together. Then everything is checked (`isles check`), and these figures have bars:

steps lost     inner steps that a worker fell behind its usual pace in the ten seconds after anybody else's fault
relaunch       seconds from loaded libraries to the first accepted contribution of a worker that was killed,
               if no other fault hits it or the broker meanwhile
fail-over      seconds from the death or freezing of the outer that merges to another one's lease
goodput        merged tokens per second, as a share of the calm run's
loss           validation loss at the end, relative to the calm run's

Ends with 0 if nothing was lost and all bars are reached, else 1; --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from isles.ops.chaos.plan import Fault, Kind, Plan, RandomPlan, draw
from isles.ops.children import isles_command
from isles.proto.config import toml_value

WORKERS = "us=2,eu=2"
NUM_WORKERS = 4
LEARNER_LEASE_SECONDS, OUTER_LEASE_SECONDS = 5.0, 3.0
FAULT_SECONDS = 6.5
"""Beyond both leases."""
KINDS: tuple[Kind, ...] = ("kill", "kill", "freeze", "delay", "reset", "cut")
TASK = {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 8, "validation_windows": 64}
STEP_SECONDS = 0.16
"""Eight times what a step of this task takes: four workers keep half a core busy."""

LOAD_CORES_MAX = 1.2
STEPS_LOST_MAX = 1.0
RELAUNCH_SECONDS_MAX = 3.0
FAIL_OVER_SECONDS_MAX = OUTER_LEASE_SECONDS + 1.0
GOODPUT_SHARE_MIN = 0.88
LOSS_CHANGE_MAX = 0.02
RUN_SECONDS_MAX = 7200.0


def make_plan(seconds: float, every: float, seed: int) -> Plan:
    """Faults all over the run; all processes die together in the middle."""
    wanted = RandomPlan(
        seed=seed, every_seconds=every, for_seconds=seconds, kinds=KINDS, regions=("eu", "us"), seconds=FAULT_SECONDS
    )
    drawn = draw(wanted, random.Random(seed))
    middle = len(drawn.fault) // 2
    faults = [Fault(at=one.at, kind="kill-all") if n == middle else one for n, one in enumerate(drawn.fault)]
    return Plan(seed=seed, fault=tuple(faults))


def write_plan(path: Path, plan: Plan) -> Path:
    lines = [f"seed = {plan.seed}"]
    for fault in plan.fault:
        lines.append("[[fault]]")
        lines += [f"{key} = {toml_value(value)}" for key, value in fault.model_dump(exclude_unset=True).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(folder: Path, plan: Plan, tokens: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; its summary, its report, and the cores that it kept busy."""
    command = isles_command(
        "up", "--run-dir", str(folder), "--workers", WORKERS, "--tokens", str(tokens), "--seed", str(arguments.seed),
        "--outers", "2", "--step-seconds", str(arguments.step_seconds), "--sync.interval-steps", "24",
        "--chaos", str(write_plan(folder.with_suffix(".toml"), plan)),
        *(part for key, value in TASK.items() for part in ("--set", f"task.{key}={value}")),
        "--set", f"broker.learner_lease_seconds={LEARNER_LEASE_SECONDS}",
        "--set", f"broker.outer_lease_seconds={OUTER_LEASE_SECONDS}",
        "--set", "evaluator.every_seconds_min=10", "--set", "worker.checkpoint_seconds=2",
        *(part for assignment in arguments.set for part in ("--set", assignment)), "--json",
    )  # fmt: skip
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=RUN_SECONDS_MAX)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    if not (folder / "chaos.json").exists():
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}")
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "code": result.returncode,
        "summary": json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        "report": json.loads((folder / "chaos.json").read_text(encoding="utf-8")),
        "cores": busy / seconds,
        "seconds": seconds,
    }


def of_workers(restarts: list[dict[str, Any]], name: str) -> list[float]:
    """Of those that no other fault hit meanwhile."""
    workers = [one for one in restarts if one["child"].partition("-")[0] in ("us", "eu")]
    return [one[name] for one in workers if one[name] is not None and one["disturbed_by"] is None]


Row = tuple[str, str, str, bool]
"""Figure, value, bar, and whether it is reached."""


def at_most(name: str, numbers: list[float], unit: str, most: float) -> Row:
    if not numbers:
        return name, "none", "", True
    value = f"median {statistics.median(numbers):.2f} {unit}, largest {max(numbers):.2f} of {len(numbers)}"
    if len(numbers) == 1:
        value = f"{numbers[0]:.2f} {unit}"
    return name, value, "" if math.isinf(most) else f"at most {most:g} {unit}", max(numbers) <= most


def judge(calm: dict[str, Any], disturbed: dict[str, Any]) -> list[Row]:
    before, after = calm["report"], disturbed["report"]
    lost = [one["steps_lost"] for effect in after["effects"] for one in effect["survivors"]]
    by_broker = [
        one["steps_lost"]
        for effect in after["effects"]
        if (effect["fault"]["kind"], effect["fault"]["targets"]) == ("kill", ["broker"])
        for one in effect["survivors"]
    ]
    fail_overs = [one["leased_seconds"] for one in after["fail_overs"] if one["kind"] != "kill-all"]
    share = after["goodput"]["whole"] / before["goodput"]["whole"]
    losses = [one["summary"]["val_loss_last"] for one in (calm, disturbed)]
    change = losses[1] / losses[0] - 1
    is_kept = before["is_kept"] and after["is_kept"]
    loss = f"{losses[1]:.4f} against {losses[0]:.4f}: {100 * change:+.2f} %"
    return [
        ("promises", "kept" if is_kept else "BROKEN", "all kept", is_kept),
        at_most("load of the calm run", [calm["cores"]], "cores", LOAD_CORES_MAX),
        at_most("load of the other", [disturbed["cores"]], "cores", math.inf),
        at_most("steps lost", lost, "steps", STEPS_LOST_MAX),
        at_most("  by a broker's death", by_broker, "steps", STEPS_LOST_MAX),
        at_most("loading", of_workers(after["restarts"], "loading_seconds"), "s", math.inf),
        at_most("relaunch", of_workers(after["restarts"], "accepted_seconds"), "s", RELAUNCH_SECONDS_MAX),
        at_most("fail-over", [one for one in fail_overs if one is not None], "s", FAIL_OVER_SECONDS_MAX),
        ("goodput", f"{share:.3f} of {before['goodput']['whole']:.0f} tokens/s", f"at least {GOODPUT_SHARE_MIN}",
         share >= GOODPUT_SHARE_MIN),
        ("loss", loss, f"at most {100 * LOSS_CHANGE_MAX:g} % more", change <= LOSS_CHANGE_MAX),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the calm run")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="an inner step takes at least so long")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any setting of isles")
    parser.add_argument("--keep", type=Path, help="keep both run folders here")
    parser.add_argument("--short", action="store_true", help="half a minute: only shows that this works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.minutes, arguments.every = 0.5, 8.0
    seconds = 60 * arguments.minutes
    tokens = round(seconds * NUM_WORKERS * TASK["batch_size"] * TASK["context"] / arguments.step_seconds)
    plan = make_plan(1.5 * seconds, arguments.every, arguments.seed)  # the disturbed run takes longer
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        calm = train(folder / "calm", Plan(), tokens, arguments)
        disturbed = train(folder / "disturbed", plan, tokens, arguments)
    announce()
    faults = [one for one in disturbed["report"]["faults"] if not one["failure"]]
    kinds = {kind: sum(one["kind"] == kind for one in faults) for kind in sorted({one["kind"] for one in faults})}
    print(f"{tokens} tokens, {len(faults)} faults: {kinds}")
    rows = judge(calm, disturbed)
    for name, value, bar, is_reached in rows:
        print(f"{name:<24}{value:<46}{bar:<20}{'' if is_reached else 'MISSED'}")
    return 0 if all(is_reached for _, _, _, is_reached in (rows[:1] if arguments.short else rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
