"""Live learners, their rates, and the data shards they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.membership import Membership
from isles.brokers.stage import Member, Stage
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.proto.messages import (
    COUNT_MAX,
    Alive,
    Contribution,
    LearnerInfo,
    Leave,
    Offer,
    Progress,
    Shards,
    ShardsLeased,
    Welcome,
)

Make = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]


def info_of(stage: Stage, learner: str) -> LearnerInfo:
    [info] = [info for info in stage.router.state.membership.infos() if info.learner == learner]
    return info


def shards_of(answer: object) -> dict[int, int]:
    assert isinstance(answer, ShardsLeased | Welcome)
    return answer.shards


def test_a_silent_learner_expires_and_comes_back_when_it_is_heard(stage: Stage, worker: Member) -> None:
    stage.advance(stage.settings.learner_lease_seconds + 0.1)
    assert not info_of(stage, "us-1").is_live
    assert stage.events()[-1] == "learner.expired"
    worker.ask(Progress())
    assert info_of(stage, "us-1").is_live
    assert stage.events()[-1] == "client.joined"


def test_the_answer_to_progress_tells_the_median_step_of_those_that_live(stage: Stage, worker: Member) -> None:
    def typical(step_seconds: float) -> float:
        answer = worker.ask(Progress(step_seconds=step_seconds))
        assert isinstance(answer, Alive)
        return answer.typical_step_seconds

    assert typical(0.0) == 0.0
    for number, seconds in enumerate((0.1, 0.4, 0.8)):
        other = stage.member("worker", f"eu-{number}", f"{number:02}" * 8)
        other.join()
        other.ask(Progress(step_seconds=seconds))
    assert typical(0.2) == pytest.approx(0.3)
    stage.advance(stage.settings.learner_lease_seconds + 0.1)
    assert typical(0.2) == 0.2


def test_heartbeats_keep_a_learner_live(stage: Stage, worker: Member) -> None:
    for _ in range(40):
        stage.advance(1.0)
        worker.ask(Progress())
    assert info_of(stage, "us-1").is_live


def test_after_a_restart_a_learner_stays_live_for_one_lease(stage: Stage, worker: Member) -> None:
    stage.advance(5.0)
    stage.restart()
    assert info_of(stage, "us-1").is_live
    stage.advance(stage.settings.learner_lease_seconds + 0.1)
    assert not info_of(stage, "us-1").is_live


def test_the_rate_is_measured_on_the_brokers_own_clock(stage: Stage, worker: Member) -> None:
    for second in range(60):
        worker.ask(Progress(tokens=500 * second, steps=10 * second, step_seconds=0.1))
        stage.advance(1.0)
    info = info_of(stage, "us-1")
    assert info.tokens_per_second == pytest.approx(500, rel=0.01)
    assert (info.tokens, info.steps, info.step_seconds) == (500 * 59, 590, 0.1)


def test_counters_add_up_over_incarnations_and_restarts(stage: Stage, worker: Member) -> None:
    worker.ask(Progress(tokens=1000, steps=10))
    newer = stage.member("worker", "us-1", "a2" * 8)
    newer.join()
    newer.ask(Progress(tokens=300, steps=3))
    newer.ask(Progress(tokens=200, steps=2))
    assert (info_of(stage, "us-1").tokens, info_of(stage, "us-1").steps) == (1300, 13)
    stage.advance(stage.settings.flush_seconds)
    stage.restart()
    assert info_of(stage, "us-1").tokens == 1300
    assert stage.router.state.membership.tokens_produced == 1300


def test_counters_are_kept_with_the_contribution_that_they_cover(
    stage: Stage, worker: Member, contribute: Callable[..., Contribution], payload: Callable[[Member, int], bytes]
) -> None:
    worker.ask(Progress(tokens=700))
    worker.send(Offer(contribution=contribute(worker, 0)), payload(worker, 0))
    stage.restart()
    assert stage.router.state.membership.tokens_produced == 700


def test_the_last_counters_of_who_leaves_or_expires_are_kept(stage: Stage, worker: Member) -> None:
    worker.ask(Progress(tokens=700))
    worker.ask(Leave())
    stage.restart()
    assert stage.router.state.membership.tokens_produced == 700


def test_what_was_accepted_of_a_learner_was_produced_whatever_its_progress_said(
    stage: Stage, worker: Member, outer: Member, contribute: Make, payload: Payload, merge: Callable[..., object]
) -> None:
    worker.ask(Progress(tokens=150))
    for number in range(3):
        contribution = contribute(worker, number, base=number, tokens=100)
        worker.send(Offer(contribution=contribution), payload(worker, number))
        merge(outer, [contribution], base=number)
    same_tokens = contribute(worker, 0, fragment=1, tokens=250)
    worker.send(Offer(contribution=same_tokens), payload(worker, 0))
    assert stage.router.state.membership.tokens_produced == 300, "each fragment counts each token"
    stage.restart()
    assert stage.router.state.membership.tokens_produced == 300
    worker.join()
    worker.ask(Progress(tokens=320))
    assert stage.router.state.membership.tokens_produced == 320


# -------------------------------------------------------------------------------------------------------------- shards


def test_each_shard_is_held_by_one_learner(stage: Stage, worker: Member) -> None:
    other = stage.member("worker", "eu-1")
    other.join()
    mine = shards_of(worker.ask(Shards(num_wanted=5)))
    theirs = shards_of(other.ask(Shards(num_wanted=5)))
    assert (len(mine), len(theirs)) == (5, 3), "there are 8"
    assert not mine.keys() & theirs.keys()
    assert shards_of(worker.ask(Shards(num_wanted=5))) == mine, "asking again changes nothing"


def test_returned_shards_keep_their_cursors_and_the_least_read_are_lent_first(stage: Stage, worker: Member) -> None:
    held = shards_of(worker.ask(Shards(num_wanted=8)))
    returned = {shard: 10 * (8 - shard) for shard in held}
    assert shards_of(worker.ask(Shards(num_wanted=0, returned=returned))) == {}
    assert shards_of(worker.ask(Shards(num_wanted=3))) == {5: 30, 6: 20, 7: 10}


def test_a_shard_of_somebody_else_cannot_be_given_back(stage: Stage, worker: Member) -> None:
    mine = shards_of(worker.ask(Shards(num_wanted=2)))
    other = stage.member("worker", "eu-1")
    other.join()
    other.ask(Shards(num_wanted=0, returned=dict.fromkeys(mine, 99)))
    assert shards_of(worker.ask(Shards(num_wanted=2))) == mine


def test_shards_are_free_again_when_a_learner_leaves_or_expires(stage: Stage, worker: Member) -> None:
    worker.ask(Shards(num_wanted=8))
    stage.advance(stage.settings.learner_lease_seconds + 0.1)
    other = stage.member("worker", "eu-1")
    other.join()
    assert len(shards_of(other.ask(Shards(num_wanted=8)))) == 8
    other.ask(Leave())
    assert len(shards_of(worker.ask(Shards(num_wanted=8)))) == 8


def test_a_newer_incarnation_keeps_the_shards(stage: Stage, worker: Member) -> None:
    mine = shards_of(worker.ask(Shards(num_wanted=3)))
    assert shards_of(stage.member("worker", "us-1", "a2" * 8).join()) == mine


def test_a_cursor_advances_with_the_contribution_that_carries_it(
    stage: Stage,
    worker: Member,
    contribute: Callable[..., Contribution],
    payload: Callable[[Member, int], bytes],
) -> None:
    worker.ask(Shards(num_wanted=2))
    worker.ask(Shards(num_wanted=2, returned={}))
    contribution = contribute(worker, 0, cursor={0: 40, 1: 50, 7: 60})
    worker.send(Offer(contribution=contribution), payload(worker, 0))
    assert shards_of(worker.ask(Shards(num_wanted=2))) == {0: 40, 1: 50}
    stage.restart()
    assert shards_of(worker.join()) == {0: 40, 1: 50}, "and is durable"
    other = stage.member("worker", "eu-1")
    other.join()
    assert shards_of(other.ask(Shards(num_wanted=8)))[7] == 0, "only shards that it holds"


def test_a_cursor_never_goes_back() -> None:
    membership = Membership(SqliteIndex(IN_MEMORY), lease_seconds=10, num_shards=2, now=0.0)
    membership.join("us-1", "a1" * 8, "us", 0.0, 0.0)
    membership.lease_shards("us-1", 2, {})
    membership.advance_shards("us-1", {0: 30})
    membership.advance_shards("us-1", {0: 20})
    assert membership.lease_shards("us-1", 2, {0: 10}) == {0: 30, 1: 0}


def test_absurd_counters_spoil_nobodys_status(stage: Stage, worker: Member) -> None:
    worker.ask(Progress(tokens=COUNT_MAX))
    newer = stage.member("worker", "us-1", "a2" * 8)
    newer.join()
    newer.ask(Progress(tokens=COUNT_MAX))
    assert info_of(stage, "us-1").tokens == COUNT_MAX
    assert stage.router.state.membership.tokens_produced == COUNT_MAX
