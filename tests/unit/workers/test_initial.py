"""Weights come into a model by name, whole and unchanged, or are refused with the tensor that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from isles.proto.errors import ManifestMismatchError, UsageError
from isles.workers.initial import load_weights


class Model(nn.Module):
    """One of everything: tied, frozen, averaged, counted, a half-precision parameter, and a buffer of one's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    """All tensors of such a model, with other values than a new one has."""
    model = Model(seed=2)
    assert model.norm.running_mean is not None
    model.norm.running_mean.add_(1.5)
    return {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}


def load(given: dict[str, torch.Tensor], folder: Path) -> Model:
    path = folder / "weights.safetensors"
    save_file(given, path)
    model = Model(seed=1)
    load_weights(model, path)
    return model


def test_all_values_are_those_of_the_file(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    model = load(given, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, given[name]), name
    assert model.head.weight is model.embedding.weight


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_tensor_may_stand_under_either_name(name: str, given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del given[name]
    assert torch.equal(load(given, tmp_path).embedding.weight, Model(seed=2).embedding.weight)


@pytest.mark.parametrize("name", ["fixed", "mask"])
def test_what_no_learner_sends_may_be_left_out(name: str, given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del given[name]
    load(given, tmp_path)


@pytest.mark.parametrize("name", ["head.bias", "narrow", "norm.running_mean", "norm.num_batches_tracked"])
def test_a_missing_tensor_is_named(name: str, given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    del given[name]
    with pytest.raises(ManifestMismatchError, match=f"tensor '{name}' is missing in the file"):
        load(given, tmp_path)


def test_an_extra_tensor_is_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given["other.bias"] = torch.zeros(1)
    with pytest.raises(ManifestMismatchError, match=r"tensor 'other\.bias' is not in the model"):
        load(given, tmp_path)


def test_another_shape_is_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given["head.bias"] = torch.zeros(8)
    with pytest.raises(ManifestMismatchError, match=r"tensor 'head.bias' has the shape \(8,\), the model has \(7,\)"):
        load(given, tmp_path)


def test_another_type_is_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given["narrow"] = given["narrow"].float()
    with pytest.raises(ManifestMismatchError, match="tensor 'narrow' has the type F32, the model has bfloat16"):
        load(given, tmp_path)


@pytest.mark.parametrize("name", ["head.bias", "norm.running_var"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(
    name: str, value: float, given: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    given[name][-1] = value
    with pytest.raises(UsageError, match=f"tensor '{name}' holds NaN or infinity"):
        load(given, tmp_path)


def test_other_values_of_a_frozen_tensor_are_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given["fixed"] += 1
    with pytest.raises(ManifestMismatchError, match="tensor 'fixed' is frozen in the model and has other values"):
        load(given, tmp_path)


def test_tied_tensors_with_different_values_are_named(given: dict[str, torch.Tensor], tmp_path: Path) -> None:
    given["head.weight"] += 1
    with pytest.raises(ManifestMismatchError, match=r"tensor 'head\.weight' is tied to another tensor"):
        load(given, tmp_path)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        load_weights(Model(seed=1), tmp_path / "none.safetensors")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a pickle of torch.save", b"\xff" * 64])
def test_a_file_of_another_format_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="is no safetensors file"):
        load_weights(Model(seed=1), path)
