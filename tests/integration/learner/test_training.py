"""Learners train one model, whatever happens to broker, outer and each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isles.proto.agreement import Budget
from isles.proto.errors import FencedError, UsageError
from isles.proto.logs import ListLogger


def test_a_learner_trains_hands_in_everything_and_leaves(world: Any) -> None:
    world.start_outer()
    with world.make() as toy:
        assert toy.learner.versions == {0: 0, 1: 0}
        toy.train_to(3)
        steps = toy.learner.num_steps
        assert toy.learner.drain()
    totals = world.status().totals
    assert totals.tokens_merged == totals.tokens_produced == 10 * steps
    assert (totals.rejected, totals.expired) == (0, 0)
    assert [one.is_live for one in world.status().learners] == [False]


def test_four_learners_train_one_model(world: Any) -> None:
    world.start_outer()
    toys = [world.make(f"us-{index}", seed=index) for index in range(4)]

    def work(toy: Any) -> None:
        with toy:
            toy.train_to(5)

    threads = [threading.Thread(target=work, args=(toy,)) for toy in toys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = world.status().totals
    assert totals.tokens_merged == totals.tokens_produced == sum(10 * toy.learner.num_steps for toy in toys)


def test_training_goes_on_without_a_broker_and_the_work_is_handed_in_later(world: Any) -> None:
    world.start_outer()
    with world.make() as toy:
        toy.train_to(1)
        world.kill_broker()
        steps = toy.learner.num_steps
        toy.train(100)
        assert toy.learner.num_steps == steps + 100
        version = toy.version
        world.start_broker()
        toy.train_to(version + 2)
        steps = toy.learner.num_steps
    assert world.status().totals.tokens_merged == 10 * steps


def test_training_goes_on_without_an_outer_and_the_work_is_handed_in_later(world: Any) -> None:
    world.start_outer()
    with world.make() as toy:
        toy.train_to(1)
        world.kill_outer()
        toy.train(100)
        version = toy.version
        world.start_outer()
        toy.train_to(version + 2)
        steps = toy.learner.num_steps
    assert world.status().totals.tokens_merged == 10 * steps


def test_a_second_incarnation_fences_the_first(world: Any) -> None:
    world.start_outer()
    first = world.make()
    first.learner.start()
    with world.make() as second:
        with pytest.raises(FencedError):
            first.train_until(lambda: False)
        second.train()
    first.learner.close()


def test_a_rejected_contribution_resets_the_learner_and_it_goes_on(world: Any) -> None:
    log = ListLogger()
    with world.make(log=log) as toy:
        toy.train_until(lambda: world.reject_pending(0, "too odd for this test") == 1)
        toy.train_until(lambda: "learner.reset" in log.events())
        world.start_outer()
        toy.train_to(2)
    (fields,) = [fields for _, event, fields in log.records if event == "learner.reset"]
    assert (fields["fragment"], fields["reason"]) == (0, "too odd for this test")
    totals = world.status().totals
    assert totals.rejected == 1
    assert totals.tokens_produced - totals.tokens_merged == fields["tokens"] / 2


def test_a_local_nan_is_never_sent_and_training_recovers_from_it(world: Any) -> None:
    world.start_outer()
    log = ListLogger()
    with world.make(log=log) as toy:
        toy.train_to(1)
        with torch.no_grad():
            toy.model[0].weight[0, 0] = float("nan")
        toy.train_until(lambda: "learner.reset" in log.events())
        assert bool(torch.isfinite(toy.values).all())
        resets = log.events().count("learner.reset")
        toy.train(20)
        assert log.events().count("learner.reset") == resets
        assert bool(torch.isfinite(toy.values).all())
    assert world.status().totals.rejected == 0


@pytest.mark.parametrize("rule", ["rebase", "overwrite", "blend", "hybrid"])
def test_every_apply_rule_hands_in_all_work(make_world: Callable[..., Any], rule: str) -> None:
    world = make_world(apply_rule=rule)
    with world.make() as toy:
        toy.train_to(3)
    totals = world.status().totals
    assert totals.tokens_merged == totals.tokens_produced


def test_progress_is_a_function_of_the_versions_held(world: Any) -> None:
    world.start_outer()
    with world.make(budget=Budget(tokens=200)) as toy:
        assert toy.learner.progress == 0.0
        assert not toy.learner.is_finished
        toy.train_until(lambda: toy.learner.is_finished)
        assert toy.learner.progress == 1.0


def test_a_learner_has_enough_once_its_own_work_fills_the_budget_and_overshoots_it_by_less_than_a_step(
    world: Any,
) -> None:
    with world.make(budget=Budget(tokens=195)) as toy:
        toy.train(19)
        assert not toy.learner.has_enough
        toy.train(1)
        assert toy.learner.has_enough
        assert not toy.learner.is_finished, "nothing of it is merged"
        world.start_outer()
    assert toy.learner.is_finished
    assert world.status().totals.tokens_merged == 200


def test_a_deterministic_run_gives_equal_bits_twice(make_world: Callable[..., Any]) -> None:
    results = []
    for _ in range(2):
        world = make_world(is_deterministic=True, overlap_steps=2.0)
        with world.make(budget=Budget(tokens=200)) as toy:
            torch.manual_seed(3)
            while not toy.learner.is_finished:
                toy.train()
        results.append([world.digests(0), world.digests(1)])
    assert results[0] == results[1]
    assert len(results[0][0]) > 4


def test_data_shards_are_leased_and_returned_with_their_cursors(world: Any) -> None:
    world.start_outer()
    with world.make(num_shards=3) as toy:
        toy.train_until(lambda: len(toy.learner.shards) == 3)
        shard = min(toy.learner.shards)
        toy.train(cursor={shard: 5})
        assert toy.learner.shards[shard] == 5
        toy.learner.request_shards(2, {shard: 5})
        toy.train_until(lambda: len(toy.learner.shards) == 2 and shard not in toy.learner.shards)
    with world.make("us-1", num_shards=1024) as other:
        other.train_until(lambda: shard in other.learner.shards)
        assert other.learner.shards[shard] == 5


def test_a_drain_that_nobody_merges_ends_at_its_timeout_and_says_so(world: Any) -> None:
    with world.make() as toy:
        toy.train()
        assert not toy.learner.drain(timeout_seconds=0.1)


def test_no_step_may_follow_a_drain_and_none_may_come_before_the_start(world: Any) -> None:
    world.start_outer()
    toy = world.make()
    with pytest.raises(UsageError, match="has not been started"):
        toy.learner.step(tokens=1)
    with toy:
        toy.learner.drain()
        assert toy.learner.drain()
        with pytest.raises(UsageError, match="no step may follow"):
            toy.learner.step(tokens=1)


def test_an_error_in_the_loop_ends_the_courier_without_a_drain(world: Any) -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        with world.make() as toy:
            toy.train()
            raise OwnError

    with pytest.raises(OwnError):
        fail()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("courier")]


def test_the_time_that_a_learner_takes_from_the_loop_is_counted(world: Any) -> None:
    world.start_outer()
    with world.make() as toy:
        toy.train()
        assert toy.learner.seconds_blocked > 0.0
