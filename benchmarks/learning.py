"""Is it worth having more learners, and what does one learner pay for isles?

    .venv/bin/python -P benchmarks/learning.py [--seed 1] [--only loss|speed] [--short]

loss     Four workers and one worker train the built-in task from equal parameters, each worker with the same number of
         inner steps. The figure is the validation loss of the global parameters at the end, in nats per byte.
speed    One training loop runs bare and with a `Learner`, a broker and an outer, in turns, each time in a process of
         its own with one thread. Broker and outer are kept to the last core. The figure is tokens per second after a
         warm-up, as the ratio of neighbouring runs.

Ends with 0 if both bars are reached, else 1; --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from isles.ops.children import ChildProcess, child_environment, isles_command
from isles.ops.run_folder import choose_address

LOSS_GAIN_MIN = 0.1
"""Nats per byte by which four workers must be ahead of one."""
SPEED_RATIO_MIN = 0.97
"""Share of the bare loop's tokens per second that is left with isles."""
RUN_SECONDS_MAX = 3600.0
STOP_SECONDS = 20.0

SHORT_TASK = {"layers": 1, "width": 32, "context": 64, "batch_size": 4, "validation_windows": 32}


# ----------------------------------------------------------------------------------------------------------------- loss


def train(workers: str, tokens: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of `isles up`; returns its summary."""
    task = SHORT_TASK if arguments.short else {}
    command = isles_command(
        "up", "--run-dir", str(folder), "--workers", workers, "--tokens", str(tokens), "--seed", str(arguments.seed),
        *(part for key, value in task.items() for part in ("--set", f"task.{key}={value}")),
        *(part for assignment in arguments.set for part in ("--set", assignment)), "--json",
    )  # fmt: skip
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=RUN_SECONDS_MAX)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}")
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def compare_losses(arguments: argparse.Namespace, scratch: Path) -> bool:
    from isles.workers.task import load_task

    per_worker = arguments.steps_per_worker * load_task("gpt", SHORT_TASK if arguments.short else {}).tokens_per_batch
    rows = {
        "one worker": train("one=1", per_worker, arguments, scratch / "one"),
        "four workers": train("us=2,eu=2", 4 * per_worker, arguments, scratch / "four"),
    }
    print(f"\nloss: {arguments.steps_per_worker} inner steps per worker, seed {arguments.seed}")
    print(f"{'':<14}{'tokens':>10}{'rounds':>8}{'participants':>14}{'fraction':>10}{'seconds':>9}{'loss':>8}")
    for name, row in rows.items():
        print(
            f"{name:<14}{row['tokens_merged']:>10.0f}{row['rounds_committed']:>8}{row['participation_mean']:>14.2f}"
            f"{row['fraction_mean']:>10.2f}{row['wall_seconds']:>9.1f}{row['val_loss_last']:>8.4f}"
        )
    gain = rows["one worker"]["val_loss_last"] - rows["four workers"]["val_loss_last"]
    print(f"four workers are ahead by {gain:.4f} nats per byte (bar: {LOSS_GAIN_MIN})")
    return bool(gain >= LOSS_GAIN_MIN)


# ---------------------------------------------------------------------------------------------------------------- speed


@contextmanager
def broker_and_outer(folder: Path) -> Iterator[str]:
    """A broker with an empty store and an outer, on the last core; gives the broker's address."""
    folder.mkdir(parents=True)
    address = choose_address("")
    last_core = {max(os.sched_getaffinity(0))} if hasattr(os, "sched_getaffinity") else set()
    children = []
    for role, own in (
        ("broker", ["--store", str(folder / "store"), "--port", str(address.control_port)]),
        ("outer", ["--broker", str(address)]),
    ):
        log = ["--log-file", str(folder / f"{role}.jsonl"), "--exit-with-parent"]
        output = folder / f"{role}.err"
        children.append(ChildProcess([role, *own, *log], output=output, environment=child_environment(2)))
        if last_core:
            os.sched_setaffinity(children[-1].pid, last_core)
    try:
        yield str(address)
    finally:
        for child in reversed(children):
            child.terminate()
            child.wait(STOP_SECONDS)
            child.close()


def measure(arguments: argparse.Namespace) -> None:
    """The measured process: prints tokens per second after the warm-up, and what `step` took of it."""
    import torch

    from isles.proto.agreement import Budget
    from isles.workers.learner import Learner
    from isles.workers.task import load_task

    torch.set_num_threads(1)
    task = load_task("gpt", SHORT_TASK if arguments.short else {})
    model = task.build_model(arguments.seed)
    optimizer = task.make_optimizer(model)
    batches = task.batches(dict.fromkeys(range(16), 0), arguments.seed)
    learner = None
    if arguments.broker:
        # More tokens than will be trained: the run must not end before the measurement does.
        budget = Budget(tokens=10 * task.tokens_per_batch * (arguments.warmup + arguments.steps))
        learner = Learner(model, optimizer, broker=arguments.broker, learner="one", budget=budget, seed=arguments.seed)
        learner.start()
    started = blocked = 0.0
    for number in range(arguments.warmup + arguments.steps):
        if number == arguments.warmup:
            started = time.perf_counter()
            blocked = learner.seconds_blocked if learner is not None else 0.0
        for group in optimizer.param_groups:
            group["lr"] = task.schedule.at(number / (arguments.warmup + arguments.steps))
        task.loss(model, batches.next_batch()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.gradient_norm_max)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if learner is not None:
            learner.step(tokens=task.tokens_per_batch, cursor=batches.cursors)
    seconds = time.perf_counter() - started
    result = {"tokens_per_second": arguments.steps * task.tokens_per_batch / seconds, "versions": 0, "blocked": 0.0}
    if learner is not None:
        result["blocked"] = (learner.seconds_blocked - blocked) / seconds
        result["versions"] = sum(learner.versions.values())
        learner.close()
    print(json.dumps(result))


def run_measure(arguments: argparse.Namespace, broker: str) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--measure", "--broker", broker, "--seed", str(arguments.seed)]
    command += ["--steps", str(arguments.steps), "--warmup", str(arguments.warmup)]
    command += ["--short"] if arguments.short else []
    environment = child_environment(2)
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=RUN_SECONDS_MAX, env=environment
    )
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


