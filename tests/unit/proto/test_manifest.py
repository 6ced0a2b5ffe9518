"""How a model is split, what a manifest refuses, and what it says about another one."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.proto.agreement import SyncSettings
from isles.proto.errors import ManifestError, MessageError
from isles.proto.manifest import (
    DIMENSIONS_MAX,
    NAME_CHARACTERS_MAX,
    TENSORS_MAX,
    VALUES_MAX,
    Fragment,
    Manifest,
    Role,
    TensorSlice,
    TensorSpec,
    codecs_of,
)


def parameter(name: str, *shape: int, dtype: str = "float32", role: Role = "parameter") -> TensorSpec:
    return TensorSpec(name, shape, dtype, role)


SPECS = (
    parameter("embedding.weight", 256, 64, role="embedding"),
    parameter("block.0.weight", 64, 64),
    parameter("block.0.bias", 64),
    parameter("block.1.weight", 64, 64, dtype="bfloat16"),
    parameter("block.1.scale"),
    parameter("block.1.nothing", 0, 4),
    TensorSpec("norm.frozen", (64,), "float32", "frozen", "0123456789abcdef"),
    parameter("norm.mean", 64, role="buffer_average"),
    parameter("norm.count", dtype="int64", role="buffer_maximum"),
    parameter("mask", 8, 8, dtype="bool", role="buffer_skip"),
)
ALIASES = {"head.weight": "embedding.weight"}


@pytest.fixture
def manifest() -> Manifest:
    return Manifest.build(SPECS, ALIASES, 3)


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.text("abc.0123", min_size=1, max_size=8), min_size=1, max_size=20, unique=True))
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    roles: st.SearchStrategy[Role] = st.sampled_from(
        ["parameter", "parameter", "embedding", "frozen", "buffer_skip", "buffer_average", "buffer_maximum"]
    )
    kinds = [(draw(shapes), draw(roles)) for _ in names]
    types = {"buffer_maximum": "int64"}
    specs = [
        TensorSpec(name, shape, types.get(role, "float32"), role)
        for name, (shape, role) in zip(names, kinds, strict=True)
    ]
    return [*specs, parameter("always", 3)]


@given(specs=models(), data=st.data())
def test_every_value_of_every_parameter_and_merged_buffer_is_in_exactly_one_fragment(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    trainable = {spec.name: spec for spec in specs if spec.is_synchronised}
    buffers = {spec.name: spec for spec in specs if spec.is_merged_buffer}
    count = data.draw(st.integers(1, len(trainable)))
    built = Manifest.build(specs, {}, count)
    covered = []
    for fragment in built.fragments:
        position = 0
        source = buffers if fragment.is_buffers else trainable
        for piece in built.slices(fragment.fragment_id):
            assert piece.start == position
            assert piece.stop - piece.start == source[piece.name].num_values
            assert (piece.shape, piece.role) == (source[piece.name].shape, source[piece.name].role)
            position = piece.stop
            covered.append(piece.name)
        assert position == fragment.num_values > 0
    assert sorted(covered) == sorted(trainable | buffers)
    assert built.num_values == sum(spec.num_values for spec in trainable.values())
    assert built.num_parameter_fragments == count
    assert [one.is_buffers for one in built.fragments] == [False] * count + [True] * bool(buffers)


@given(specs=models(), data=st.data())
def test_equal_models_give_equal_texts_whatever_the_order_of_their_tensors(
    specs: list[TensorSpec], data: st.DataObject
) -> None:
    turned = data.draw(st.permutations(specs))
    one, other = (Manifest.build(some, {}, 1) for some in (specs, turned))
    assert one.to_text() == other.to_text()
    assert one.difference(other) is None
    copied = Manifest.from_text(one.to_text())
    assert (copied, copied.digest) == (one, one.digest)


@given(specs=models(), others=models())
def test_two_manifests_differ_in_their_texts_exactly_if_a_difference_can_be_named(
    specs: list[TensorSpec], others: list[TensorSpec]
) -> None:
    one, other = Manifest.build(specs, {}, 1), Manifest.build(others, {}, 1)
    assert (one.difference(other) is None) == (one.digest == other.digest)


def test_buffers_travel_exactly_and_parameters_in_the_codecs_of_the_run(manifest: Manifest) -> None:
    sync = SyncSettings(codec_up="int4", codec_down="int8")
    assert [codecs_of(fragment, sync) for fragment in manifest.fragments] == 3 * [("int4", "int8")] + [("fp32", "fp32")]
    for fragment in manifest.fragments:
        assert {codecs_of(one, sync) for one in manifest.slices(fragment.fragment_id)} == {codecs_of(fragment, sync)}


def test_slices_know_the_role_of_their_tensor(manifest: Manifest) -> None:
    assert manifest.slices(0) == (TensorSlice("embedding.weight", 0, 16384, (256, 64), "embedding"),)
    assert manifest.slices(3) == (
        TensorSlice("norm.count", 0, 1, (), "buffer_maximum"),
        TensorSlice("norm.mean", 1, 65, (64,), "buffer_average"),
    )


def test_a_model_without_buffers_to_merge_has_no_fragment_for_them() -> None:
    specs = [spec for spec in SPECS if not spec.is_merged_buffer]
    assert len(Manifest.build(specs, {}, 3).fragments) == 3


def test_a_large_embedding_is_by_itself_and_the_rest_is_balanced(manifest: Manifest) -> None:
    assert manifest.fragments == (
        Fragment(0, ("embedding.weight",), 16384),
        Fragment(1, ("block.0.bias", "block.0.weight"), 4096 + 64),
        Fragment(2, ("block.1.scale", "block.1.weight"), 4096 + 1),
        Fragment(3, ("norm.count", "norm.mean"), 65, is_buffers=True),
    )
    assert manifest.num_values == 16384 + 2 * 4096 + 64 + 1


def test_frozen_tensors_skipped_buffers_and_empty_parameters_are_recorded_but_not_sent(manifest: Manifest) -> None:
    sent = {name for fragment in manifest.fragments for name in fragment.tensor_names}
    trained = {"embedding.weight", "block.0.weight", "block.0.bias", "block.1.weight", "block.1.scale"}
    assert sent == trained | {"norm.mean", "norm.count"}
    assert {spec.name for spec in manifest.tensors} == {spec.name for spec in SPECS}
    assert [spec.name for spec in manifest.tensors] == sorted(spec.name for spec in SPECS)


def test_slices_of_an_unknown_fragment_are_refused(manifest: Manifest) -> None:
    for fragment_id in (-1, 4):
        with pytest.raises(ManifestError, match=r"0\.\.3"):
            manifest.slices(fragment_id)


@pytest.mark.parametrize("num_fragments", [0, -1, 6, 10**9])
def test_more_fragments_than_tensors_are_refused_with_the_possible_numbers(num_fragments: int) -> None:
    with pytest.raises(ManifestError, match=r"set the number of fragments to 1\.\.5"):
        Manifest.build(SPECS, ALIASES, num_fragments)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ManifestError, match="unfreeze"):
        Manifest.build([parameter("a", 3, role="frozen"), parameter("b", 0)], {}, 1)


@pytest.mark.parametrize(
    ("aliases", "match"),
    [
        ({"head.weight": "nowhere"}, "no tensor of the model"),
        ({"mask": "embedding.weight"}, "one owner"),
        ({"a": "b", "b": "embedding.weight"}, "no tensor of the model"),
        ({"": "embedding.weight"}, "printable"),
    ],
)
def test_a_tie_needs_one_owner_that_is_a_tensor(aliases: dict[str, str], match: str) -> None:
    with pytest.raises(ManifestError, match=match):
        Manifest.build(SPECS, aliases, 3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("", (1,), "float32", "parameter"), "printable"),
        (("a\nb", (1,), "float32", "parameter"), "printable"),
        (("a" * (NAME_CHARACTERS_MAX + 1), (1,), "float32", "parameter"), "printable"),
        ((7, (1,), "float32", "parameter"), "printable"),
        (("a", [1], "float32", "parameter"), "tuple of sizes"),
        (("a", (True,), "float32", "parameter"), "tuple of sizes"),
        (("a", (1.0,), "float32", "parameter"), "tuple of sizes"),
        (("a", (-1,), "float32", "parameter"), "tuple of sizes"),
        (("a", (0, VALUES_MAX + 1), "float32", "parameter"), "tuple of sizes"),
        (("a", (VALUES_MAX, 2), "float32", "parameter"), "is the limit"),
        (("a", (1,) * (DIMENSIONS_MAX + 1), "float32", "parameter"), "dimensions"),
        (("a", (1,), "float31", "parameter"), "type 'float31'"),
        (("a", (1,), "float32", "hyperparameter"), "role"),
        (("a", (1,), "int64", "parameter"), "freeze it"),
        (("a", (1,), "complex64", "parameter"), "freeze it"),
        (("a", (1,), "int64", "buffer_average"), "skipped"),
        (("a", (1,), "float32", "buffer_maximum"), "skipped"),
        (("a", (1,), "bool", "buffer_maximum"), "skipped"),
        (("a", (1,), "int8", "embedding"), "freeze it"),
        (("a", (1,), "int8", "frozen", "0123"), "16 lower-case"),
        (("a", (1,), "int8", "frozen", None), "16 lower-case"),
        (("a", (1,), "float32", "parameter", "0123456789abcdef"), "any other tensor none"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(arguments: Any, match: str) -> None:
    with pytest.raises(ManifestError, match=match):
        TensorSpec(*arguments)


def test_the_constructor_refuses_fragments_that_do_not_cover_the_model_once(manifest: Manifest) -> None:
    first, second, third, buffers = manifest.fragments
    cases: list[tuple[tuple[Fragment, ...], str]] = [
        ((), "0 fragments"),
        ((first, second, buffers), "in no fragment"),
        ((first, second, third), "in no fragment"),
        ((first, second, third, buffers, replace(third, fragment_id=4)), "twice"),
        ((first, second, third, buffers, Fragment(4, (), 0)), "empty"),
        ((first, second, replace(third, tensor_names=(*third.tensor_names, "mask")), buffers), "no parameter"),
        ((first, second, replace(third, tensor_names=(*third.tensor_names, "nowhere")), buffers), "no parameter"),
        ((first, second, replace(third, num_values=third.num_values + 1), buffers), "number of values"),
        ((first, second, third, replace(buffers, is_buffers=False)), "number of values"),
        ((second, first, third, buffers), "numbered"),
        ((first, second, replace(third, fragment_id=10**12), buffers), "numbered"),
        ((first, second, buffers, third), "for themselves"),
        ((first, second, replace(third, tensor_names=(*third.tensor_names, *buffers.tensor_names))), "for themselves"),
    ]
    longest = max(manifest.fragments, key=lambda fragment: len(fragment.tensor_names))
    turned = replace(longest, tensor_names=longest.tensor_names[::-1])
    cases.append((tuple(turned if part is longest else part for part in manifest.fragments), "order"))
    for fragments, match in cases:
        with pytest.raises(ManifestError, match=match):
            Manifest(manifest.tensors, fragments, manifest.aliases)


def test_tensors_listed_twice_or_out_of_order_are_refused(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="twice"):
        Manifest.build([*SPECS, SPECS[0]], {}, 3)
    with pytest.raises(ManifestError, match="sorted"):
        Manifest(manifest.tensors[::-1], manifest.fragments, manifest.aliases)


def test_a_model_beyond_the_limits_is_refused() -> None:
    with pytest.raises(ManifestError, match="values"):
        Manifest.build([parameter("a", VALUES_MAX), parameter("b", 1)], {}, 1)
    with pytest.raises(ManifestError, match="tensors"):
        Manifest.build([parameter(f"p{index}", 1) for index in range(TENSORS_MAX + 1)], {}, 1)


def test_a_manifest_survives_msgpack_and_its_text(manifest: Manifest) -> None:
    unpacked = msgpack.unpackb(msgpack.packb(manifest.to_dict()))
    for copied in (Manifest.from_dict(unpacked), Manifest.from_text(manifest.to_text())):
        assert copied == manifest
        assert hash(copied) == hash(manifest)
        assert copied.digest == manifest.digest
        assert copied.difference(manifest) is None


def test_the_digest_is_that_of_the_canonical_text_and_never_changes_by_accident(manifest: Manifest) -> None:
    assert manifest.digest == hashlib.sha256(manifest.to_text().encode()).hexdigest()
    frozen = TensorSpec("f", (), "bool", "frozen", "0123456789abcdef")
    small = Manifest.build([parameter("w", 2, 3), parameter("b", 4, role="buffer_average"), frozen], {"v": "w"}, 1)
    assert small.to_text() == (
        '{"aliases":{"v":"w"},"format":2,"num_fragments":1,"tensors":['
        '["b",[4],"float32","buffer_average",1,""],'
        '["f",[],"bool","frozen",null,"0123456789abcdef"],'
        '["w",[2,3],"float32","parameter",0,""]]}'
    )


def test_aliases_cannot_be_changed_under_a_digest(manifest: Manifest) -> None:
    with pytest.raises(TypeError):
        manifest.aliases["x"] = "mask"  # type: ignore[index]


def changed(data: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return copy.deepcopy(data) | fields


def test_anything_but_a_manifest_is_refused_when_read(manifest: Manifest) -> None:
    data = manifest.to_dict()
    rows = data["tensors"]
    odd_rows: list[object] = [
        [],
        None,
        rows[0][:5],
        [7, [1], "float32", "parameter", 0, ""],
        [["a"], [1], "float32", "parameter", 0, ""],
        ["a", 1, "float32", "parameter", 0, ""],
        ["a", [1], [], "parameter", 0, ""],
        ["a", [1], "float32", {}, 0, ""],
        ["a", [1], "float32", "parameter", 0, 7],
        ["a", [1], "float32", "frozen", None, "no digest"],
        ["a", [1], "float32", "buffer_average", 0, ""],
        ["a", [1], "float32", "parameter", True, ""],
        ["a", [1], "float32", "parameter", -1, ""],
        ["a", [1], "float32", "parameter", 10**30, ""],
    ]
    odd_tables: list[object] = [None, {}, rows * 2, rows[::-1]]
    odd_aliases: list[object] = [None, [], {"a": 1}, {1: "mask"}, {"a": "nowhere"}]
    odd_counts: list[object] = [2, 4, True, None, "3", 3.0]
    bad: list[object] = [
        None,
        [],
        "text",
        {},
        changed(data, more=1),
        changed(data, format=1),
        changed(data, format=True),
    ]
    bad += [changed(data, tensors=[row, *rows[1:]]) for row in odd_rows]
    bad += [changed(data, tensors=table) for table in odd_tables]
    bad += [changed(data, aliases=aliases) for aliases in odd_aliases]
    bad += [changed(data, num_fragments=count) for count in odd_counts]
    for value in bad:
        with pytest.raises(MessageError, match="a peer's manifest"):
            Manifest.from_dict(value)


def test_a_text_that_is_not_canonical_is_refused(manifest: Manifest) -> None:
    text = manifest.to_text()
    for bad in (
        "",
        "nonsense",
        "[" * 100_000,
        "1" * 5000,
        " " + text,
        json.dumps(manifest.to_dict()),
        text[:-1],
        "NaN",
    ):
        with pytest.raises(MessageError, match="a peer's manifest"):
            Manifest.from_text(bad)
    with pytest.raises(MessageError, match="characters"):
        Manifest.from_text(" " * (7 << 20))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(field=st.sampled_from(["format", "num_fragments", "tensors", "aliases"]), value=json_values)
def test_random_data_in_any_field_is_refused_or_harmless(field: str, value: object) -> None:
    data = Manifest.build(SPECS, ALIASES, 3).to_dict() | {field: value}
    with contextlib.suppress(MessageError):
        assert Manifest.from_dict(data).slices(0)


@given(row=st.integers(0, len(SPECS) - 1), column=st.integers(0, 5), value=json_values)
def test_random_data_in_any_cell_is_refused_or_harmless(row: int, column: int, value: object) -> None:
    data = Manifest.build(SPECS, ALIASES, 3).to_dict()
    data["tensors"][row][column] = value
    with contextlib.suppress(MessageError):
        assert Manifest.from_dict(data).slices(0)


@pytest.mark.parametrize(
    ("specs", "aliases", "num_fragments", "sentence"),
    [
        (SPECS[1:], {}, 3, "tensor 'embedding.weight' (embedding) is only in the own model"),
        ((*SPECS, parameter("zzz", 1, role="frozen")), ALIASES, 3, "tensor 'zzz' (frozen) is only in the other model"),
        (
            (parameter("embedding.weight", 257, 64, role="embedding"), *SPECS[1:]),
            ALIASES,
            3,
            "tensor 'embedding.weight' has shape (256, 64) in the own model and (257, 64) in the other",
        ),
        (
            (parameter("embedding.weight", 256, 64, dtype="float16", role="embedding"), *SPECS[1:]),
            ALIASES,
            3,
            "tensor 'embedding.weight' has dtype float32 in the own model and float16 in the other",
        ),
        (
            (parameter("embedding.weight", 256, 64, role="frozen"), *SPECS[1:]),
            ALIASES,
            3,
            "tensor 'embedding.weight' has role embedding in the own model and frozen in the other",
        ),
        (
            tuple(replace(spec, role="buffer_skip") if spec.name == "norm.mean" else spec for spec in SPECS),
            ALIASES,
            3,
            "tensor 'norm.mean' has role buffer_average in the own model and buffer_skip in the other",
        ),
        (
            tuple(replace(spec, values_digest="f" * 16) if spec.name == "norm.frozen" else spec for spec in SPECS),
            ALIASES,
            3,
            (
                "the frozen tensor 'norm.frozen' has other values in the own model than in the other: they are never "
                "sent, so every learner must load the same ones; a table that is computed can be a buffer"
            ),
        ),
        (SPECS, {}, 3, "tensor 'head.weight' is tied to 'embedding.weight' in the own model and to None in the other"),
        (SPECS, ALIASES, 2, "the own model has 3 fragments, the other 2"),
    ],
)
def test_a_difference_names_the_first_tensor_that_differs(
    manifest: Manifest, specs: tuple[TensorSpec, ...], aliases: dict[str, str], num_fragments: int, sentence: str
) -> None:
    other = Manifest.build(specs, aliases, num_fragments)
    assert manifest.difference(other) == sentence
    assert other.difference(manifest) is not None
    assert other.digest != manifest.digest


def test_another_split_of_the_same_model_is_a_difference() -> None:
    specs = [parameter("a", 2), parameter("b", 2)]
    one = Manifest.build(specs, {}, 2)
    other = Manifest(one.tensors, (Fragment(0, ("b",), 2), Fragment(1, ("a",), 2)), {})
    assert one.difference(other) == "tensor 'a' is in fragment 0 here and 1 in the other"


def test_the_manifest_is_plain_python() -> None:
    check = "import sys, isles.proto.manifest; sys.exit(bool({'torch', 'numpy', 'zmq'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
