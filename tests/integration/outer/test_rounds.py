"""Rounds against a real broker: what is merged, what is refused, and that the tape replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isles.outer.optimizer import FragmentState, make_version, parameters_digest
from isles.proto.codec import decode, encode
from isles.proto.codec.frame import pack
from isles.proto.codec.table import codec_named


def not_finite(num_values: int) -> bytes:
    """What no encoder of ours writes: a well-formed fp32 payload of NaN."""
    vector = np.full(num_values, np.nan, np.float32)
    planes = np.ascontiguousarray(vector.view(np.uint8).reshape(-1, 4).T)
    return pack(codec_named("fp32"), num_values=num_values, scale_exponent=0, raw=planes.tobytes())


def test_contributions_become_a_version(world: Any, learners: Any) -> None:
    world.outer("first")
    for seed, learner in enumerate(learners):
        learner.contribute(world.delta(seed))
    world.until(lambda: all(learner.row().state == "merged" for learner in learners))
    versions = learners[0].history()
    assert [info.version for info in versions] == list(range(len(versions)))
    assert sum(info.num_participants for info in versions) == 2
    assert versions[-1].tokens_total == 200


def test_a_learner_follows_the_updates_to_the_committed_digest(world: Any, learners: Any) -> None:
    world.outer("first")
    parameters = world.first_parameters()[0]
    for turn in range(4):
        for learner in learners:
            learner.contribute(world.delta(10 * turn + learner.number))
        world.until(lambda: all(learner.row().state == "merged" for learner in learners))
    for info in learners[0].history()[1:]:
        parameters = parameters + decode(learners[0].fetch(info.update), num_values=parameters.size)
        assert parameters_digest(parameters) == info.parameters_sha256


def test_every_version_recomputes_from_its_recipe_to_the_bit(world: Any, learners: Any) -> None:
    world.outer("first")
    payloads: dict[str, bytes] = {}
    for turn in range(3):
        for learner in learners:
            payload = encode("fp32", world.delta(10 * turn + learner.number))
            payloads[str(learner.contribute(payload))] = payload
        world.until(lambda: all(learner.row().state == "merged" for learner in learners))
    versions = learners[0].history()
    assert len(versions) > 1
    state = FragmentState(world.first_parameters()[0])
    for info in versions[1:]:
        deltas = [decode(payloads[str(part.id)], num_values=state.parameters.size) for part in info.recipe.ingredients]
        made = make_version(state, deltas, info.recipe, world.record.sync, world.manifest.slices(0))
        assert made.parameters_sha256 == info.parameters_sha256
        assert made.optimizer_sha256 == info.optimizer_sha256
        assert made.update == learners[0].fetch(info.update)
        state = made.state


def test_fragments_go_their_own_ways(world: Any, learners: Any) -> None:
    world.outer("first")
    learners[0].contribute(world.delta(1, fragment=1), fragment=1)
    world.until(lambda: learners[0].head(1) == 1)
    assert learners[0].head(0) == 0


def test_a_round_of_one_among_two_takes_a_part_of_a_step(world: Any, learners: Any) -> None:
    world.outer("first")
    learners[0].contribute(world.delta(1))
    world.until(lambda: learners[0].head() == 1)
    assert learners[0].history()[1].recipe.fraction < 1


def test_with_fewer_live_learners_than_required_nothing_is_merged_until_the_others_are_here(
    world: Any, learners: Any
) -> None:
    _, logger, _ = world.outer("first", require_learners=3)
    learners[0].contribute(world.delta(1))
    world.run(5.0)
    assert learners[0].head() == 0
    assert learners[0].row().state == "pending"
    assert logger.events().count("learners.missing") == 1
    world.learner("c")
    world.until(lambda: learners[0].row().state == "merged")
    assert "learners.complete" in logger.events()


def test_an_outer_waits_until_there_is_a_run(bare_world: Any) -> None:
    bare_world.outer("first")
    bare_world.run(20.0)
    learner = bare_world.learner("a")
    learner.init(bare_world.record, bare_world.first_parameters())
    learner.contribute(bare_world.delta(1))
    bare_world.until(lambda: learner.row().state == "merged")


def test_an_outer_asks_rarely_whether_there_is_a_run(bare_world: Any) -> None:
    bare_world.outer("first")
    bare_world.run(100.0)
    assert bare_world.broker_logger.events().count("client.joined") <= 8


def test_what_is_not_finite_is_rejected_and_the_rest_is_merged(world: Any, learners: Any) -> None:
    world.outer("first")
    learners[0].contribute(not_finite(world.delta(0).size))
    learners[1].contribute(world.delta(1))
    world.until(lambda: learners[0].row().state == "rejected" and learners[1].row().state == "merged")
    tensor = world.manifest.slices(0)[0].name
    assert f"learner a, fragment 0: tensor {tensor} is not finite" in learners[0].row().reason


@pytest.mark.parametrize("payload", ["garbage", "another length", "another codec"])
def test_a_payload_that_is_not_the_runs_is_rejected(payload: str, world: Any, learners: Any) -> None:
    world.outer("first")
    spoiled = {
        "garbage": b"just some bytes of a stranger" * 9,
        "another length": encode("fp32", np.ones(3, np.float32)),
        "another codec": encode("int4", world.delta(1)),
    }
    learners[0].contribute(spoiled[payload])
    world.until(lambda: learners[0].row().state == "rejected")
    assert learners[0].head() == 0


def test_a_round_of_bad_payloads_alone_is_abandoned_and_the_run_goes_on(world: Any, learners: Any) -> None:
    _, logger, _ = world.outer("first")
    for learner in learners:
        learner.contribute(not_finite(world.delta(0).size))
    world.until(lambda: all(learner.row().state == "rejected" for learner in learners))
    assert "round.abandoned" in logger.events()
    for learner in learners:
        learner.contribute(world.delta(learner.number))
    world.until(lambda: all(learner.row().state == "merged" for learner in learners))


def test_a_payload_that_is_lost_is_rejected_rather_than_waited_for(world: Any, learners: Any) -> None:
    contribution_id = learners[0].contribute(world.delta(1))
    world.store.blobs.delete(world.store.index.row("a", 0).contribution.blob.digest)
    _, logger, _ = world.outer("first")
    world.until(lambda: learners[0].row().state == "rejected")
    assert learners[0].row().id == contribution_id
    assert "cannot be had" in learners[0].row().reason
    assert "blob.unavailable" in logger.events()


def test_a_step_that_is_not_finite_costs_one_contribution_and_no_more(world: Any, learners: Any) -> None:
    _, logger, _ = world.outer("first")
    huge = np.full(world.delta(0).size, 3e38, np.float32)
    learners[0].contribute(huge)
    learners[1].contribute(world.delta(1))
    world.until(lambda: learners[0].row().state == "rejected" and learners[1].row().state == "merged")
    assert "round.abandoned" in logger.events()


def test_a_broker_that_restarts_during_a_merge_costs_nothing(world: Any, learners: Any) -> None:
    _, _, jobs = world.outer("first")
    world.run(1.0)
    jobs.is_holding = True
    learners[0].contribute(world.delta(9))
    world.until(lambda: jobs.num_held > 0)
    world.restart_broker()
    jobs.release()
    world.until(lambda: learners[0].row().state == "merged")
    versions = learners[0].history()
    assert [info.version for info in versions] == list(range(len(versions)))


def test_the_state_of_the_head_is_fetched_once_and_then_kept(world: Any, learners: Any) -> None:
    outer, _, _ = world.outer("first")
    fetched: list[str] = []
    fetch = outer.fetch
    outer.fetch = lambda blob, then, *, bytes_max: (fetched.append(blob.digest), fetch(blob, then, bytes_max=bytes_max))
    for turn in range(3):
        learners[0].contribute(world.delta(turn))
        world.until(lambda: learners[0].row().state == "merged")
    versions = learners[0].history()
    assert len(versions) == 4
    assert fetched.count(versions[0].parameters.digest) == 1
    assert len(fetched) == len(world.manifest.fragments) + 3
