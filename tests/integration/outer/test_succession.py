"""Two outers on one run: one works, the other stands by, takes over, and the first one finds out."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from isles.outer.optimizer import FragmentState, make_version
from isles.proto.clock import ManualClock
from isles.proto.codec import decode, encode
from isles.proto.errors import FencedError, RefusedError, UnreachableError
from isles.proto.messages import AskStatus, BlobRef, Commit, Committed, List, Listing, Status


def merged(learner: Any) -> bool:
    return bool(learner.row().state == "merged")


def leave_out(world: Any, outer: Any) -> None:
    """Killed or frozen: it says nothing any more."""
    world.outers.remove(outer)


def test_one_works_and_the_other_says_once_that_it_stands_by(world: Any, learners: Any) -> None:
    _, first, _ = world.outer("first")
    world.run(0.5)
    _, second, _ = world.outer("second")
    for turn in range(3):
        learners[0].contribute(world.delta(turn))
        world.until(lambda: merged(learners[0]))
    world.run(10.0)
    assert first.events().count("round.merged") == 3
    assert second.events().count("outer.standing_by") == 1
    assert "round.merged" not in second.events()


def test_the_second_takes_over_within_the_lease(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    world.run(0.5)
    _, second, _ = world.outer("second")
    world.run(1.0)
    leave_out(world, outer)
    killed_at = world.clock.now()
    learners[0].contribute(world.delta(1))
    world.until(lambda: "outer.leased" in second.events())
    assert world.clock.now() - killed_at < 1.4 * 3.0
    world.until(lambda: merged(learners[0]))


def test_a_second_one_continues_momentum_and_averages(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    payloads = [encode("fp32", world.delta(number)) for number in (1, 2)]
    learners[0].contribute(payloads[0])
    world.until(lambda: merged(learners[0]))
    leave_out(world, outer)
    world.outer("second")
    learners[0].contribute(payloads[1])
    world.until(lambda: merged(learners[0]))
    _, before, after = learners[0].history()
    assert after.epoch > before.epoch
    state = FragmentState(world.first_parameters()[0])
    for info, payload in zip((before, after), payloads, strict=True):
        delta = decode(payload, num_values=state.parameters.size)
        made = make_version(state, [delta], info.recipe, world.record.sync, world.manifest.slices(0))
        assert made.optimizer_sha256 == info.optimizer_sha256
        state = made.state
    old, new = before.recipe.averages, after.recipe.averages
    assert min(old.quorum_seconds, new.quorum_seconds) > 0


def test_a_lease_outlives_a_merge_that_takes_long(world: Any, learners: Any) -> None:
    _, _, jobs = world.outer("first")
    world.run(0.5)
    _, second, _ = world.outer("second")
    jobs.is_holding = True
    learners[0].contribute(world.delta(1))
    world.until(lambda: jobs.num_held > 0)
    world.run(5 * 3.0)
    assert "outer.leased" not in second.events()
    jobs.release()
    world.until(lambda: merged(learners[0]))


def test_a_frozen_one_that_wakes_drops_its_round(world: Any, learners: Any) -> None:
    frozen, logger, jobs = world.outer("first")
    world.run(0.5)
    jobs.is_holding = True
    learners[0].contribute(world.delta(1))
    world.until(lambda: jobs.num_held > 0)
    leave_out(world, frozen)
    world.outer("second")
    world.until(lambda: merged(learners[0]))
    jobs.release()
    world.outers.append(frozen)
    world.until(lambda: "outer.standing_by" in logger.events())
    world.run(5.0)
    assert [info.version for info in learners[0].history()] == [0, 1]


def test_a_frozen_one_that_commits_first_thing_is_fenced(world: Any, learners: Any) -> None:
    clock = ManualClock()  # stands still while the outer is frozen, so that it does not know how late it is
    frozen, logger, jobs = world.outer("first", clock)
    world.run(0.5)
    jobs.is_holding = True
    learners[0].contribute(world.delta(1))
    world.run(0.5)
    clock.advance(0.2)
    world.until(lambda: jobs.num_held > 0)
    leave_out(world, frozen)
    world.outer("second")
    world.until(lambda: merged(learners[0]))
    jobs.release()
    world.outers.append(frozen)
    world.until(lambda: "outer.fenced" in world.broker_logger.events())
    clock.advance(2.0)
    world.until(lambda: "outer.standing_by" in logger.events())
    assert [info.version for info in learners[0].history()] == [0, 1]


def test_a_stale_commit_is_given_up_and_the_next_round_goes_on(world: Any, learners: Any) -> None:
    _, logger, jobs = world.outer("first")
    world.run(0.5)
    learners[0].contribute(world.delta(1))
    world.until(lambda: merged(learners[0]))
    jobs.is_holding = True
    learners[0].contribute(world.delta(2))
    world.until(lambda: jobs.num_held > 0)
    commit_before(world, learners)
    jobs.release()
    world.until(
        lambda: any("stale" in str(fields) for _, event, fields in logger.records if event == "round.abandoned")
    )
    learners[0].contribute(world.delta(3))
    world.until(lambda: merged(learners[0]))
    assert [info.version for info in learners[0].history()] == [0, 1, 2, 3]


def commit_before(world: Any, learners: Any) -> None:
    """Somebody with the newest epoch was quicker: commits what is pending."""
    other = world.outside("outer", "quicker", "cd" * 8)
    [row] = other.ask(List(fragment=0), Listing).pending
    before = other.history()[-1]
    changes = {"id": row.id, "digest": row.blob.digest, "size_bytes": row.blob.size_bytes}
    ingredient = before.recipe.ingredients[0].model_copy(update=changes)
    recipe = before.recipe.model_copy(update={"ingredients": (ingredient,)})
    state = FragmentState(world.first_parameters()[0])
    for one in (before.recipe, recipe):
        [part] = one.ingredients
        payload = other.fetch(BlobRef(digest=part.digest, size_bytes=part.size_bytes))
        delta = decode(payload, num_values=state.parameters.size)
        made = make_version(state, [delta], one, world.record.sync, world.manifest.slices(0))
        state = made.state
    commit = Commit(
        commit_id="ef" * 8,
        fragment=0,
        epoch=before.epoch,
        base_version=before.version,
        parameters_sha256=made.parameters_sha256,
        optimizer_sha256=made.optimizer_sha256,
        update=other.upload(made.update),
        recipe=recipe,
    )
    other.ask(commit, Committed)


def test_one_that_is_told_to_stop_finishes_and_frees_its_leases(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    learners[0].contribute(world.delta(1))
    world.until(lambda: merged(learners[0]))
    world.outers.remove(outer)
    should_stop = threading.Event()
    should_stop.set()
    life = threading.Thread(target=outer.run, args=(should_stop,))
    life.start()
    while life.is_alive():
        world.broker.work(0.01)
        world.clock.advance(0.001)
    leases = learners[0].ask(AskStatus(), Status).leases
    assert leases
    assert all(lease.expires_seconds <= 0 for lease in leases)


def test_a_newer_incarnation_ends_the_older_one(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    world.run(0.5)
    world.outers.remove(outer)
    world.outside("outer", "first", "cd" * 8)
    world.outers.append(outer)
    with pytest.raises(FencedError, match="newer incarnation"):
        world.run(5.0)


def test_an_outer_that_finds_no_broker_gives_up_with_one_sentence(bare_world: Any) -> None:
    bare_world.broker = None
    bare_world.outer("first")
    with pytest.raises(UnreachableError, match="is it running there"):
        bare_world.run(130.0)


def test_an_outer_keeps_to_its_run(world: Any) -> None:
    outer, _, _ = world.outer("first")
    world.run(0.5)
    outer._record = outer._record.model_copy(update={"run": "another"})
    world.restart_broker()
    with pytest.raises(RefusedError, match="another run"):
        world.run(5.0)


def test_a_lost_broker_is_reported_once_and_so_is_its_return(world: Any) -> None:
    _, logger, _ = world.outer("first")
    world.run(1.0)
    broker, world.broker = world.broker, None
    world.run(30.0)
    assert logger.events().count("broker.lost") == 1
    world.broker = broker
    world.run(10.0)
    assert logger.events().count("broker.lost") == 1
    assert logger.events().count("broker.joined") == 2
