"""Figures come out of logs as a person would work them out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from isles.ops.chaos.measures import FaultRecord, Rounds, measure


def at(unix: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"unix": unix, "event": event, **fields}


def worker(start: float, end: float, rate: float, *, pause: tuple[float, float] = (0.0, 0.0)) -> list[dict[str, Any]]:
    """A learner that takes `rate` steps per second, but none during the pause, and says so each second."""
    lines = [at(start, "process.started"), at(start, "process.loaded", seconds=1.0)]
    steps, unix = 0.0, start
    while unix <= end:
        lines.append(at(unix, "learner.progressed", steps=round(steps)))
        steps += 0.0 if pause[0] <= unix < pause[1] else rate
        unix += 1.0
    return lines


def fault(began: float, ended: float, kind: str, *targets: str, number: int = 1, **more: Any) -> FaultRecord:
    return FaultRecord(number=number, kind=kind, targets=targets, began_unix=began, ended_unix=ended, **more)


def test_a_survivor_that_did_not_notice_loses_no_step() -> None:
    logs = {"us-0": worker(0, 60, 10), "us-1": worker(0, 60, 10), "broker": [at(5, "broker.started")]}
    (effect,) = measure(logs, [fault(30, 30, "kill", "us-0")]).effects
    (survivor,) = effect.survivors
    assert survivor.learner == "us-1"
    assert survivor.steps_lost == pytest.approx(0)
    assert survivor.steps_per_second_during == pytest.approx(10)


def test_a_survivor_that_stood_still_loses_what_it_would_have_done() -> None:
    logs = {"us-0": worker(0, 60, 10), "us-1": worker(0, 60, 10, pause=(32, 36))}
    measures = measure(logs, [fault(30, 30, "kill", "us-0")])
    assert measures.steps_lost_most == pytest.approx(40)


def test_who_is_hit_later_counts_up_to_then() -> None:
    logs = {"us-0": worker(0, 60, 10), "us-1": worker(0, 60, 10, pause=(36, 50))}
    faults = [fault(30, 30, "kill", "us-0"), fault(36, 50, "freeze", "us-1", number=2)]
    first, second = measure(logs, faults).effects
    assert [one.steps_lost for one in first.survivors] == [pytest.approx(0)]
    assert [one.learner for one in second.survivors] == ["us-0"]


@pytest.mark.parametrize("own", [(36.5, 50.0), (20.0, 29.5)], ids=["hit later", "hit before"])
def test_the_time_of_a_fault_of_ones_own_is_not_counted_as_lost_to_another(own: tuple[float, float]) -> None:
    silent = [one for one in worker(0, 60, 10, pause=own) if not own[0] <= one["unix"] < own[1]]
    faults = sorted(
        (fault(30, 30, "kill", "us-0"), fault(*own, "freeze", "us-1", number=2)), key=lambda one: one.began_unix
    )
    effects = measure({"us-0": worker(0, 60, 10), "us-1": silent}, faults).effects
    (effect,) = (one for one in effects if one.fault.kind == "kill")
    assert [one.steps_lost for one in effect.survivors] == [pytest.approx(0)]


def test_a_fault_that_did_not_happen_has_no_effect() -> None:
    measures = measure({"us-0": worker(0, 60, 10)}, [fault(30, 30, "kill", "us-0", failure="nobody was there")])
    assert measures.effects == ()


def test_a_restart_is_taken_apart() -> None:
    up = [at(0, "process.started"), at(1, "child.started", child="us-0"), at(20, "child.started", child="us-0")]
    own = [
        at(2, "process.loaded"), at(3, "contribution.sent"), at(21, "process.started"), at(24, "process.loaded"),
        at(24.5, "learner.joined"), at(25, "contribution.sent"),
    ]  # fmt: skip
    broker = [at(4, "contribution.accepted", learner="us-0"), at(25.25, "contribution.accepted", learner="us-0")]
    (restart,) = measure({"up": up, "us-0": own, "broker": broker}, []).restarts
    assert (restart.loading_seconds, restart.joined_seconds) == (4.0, 0.5)
    assert (restart.sent_seconds, restart.accepted_seconds) == (1.0, 1.25)


@pytest.mark.parametrize(
    ("hit", "disturbed_by"),
    [
        (fault(20, 20, "kill", "us-0"), None),
        (fault(24.2, 30, "cut", "us-0", "us-1"), 1),
        (fault(22, 26, "freeze", "broker"), 1),
        (fault(24.2, 30, "cut", "eu-0"), None),
        (fault(26, 30, "cut", "us-0"), None),
        (fault(24.2, 30, "cut", "us-0", failure="nobody was there"), None),
    ],
)
def test_a_restart_that_another_fault_hits_names_that_fault(hit: FaultRecord, disturbed_by: int | None) -> None:
    up = [at(1, "child.started", child="us-0"), at(20, "child.started", child="us-0")]
    own = [at(24, "process.loaded"), at(24.5, "learner.joined")]
    broker = [at(25.25, "contribution.accepted", learner="us-0")]
    (restart,) = measure({"up": up, "us-0": own, "broker": broker}, [hit]).restarts
    assert restart.disturbed_by == disturbed_by


def test_a_restart_that_came_to_nothing_says_so() -> None:
    up = [at(1, "child.started", child="us-0"), at(20, "child.started", child="us-0")]
    (restart,) = measure({"up": up, "us-0": [at(2, "process.loaded")]}, []).restarts
    assert restart.loading_seconds is None


def test_a_fail_over_lasts_until_another_outer_has_the_lease_and_commits() -> None:
    broker = [
        at(1, "outer.leased", outer="outer"),
        at(5, "round.committed", fragment=0, tokens=10),
        at(13.5, "outer.leased", outer="outer-2"),
        at(14, "round.committed", fragment=0, tokens=20),
    ]
    faults = [fault(10, 10, "kill", "outer"), fault(11, 11, "kill", "outer-2", number=2)]
    (one,) = measure({"broker": broker}, faults).fail_overs
    assert (one.outer, one.heir, one.leased_seconds, one.committed_seconds) == ("outer", "outer-2", 3.5, 4.0)


def test_merged_tokens_are_those_that_were_added_mean_over_fragments() -> None:
    rounds = Rounds([(1, 0, 100), (2, 1, 80), (5, 0, 300), (6, 1, 180), (9, 0, 400)])
    assert rounds.between(2, 6) == (2, 150.0)
    assert rounds.between(0, 9) == (5, 290.0)
    assert rounds.between(9, 20) == (0, 0.0)


def test_goodput_is_told_apart_before_and_during_the_faults() -> None:
    totals = [100 * n if n <= 10 else 500 + 50 * n for n in range(31)]
    broker = [at(float(n), "round.committed", fragment=0, tokens=total) for n, total in enumerate(totals)]
    goodput = measure({"broker": broker}, [fault(10, 10, "kill", "us-0"), fault(28, 30, "freeze", "us-0")]).goodput
    assert (goodput.calm, goodput.disturbed) == (100.0, 50.0)
    assert goodput.whole == pytest.approx(2000 / 30, abs=0.01)


def test_logs_that_say_nothing_give_no_figures() -> None:
    measures = measure({}, [fault(1, 1, "kill", "us-0")])
    assert measures.goodput.whole is None
    assert measures.steps_lost_most == 0