def compare_speeds(arguments: argparse.Namespace, scratch: Path) -> bool:
    pairs = []
    for number in range(arguments.repeats):
        bare = run_measure(arguments, "")
        with broker_and_outer(scratch / f"speed-{number}") as address:
            pairs.append((bare, run_measure(arguments, address)))
    print(f"\nspeed: {arguments.repeats} pairs of {arguments.steps} inner steps after {arguments.warmup}, one thread")
    print(f"{'pair':<6}{'bare tokens/s':>15}{'with isles':>12}{'ratio':>8}{'in step()':>11}{'versions':>10}")
    ratios = []
    for number, (bare, isles) in enumerate(pairs):
        ratios.append(isles["tokens_per_second"] / bare["tokens_per_second"])
        print(
            f"{number:<6}{bare['tokens_per_second']:>15.0f}{isles['tokens_per_second']:>12.0f}{ratios[-1]:>8.3f}"
            f"{isles['blocked']:>11.2%}{isles['versions']:>10}"
        )
    ratio = statistics.median(ratios)
    print(f"with isles the loop keeps {ratio:.3f} of its speed, median of the pairs (bar: {SPEED_RATIO_MIN})")
    return ratio >= SPEED_RATIO_MIN


# ----------------------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters and the order of the data")
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps: only shows that this works")
    parser.add_argument("--only", choices=("loss", "speed"), help="one of the two comparisons")
    parser.add_argument("--steps-per-worker", type=int, default=1572, help="loss: inner steps of each worker")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="loss: for isles up")
    parser.add_argument("--repeats", type=int, default=5, help="speed: pairs of runs")
    parser.add_argument("--steps", type=int, default=240, help="speed: measured inner steps")
    parser.add_argument("--warmup", type=int, default=48, help="speed: inner steps before the measured ones")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short and not arguments.measure:
        arguments.steps_per_worker, arguments.repeats, arguments.steps, arguments.warmup = 60, 1, 120, 24
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.measure:
        measure(arguments)
        return 0
    announce()
    is_reached = True
    with tempfile.TemporaryDirectory(prefix="isles-learning-") as scratch:
        if arguments.only != "speed":
            is_reached &= compare_losses(arguments, Path(scratch))
        if arguments.only != "loss":
            is_reached &= compare_speeds(arguments, Path(scratch))
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
