"""Rounds judge what passed the screen: what is out of proportion is not merged, and nobody waits for who sent it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from isles.outer.orders import Merge, Merged, PayloadScreened, Plan, Settle
from isles.outer.rounds import State
from isles.proto.messages import Committed, Contribution, LearnerInfo, Recipe, Settled

if TYPE_CHECKING:
    from tests.unit.outer.rounds.conftest import Bench

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def rows(make_contribution: Callable[..., Contribution]) -> list[Contribution]:
    return [make_contribution(name) for name in NAMES]


@pytest.fixture
def learners(make_learner: Callable[..., LearnerInfo]) -> list[LearnerInfo]:
    return [make_learner(name, last_seen_unix=1000.0) for name in NAMES]


def measure(bench: Bench, rows: list[Contribution], *norms: float) -> None:
    for row, norm in zip(rows, norms, strict=True):
        bench.tell(PayloadScreened(row.id, norm=norm))


def commit(bench: Bench, plan: Plan) -> None:
    bench.tell(Merged(plan, bench.blobs))
    bench.tell(Committed(fragment=0, version=plan.head.version + 1))


def test_one_that_goes_much_too_far_is_settled_and_the_others_are_merged(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows, learners)
    measure(bench, rows, 1.0, 1.0, 1000.0, 1.0)
    [rejection] = bench.one(Settle).rejections
    assert (rejection.id, rejection.kind) == (rows[2].id, "norm")
    assert rejection.reason.startswith("learner c, fragment 0: ")
    bench.wait(bench.grace_seconds)
    assert [one.id.learner for one in bench.one(Merge).plan.contributions] == ["a", "b", "d"]


def test_a_quorum_of_everybody_does_not_wait_for_one_that_was_rejected(
    make_bench: Callable[..., Bench], rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench = make_bench(quorum=len(NAMES))
    bench.look(rows, learners)
    measure(bench, rows, 1.0, 1.0, 1000.0, 1.0)
    assert bench.one(Settle).rejections[0].id == rows[2].id
    bench.tell(Settled(fragment=0))
    bench.look([rows[0], rows[1], rows[3]], learners)
    bench.wait(bench.grace_seconds)
    assert [one.id.learner for one in bench.one(Merge).plan.contributions] == ["a", "b", "d"]


def test_a_quorum_waits_again_for_who_was_rejected_in_an_earlier_round(
    make_bench: Callable[..., Bench],
    rows: list[Contribution],
    learners: list[LearnerInfo],
    make_contribution: Callable[..., Contribution],
) -> None:
    bench = make_bench(quorum=len(NAMES))
    bench.look(rows, learners)
    measure(bench, rows, 1.0, 1.0, 1000.0, 1.0)
    bench.tell(Settled(fragment=0))
    bench.look([rows[0], rows[1], rows[3]], learners)
    bench.wait(bench.grace_seconds)
    plan = bench.one(Merge).plan
    commit(bench, plan)
    again = [make_contribution(name, 2) for name in "abd"]
    bench.look(again, learners, version=1, recipe=plan.recipe)
    measure(bench, again, 1.0, 1.0, 1.0)
    bench.wait(bench.grace_seconds)
    assert bench.state is State.COLLECTING


def test_what_is_clipped_is_in_the_recipe_and_in_the_log(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    bench.look(rows, learners)
    measure(bench, rows, 1.0, 1.0, 6.0, 1.0)
    plan = bench.one(Merge).plan
    assert [one.clip for one in plan.recipe.ingredients] == [1.0, 1.0, 0.5, 1.0]
    commit(bench, plan)
    [said] = [log for log in bench.logged if log.event == "contribution.clipped"]
    assert said.fields == {"fragment": 0, "version": 1, "learner": "c", "factor": 0.5}


def test_rounds_that_know_nothing_but_the_store_judge_like_those_before_them(
    make_bench: Callable[..., Bench],
    rows: list[Contribution],
    learners: list[LearnerInfo],
    make_contribution: Callable[..., Contribution],
) -> None:
    old, new = make_bench(), make_bench()
    old.look(rows, learners)
    measure(old, rows, 1.0, 1.1, 6.0, 0.9)
    plan = old.one(Merge).plan
    commit(old, plan)
    late = [make_contribution("c", 2, tokens=10**6)]
    recipes: list[Recipe] = []
    for bench in (old, new):
        bench.look(late, learners, version=1, recipe=plan.recipe)
        measure(bench, late, 90.0)
        bench.wait(bench.grace_seconds)
        recipes.append(bench.one(Merge).plan.recipe)
    assert recipes[0].ingredients == recipes[1].ingredients
    assert recipes[0].conduct == recipes[1].conduct
    assert recipes[0].ingredients[0].clip < 1


def test_absurd_claims_are_settled_and_the_others_are_merged(
    bench: Bench, rows: list[Contribution], learners: list[LearnerInfo]
) -> None:
    greedy = rows[0].model_copy(update={"tokens": 10**15, "seconds": 0.0})
    bench.look([greedy, *rows[1:]], learners)
    measure(bench, rows, 1.0, 1.0, 1.0, 1.0)
    assert bench.one(Settle).rejections[0].kind == "claim"
    bench.wait(bench.grace_seconds)
    assert len(bench.one(Merge).plan.contributions) == 3
    assert "round.abandoned" not in bench.log_names()
