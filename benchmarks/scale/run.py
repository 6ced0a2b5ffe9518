"""How far does one broker and one outer go: a model of a billion parameters, and 256 learners.

    .venv/bin/python -P benchmarks/scale/run.py [--only model|learners] [--short]

model      `benchmarks/scale/model.py`: a whole cycle of a synthetic model, with 2 and with 8 contributions to each
           fragment. Figures: seconds, bytes, and the largest resident memory of each process.
learners   `benchmarks/scale/learners.py`: 8, 64 and 256 synthetic learners of a small model at a fixed pace. Figures:
           CPU, memory, and how long a round takes from its last contribution to its version.

Ends with 0 if no process went over the bar for memory, else 1; --short only shows that everything works.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("model", "learners"), help="one of the two experiments")
    parser.add_argument("--short", action="store_true", help="tiny sizes: only shows that this works")
    parser.add_argument("--seed", type=int, default=1, help="of all synthetic values")
    parser.add_argument("--scratch", type=Path, help="folder on a disk with space: 20 bytes a parameter")
    parser.add_argument("--keep", action="store_true", help="leave the stores and logs in the scratch folder")
    parser.add_argument("--timeout-seconds", type=float, default=1800.0, help="of every single wait")
    parser.add_argument("--memory-gib", type=float, default=10.0, help="model: bar for each process")
    parser.add_argument("--size", type=int, default=1_000_000_000, help="model: parameters")
    parser.add_argument("--fragments", type=int, default=24, help="model: fragments")
    parser.add_argument(
        "--contributions-each", type=int, nargs="+", default=[2, 8], help="model: contributions to each fragment"
    )
    parser.add_argument("--outer-flags", nargs="*", default=["--checkpoint-versions", "1"], help=argparse.SUPPRESS)
    parser.add_argument("--learners-each", type=int, nargs="+", default=[8, 64, 256], help="learners: how many")
    parser.add_argument("--pace-seconds", type=float, default=4.0, help="learners: between two contributions of one")
    parser.add_argument("--rounds", type=int, default=3, help="learners: measured rounds of each fragment, after one")
    parser.add_argument("--role", choices=("initialise", "learner", "contributors"), help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--contributions", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short and not arguments.role:
        arguments.size, arguments.fragments, arguments.contributions_each = 2_000_000, 4, [2, 4]
        arguments.learners_each, arguments.pace_seconds, arguments.rounds = [2, 8], 0.5, 2
        arguments.timeout_seconds = 120.0
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.role:
        from benchmarks.scale.roles import Contributors, follow, initialise

        roles = {"initialise": initialise, "learner": follow, "contributors": lambda given: Contributors(given).run()}
        print(json.dumps(roles[arguments.role](arguments)))
        return 0
    announce()
    is_reached = True
    if arguments.scratch is not None:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="isles-scale-", dir=arguments.scratch))
    try:
        if arguments.only != "learners":
            from benchmarks.scale.model import compare_cycles

            is_reached &= compare_cycles(arguments, scratch)
        if arguments.only != "model":
            from benchmarks.scale.learners import compare_crowds

            compare_crowds(arguments, scratch)
    finally:
        if arguments.keep:
            print(f"stores and logs are in {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
