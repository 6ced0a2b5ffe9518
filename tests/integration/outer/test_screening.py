"""One hostile learner among honest ones, in front of a real broker and a real outer: what becomes of its work, of that
of the others, and of what a later outer or a replay makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from isles.outer.orders import Merge, Plan
from isles.outer.outer import Outer
from isles.outer.replay import Replay, find_stretch
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.codec.frame import pack
from isles.proto.codec.table import codec_named
from isles.proto.messages import COUNT_MAX, AskHistory, BlobRef, History, Message, Progress, VersionInfo

Vector = npt.NDArray[np.float32]

HONEST = ("a", "b", "c", "d")
HOSTILE = "mallory"
USUAL_LENGTH = 0.2
"""About the L2 norm of what the honest ones send: 700 values of size 0.01."""


@pytest.fixture
def sync(request: pytest.FixtureRequest) -> SyncSettings:
    rule = getattr(request, "param", "mean")
    return SyncSettings(num_fragments=2, codec_up="fp32", codec_down="int4", grace_max_seconds=0.1, merge_rule=rule)


BOTH_RULES = pytest.mark.parametrize("sync", ["mean", "rda"], indirect=True)


@pytest.fixture
def hostile(world: Any) -> Any:
    """A fifth learner beside four honest ones, all known by name in `world.crew`."""
    for name in HONEST[2:]:
        world.learner(name)
    mallory = world.learner(HOSTILE)
    world.crew = {outsider.name: outsider for outsider in world.outsiders if outsider.name in (*HONEST, HOSTILE)}
    return mallory


def send(world: Any, learner: Any, delta: Vector, **fields: Any) -> None:
    """Contributes a delta with the norms that it has."""
    norms = tuple(float(np.linalg.norm(delta[one.start : one.stop])) for one in world.manifest.slices(0))
    learner.contribute(delta, **({"norms": norms} | fields))


def contribute_honestly(world: Any, names: tuple[str, ...] = HONEST, **fields: Any) -> None:
    for name in names:
        learner = world.crew[name]
        send(world, learner, world.delta(100 * learner.number + sorted(world.crew).index(name)), **fields)


def settled(world: Any, *names: str) -> bool:
    return all(world.crew[name].row().state != "pending" for name in names)


def a_round(world: Any, contribute: Callable[[], None], names: tuple[str, ...] = (*HONEST, HOSTILE)) -> None:
    """One round of everybody: what they sent is pending before an outer sees any of it."""
    world.outers, outers = [], world.outers
    contribute()
    world.outers = outers
    world.until(lambda: settled(world, *names))


def moved(world: Any) -> float:
    """How far the parameters of fragment 0 have moved, as an L2 norm."""
    learner = world.crew["a"]
    total = np.zeros(world.manifest.fragments[0].num_values, np.float32)
    for info in learner.history()[1:]:
        total += decode(learner.fetch(info.update), num_values=total.size)
    return float(np.linalg.norm(total))


def in_fp32(vector: Vector) -> bytes:
    """What no encoder of ours writes, whatever the values are."""
    planes = np.ascontiguousarray(vector.view(np.uint8).reshape(-1, 4).T)
    return pack(codec_named("fp32"), num_values=vector.size, scale_exponent=0, raw=planes.tobytes())


def payloads(world: Any) -> dict[str, Vector | bytes]:
    delta = world.delta(7)
    nan, infinite = delta.copy(), delta.copy()
    nan[3], infinite[-1] = np.nan, -np.inf
    sound = encode("fp32", delta)
    return {
        "NaN": in_fp32(nan),
        "infinity": in_fp32(infinite),
        "scaled x100": delta * np.float32(100),
        "as large as single precision": np.full(delta.size, 3e38, np.float32),
        "of another fragment": world.delta(7, fragment=1)[:-1],
        "another codec": encode("int8", delta),
        "cut short": sound[:-9],
        "a flipped bit": sound[:40] + bytes([sound[40] ^ 1]) + sound[41:],
        "no payload": b"x" * 900,
    }


REJECTED = {
    "NaN": "is not finite",
    "infinity": "is not finite",
    "scaled x100": "times what is usual for 10 steps",
    "as large as single precision": "times what is usual for 10 steps",
    "of another fragment": "values",
    "another codec": "codec int8",
    "cut short": "payload",
    "a flipped bit": "payload",
    "no payload": "does not begin like a payload",
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_cannot_be_right_is_rejected_with_the_reason_and_the_round_goes_on_without(
    what: str, world: Any, hostile: Any
) -> None:
    world.outer("first")

    def contribute() -> None:
        contribute_honestly(world)
        hostile.contribute(payloads(world)[what])

    a_round(world, contribute)
    row = hostile.row()
    assert row.state == "rejected"
    assert row.reason.startswith("learner mallory, fragment 0: ")
    assert REJECTED[what] in row.reason
    assert [world.crew[name].row().state for name in HONEST] == ["merged"] * 4
    [said] = [fields for _, event, fields in world.broker_logger.records if event == "contribution.rejected"]
    assert (said["learner"], said["fragment"], said["reason"]) == (HOSTILE, 0, row.reason)
    assert moved(world) < 2 * USUAL_LENGTH


@BOTH_RULES
def test_a_delta_that_is_too_long_is_merged_scaled_down_and_said_so(world: Any, hostile: Any) -> None:
    _, logger, _ = world.outer("first")

    def contribute() -> None:
        contribute_honestly(world)
        send(world, hostile, world.delta(7) * np.float32(10))

    a_round(world, contribute)
    clips = recipe_clips(hostile.history()[-1])
    assert clips[HOSTILE] == pytest.approx(0.3, rel=0.2)
    assert [clips[name] for name in HONEST] == [1.0] * 4
    [said] = [fields for _, event, fields in logger.records if event == "contribution.clipped"]
    assert (said["learner"], said["version"], said["factor"]) == (HOSTILE, 1, clips[HOSTILE])


def test_one_that_says_the_opposite_of_the_others_is_rejected(world: Any, hostile: Any) -> None:
    world.outer("first")
    common = world.delta(1000)

    def contribute() -> None:
        for number, name in enumerate(HONEST):
            send(world, world.crew[name], common + world.delta(number))
        send(world, hostile, -common + world.delta(7))

    a_round(world, contribute)
    assert hostile.row().state == "rejected"
    assert "opposed to those of the others, with a cosine of -0." in hostile.row().reason
    assert [world.crew[name].row().state for name in HONEST] == ["merged"] * 4


def test_absurd_claims_own_neither_a_round_nor_the_run(world: Any, hostile: Any) -> None:
    world.outer("first")

    def contribute() -> None:
        contribute_honestly(world)
        send(world, hostile, world.delta(7), tokens=10**12)

    a_round(world, contribute)
    assert hostile.row().state == "rejected"
    assert "there was time for only" in hostile.row().reason
    assert hostile.history()[-1].tokens_total == 400


@pytest.mark.parametrize(
    "claims",
    [
        {"tokens": 3000, "seconds": 30.0},
        {"tokens": 3000, "seconds": 30.0, "steps": 1},
        {"tokens": 100, "seconds": 0.0, "steps": 1},
        {"tokens": 3000, "seconds": 1e300, "steps": COUNT_MAX},
        {"tokens": 3000, "seconds": 1e-300, "steps": 1},
    ],
)
def test_whatever_a_learner_claims_it_counts_for_no_more_than_four(
    claims: dict[str, Any], world: Any, hostile: Any
) -> None:
    world.outer("first")

    def contribute() -> None:
        contribute_honestly(world)
        send(world, hostile, world.delta(7), **claims)

    a_round(world, contribute)
    weights = {one.id.learner: one.weight for one in hostile.history()[-1].recipe.ingredients}
    assert weights[HOSTILE] <= 4 * weights["a"]


def test_a_live_learner_that_claims_a_huge_rate_does_not_make_the_steps_of_others_small(
    world: Any, hostile: Any
) -> None:
    for tokens in (10**14, 2 * 10**14):
        hostile.ask(Progress(steps=10, tokens=tokens, step_seconds=0.1), Message)
        world.run(1.0)
    for name in HONEST:
        world.crew[name].progress()
    world.outer("first")
    a_round(world, lambda: contribute_honestly(world), HONEST)
    assert hostile.history()[-1].recipe.fraction >= 4 / 8


class LiveTape:
    """What a broker has on tape, as a replay reads it."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        return self.learner.ask(AskHistory(fragment=fragment, first=first, num_max=num_max), History).versions

    def read(self, blob: BlobRef, *, bytes_max: int) -> bytes:
        return self.learner.fetch(blob)


