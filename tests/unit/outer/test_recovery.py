"""From a checkpoint and the recipes after it to the state of the head, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.optimizer import FragmentState, Vector, make_version, optimizer_digest, parameters_digest
from isles.outer.recovery import (
    TAPE_VERSIONS_MAX,
    AskTape,
    Event,
    GiveUp,
    Instruction,
    Prevented,
    ReadCheckpoint,
    Recovered,
    Recovery,
    Remake,
    StateMade,
    StatePoint,
    TapeRead,
)
from isles.proto.agreement import SyncSettings
from isles.proto.errors import RefusedError
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import BlobRef, Ingredient, Recipe, VersionInfo

NUM_VALUES = 24
SLICES = Manifest.build([TensorSpec("a", (NUM_VALUES,), "float32", "parameter")], {}, 1).slices(0)
EPOCHS = (
    SyncSettings(num_fragments=1, codec_down="int4", merge_rule="mean", outer_momentum=0.9),
    SyncSettings(num_fragments=1, codec_down="fp32", merge_rule="mean", outer_momentum=0.0, outer_learning_rate=0.3),
    SyncSettings(num_fragments=1, codec_down="int8", merge_rule="mean", outer_momentum=0.5),
)


def random_vector(*seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(NUM_VALUES).astype(np.float32)


def digests_of(state: FragmentState) -> tuple[str, str]:
    return parameters_digest(state.parameters), optimizer_digest(state)


@dataclass
class Story:
    """A fragment's life: every state that there was, and the tape of it."""

    states: list[FragmentState] = field(default_factory=lambda: [FragmentState(random_vector(0))])
    tape: list[VersionInfo] = field(default_factory=list)
    page: int = TAPE_VERSIONS_MAX

    def __post_init__(self) -> None:
        self.tape.append(VersionInfo(fragment=0, version=0, parameters_sha256=digests_of(self.states[0])[0]))

    def commit(self, sync: SyncSettings, num_learners: int = 2) -> None:
        version = len(self.tape)
        ingredients = tuple(
            Ingredient(
                id=ContributionId(f"l{learner}", 0, "ab" * 8, version),
                digest="0" * 64,
                size_bytes=100,
                base_version=version - 1,
                tokens=10,
                steps=1,
                weight=1.0 + learner,
            )
            for learner in range(num_learners)
        )
        recipe = Recipe(ingredients=ingredients, fraction=0.5, merge_rule="mean", settings_digest=sync.digest)
        made = make_version(self.states[-1], self.deltas(recipe), recipe, sync, SLICES)
        self.states.append(made.state)
        parameters_sha256, optimizer_sha256 = digests_of(made.state)
        self.tape.append(
            VersionInfo(
                fragment=0,
                version=version,
                parameters_sha256=parameters_sha256,
                optimizer_sha256=optimizer_sha256,
                recipe=recipe,
            )
        )

    def deltas(self, recipe: Recipe) -> list[Vector]:
        return [random_vector(part.id.number, int(part.id.learner[1:])) for part in recipe.ingredients]

    def checkpoint(self, version: int) -> VersionInfo:
        blob = BlobRef(digest="1" * 64, size_bytes=1)
        return self.tape[version].model_copy(update={"parameters": blob, "recipe": None})

    def recovery(self, checkpoint: int, held: int | None = None, head: int | None = None) -> Recovery:
        point = None if held is None else StatePoint(held, *digests_of(self.states[held]))
        last = self.tape[-1 if head is None else head]
        return Recovery(last, self.checkpoint(checkpoint), point, self.sync_of)

    def sync_of(self, digest: str) -> SyncSettings | None:
        return next((sync for sync in EPOCHS if sync.digest == digest), None)


