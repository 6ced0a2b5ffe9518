"""The rows of the benchmark, as data: what each one trains with, and what it is compared with.

A row states only what it is about; everything else is the default or its preset's. Rows that come out as the same
settings are one row, measured once, whatever groups they are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, Final

from isles.proto.agreement import SyncSettings

INTERVAL_STEPS: Final = 24
"""H of every row: the runs are short."""
TASK: Final[Mapping[str, int | float]] = MappingProxyType(
    {
        "layers": 2,
        "width": 64,
        "heads": 2,
        "context": 64,
        "batch_size": 4,
        "learning_rate": 3e-3,
        "validation_windows": 512,
    }
)
"""The built-in GPT with 131,072 parameters."""
SHORT_TASK: Final[Mapping[str, int | float]] = MappingProxyType(
    {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 2, "validation_windows": 16}
)
EVEN: Final = 0.18
"""Spread of step times unless a row says otherwise: from 0.91 to 1.09 of the average."""
WIDE: Final = 1.2
"""Step times from 0.4 to 1.6 of the average."""
OUTAGE: Final = (0.3, 0.6)
"""When the learner of a row with an outage dies and returns, as shares of the run."""


@dataclass(frozen=True)
class Size:
    """What all rows of a campaign have alike; figures of two sizes are never compared."""

    num_learners: int = 8
    num_steps: int = 240
    """Inner steps of an average learner."""
    task: Mapping[str, int | float] = field(default_factory=lambda: dict(TASK))

    def to_dict(self) -> dict[str, Any]:
        return {"num_learners": self.num_learners, "num_steps": self.num_steps, "task": dict(self.task)}


SHORT: Final = Size(num_learners=2, num_steps=40, task=dict(SHORT_TASK))


@dataclass(frozen=True)
class Case:
    """One row."""

    group: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the synchronisation."""
    reference: str = ""
    """Row of the same group that its loss is compared with."""
    spread: float = EVEN
    outage: tuple[float, float] | None = None
    rate_factor: float | None = None
    """Data parallel in a single process, with so many times the task's learning rate."""

    def sync(self, stated: Mapping[str, Any]) -> SyncSettings:
        """The settings of the row; `stated` ones win."""
        return SyncSettings.model_validate({"interval_steps": INTERVAL_STEPS, **FP32, **self.settings, **stated})

    def key(self, stated: Mapping[str, Any]) -> str:
        """Names what is measured: rows with equal keys have equal figures."""
        if self.rate_factor is not None:
            return f"data parallel, rate x{self.rate_factor:g}"
        outage = "" if self.outage is None else f", outage {self.outage[0]:g}-{self.outage[1]:g}"
        return f"sync {self.sync(stated).digest[:16]}, spread {self.spread:g}{outage}"


# --------------------------------------------------------------------------------------------------------------- codecs

FP32: Final = MappingProxyType({"codec_up": "fp32", "codec_down": "fp32"})
PAIRS: Final = (
    ("fp32", "fp32"),
    ("int4", "int4"),
    ("step1", "step1"),
    ("step1.5", "step1"),
    ("step2", "step1"),
    ("step2.5", "step1"),
    ("step1.5", "step1.5"),
)
UP: Final = ("bf16", "int8", "int4", "step0.5", "step1", "step1.5", "step2", "step2.5")
DOWN: Final = ("int4", "step1", "step1.5")
RULES: Final = ("rda", "mean")


def both_ways() -> Iterator[Case]:
    """Codecs up and down, under both merge rules."""
    for rule, (up, down) in product(RULES, PAIRS):
        settings = {"codec_up": up, "codec_down": down, "merge_rule": rule}
        yield Case("codecs", f"{up}/{down}, {rule}", settings, reference=f"fp32/fp32, {rule}")


def one_way() -> Iterator[Case]:
    """One codec at a time."""
    for group, setting, names in (("up", "codec_up", UP), ("down", "codec_down", DOWN)):
        for name in ("fp32", *names):
            yield Case(group, f"{name} {group}", {setting: name, "merge_rule": "rda"}, reference=f"fp32 {group}")


# -------------------------------------------------------------------------------------------------------------- methods

