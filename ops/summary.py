"""What came of a run, in the numbers a person asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from isles.proto.messages import RelayInfo, ReportInfo, Status

LOSS_NAME: Final = "validation_loss"
"""As the evaluator reports it."""
LOSSES_MAX: Final = 200
"""Points of the curve in a summary: more than a person looks at, and under 20 KB."""


class Contributions(BaseModel):
    """Fates of all contributions."""

    model_config = ConfigDict(frozen=True)

    merged: int = 0
    rejected: int = 0
    expired: int = 0


class Loss(BaseModel):
    """One point of the curve."""

    model_config = ConfigDict(frozen=True)

    tokens: float
    value: float


class RelayLink(BaseModel):
    """What a relay has carried between its region and the broker since it started last."""

    model_config = ConfigDict(frozen=True)

    relay: str
    region: str
    bytes_up: int
    bytes_down: int
    num_waiting: int
    """Contributions that it has, and the broker has not."""


class Summary(BaseModel):
    """The content of `summary.json`; losses are of the global parameters, those of the task `gpt` in nats per byte."""

    model_config = ConfigDict(frozen=True)

    status: Literal["finished", "interrupted", "failed"]
    text: str = ""
    """One sentence about why it ended."""
    run: str = ""
    task: str = "gpt"
    progress: float = 0.0
    tokens_produced: int = 0
    tokens_merged: int = 0
    rounds_committed: int = 0
    wall_seconds: float = 0.0
    """Of all starts together."""
    starts: int = 1
    val_loss_first: float | None = None
    """Of version 0."""
    val_loss_last: float | None = None
    participation_mean: float = 0.0
    staleness_mean: float = 0.0
    fraction_mean: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    bits_per_parameter_up: float = 0.0
    """Payload bits of one parameter in one contribution."""
    bits_per_parameter_down: float = 0.0
    """Payload bits of one parameter in one published update."""
    contributions: Contributions = Contributions()
    restarts: int = 0
    restarts_by_process: dict[str, int] = {}
    num_parameters: int = 0
    num_fragments: int = 0
    """Of parameters."""
    has_buffers: bool = False
    """Whether there is one more fragment, of the buffers that are merged."""
    num_learners: int = 0
    corpus_sha256: str = ""
    relays: tuple[RelayLink, ...] = ()
    losses: tuple[Loss, ...] = ()
    """The validation losses in between, evenly chosen if there were more than 200."""


def losses(reports: Iterable[ReportInfo]) -> list[ReportInfo]:
    """The validation losses in the order in which they were reported."""
    return sorted((report for report in reports if report.name == LOSS_NAME), key=lambda report: report.seq)


_T = TypeVar("_T")


def chosen_evenly(values: Sequence[_T], num_max: int) -> list[_T]:
    """At most `num_max` of them, the first and the last included."""
    if len(values) <= num_max:
        return list(values)
    step = (len(values) - 1) / max(1, num_max - 1)
    return [values[round(n * step)] for n in range(num_max)]


def first_loss(reports: Iterable[ReportInfo]) -> float | None:
    """That of version 0 of every fragment, else None."""
    return next((report.value for report in losses(reports) if not any(report.versions.values())), None)


def last_loss(reports: Iterable[ReportInfo]) -> float | None:
    """That of the newest parameters; of several about the same ones, the last."""
    values = losses(reports)
    return max(values, key=lambda report: (sum(report.versions.values()), report.seq)).value if values else None


def bits_up(status: Status) -> float:
    """Payload bits of one parameter in one contribution, as if all fragments were of one size."""
    totals, num_fragments = status.totals, len(status.fragments)
    accepted = totals.merged + totals.rejected + sum(status.num_pending.values())
    return _ratio(8 * totals.bytes_up * num_fragments, status.num_parameters * accepted)


def bits_down(status: Status) -> float:
    """Payload bits of one parameter in one published update, likewise."""
    num_versions = sum(head.version for head in status.fragments)
    return _ratio(8 * status.totals.update_bytes * len(status.fragments), status.num_parameters * num_versions)


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def summarise(
    status: Status | None,
    reports: Iterable[ReportInfo],
    *,
    ended: Literal["finished", "interrupted", "failed"],
    text: str,
    wall_seconds: float,
    starts: int = 1,
    restarts: Mapping[str, int],
    task: str,
    num_fragments: int,
    corpus_sha256: str = "",
) -> Summary:
    """The summary out of the broker's last words; without a status, of what `up` itself knows.

    `num_fragments` is P: what the broker has besides is the fragment of buffers.
    """
    own: dict[str, Any] = {
        "status": ended,
        "text": text,
        "wall_seconds": round(wall_seconds, 3),
        "starts": starts,
        "restarts": sum(restarts.values()),
        "restarts_by_process": {name: count for name, count in sorted(restarts.items()) if count},
        "task": task,
        "corpus_sha256": corpus_sha256,
    }
    reports = list(reports)
    curve = [Loss(tokens=report.tokens, value=report.value) for report in losses(reports)]
    own["losses"] = tuple(chosen_evenly(curve, LOSSES_MAX))
    own |= {"val_loss_first": first_loss(reports), "val_loss_last": last_loss(reports)}
    return Summary(**own, **({} if status is None else _figures(status, num_fragments)))


def _figures(status: Status, num_fragments: int) -> dict[str, Any]:
    """What the broker knows."""
    totals = status.totals
    return {
        "run": status.run,
        "progress": status.progress,
        "tokens_produced": totals.tokens_produced,
        "tokens_merged": round(totals.tokens_merged),
        "rounds_committed": totals.rounds_committed,
        "participation_mean": totals.participation_mean,
        "staleness_mean": totals.staleness_mean,
        "fraction_mean": totals.fraction_mean,
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "bits_per_parameter_up": bits_up(status),
        "bits_per_parameter_down": bits_down(status),
        "contributions": Contributions(merged=totals.merged, rejected=totals.rejected, expired=totals.expired),
        "num_parameters": status.num_parameters,
        "num_fragments": min(num_fragments, len(status.fragments)),
        "has_buffers": len(status.fragments) > num_fragments,
        "num_learners": len(status.learners),
        "relays": tuple(_link(relay) for relay in status.relays),
    }


def _link(relay: RelayInfo) -> RelayLink:
    facts = relay.facts
    return RelayLink(
        relay=relay.relay,
        region=facts.region,
        bytes_up=facts.bytes_up,
        bytes_down=facts.bytes_down,
        num_waiting=facts.num_waiting,
    )