@dataclass
class Performer:
    """Does what a recovery orders, as an outer would; may be prevented at any order."""

    story: Story
    state: FragmentState | None = None
    ordered: list[Instruction] = field(default_factory=list)
    spoil: Callable[[FragmentState], FragmentState] = lambda state: state

    def run(self, recovery: Recovery, prevented_at: int | None = None) -> Recovered | GiveUp:
        [instruction] = recovery.start()
        while not isinstance(instruction, Recovered | GiveUp):
            self.ordered.append(instruction)
            is_prevented = prevented_at is not None and len(self.ordered) > prevented_at
            event = Prevented("the broker is away") if is_prevented else self.perform(instruction)
            [instruction] = recovery.handle(event)
        return instruction

    def perform(self, instruction: Instruction) -> Event:
        match instruction:
            case ReadCheckpoint(info):
                self.state = self.spoil(self.story.states[info.version])
                return StateMade(*digests_of(self.state))
            case AskTape(first, num_max):
                return TapeRead(self.story.tape[first : first + min(num_max, self.story.page)])
            case Remake(info, sync):
                assert self.state is not None
                assert info.recipe is not None
                made = make_version(self.state, self.story.deltas(info.recipe), info.recipe, sync, SLICES)
                self.state = self.spoil(made.state)
                return StateMade(*digests_of(self.state))
        raise AssertionError(instruction)

    def has_head(self) -> bool:
        assert self.state is not None
        return digests_of(self.state) == digests_of(self.story.states[-1])


