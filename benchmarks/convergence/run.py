"""Does it train? One small GPT, equal tokens, many settings: what does each cost in loss, and what in bits?

    .venv/bin/python -P benchmarks/convergence/run.py [--json PATH] [--seeds 3] [--jobs 2] [--only TEXT] [--short]
    .venv/bin/python -P benchmarks/convergence/run.py --json PATH --no-runs [--table PATH] [--plot PATH]

codecs     codecs up and down, under both merge rules, beside fp32 both ways
up, down   one codec at a time
methods    presets and apply rules, beside one process that averages all learners' gradients in every step
faults     unequal speeds, a learner that dies and returns, rounds of one
merging    what the pages on merging, presets and dynamic steps show

Learners of one process train a byte-level GPT on a clock that is counted in inner steps (`world.py`); the arithmetic is
the product's own. The figure is the validation loss of the global parameters at the end, in nats per byte, after all
learners have handed in what they had, and its difference from the reference row, seed by seed, in per cent with its
standard error. Bits are those of the encoded payloads, headers included.

With --json every run is kept as it ends, and what the file has is not run again.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce, commit


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where runs are kept, and what is not run again")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row, with equal seeds in all rows")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--only", action="append", default=[], help="a group, or a part of rows' names; may be repeated"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a sync setting of every row")
    parser.add_argument("--learners", type=int, help="how many")
    parser.add_argument("--steps", type=int, help="inner steps of an average learner")
    parser.add_argument("--no-runs", action="store_true", help="only show what the file has")
    parser.add_argument("--table", type=Path, help="write the tables into this Markdown file too")
    parser.add_argument("--plot", type=Path, help="draw loss against bits into this SVG file")
    parser.add_argument("--short", action="store_true", help="a tiny model, few steps: only shows that this works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.seeds = 1
    if arguments.no_runs and arguments.json is None:
        parser.error("--no-runs shows what a file has: name it with --json")
    return arguments


def measure_all(missing: list[tuple[Any, int]], size: Any, results: Any, arguments: argparse.Namespace) -> None:
    """Runs what is missing, in its order, and keeps each run as it ends."""
    from benchmarks.convergence.measurement import measure, settle

    here = commit()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, initializer=settle) as pool:
        waiting = {pool.submit(measure, case, seed, size, stated(arguments)): case for case, seed in missing}
        for done in as_completed(waiting):
            run = replace(done.result(), commit=here)
            results.add(run)
            results.save(arguments.json)
            loss = f"{run.loss:.4f}" if math.isfinite(run.loss) else "diverged"
            bits = "" if run.bits_up is None else f", {run.bits_up:.2f} bits up, {run.bits_down:.2f} down"
            name = f"{waiting[done].group}: {waiting[done].name}"
            print(f"{name}, seed {run.seed}: {loss}{bits}, {run.cpu_seconds:.0f} CPU seconds", flush=True)


def stated(arguments: argparse.Namespace) -> dict[str, str]:
    return dict(text.split("=", maxsplit=1) for text in arguments.set)


def main() -> int:
    arguments = parse()
    from benchmarks.convergence.cases import SHORT, Size, chosen
    from benchmarks.convergence.results import Results, rows_of, table

    announce()
    size = SHORT if arguments.short else Size()
    size = replace(
        size,
        num_learners=arguments.learners or size.num_learners,
        num_steps=arguments.steps or size.num_steps,
    )
    results = Results.load(arguments.json, size.to_dict())
    cases = chosen(arguments.only, is_short=arguments.short)
    print(f"{size.num_learners} learners, {size.num_steps} inner steps each, {dict(size.task)}\n", flush=True)
    if not arguments.no_runs:
        wanted: dict[tuple[str, int], Any] = {}
        for case in cases:
            for seed in range(arguments.seed, arguments.seed + arguments.seeds):
                wanted.setdefault((case.key(stated(arguments)), seed), case)
        missing = [(case, seed) for (key, seed), case in wanted.items() if seed not in results.of(key)]
        measure_all(missing, size, results, arguments)
    rows = rows_of(cases, results, stated(arguments))
    print(f"\n{table(rows)}")
    if arguments.table is not None:
        arguments.table.write_text(f"{table(rows)}\n", encoding="utf-8")
    if arguments.plot is not None:
        from benchmarks.convergence.plot import draw

        draw(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