@BOTH_RULES
def test_versions_with_clipped_deltas_replay_to_the_bit(world: Any, hostile: Any) -> None:
    world.outer("first")
    factors = (10, 10, 1, 10)  # three in a row would not be merged
    for turn, factor in enumerate(factors):

        def contribute(turn: int = turn, factor: int = factor) -> None:
            contribute_honestly(world)
            send(world, hostile, world.delta(turn) * np.float32(factor))

        a_round(world, contribute)
    versions = hostile.history()
    assert [recipe_clips(info)[HOSTILE] < 1 for info in versions[1:]] == [factor > 1 for factor in factors]
    tape = LiveTape(hostile)
    replayed = Replay(tape, world.record).run(find_stretch(tape, 0))
    assert (replayed.last, replayed.difference) == (4, None)


def recipe_clips(info: VersionInfo) -> dict[str, float]:
    assert info.recipe is not None
    return {one.id.learner: one.clip for one in info.recipe.ingredients}


def test_a_second_outer_decides_the_same_of_what_the_first_one_left(world: Any, hostile: Any) -> None:
    """The first outer is frozen while it merges: its recipe never gets to the store, the second one's does."""
    first, _, jobs = world.outer("first")
    a_round(world, lambda: contribute_honestly(world, (*HONEST, HOSTILE)))
    plans = watch_plans(first)

    def contribute() -> None:
        contribute_honestly(world, base_version=1)
        send(world, hostile, world.delta(7) * np.float32(20), tokens=3000, seconds=30.0, base_version=1)

    world.outers, outers = [], world.outers
    contribute()
    jobs.is_holding = True
    world.outers = outers
    world.until(lambda: jobs.num_held > 0)
    world.outers.remove(first)
    world.outer("second")
    world.until(lambda: settled(world, *HONEST, HOSTILE))
    [given_up] = [plan for plan in plans if plan.fragment == 0 and plan.head.version == 1]
    committed = hostile.history()[-1].recipe
    assert recipe_clips(hostile.history()[-1])[HOSTILE] < 0.3
    assert committed.ingredients == given_up.recipe.ingredients
    assert committed.conduct.habits == given_up.recipe.conduct.habits


def watch_plans(outer: Outer) -> list[Plan]:
    """What the rounds of an outer order to be merged from now on."""
    plans: list[Plan] = []
    for desk in outer._desks:
        handle = desk.rounds.handle

        def spy(event: Any, now: float, handle: Any = handle) -> Any:
            instructions = handle(event, now)
            plans.extend(order.plan for order in instructions if isinstance(order, Merge))
            return instructions

        desk.rounds.handle = spy  # type: ignore[method-assign]
    return plans
