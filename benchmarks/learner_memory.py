"""How much memory does a learner take beside its model and its inner optimizer?

    .venv/bin/python -P benchmarks/learner_memory.py [--seed 1] [--layers 57] [--short]

One training loop runs bare, and then with a `Learner` under each rule of applying versions, each time in a process of
its own with a broker and an outer beside it, until every fragment has had some versions with this learner's own work.
The figure is the difference of the kernel's peaks of resident memory (VmHWM), in which joining, contributing and
applying all count. It is given in copies of the model in single precision, of which each rule may take so many, and two
fragments more:

    rebase                     one: the anchors
    overwrite, blend, hybrid   two: the anchors, and what is left of the account

Ends with 0 if every rule keeps within that, else 1; --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from benchmarks.scale.processes import Watch, broker_and_outer, read_cost
from isles.ops.children import child_environment

COPIES: Final = {"rebase": 1, "overwrite": 2, "blend": 2, "hybrid": 2}
"""Apply rule -> copies of the model that it may take, beside NUM_FRAGMENTS_MORE fragments."""
NUM_FRAGMENTS_MORE: Final = 2
NUM_FRAGMENTS: Final = 4
INTERVAL_STEPS: Final = 12
VERSIONS: Final = 3
"""Of every fragment: by then contributions and versions of different fragments have met."""
BATCH_SIZE: Final = 2
BARE_STEPS: Final = 6
STEP_SECONDS: Final = 0.3
"""Of the loop with a learner: a step that is over sooner waits, so that contributions are merged in time."""
RUN_SECONDS_MAX: Final = 900.0
MIB: Final = 1 << 20


def train(arguments: argparse.Namespace) -> None:
    """The measured process: prints its peak, and how many values the model and its largest fragment have."""
    import os

    import torch
    from torch import nn

    from isles.proto.agreement import Budget, SyncSettings
    from isles.workers.learner import Learner

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    layers = [
        part for _ in range(arguments.layers) for part in (nn.Linear(arguments.width, arguments.width), nn.ReLU())
    ]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    learner = None
    if arguments.rule:
        learner = Learner(
            model,
            optimizer,
            broker=arguments.broker,
            learner="one",
            sync=SyncSettings.model_validate(
                {"apply_rule": arguments.rule, "interval_steps": INTERVAL_STEPS, "num_fragments": NUM_FRAGMENTS}
            ),
            budget=Budget(rounds=10**6),
            seed=arguments.seed,
        )
        learner.start()
    deadline, num_steps = time.monotonic() + RUN_SECONDS_MAX, 0
    while num_steps < BARE_STEPS or (learner is not None and min(learner.versions.values()) < VERSIONS):
        begun = time.monotonic()
        if begun > deadline:
            raise SystemExit(f"the learner holds {learner.versions if learner else {}} after {RUN_SECONDS_MAX:g} s")
        model(torch.randn(BATCH_SIZE, arguments.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        if learner is not None:
            learner.step(tokens=BATCH_SIZE)
            time.sleep(max(0.0, begun + STEP_SECONDS - time.monotonic()))
    cost = read_cost(os.getpid())
    assert cost is not None
    num_values = sum(parameter.numel() for parameter in model.parameters())
    fragment = num_values // NUM_FRAGMENTS
    if learner is not None:
        fragment = max(learner._running.performer._flat.num_values)
        learner.close()
    print(json.dumps({"peak": cost.peak_bytes, "values": num_values, "fragment": fragment, "steps": num_steps}))


def run(arguments: argparse.Namespace, rule: str, broker: str) -> dict[str, Any]:
    command = [sys.executable, "-P", __file__, "--train", "--rule", rule, "--broker", broker]
    command += ["--layers", str(arguments.layers), "--width", str(arguments.width), "--seed", str(arguments.seed)]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=2 * RUN_SECONDS_MAX, env=child_environment(2)
    )
    if result.returncode != 0:
        raise SystemExit(f"the training process ended with {result.returncode}: its own message stands above")
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def compare(arguments: argparse.Namespace, scratch: Path) -> bool:
    bare = run(arguments, "", "")
    copy = 4 * bare["values"]
    print(
        f"{bare['values']} parameters in {NUM_FRAGMENTS} fragments, {copy / MIB:.0f} MiB a copy, seed {arguments.seed}"
    )
    print(f"bare: peak {bare['peak'] / MIB:.0f} MiB\n")
    print(f"{'rule':<12}{'steps':>6}{'peak MiB':>10}{'more MiB':>10}{'copies':>8}{'bar MiB':>9}{'copies':>8}")
    is_reached = True
    for rule in arguments.rules:
        with Watch() as watch, broker_and_outer(scratch / rule, watch) as broker:
            found = run(arguments, rule, broker)
        more = found["peak"] - bare["peak"]
        bar = COPIES[rule] * copy + NUM_FRAGMENTS_MORE * 4 * found["fragment"]
        print(
            f"{rule:<12}{found['steps']:>6}{found['peak'] / MIB:>10.0f}{more / MIB:>10.0f}{more / copy:>8.2f}"
            f"{bar / MIB:>9.0f}{bar / copy:>8.2f}",
            flush=True,
        )
        is_reached &= more <= bar
    print(f"\n{'reached' if is_reached else 'missed'}")
    return is_reached


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters and the data")
    parser.add_argument("--layers", type=int, default=57, help="square layers of the model")
    parser.add_argument("--width", type=int, default=1024, help="of each of them")
    parser.add_argument("--rules", nargs="+", choices=tuple(COPIES), default=list(COPIES), help="apply rules")
    parser.add_argument("--short", action="store_true", help="a small model: only shows that this works")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rule", default="", help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short and not arguments.train:
        arguments.layers, arguments.width, arguments.rules = 8, 128, ["rebase", "hybrid"]
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.train:
        train(arguments)
        return 0
    announce()
    with tempfile.TemporaryDirectory(prefix="isles-memory-") as scratch:
        is_reached = compare(arguments, Path(scratch))
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
