"""States that are in the store only now and then: what an outer makes of that when it starts, takes over or stops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.retained import RUN_RECORD
from isles.outer.outer import Outer
from isles.outer.services import Unavailable
from isles.proto.errors import StoreError
from isles.proto.messages import Checkpoint, List, Listing, Upload


def merged(learner: Any) -> bool:
    return bool(learner.row().state == "merged")


def merge_one(world: Any, learner: Any, seed: int) -> None:
    learner.contribute(world.delta(seed))
    world.until(lambda: merged(learner))


def leave_out(world: Any, outer: Any) -> None:
    """Killed with -9: it says nothing any more."""
    world.outers.remove(outer)


def recoveries(logger: Any, fragment: int = 0) -> list[tuple[int, int]]:
    """From which checkpoint, and how many versions were computed anew."""
    return [
        (fields["checkpoint"], fields["num_versions"])
        for _, event, fields in logger.records
        if event == "state.recovered" and fields["fragment"] == fragment
    ]


def checkpoints(logger: Any) -> list[int]:
    return [
        fields["version"]
        for _, event, fields in logger.records
        if event == "checkpoint.stored" and fields["fragment"] == 0
    ]


def versions(learner: Any) -> list[int]:
    return [info.version for info in learner.history()]


def test_a_new_outer_recomputes_what_no_checkpoint_covers_and_goes_on(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    for seed in range(5):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    _, logger, _ = world.outer("second")
    merge_one(world, learners[0], 9)
    assert recoveries(logger) == [(0, 5)]
    assert versions(learners[1]) == list(range(7))


@pytest.mark.parametrize("num_merged", range(8))
def test_an_outer_killed_after_any_number_of_commits_is_replaced_bit_equal(
    num_merged: int, world: Any, learners: Any
) -> None:
    outer, _, _ = world.outer("first", checkpoint_versions=3)
    world.run(0.5)
    for seed in range(num_merged):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    _, logger, _ = world.outer("second", checkpoint_versions=3)
    world.until(lambda: len(recoveries(logger)) == 1)
    [(checkpoint, num_remade)] = recoveries(logger)
    assert checkpoint + num_remade == num_merged
    assert checkpoint in (num_merged // 3 * 3, max(0, num_merged // 3 * 3 - 3))
    merge_one(world, learners[0], 99)


def test_checkpoints_are_made_every_so_many_versions_and_rounds_go_on_meanwhile(world: Any, learners: Any) -> None:
    _, logger, _ = world.outer("first", checkpoint_versions=2)
    for seed in range(6):
        merge_one(world, learners[0], seed)
    world.until(lambda: len(checkpoints(logger)) == 3)
    assert checkpoints(logger) == [2, 4, 6]
    assert world.broker_logger.events().count("version.checkpointed") == 3
    assert "round.abandoned" not in logger.events()


def test_a_checkpoint_that_takes_for_ever_delays_no_round(world: Any, learners: Any) -> None:
    outer, logger, _ = world.outer("first", checkpoint_versions=1)
    ask, held = outer.ask, []

    def hold_back(message: Any, then: Callable[[Any], None], payload: bytes | None = None) -> None:
        is_of_state = isinstance(message, Upload) and message.blob.size_bytes > 1500
        held.append(message) if is_of_state else ask(message, then, payload)

    outer.ask = hold_back
    for seed in range(5):
        merge_one(world, learners[0], seed)
    assert len(held) == 1
    assert checkpoints(logger) == []


def test_enough_bytes_of_payloads_make_a_checkpoint_due_before_its_versions_do(world: Any, learners: Any) -> None:
    _, logger, _ = world.outer("first", checkpoint_bytes=0)
    for seed in range(7):
        merge_one(world, learners[0], seed)
    world.run(1.0)
    state_bytes = 12 * world.manifest.fragments[0].num_values
    sizes = [info.recipe.ingredients[0].size_bytes for info in learners[0].history()[1:]]
    due = next(version for version in range(1, 8) if sum(sizes[:version]) >= state_bytes)
    assert checkpoints(logger)[0] == due > 1


def test_what_versions_were_made_from_is_counted_over_a_take_over(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    for seed in range(4):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    _, logger, _ = world.outer("second", checkpoint_bytes=0)
    world.until(lambda: checkpoints(logger) == [4])


def test_one_that_is_told_to_stop_leaves_nothing_to_recompute(world: Any, learners: Any) -> None:
    outer, logger, _ = world.outer("first")
    for seed in range(3):
        merge_one(world, learners[0], seed)
    stop(world, outer)
    assert checkpoints(logger) == [3]
    _, second, _ = world.outer("second")
    merge_one(world, learners[0], 4)
    assert recoveries(second) == [(3, 0)]


def test_one_that_stops_during_a_merge_finishes_it_first(world: Any, learners: Any) -> None:
    outer, logger, jobs = world.outer("first")
    world.run(1.0)
    jobs.is_holding = True
    learners[0].contribute(world.delta(1))
    world.until(lambda: jobs.num_held > 0)
    outer._desks[0].stop()
    world.run(1.0)
    jobs.release()
    world.until(lambda: checkpoints(logger) == [1])
    assert merged(learners[0])


def stop(world: Any, outer: Outer) -> None:
    world.outers.remove(outer)
    should_stop = threading.Event()
    should_stop.set()
    life = threading.Thread(target=outer.run, args=(should_stop,))
    life.start()
    while life.is_alive():
        world.broker.work(0.01)
        world.clock.advance(0.001)
    life.join()


def test_a_checkpoint_under_way_is_dropped_with_the_lease(world: Any, learners: Any) -> None:
    outer, logger, _ = world.outer("first", checkpoint_versions=1)
    ask, held = outer.ask, []

    def hold_back(message: Any, then: Callable[[Any], None], payload: bytes | None = None) -> None:
        held.append((message, then)) if isinstance(message, Checkpoint) else ask(message, then, payload)

    outer.ask = hold_back
    merge_one(world, learners[0], 1)
    world.until(lambda: held)
    leave_out(world, outer)
    _, second, _ = world.outer("second", checkpoint_versions=1)
    world.until(lambda: "outer.leased" in second.events())
    world.outers.append(outer)
    world.until(lambda: "outer.standing_by" in logger.events())
    assert not any(desk.is_busy for desk in outer._desks)
    assert outer._stock.checkpoints.num_started == 0
    [(message, then)] = held
    ask(message, then)
    world.run(1.0)
    assert checkpoints(logger) == []
    world.until(lambda: checkpoints(second) == [1])


def test_an_outer_without_room_for_states_or_payloads_makes_the_same_versions(world: Any, learners: Any) -> None:
    outer, logger, _ = world.outer("first", state_cache_bytes=0, payload_cache_bytes=0, checkpoint_versions=2)
    for seed in range(4):
        for learner in learners:
            learner.contribute(world.delta(10 * seed + learner.number))
        world.until(lambda: all(merged(learner) for learner in learners))
    world.until(lambda: len(checkpoints(logger)) >= 2)
    assert outer._stock.states.bytes_in_memory == 0
    num_values = sum(fragment.num_values for fragment in world.manifest.fragments)
    assert 0 < outer._stock.states.bytes_on_disk <= 12 * num_values
    leave_out(world, outer)
    _, second, _ = world.outer("second")
    world.until(lambda: len(recoveries(second)) == 1)


def test_memory_for_states_is_given_back_with_each_version(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first", checkpoint_versions=2)
    for seed in range(6):
        merge_one(world, learners[0], seed)
    world.run(1.0)
    first, second = world.manifest.fragments
    assert outer._stock.states.bytes_in_memory == 12 * first.num_values + 4 * second.num_values
    assert outer._stock.payloads.bytes_held == 0
    lines = (outer._stock.screenings, outer._stock.merges, outer._stock.recoveries, outer._stock.checkpoints)
    assert [line.num_started for line in lines] == [0, 0, 0, 0]


def test_an_outer_that_comes_back_to_its_lease_recomputes_only_what_it_missed(world: Any, learners: Any) -> None:
    first, logger, _ = world.outer("first")
    for seed in range(3):
        merge_one(world, learners[0], seed)
    leave_out(world, first)
    second, _, _ = world.outer("second")
    merge_one(world, learners[0], 7)
    leave_out(world, second)
    world.outers.append(first)
    merge_one(world, learners[0], 8)
    assert recoveries(logger) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_a_payload_that_is_needed_and_gone_ends_the_outer_with_its_name(how: str, world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    for seed in range(2):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    digest = learners[1].history()[1].recipe.ingredients[0].digest
    spoil(world.store.blobs, digest, how)
    _, logger, _ = world.outer("second")
    with pytest.raises(StoreError, match="what learner a gave for version 1 of fragment 0: its payload cannot be had"):
        world.run(60.0)
    assert logger.events().count("recovery.failed") == 2


def spoil(blobs: Any, digest: str, how: str) -> None:
    if how == "deleted":
        blobs.delete(digest)
    else:
        blobs.blobs[digest] = bytes(len(blobs.blobs[digest]))


def test_a_recovery_that_is_put_off_goes_on_from_where_it_came_to(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    for seed in range(5):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    second, logger, _ = world.outer("second")
    fetch, fetched = second.fetch, []

    def put_off_once(blob: Any, then: Any, *, bytes_max: int) -> None:
        fetched.append(blob)
        then(Unavailable("internal", "not now")) if len(fetched) == 6 else fetch(blob, then, bytes_max=bytes_max)

    second.fetch = put_off_once
    world.until(lambda: len(recoveries(logger)) == 1)
    assert "recovery.failed" in logger.events()
    [(_, num_remade)] = recoveries(logger)
    assert 0 < num_remade < 5


def test_a_checkpoint_whose_bytes_are_gone_is_gone_around(world: Any, learners: Any) -> None:
    outer, logger, _ = world.outer("first", checkpoint_versions=2)
    for seed in range(2):
        merge_one(world, learners[0], seed)
    world.until(lambda: checkpoints(logger) == [2])
    leave_out(world, outer)
    other = world.outside("outer", "looks", "cd" * 8)
    world.store.blobs.delete(other.ask(List(fragment=0), Listing).checkpoint.momentum.digest)
    _, second, _ = world.outer("second")
    world.until(lambda: len(recoveries(second)) == 1)
    assert recoveries(second) == [(0, 2)]


def test_what_was_recomputed_is_checkpointed_at_once(world: Any, learners: Any) -> None:
    """Who cannot follow the tape, because an update on it is damaged, need not wait for the next round."""
    outer, _, _ = world.outer("first")
    for seed in range(3):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    _, logger, _ = world.outer("second")
    world.until(lambda: checkpoints(logger) == [3])


def test_a_broker_that_restarts_during_a_recovery_only_delays_it(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    for seed in range(4):
        merge_one(world, learners[0], seed)
    leave_out(world, outer)
    second, logger, _ = world.outer("second")
    fetch, num_fetched = second.fetch, []

    def count(blob: Any, then: Any, *, bytes_max: int) -> None:
        num_fetched.append(blob)
        fetch(blob, then, bytes_max=bytes_max)

    second.fetch = count
    world.until(lambda: len(num_fetched) >= 3)
    world.restart_broker()
    merge_one(world, learners[0], 9)
    assert recoveries(logger)[-1][1] >= 1
    assert versions(learners[1]) == list(range(6))


def test_other_settings_are_taken_over_without_a_restart_and_older_versions_recomputed_under_theirs(
    world: Any, learners: Any
) -> None:
    first, logger, _ = world.outer("first")
    merge_one(world, learners[0], 1)
    sync = world.record.sync.model_copy(update={"outer_momentum": 0.0, "codec_down": "fp32"})
    world.record = world.record.model_copy(update={"sync": sync, "past_sync": (world.record.sync,)})
    with world.store.index.transaction():
        world.store.index.put_value(RUN_RECORD, world.record.model_dump_json().encode())
    world.restart_broker()
    merge_one(world, learners[0], 2)
    assert recoveries(logger) == [(0, 0), (0, 1)]
    leave_out(world, first)
    _, second, _ = world.outer("second")
    merge_one(world, learners[0], 3)
    assert recoveries(second) == [(1, 1)]
    digests = [info.recipe.settings_digest for info in learners[1].history()[1:]]
    assert digests == [world.record.past_sync[0].digest, sync.digest, sync.digest]


def test_nothing_of_a_checkpoint_is_in_a_commit(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    ask, uploads = outer.ask, []

    def count(message: Any, then: Callable[[Any], None], payload: bytes | None = None) -> None:
        uploads.extend([message] if isinstance(message, Upload) else [])
        ask(message, then, payload)

    outer.ask = count
    for seed in range(3):
        merge_one(world, learners[0], seed)
    assert len(uploads) == 3
