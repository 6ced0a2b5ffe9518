"""isles beside its peers, on one machine: what a synchronisation costs, how many bytes it takes, what a kill -9 costs.

    .venv/bin/python -P benchmarks/peers/run.py [--only cost|traffic|failures] [--codecs UP/DOWN ...] [--short]

cost       What one synchronisation of the whole model adds to the training thread, against torchft's DiLoCo wrapper
           with the whole model as one fragment, and with four fragments that are reduced while training goes on.
traffic    Bytes that a learner's processes send and receive for it, as the kernel counts them for each TCP connection,
           against torchft (fp32), hivemind (8 bit) and Flower (fp32).
failures   What the survivor of two learners loses when the other is killed with -9, and when what both meet at is.

Two learners train one MLP with 1.06 M and 9.46 M parameters, each at a pace that leaves the machine time. The peers are
optional: `pip install -e '.[train,bench]'`. One that is not installed, or does not run here, has a line that says why.
Ends with 0 if every bar is reached that could be tried, else 1; --short measures nothing of peers, and only shows that
the rest works.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce

if TYPE_CHECKING:
    from benchmarks.peers.orders import Orders
    from benchmarks.peers.plan import Plan


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cost", "traffic", "failures"), help="one of the three comparisons")
    parser.add_argument("--short", action="store_true", help="isles alone, few steps: only shows that this works")
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters and the data")
    parser.add_argument("--sizes", nargs="+", choices=("1.06 M", "9.46 M"), default=["1.06 M", "9.46 M"])
    parser.add_argument(
        "--codecs", nargs="+", default=[""], metavar="UP/DOWN", help="of isles; the last has to reach the bar of bytes"
    )
    parser.add_argument("--interval", type=int, default=20, help="H: inner steps between two synchronisations")
    parser.add_argument("--warmup", type=int, default=3, help="synchronisations before the measured ones")
    parser.add_argument("--syncs", type=int, default=8, help="measured synchronisations of a run")
    parser.add_argument("--repeats", type=int, default=3, help="cost: runs of each system")
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds of an inner step; 0 = by the size")
    parser.add_argument("--watch", type=float, default=20.0, help="failures: seconds that the survivor is watched")
    parser.add_argument("--down", type=float, default=5.0, help="failures: seconds until broker and outer come back")
    parser.add_argument("--keep", action="store_true", help="leave records and logs in the scratch folder")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short and not arguments.role:
        arguments.sizes, arguments.warmup, arguments.syncs, arguments.repeats = ["1.06 M"], 1, 2, 1
        arguments.pace, arguments.watch, arguments.down = 0.02, 4.0, 1.0
    return arguments


def _role(name: str) -> Callable[[Plan, Orders], None]:
    """What a process of this role does; only what it needs is imported."""
    if name == "isles":
        from benchmarks.peers import with_isles

        return with_isles.learn
    if name.startswith("torchft"):
        from benchmarks.peers import with_torchft

        return with_torchft.learn if name == "torchft" else with_torchft.light
    if name.startswith("hivemind"):
        from benchmarks.peers import with_hivemind

        return with_hivemind.learn if name == "hivemind" else with_hivemind.introduce
    from benchmarks.peers import with_flower

    return with_flower.learn if name == "flower" else with_flower.serve


def play(role: str, plan_text: str) -> None:
    """One process of a comparison, to its end. A peer's threads do not always end, so the process is ended for them."""
    from benchmarks.peers.orders import Orders
    from benchmarks.peers.plan import Plan

    code = 1
    try:
        _role(role)(Plan(**json.loads(plan_text)), Orders())
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    arguments = parse()
    if arguments.role:
        play(arguments.role, arguments.plan)
    announce()
    from benchmarks.peers.cost import compare_costs
    from benchmarks.peers.failures import compare_failures
    from benchmarks.peers.processes import print_versions
    from benchmarks.peers.traffic import compare_traffic

    print_versions()
    comparisons = {"cost": compare_costs, "traffic": compare_traffic, "failures": compare_failures}
    is_reached = True
    scratch = Path(tempfile.mkdtemp(prefix="isles-peers-"))
    try:
        for name, compare in comparisons.items():
            if arguments.only in (None, name):
                is_reached &= compare(arguments, scratch)
    finally:
        if arguments.keep:
            print(f"records and logs are in {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