DATA_PARALLEL: Final = "data parallel"
DECOUPLED: Final = "decoupled"
NOBODY_WAITS: Final = MappingProxyType({"grace_max_seconds": 0.0, "has_cues": False})


def methods() -> Iterator[Case]:
    """Presets and apply rules beside one process that has all batches in each step."""
    yield Case("methods", DATA_PARALLEL, rate_factor=1.0)
    rows: dict[str, dict[str, Any]] = {
        "diloco": {"preset": "diloco"},
        "streaming": {"preset": "streaming"},
        "local-sgd": {"preset": "local-sgd"},
        "async": {"preset": "async"},
    }
    for rule, apply_rule in product(RULES, ("rebase", "overwrite", "blend", "hybrid")):
        rows[f"{DECOUPLED}, {apply_rule}, {rule}"] = {"apply_rule": apply_rule, "merge_rule": rule}
    for name, settings in rows.items():
        yield Case("methods", name, settings, reference=DATA_PARALLEL)
    for factor in (2.0, 4.0):
        yield Case("methods", f"{DATA_PARALLEL}, {factor:g} x the rate", reference=DATA_PARALLEL, rate_factor=factor)


def faults() -> Iterator[Case]:
    """What unequal learners, dead ones and rounds of one cost."""
    group = "faults"
    for rule in RULES:
        settings: dict[str, Any] = {"merge_rule": rule}
        reference = f"{DECOUPLED}, {rule}"
        yield Case(group, reference, settings)
        yield Case(group, f"unequal speeds, {rule}", settings, reference, spread=WIDE)
        yield Case(group, f"one dies and returns, {rule}", settings, reference, outage=OUTAGE)
        yield Case(group, f"nobody waits, {rule}", {**settings, **NOBODY_WAITS}, reference)
        whole = {**settings, **NOBODY_WAITS, "has_fractional_steps": False}
        yield Case(group, f"nobody waits, whole steps, {rule}", whole, reference)


def merging() -> Iterator[Case]:
    """The tables of the pages on merging, presets and dynamic steps."""
    group = "merging"
    short = {"grace_max_seconds": 1.5}
    rows: dict[str, dict[str, Any]] = {
        DECOUPLED: {"merge_rule": "mean"},
        "decoupled, rda": {"merge_rule": "rda"},
        "short grace": {**short, "merge_rule": "mean"},
        "short grace, rda": {**short, "merge_rule": "rda"},
        "diloco": {"preset": "diloco"},
        "streaming": {"preset": "streaming"},
        "streaming, exact books": {"preset": "streaming", "books": "exact"},
        "local-sgd": {"preset": "local-sgd"},
        "async": {"preset": "async"},
        "async, staleness 0.5": {"preset": "async", "staleness_exponent": 0.5},
        "async, momentum 0.5": {"preset": "async", "outer_momentum": 0.5},
        "async, whole steps": {"preset": "async", "has_fractional_steps": False},
    }
    for name, settings in rows.items():
        yield Case(group, name, settings, reference=DECOUPLED)
    dynamic = {"preset": "local-sgd", "has_dynamic_interval": True}
    wide: dict[str, dict[str, Any]] = {
        "wide": {"preset": "local-sgd"},
        "wide, dynamic": dynamic,
        "wide, no cues": {"preset": "local-sgd", "has_cues": False},
        "wide, no cues, dynamic": {**dynamic, "has_cues": False},
    }
    for name, settings in wide.items():
        yield Case(group, name, settings, reference="wide", spread=WIDE)


CASES: Final = (*both_ways(), *one_way(), *methods(), *faults(), *merging())


def chosen(only: list[str], *, is_short: bool) -> list[Case]:
    """Rows whose group is one of `only` or whose name has it in it, with their references; all without `only`.

    In short, without `only`, two rows of each group.
    """
    if not only:
        groups = dict.fromkeys(case.group for case in CASES)
        firsts = [[case for case in CASES if case.group == group][:2] for group in groups]
        return [case for cases in firsts for case in cases] if is_short else list(CASES)
    wanted = [case for case in CASES if any(text == case.group or text in case.name for text in only)]
    references = {(case.group, case.reference) for case in wanted}
    return [case for case in CASES if case in wanted or (case.group, case.name) in references]
