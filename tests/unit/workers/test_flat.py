"""From a model to flat vectors and back, for the models that people have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isles.proto.errors import ManifestError
from isles.proto.manifest import Manifest
from isles.workers.flat import FlatModel, describe


class Odd(nn.Module):
    """Tied, frozen, non-contiguous and scalar parameters, an empty one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(3)


def make_flat(model: nn.Module, num_fragments: int = 2) -> tuple[FlatModel, Manifest]:
    tensors = describe(model)
    manifest = Manifest.build(tensors.specs, tensors.aliases, num_fragments)
    return FlatModel(tensors, manifest), manifest


def test_every_trainable_value_is_in_exactly_one_fragment_once() -> None:
    model = Odd()
    flat, manifest = make_flat(model)
    trainable = {id(one): one for one in model.parameters() if one.requires_grad}
    assert sum(flat.num_values) == sum(one.numel() for one in trainable.values())
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    roles = {spec.name: spec.role for spec in manifest.tensors}
    assert roles["frozen"] == "frozen"
    assert roles["norm.running_mean"] == roles["norm.num_batches_tracked"] == "buffer_skip"


def test_gathered_values_are_the_flattened_tensors_in_manifest_order() -> None:
    model = Odd()
    flat, manifest = make_flat(model)
    named = dict(model.named_parameters())
    for fragment in manifest.fragments:
        expected = torch.cat([named[name].detach().reshape(-1) for name in fragment.tensor_names])
        assert torch.equal(flat.gather(fragment.fragment_id), expected)


def test_scattered_values_are_gathered_again_and_the_layout_stays() -> None:
    model = Odd()
    flat, _ = make_flat(model)
    for fragment, count in enumerate(flat.num_values):
        values = torch.arange(count, dtype=torch.float32) + 100 * fragment
        flat.scatter(fragment, values)
        assert torch.equal(flat.gather(fragment), values)
        flat.add(fragment, values)
        assert torch.equal(flat.gather(fragment), 2 * values)
    assert model.turned.stride() == (1, 3)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.frozen, torch.ones(2))


def test_values_are_gathered_into_a_buffer_that_was_given() -> None:
    flat, _ = make_flat(Odd())
    buffer = torch.empty(flat.num_values[0])
    assert flat.gather(0, buffer) is buffer


def test_tensors_are_bounded_in_the_vector_as_the_manifest_says() -> None:
    flat, manifest = make_flat(Odd())
    assert flat.bounds(1) == [(one.start, one.stop) for one in manifest.slices(1)]


def test_two_parameters_of_one_storage_have_one_owner() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    tensors = describe(model)
    assert tensors.aliases == {"b.weight": "a.weight"}
    assert list(tensors.parameters) == ["a.weight"]


def test_a_tie_of_a_frozen_and_a_trainable_parameter_is_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    model["a"].weight.requires_grad_(False)
    with pytest.raises(ManifestError, match=r"'b\.weight' and 'a\.weight' share .* only one"):
        describe(model)


def test_parameters_that_overlap_are_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 2, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data[1:])
    with pytest.raises(ManifestError, match=r"'a\.weight' and 'b\.weight' overlap"):
        describe(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_in_another_type_is_refused_with_what_to_do(dtype: torch.dtype) -> None:
    with pytest.raises(ManifestError, match=r"only float32 .*\.autocast, or freeze"):
        describe(nn.Linear(2, 2).to(dtype))


def test_a_frozen_parameter_may_have_any_type() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16).requires_grad_(False))
    assert {spec.dtype for spec in describe(model).specs} == {"float32", "bfloat16"}


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ManifestError, match="no values yet"):
        describe(nn.Linear(2, 2, device="meta"))


def test_a_fragment_with_nan_or_infinity_is_found() -> None:
    model = nn.Linear(2, 2)
    flat, _ = make_flat(model)
    assert flat.is_finite(0)
    assert flat.is_finite(1)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
        model.bias[0] = float("inf")
    assert not flat.is_finite(0)
    assert not flat.is_finite(1)


def test_gradients_are_not_recorded_and_not_lost() -> None:
    model = nn.Linear(2, 2)
    flat, _ = make_flat(model)
    model(torch.ones(1, 2)).sum().backward()
    flat.add(0, torch.ones(flat.num_values[0]))
    assert model.weight.grad is not None
    assert model.weight.is_leaf
