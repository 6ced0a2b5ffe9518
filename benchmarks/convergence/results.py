"""What was measured, in one JSON file that a stopped campaign goes on from, and what is said about it. Pure but for it.

Rows are compared seed by seed: a run and the one of its reference with the same seed have equal initial parameters,
data and step times, so their difference varies far less than either loss does.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.convergence.cases import Case


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one row."""

    key: str
    """Of the row: `Case.key`."""
    seed: int
    loss: float
    """Nats per byte on held-out text, infinite if the run diverged beyond single precision."""
    bits_up: float | None = None
    """Per parameter, of the encoded payloads of contributions; None where nothing is sent."""
    bits_down: float | None = None
    """The same of updates, to one learner."""
    num_rounds: int | None = None
    participants: float | None = None
    """Mean over the rounds before the last contributions are collected."""
    waited: float | None = None
    """Mean time from the first contribution of a round to its merge, in inner steps of an average learner."""
    cpu_seconds: float = 0.0
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a row from its reference, in per cent of the reference's loss, over the seeds that both have."""

    percent: float
    standard_error: float | None
    """None with fewer than two seeds."""
    num_seeds: int

    def __str__(self) -> str:
        if not math.isfinite(self.percent):
            return "diverges"
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2f}"
        return f"{self.percent:+.2f}{error} %"


def difference(losses: Mapping[int, float], references: Mapping[int, float]) -> Difference | None:
    """Of losses by seed; None if no seed has both."""
    seeds = sorted(losses.keys() & references.keys())
    if not seeds:
        return None
    each = [100 * (losses[seed] / references[seed] - 1) for seed in seeds]
    if not all(map(math.isfinite, each)):
        return Difference(math.inf, None, len(seeds))
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(statistics.fmean(each), error, len(seeds))


@dataclass
class Results:
    """All runs of one size."""

    size: Mapping[str, Any]
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path | None, size: Mapping[str, Any]) -> Results:
        """What is in the file, nothing if there is none; raises SystemExit for one of another size."""
        if path is None or not path.exists():
            return cls(size)
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["size"] != size:
            raise SystemExit(
                f"{path} has runs of {data['size']}, these would be of {size}: name another file or equal sizes"
            )
        return cls(
            size, [Run(**{**run, "loss": math.inf if run["loss"] is None else run["loss"]}) for run in data["runs"]]
        )

    def save(self, path: Path | None) -> None:
        """Whole or not at all: a campaign may be stopped at any time."""
        if path is None:
            return
        runs = [asdict(run) for run in sorted(self.runs, key=lambda run: (run.key, run.seed))]
        lines = [json.dumps({**run, "loss": run["loss"] if math.isfinite(run["loss"]) else None}) for run in runs]
        text = f'{{"size": {json.dumps(self.size)}, "runs": [\n' + ",\n".join(lines) + "\n]}\n"
        draft = path.with_name(f"{path.name}.new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)

    def add(self, run: Run) -> None:
        kept = [one for one in self.runs if (one.key, one.seed) != (run.key, run.seed)]
        self.runs = [*kept, replace(run, loss=round(run.loss, 6))]

    def of(self, key: str) -> dict[int, Run]:
        """Seed -> run."""
        return {run.seed: run for run in self.runs if run.key == key}

    def losses(self, key: str) -> dict[int, float]:
        """Seed -> loss."""
        return {seed: run.loss for seed, run in sorted(self.of(key).items())}


@dataclass(frozen=True, slots=True)
class Row:
    """A case with what was measured of it."""

    case: Case
    runs: Sequence[Run]
    """At least one, by seed."""
    difference: Difference | None
    """None without a reference, or without a run of it."""

    def mean(self, name: str) -> float | None:
        """Of a figure over the seeds; None if it has none."""
        values = [value for run in self.runs if (value := asdict(run)[name]) is not None]
        return statistics.fmean(values) if values else None

    def shown(self, name: str, form: str) -> str:
        """The same as text."""
        mean = self.mean(name)
        return "" if mean is None else format(mean, form)


def rows_of(cases: Iterable[Case], results: Results, stated: Mapping[str, Any]) -> list[Row]:
    """The cases that have runs, in their order."""
    cases = list(cases)
    keys = {(case.group, case.name): case.key(stated) for case in cases}
    rows = []
    for case in cases:
        runs = [run for _, run in sorted(results.of(case.key(stated)).items())]
        reference = keys.get((case.group, case.reference))
        compared = None
        if reference is not None and case.name != case.reference:
            compared = difference(results.losses(case.key(stated)), results.losses(reference))
        if runs:
            rows.append(Row(case, runs, compared))
    return rows


COLUMNS: Final[Mapping[str, Callable[[Row], str]]] = {
    "row": lambda row: row.case.name,
    "loss": lambda row: row.shown("loss", ".3f"),
    "each seed": lambda row: " ".join(f"{run.loss:.3f}" for run in row.runs),
    "beside its reference": lambda row: "" if row.difference is None else f"{row.difference} ({row.case.reference})",
    "bits up": lambda row: row.shown("bits_up", ".2f"),
    "bits down": lambda row: row.shown("bits_down", ".2f"),
    "rounds": lambda row: row.shown("num_rounds", ".0f"),
    "participants": lambda row: row.shown("participants", ".1f"),
    "waited": lambda row: row.shown("waited", ".1f"),
}


def table(rows: Sequence[Row]) -> str:
    """Markdown, one table a group."""
    return "\n\n".join(
        _table(group, [row for row in rows if row.case.group == group])
        for group in dict.fromkeys(row.case.group for row in rows)
    )


def _table(group: str, rows: Iterable[Row]) -> str:
    lines = [f"**{group}**", "", f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(show(row) for show in COLUMNS.values())} |" for row in rows]
    return "\n".join(lines)
