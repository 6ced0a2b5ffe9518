"""When enough have contributed."""

from __future__ import annotations

from collections.abc import Callable

from isles.outer.quorum import able_learners, has_everyone, has_quorum, live_learners, num_needed
from isles.proto.messages import LearnerInfo


def test_a_round_needs_as_many_learners_as_can_contribute() -> None:
    assert num_needed(3, 8) == 3
    assert num_needed(3, 2) == 2
    assert num_needed(3, 0) == 1


def test_dead_owners_count_towards_the_quorum() -> None:
    assert has_quorum({"dead", "a"}, frozenset({"a", "b"}), 2)
    assert not has_quorum({"dead"}, frozenset({"a", "b"}), 2)


def test_any_row_is_enough_without_live_learners() -> None:
    assert has_quorum({"dead"}, frozenset(), 8)
    assert not has_quorum(set(), frozenset(), 8)


def test_everyone_means_every_live_learner() -> None:
    assert has_everyone({"a", "b", "dead"}, frozenset({"a", "b"}))
    assert not has_everyone({"a", "dead"}, frozenset({"a", "b"}))


def test_only_those_heard_of_lately_are_live(make_learner: Callable[..., LearnerInfo]) -> None:
    assert live_learners([make_learner("a"), make_learner("b", is_live=False)]) == {"a"}


def test_a_learner_that_drains_raises_the_quorum_only_by_what_it_hands_in(
    make_learner: Callable[..., LearnerInfo],
) -> None:
    learners = [make_learner("a"), make_learner("b", is_draining=True), make_learner("c", is_live=False)]
    assert able_learners(learners, set()) == {"a"}
    assert able_learners(learners, {"b", "c"}) == {"a", "b"}
