"""Buffers are measured again and again: what becomes of a running variance that starts far from its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from isles.outer.ledger import make_recipe
from isles.outer.optimizer import FragmentState, make_version
from isles.proto.agreement import SyncSettings
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Averages, Contribution, LearnerInfo

VARIANCE = 0.05
"""What every learner measures; the buffer starts at 1."""

DECAY = 0.9
"""Of the running average, per inner step, as BatchNorm has it."""

NO_FRACTIONS = SyncSettings(has_fractional_steps=False)
SLICES = (TensorSlice("norm.running_var", 0, 1, (1,), "buffer_average"),)


class Fleet:
    """Equal learners of one running variance, that rebase, and their outer."""

    def __init__(self, size: int, make_contribution: Callable[..., Contribution], infos: Sequence[LearnerInfo]) -> None:
        self.lives = np.ones(size)
        self.anchor = np.ones(1, np.float32)
        self.infos = infos
        self._make_contribution = make_contribution
        self._num_rounds = 0

    def train(self, num_steps: int) -> None:
        self.lives = VARIANCE + (self.lives - VARIANCE) * DECAY**num_steps

    def merge(self, members: Sequence[int]) -> float:
        """A round of these members, whose version everybody applies at once; returns the merged variance."""
        merged = [
            self._make_contribution(self.infos[member].learner, base_version=self._num_rounds) for member in members
        ]
        recipe = make_recipe(
            merged,
            self.infos,
            NO_FRACTIONS,
            head_version=self._num_rounds,
            learning_rate=1.0,
            is_buffers=True,
            averages=Averages(),
            grace_seconds=0.0,
            waited_seconds=0.0,
        )
        deltas = {member: np.array(self.anchor - self.lives[member], np.float32) for member in members}
        made = make_version(FragmentState(self.anchor), list(deltas.values()), recipe, NO_FRACTIONS, SLICES)
        increment = float((made.state.parameters - self.anchor)[0])
        for member in range(self.lives.size):
            self.lives[member] += increment + float(deltas.get(member, np.zeros(1))[0])
        self.anchor = made.state.parameters
        self._num_rounds += 1
        return float(self.anchor[0])


@pytest.fixture
def make_fleet(
    make_contribution: Callable[..., Contribution], make_learner: Callable[..., LearnerInfo]
) -> Callable[[int], Fleet]:
    return lambda size: Fleet(size, make_contribution, [make_learner(f"l{index}") for index in range(size)])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_rounds_of_one_learner_each_never_carry_a_variance_below_its_value(
    make_fleet: Callable[[int], Fleet], size: int
) -> None:
    fleet, found = make_fleet(size), []
    for turn in range(12 * size):
        fleet.train(48 // size)
        found.append(fleet.merge([turn % size]))
    assert min(found) > VARIANCE - 1e-4
    assert found[-1] == pytest.approx(VARIANCE, abs=2e-3)


def test_a_full_round_is_the_mean_of_what_all_learners_have(make_fleet: Callable[[int], Fleet]) -> None:
    fleet = make_fleet(4)
    fleet.train(48)
    fleet.lives += np.array([0.0, 0.1, 0.2, 0.5])
    expected = float(fleet.lives.mean())
    assert fleet.merge(range(4)) == pytest.approx(expected)
    assert fleet.lives == pytest.approx(np.full(4, expected))
