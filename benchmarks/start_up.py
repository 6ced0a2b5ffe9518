"""CPU seconds that the commands of isles cost before they do anything.

    .venv/bin/python -P benchmarks/start_up.py [--runs 20]

Each command runs in a process of its own; the figure is its user and system time, not the wall clock, so that other
load on the machine matters little. A bare interpreter is measured beside it, interleaved.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce

ISLES = str(Path(sys.executable).with_name("isles"))
COMMANDS = {
    "bare interpreter": [sys.executable, "-c", "pass"],
    "isles --help": [ISLES, "--help"],
    "isles --version": [ISLES, "--version"],
    "isles broker --help": [ISLES, "broker", "--help"],
    "isles worker --help": [ISLES, "worker", "--help"],
    "isles up --help": [ISLES, "up", "--help"],
}
HELP_SECONDS_MAX = 0.3
"""CPU time of `isles --help` that a person does not notice."""


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="times that each command is started")
    parser.add_argument("--short", action="store_true", help="start each command twice: only shows that this works")
    arguments = parser.parse_args()
    runs = 2 if arguments.short else arguments.runs
    for command in COMMANDS.values():
        cpu_seconds(command)  # the first start writes compiled files
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs):
        for name, command in COMMANDS.items():
            seconds[name].append(cpu_seconds(command))
    announce()
    print(f"{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}: CPU seconds of {runs} runs")
    print(f"{'command':<24}{'median':>8}{'min':>8}{'max':>8}")
    for name, values in seconds.items():
        print(f"{name:<24}{statistics.median(values):>8.3f}{min(values):>8.3f}{max(values):>8.3f}")
    return 0 if statistics.median(seconds["isles --help"]) < HELP_SECONDS_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