def story_of(num_versions: int, page: int = TAPE_VERSIONS_MAX) -> Story:
    story = Story(page=page)
    for version in range(num_versions):
        story.commit(EPOCHS[version * len(EPOCHS) // max(1, num_versions)], 1 + version % 3)
    return story


@pytest.fixture
def story() -> Story:
    return story_of(6)


@given(
    num_versions=st.integers(0, 9), checkpoint=st.integers(0, 9), crashes=st.lists(st.integers(0, 12), max_size=5),
    page=st.integers(1, 4), is_held_kept=st.booleans(),
)  # fmt: skip
def test_the_head_comes_back_bit_equal_after_any_commits_and_crashes(
    num_versions: int, checkpoint: int, crashes: Sequence[int], page: int, is_held_kept: bool
) -> None:
    story = story_of(num_versions, page)
    checkpoint = min(checkpoint, num_versions)
    performer, held = Performer(story), None
    for prevented_at in [*crashes, None]:
        performer.ordered.clear()
        recovery = story.recovery(checkpoint, held)
        ended = performer.run(recovery, prevented_at)
        if recovery.point is not None:
            assert performer.state is not None
            assert digests_of(performer.state) == digests_of(story.states[recovery.point.version])
        held = recovery.point.version if recovery.point is not None and is_held_kept else None
    assert isinstance(ended, Recovered)
    assert performer.has_head()


def test_a_checkpoint_of_the_head_is_all_there_is_to_read(story: Story) -> None:
    performer = Performer(story)
    assert isinstance(performer.run(story.recovery(6)), Recovered)
    assert [type(order) for order in performer.ordered] == [ReadCheckpoint]


def test_a_state_that_is_held_spares_the_checkpoint_and_what_is_before_it(story: Story) -> None:
    performer = Performer(story, story.states[4])
    recovery = story.recovery(1, held=4)
    assert isinstance(performer.run(recovery), Recovered)
    assert [type(order) for order in performer.ordered] == [AskTape, Remake, Remake]
    assert recovery.num_remade == 2
    assert performer.has_head()


def test_a_state_older_than_the_checkpoint_is_of_no_use_since_payloads_behind_it_may_be_gone(story: Story) -> None:
    performer = Performer(story, story.states[1])
    performer.run(story.recovery(3, held=1))
    assert isinstance(performer.ordered[0], ReadCheckpoint)


@pytest.mark.parametrize("version", [4, 6, 9])
def test_a_state_that_is_not_on_the_tape_is_not_built_upon(version: int, story: Story) -> None:
    performer = Performer(story)
    strange = StatePoint(version, "a" * 64, "b" * 64)
    recovery = Recovery(story.tape[-1], story.checkpoint(2), strange, story.sync_of)
    assert isinstance(performer.run(recovery), Recovered)
    assert performer.has_head()


def test_the_bytes_that_each_version_was_made_from_are_counted(story: Story) -> None:
    recovery = story.recovery(2)
    Performer(story).run(recovery)
    assert recovery.payload_bytes == {3: 300, 4: 100, 5: 200, 6: 300}


def test_older_settings_epochs_are_recomputed_under_their_own_settings(story: Story) -> None:
    performer = Performer(story)
    performer.run(story.recovery(0))
    settings = [order.sync for order in performer.ordered if isinstance(order, Remake)]
    assert settings == [EPOCHS[0]] * 2 + [EPOCHS[1]] * 2 + [EPOCHS[2]] * 2


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_another_build_that_computes_otherwise_is_refused_by_fragment_and_version(story: Story) -> None:
    def spoil(state: FragmentState) -> FragmentState:
        is_third = digests_of(state) == digests_of(story.states[3])
        return FragmentState(state.parameters + 1, state.momentum, state.remainder) if is_third else state

    with pytest.raises(RefusedError, match=r"fragment 0, version 3 was recomputed to other parameters .* the build"):
        Performer(story, spoil=spoil).run(story.recovery(1))


def test_a_wrong_momentum_is_noticed_although_the_parameters_are_right(story: Story) -> None:
    def spoil(state: FragmentState) -> FragmentState:
        return FragmentState(state.parameters, random_vector(99), state.remainder)

    with pytest.raises(RefusedError, match="momentum or remainder of its checkpoint"):
        Performer(story, spoil=spoil).run(story.recovery(1))


def test_a_checkpoint_with_other_parameters_than_were_committed_is_refused(story: Story) -> None:
    story.states[2] = FragmentState(random_vector(99), story.states[2].momentum, story.states[2].remainder)
    with pytest.raises(RefusedError, match="version 2: the parameters of its checkpoint"):
        Performer(story).run(story.recovery(2))


def test_settings_that_the_run_never_had_are_refused(story: Story) -> None:
    recovery = Recovery(story.tape[-1], story.checkpoint(1), None, lambda _: None)
    with pytest.raises(RefusedError, match="version 2 cannot be recomputed: it was made under settings"):
        Performer(story).run(recovery)


def test_a_recipe_that_cannot_be_followed_is_refused(story: Story) -> None:
    assert story.tape[3].recipe is not None
    empty = story.tape[3].recipe.model_copy(update={"ingredients": ()})
    story.tape[3] = story.tape[3].model_copy(update={"recipe": empty})
    with pytest.raises(RefusedError, match="version 3 cannot be recomputed: the recipe has no ingredients"):
        Performer(story).run(story.recovery(1))


def test_a_recipe_that_was_changed_in_the_store_is_not_blamed_on_the_build(story: Story) -> None:
    info = story.tape[3]
    assert info.recipe is not None
    changed = info.recipe.model_copy(update={"fraction": 0.25})
    story.tape[3] = info.model_copy(update={"recipe": changed, "recipe_sha256": info.recipe.digest()})
    with pytest.raises(RefusedError, match="version 3 cannot be recomputed: its recipe is not the one that was"):
        Performer(story).run(story.recovery(1))


@pytest.mark.parametrize(
    ("cut", "missing"),
    [
        (lambda tape: [*tape[:3], *tape[4:]], 3),
        (lambda tape: tape[:4], 4),
        (lambda tape: tape[:2], 2),
        (lambda tape: [*tape[:3], tape[3].model_copy(update={"recipe": None}), *tape[4:]], 3),
    ],
)
def test_a_tape_with_a_gap_is_given_up_with_the_version_that_is_missing(
    cut: Callable[[Any], Any], missing: int, story: Story
) -> None:
    recovery = story.recovery(1)
    story.tape = cut(story.tape)
    ended = Performer(story).run(recovery)
    assert isinstance(ended, GiveUp)
    assert f"has a gap: version {missing} or its recipe is missing" in ended.reason


def test_a_listing_that_contradicts_itself_is_given_up(story: Story) -> None:
    ended = Performer(story).run(story.recovery(5, head=3))
    assert isinstance(ended, GiveUp)
    assert "newer than the head" in ended.reason


def test_a_head_that_is_another_on_the_tape_is_given_up(story: Story) -> None:
    head = story.tape[-1].model_copy(update={"parameters_sha256": "a" * 64})
    ended = Performer(story).run(Recovery(head, story.checkpoint(2), None, story.sync_of))
    assert isinstance(ended, GiveUp)
    assert "another one on the tape" in ended.reason
