"""A tape recomputes bit by bit, and whatever was changed on it is found and named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from isles.outer.optimizer import FragmentState, make_version, optimizer_digest, parameters_digest
from isles.outer.replay import MOVES_MAX, Difference, Kind, Replay, Replayed, find_stretch
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.errors import PayloadError, RemoteDataError, UsageError
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Averages, BlobRef, Ingredient, Recipe, VersionInfo

NUM_VALUES = 300
FASTER = "the run moves on faster than this machine recomputes: stop it first, or raise broker.versions_kept"
OLD = SyncSettings(num_fragments=1, codec_up="fp32", codec_down="int8", merge_rule="mean", outer_momentum=0.0)
NEW = SyncSettings(num_fragments=1, codec_up="int4", codec_down="int4", merge_rule="mean", outer_momentum=0.9)
MANIFEST = Manifest.build([TensorSpec("only", (NUM_VALUES,), "float32", "parameter")], {}, 1)
RECORD = RunRecord(
    run="demo",
    seed=1,
    sync=NEW,
    past_sync=(OLD,),
    budget=Budget(rounds=10),
    manifest_digest=MANIFEST.digest,
    manifest=MANIFEST.to_text(),
)


@dataclass
class MemoryTape:
    """A tape that anything may be done to."""

    infos: list[VersionInfo] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    on_read: Callable[[], None] = lambda: None

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        return [info for info in self.infos if info.fragment == fragment and info.version >= first][:num_max]

    def read(self, blob: BlobRef, *, bytes_max: int) -> bytes:
        self.on_read()
        payload = self.blobs.get(blob.digest)
        if payload is None:
            raise PayloadError(f"blob {blob.digest[:12]} is not in the store")
        if hashlib.sha256(payload).hexdigest() != blob.digest:
            raise PayloadError(f"blob {blob.digest[:12]} is damaged")
        assert len(payload) <= bytes_max
        return payload

    def put(self, payload: bytes) -> BlobRef:
        digest = hashlib.sha256(payload).hexdigest()
        self.blobs[digest] = payload
        return BlobRef(digest=digest, size_bytes=len(payload))

    def put_state(self, info: VersionInfo, state: FragmentState) -> VersionInfo:
        """Makes a version a checkpoint."""
        parts = {"parameters": state.parameters, "momentum": state.momentum, "remainder": state.remainder}
        blobs = {name: self.put(encode("fp32", part)) for name, part in parts.items() if part is not None}
        return info.model_copy(update=blobs)

    def damage(self, blob: BlobRef | None) -> None:
        assert blob is not None
        payload = bytearray(self.blobs[blob.digest])
        payload[len(payload) // 2] ^= 1
        self.blobs[blob.digest] = bytes(payload)

    def change(self, version: int, **fields: Any) -> None:
        """Other fields in the entry of a version."""
        self.infos[version] = self.infos[version].model_copy(update=fields)

    def change_recipe(self, version: int, **fields: Any) -> None:
        recipe = self.infos[version].recipe
        assert recipe is not None
        self.change(version, recipe=recipe.model_copy(update=fields))

    def change_ingredient(self, version: int, **fields: Any) -> None:
        recipe = self.infos[version].recipe
        assert recipe is not None
        first, *others = recipe.ingredients
        self.change_recipe(version, ingredients=(first.model_copy(update=fields), *others))


def random_vector(rng: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.standard_normal(NUM_VALUES).astype(np.float32)


@pytest.fixture
def tape() -> MemoryTape:
    """Six versions of two contributions each: three under the old settings, three under the new; 4 a checkpoint."""
    rng = np.random.default_rng(7)
    made = MemoryTape()
    state = FragmentState(random_vector(rng))
    digest = parameters_digest(state.parameters)
    made.infos.append(made.put_state(VersionInfo(fragment=0, version=0, parameters_sha256=digest), state))
    for version in range(1, 7):
        sync = OLD if version <= 3 else NEW
        payloads = [encode(sync.codec_up, random_vector(rng)) for _ in range(2)]
        recipe = recipe_of(version, [made.put(payload) for payload in payloads], sync)
        deltas = [decode(payload, num_values=NUM_VALUES) for payload in payloads]
        new = make_version(state, deltas, recipe, sync, MANIFEST.slices(0))
        state = new.state
        info = VersionInfo(
            fragment=0,
            version=version,
            parameters_sha256=new.parameters_sha256,
            optimizer_sha256=optimizer_digest(state),
            tokens_total=30 * version,
            num_participants=2,
            update=made.put(new.update),
            recipe=recipe,
        )
        made.infos.append(made.put_state(info, state) if version == 4 else info)
    return made


def recipe_of(version: int, blobs: Sequence[BlobRef], sync: SyncSettings) -> Recipe:
    ingredients = tuple(
        Ingredient(
            id=ContributionId(f"us-{n}", 0, "ab" * 8, version),
            digest=blob.digest,
            base_version=version - 1,
            tokens=10 + 10 * n,
            steps=1,
            weight=1.0 + n,
            size_bytes=blob.size_bytes,
        )
        for n, blob in enumerate(blobs)
    )
    return Recipe(ingredients=ingredients, fraction=0.5, merge_rule="mean", settings_digest=sync.digest)


def replay(tape: MemoryTape, to_version: int | None = None) -> Replayed:
    return Replay(tape, RECORD).run(find_stretch(tape, 0, to_version=to_version))


def let_go(tape: MemoryTape, last: int) -> None:
    """What retention does to versions 1..last."""
    for version in range(1, last + 1):
        tape.change(version, update=None, parameters=None, momentum=None, remainder=None)


def test_every_version_comes_out_bit_equal_through_a_change_of_settings(tape: MemoryTape) -> None:
    assert replay(tape) == Replayed(0, checkpoint=0, last=6)


def test_each_version_is_reported_as_it_comes_out(tape: MemoryTape) -> None:
    seen: list[tuple[int, int]] = []
    Replay(tape, RECORD, lambda fragment, version: seen.append((fragment, version))).run(find_stretch(tape, 0))
    assert seen == [(0, version) for version in range(1, 7)]


def test_it_stops_at_the_version_that_was_asked_for(tape: MemoryTape) -> None:
    assert replay(tape, to_version=2) == Replayed(0, checkpoint=0, last=2)


def test_it_begins_with_the_oldest_checkpoint_behind_which_nothing_is_missing(tape: MemoryTape) -> None:
    let_go(tape, 3)
    assert replay(tape) == Replayed(0, checkpoint=4, last=6)


def test_a_version_that_is_older_than_the_tape_is_refused_with_what_there_is(tape: MemoryTape) -> None:
    let_go(tape, 3)
    with pytest.raises(UsageError, match=r"version 2 of fragment 0 is not on tape any more.*4\.\.6"):
        find_stretch(tape, 0, to_version=2)


def test_a_tape_that_moves_meanwhile_does_not_move_the_end_that_was_asked_for(tape: MemoryTape) -> None:
    stretch = find_stretch(tape, 0, to_version=5)
    let_go(tape, 3)
    assert Replay(tape, RECORD).run(stretch) == Replayed(0, checkpoint=4, last=5)


def test_a_tape_that_lets_go_of_the_end_that_was_asked_for_is_named(tape: MemoryTape) -> None:
    stretch = find_stretch(tape, 0, to_version=2)
    let_go(tape, 3)
    found = Replay(tape, RECORD).run(stretch).difference
    assert found is not None
    assert found.kind == "outrun"
    assert "version 2 of fragment 0 is not on tape any more" in found.text


def test_a_tape_that_lets_go_of_every_beginning_is_not_called_different(tape: MemoryTape) -> None:
    """Each checkpoint is there when the tape is looked at, and has gone by the time it is read."""
    for version in range(1, 7):
        tape.change(version, parameters=tape.infos[0].parameters)
    let_go(tape, 1)
    stretch = find_stretch(tape, 0)
    tape.blobs.clear()
    gone = iter(range(2, 7))
    tape.on_read = lambda: let_go(tape, next(gone))
    assert Replay(tape, RECORD).run(stretch).difference == Difference(6, "outrun", FASTER)
    assert next(gone) == 2 + MOVES_MAX


def test_a_fragment_without_any_checkpoint_is_refused(tape: MemoryTape) -> None:
    let_go(tape, 5)
    tape.change(0, parameters=None)
    with pytest.raises(UsageError, match="fragment 0 has nothing on tape"):
        find_stretch(tape, 0)


def difference(tape: MemoryTape, kind: Kind = "differs") -> tuple[int, str]:
    result = replay(tape)
    assert result.difference is not None
    assert result.difference.kind == kind
    assert result.last == max(0, result.difference.version - 1)
    return result.difference.version, result.difference.text


def test_a_damaged_payload_is_named_with_its_learner(tape: MemoryTape) -> None:
    recipe = tape.infos[2].recipe
    assert recipe is not None
    tape.damage(BlobRef(digest=recipe.ingredients[1].digest, size_bytes=recipe.ingredients[1].size_bytes))
    version, text = difference(tape, "unreadable")
    assert version == 2
    assert "the payload of us-1's contribution 2 cannot be read" in text
    assert "damaged" in text


def test_a_missing_payload_is_named(tape: MemoryTape) -> None:
    recipe = tape.infos[5].recipe
    assert recipe is not None
    del tape.blobs[recipe.ingredients[0].digest]
    version, text = difference(tape, "unreadable")
    assert version == 5
    assert "us-0's contribution 5 cannot be read" in text
    assert "not in the store" in text


def test_a_payload_that_the_recipe_names_by_another_digest_is_named(tape: MemoryTape) -> None:
    tape.change_ingredient(5, digest="0" * 64)
    version, text = difference(tape, "unreadable")
    assert version == 5
    assert "us-0's contribution 5 cannot be read" in text


def test_a_damaged_update_is_named(tape: MemoryTape) -> None:
    tape.damage(tape.infos[3].update)
    version, text = difference(tape, "unreadable")
    assert version == 3
    assert "its update cannot be read" in text


@pytest.mark.parametrize("part", ["parameters", "momentum", "remainder"])
def test_a_damaged_checkpoint_on_the_way_is_named(part: str, tape: MemoryTape) -> None:
    tape.damage(getattr(tape.infos[4], part))
    version, text = difference(tape, "unreadable")
    assert version == 4
    assert f"the {part} of its checkpoint cannot be read" in text


def test_a_checkpoint_that_is_another_state_is_named(tape: MemoryTape) -> None:
    tape.change(4, momentum=tape.infos[4].remainder)
    assert difference(tape) == (4, "the momentum or the remainder of its checkpoint is not the one that was committed")


def test_a_beginning_with_other_parameters_is_named(tape: MemoryTape) -> None:
    tape.change(0, parameters_sha256="0" * 64)
    assert difference(tape) == (0, "the parameters of its checkpoint are not those that were committed")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fraction": 0.25}, "recomputed, its parameters, update, momentum and remainder differ"),
        ({"settings_digest": "0" * 64}, "names settings (digest 000000000000) that this run never had"),
        ({"settings_digest": OLD.digest}, "recomputed, its parameters, update, momentum and remainder differ"),
        ({"merge_rule": "rda"}, "the recipe was merged by 'rda'"),
        ({"learning_rate": 0.1}, "recomputed, its parameters, update, momentum and remainder differ"),
    ],
)
def test_a_changed_recipe_is_found(change: dict[str, Any], text: str, tape: MemoryTape) -> None:
    tape.change_recipe(5, **change)
    version, found = difference(tape)
    assert version == 5
    assert text in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": 1.5}, "recomputed, its parameters, update, momentum and remainder differ"),
        ({"clip": 0.5}, "recomputed, its parameters, update, momentum and remainder differ"),
        ({"tokens": 11}, "its recipe adds 31 tokens, its total grows by 30"),
        ({"base_version": 5}, "contribution of us-0 with the later base version 5"),
        ({"id": ContributionId("us-0", 3, "ab" * 8, 5)}, "contribution of us-0 to fragment 3"),
        ({"id": ContributionId("zz", 0, "ab" * 8, 5)}, "not in strictly rising id order"),
    ],
)
def test_a_changed_ingredient_is_found(change: dict[str, Any], text: str, tape: MemoryTape) -> None:
    tape.change_ingredient(5, **change)
    version, found = difference(tape)
    assert version == 5
    assert text in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parameters_sha256": "0" * 64}, "recomputed, its parameters differ"),
        ({"optimizer_sha256": "0" * 64}, "recomputed, its momentum and remainder differ"),
        ({"num_participants": 3}, "it counts 3 participants, its recipe has 2"),
    ],
)
def test_a_changed_entry_is_found(change: dict[str, Any], text: str, tape: MemoryTape) -> None:
    tape.change(5, **change)
    version, found = difference(tape)
    assert version == 5
    assert text in found


def test_an_entry_without_its_recipe_is_named(tape: MemoryTape) -> None:
    tape.change(5, recipe=None)
    assert difference(tape, "unreadable") == (5, "it has no recipe or no update on tape")


@pytest.mark.parametrize(
    "change", [{"waited_seconds": 1.5}, {"grace_seconds": 0.5}, {"averages": Averages(step_seconds=1.0)}]
)
def test_a_changed_figure_that_enters_no_sum_is_found_by_the_recipes_digest(
    change: dict[str, Any], tape: MemoryTape
) -> None:
    recipe = tape.infos[5].recipe
    assert recipe is not None
    tape.change(5, recipe_sha256=recipe.digest())
    assert replay(tape).difference is None
    tape.change_recipe(5, **change)
    assert difference(tape) == (5, "its recipe is not the one that was committed: its entry was changed or damaged")


def test_an_update_that_is_another_one_is_found(tape: MemoryTape) -> None:
    tape.change(5, update=tape.infos[6].update)
    assert "recomputed, its update differ" in difference(tape)[1]


def test_a_missing_entry_is_found(tape: MemoryTape) -> None:
    stretch = find_stretch(tape, 0)
    del tape.infos[3]
    result = Replay(tape, RECORD).run(stretch)
    assert result.difference is not None
    assert (result.difference.version, result.difference.kind, result.last) == (3, "unreadable", 2)
    assert "version 4 of fragment 0 where version 3 of fragment 0 belongs" in result.difference.text


def test_a_tape_that_lacks_a_version_is_damaged(tape: MemoryTape) -> None:
    del tape.infos[3]
    with pytest.raises(RemoteDataError, match="version 4 of fragment 0 where version 3 of fragment 0 belongs"):
        find_stretch(tape, 0)


def test_a_run_that_lets_go_meanwhile_is_followed_from_its_newer_checkpoint(tape: MemoryTape) -> None:
    stretch = find_stretch(tape, 0)

    def forget() -> None:
        let_go(tape, 3)
        for digest in list(tape.blobs):
            kept = {blob.digest for info in tape.infos for blob in blobs_of(info)}
            if digest not in kept:
                del tape.blobs[digest]

    reads = iter(range(100))
    tape.on_read = lambda: forget() if next(reads) == 3 else None
    assert Replay(tape, RECORD).run(stretch) == Replayed(0, checkpoint=4, last=6)


def blobs_of(info: VersionInfo) -> list[BlobRef]:
    """Blobs that retention keeps for a version."""
    own = [blob for blob in (info.update, info.parameters, info.momentum, info.remainder) if blob is not None]
    recipe = info.recipe if info.update is not None else None
    merged = [] if recipe is None else recipe.ingredients
    return own + [BlobRef(digest=one.digest, size_bytes=one.size_bytes) for one in merged]
