"""What K, H, cues, the grace window and outages do to goodput and participation."""

from __future__ import annotations

import numpy as np
import pytest

from isles.ops.goodput.fast import simulate
from isles.ops.goodput.outcome import Outcome, Rounds
from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.synchronised import moved
from isles.ops.goodput.trace import draw
from isles.outer.grace import updated
from isles.proto.messages import Averages

FLEET = {"chips": 600_000, "learners": 8, "days": 1.0}


def outcome(**given: object) -> Outcome:
    scenario = Scenario.model_validate({**FLEET, **given})
    return simulate(scenario, draw(scenario), "decoupled", has_rounds=True)


def rounds(**given: object) -> Rounds:
    found = outcome(**given).rounds
    assert found is not None
    return found


def test_the_moving_averages_are_those_of_the_outer() -> None:
    average, several = Averages(), np.zeros(1)
    for value in (2.0, 0.0, 3.0, 100.0, 0.5):
        average = updated(average, quorum_seconds=value)
        several = moved(several, np.array([value]))
        assert several[0] == pytest.approx(average.quorum_seconds)


def test_learners_never_wait_so_that_neither_quorum_nor_grace_changes_the_goodput() -> None:
    goodputs = {outcome(quorum=quorum, grace_share=share).goodput for quorum in (1, 8) for share in (0.0, 0.9)}
    assert len(goodputs) == 1


def test_without_failures_everybody_is_in_every_round_and_each_fragment_has_one_in_h_steps() -> None:
    found = rounds(chip_failure_years=1e6)
    assert found.participation == pytest.approx(1.0)
    assert found.per_hour == pytest.approx(3600, rel=0.06)
    assert found.gap_seconds == pytest.approx(24, rel=0.06)


def test_a_shorter_grace_window_takes_fewer_learners() -> None:
    shares = [rounds(overlap_steps=tau, speed_spread=0.2).participation for tau in (0, 1, 2, 4)]
    assert shares == sorted(shares)
    assert shares[0] < 0.7 < shares[-1]


def test_a_quorum_of_all_waits_for_whoever_stands_still_until_its_lease_is_over() -> None:
    one, everybody = rounds(quorum=1), rounds(quorum=8)
    assert everybody.participation > one.participation
    assert everybody.merge_seconds > one.merge_seconds


def test_without_cues_and_grace_unequal_learners_drift_apart() -> None:
    assert rounds(has_cues=False, grace_share=0.0, speed_spread=0.2).participation < 0.3


def test_a_longer_interval_loses_more_with_a_learner_that_dies() -> None:
    deadly = {"learner_failure_days": 0.02, "checkpoint_seconds": 1e6, "chip_failure_years": 1e6}
    losses = [outcome(interval_steps=steps, **deadly).lost for steps in (12, 48, 192)]
    assert losses == sorted(losses)
    assert losses[2] > 8 * losses[0] > 0


def test_an_outage_of_broker_or_outer_costs_no_goodput_and_delays_merges() -> None:
    calm = outcome()
    broken = outcome(broker_failure_days=0.05, broker_outage_seconds=900, outer_failure_days=0.05)
    assert broken.goodput == calm.goodput
    assert broken.merging < 0.95 < calm.merging == 1
    assert calm.rounds is not None
    assert broken.rounds is not None
    assert broken.rounds.merge_seconds > calm.rounds.merge_seconds
