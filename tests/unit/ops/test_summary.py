"""The summary says in a few numbers what came of a run."""

from __future__ import annotations

from typing import Any

import pytest

from isles.ops.summary import (
    LOSSES_MAX,
    bits_down,
    bits_up,
    chosen_evenly,
    first_loss,
    last_loss,
    summarise,
)
from isles.proto.messages import LearnerInfo, ReportInfo, Status, Totals, VersionInfo

KEYS = {
    "status", "tokens_produced", "tokens_merged", "rounds_committed", "wall_seconds", "val_loss_first",
    "val_loss_last", "participation_mean", "staleness_mean", "fraction_mean", "bytes_up", "bytes_down",
    "bits_per_parameter_up", "bits_per_parameter_down", "contributions", "restarts", "corpus_sha256",
}  # fmt: skip


TRAINED: dict[str, Any] = {"task": "gpt", "num_fragments": 2}


def report(seq: int, value: float, *versions: int, name: str = "validation_loss") -> ReportInfo:
    return ReportInfo(
        seq=seq, name=name, value=value, versions=dict(enumerate(versions)), tokens=100.0 * seq, reporter="e", unix=1.0
    )


@pytest.fixture
def status() -> Status:
    """Two fragments, 1,000 parameters; ten contributions of 250 bytes each, four updates of 125."""
    return Status(
        run="demo",
        broker_incarnation="ab" * 8,
        uptime_seconds=3.0,
        progress=1.0,
        num_parameters=1000,
        learners=(
            LearnerInfo(learner="us-0", region="us", incarnation="cd" * 8, is_live=True, last_seen_unix=10.0),
        ),
        fragments=tuple(VersionInfo(fragment=n, version=2, parameters_sha256="0" * 64) for n in range(2)),
        num_pending={0: 1},
        totals=Totals(
            rounds_committed=4, tokens_merged=99.6, tokens_produced=100, merged=8, rejected=1, expired=2,
            participation_mean=2.0, fraction_mean=0.5, staleness_mean=0.1,
            bytes_up=2500, bytes_down=7, update_bytes=500,
        ),
    )  # fmt: skip


def test_bits_count_the_payload_of_one_parameter_in_one_direction(status: Status) -> None:
    assert bits_up(status) == 8 * 2500 / (10 * 500)
    assert bits_down(status) == 8 * 500 / (4 * 500)


def test_bits_of_a_run_without_any_contribution_are_zero(status: Status) -> None:
    empty = status.model_copy(update={"totals": Totals(), "num_pending": {}, "num_parameters": 0})
    assert (bits_up(empty), bits_down(empty)) == (0.0, 0.0)


def test_the_first_loss_is_that_of_version_0_only() -> None:
    reports = [report(3, 2.0, 4, 4), report(2, 3.0, 1, 0), report(1, 5.5, 0, 0)]
    assert first_loss(reports) == 5.5
    assert first_loss(reports[:2]) is None


def test_the_last_loss_is_that_of_the_newest_versions_even_if_reported_earlier() -> None:
    reports = [report(1, 5.5, 0, 0), report(2, 2.0, 9, 9), report(3, 3.0, 4, 4)]
    assert last_loss(reports) == 2.0
    assert last_loss([]) is None


def test_other_figures_are_no_losses() -> None:
    assert last_loss([report(1, 0.5, 1, name="accuracy")]) is None


def test_a_summary_has_what_others_read_from_it(status: Status) -> None:
    made = summarise(
        status,
        [report(1, 5.5, 0, 0), report(2, 2.0, 2, 2)],
        ended="finished",
        text="done",
        wall_seconds=12.34567,
        restarts={"outer": 2, "us-0": 0},
        task="gpt",
        num_fragments=2,
        corpus_sha256="ff",
    ).model_dump()
    assert made.keys() >= KEYS
    assert (made["status"], made["tokens_merged"], made["tokens_produced"]) == ("finished", 100, 100)
    assert (made["val_loss_first"], made["val_loss_last"], made["wall_seconds"]) == (5.5, 2.0, 12.346)
    assert made["contributions"] == {"merged": 8, "rejected": 1, "expired": 2}
    assert (made["restarts"], made["restarts_by_process"]) == (2, {"outer": 2})
    assert [loss["value"] for loss in made["losses"]] == [5.5, 2.0]


def test_without_a_word_from_the_broker_there_is_still_a_summary() -> None:
    made = summarise(None, [], ended="failed", text="no broker", wall_seconds=1.0, restarts={"broker": 7}, **TRAINED)
    assert (made.status, made.text, made.restarts, made.rounds_committed) == ("failed", "no broker", 7, 0)


@pytest.mark.parametrize(("of_parameters", "has_buffers"), [(2, False), (1, True)])
def test_the_fragment_of_buffers_is_not_counted_among_those_of_parameters(
    of_parameters: int, has_buffers: bool, status: Status
) -> None:
    made = summarise(
        status, [], ended="finished", text="", wall_seconds=1.0, restarts={}, task="gpt", num_fragments=of_parameters
    )
    assert (made.num_fragments, made.has_buffers) == (of_parameters, has_buffers)


def test_a_long_curve_is_thinned_but_keeps_its_ends(status: Status) -> None:
    reports = [report(n + 1, 5.0 - n / 1000, n, n) for n in range(1000)]
    made = summarise(status, reports, ended="finished", text="", wall_seconds=1.0, restarts={}, **TRAINED)
    assert len(made.losses) == LOSSES_MAX
    assert (made.losses[0].value, made.losses[-1].value) == (5.0, reports[-1].value)


def test_few_values_are_all_kept() -> None:
    assert chosen_evenly([1, 2, 3], 3) == [1, 2, 3]
