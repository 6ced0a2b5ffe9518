"""Which files of parameters a model takes, and which it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from isles.ops.sample import load_parameters
from isles.proto.errors import UsageError

FILE = Path("model.safetensors")


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    return model


def exported(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `isles export` would write of it: what is synchronised and merged."""
    return {name: torch.ones_like(one) for name, one in model.state_dict().items() if name[0] in "12"}


def test_frozen_and_empty_parameters_need_not_be_in_the_file() -> None:
    model = make_model()
    frozen = model.state_dict()["0.weight"].clone()
    load_parameters(model, exported(model), FILE)
    assert torch.equal(model.state_dict()["2.weight"], torch.ones(1, 3))
    assert torch.equal(model.state_dict()["1.running_mean"], torch.ones(3))
    assert torch.equal(model.state_dict()["0.weight"], frozen)


def test_a_file_of_another_model_is_refused_by_name() -> None:
    model = make_model()
    tensors = exported(model)
    with pytest.raises(UsageError, match=r"lacks '2\.weight'"):
        load_parameters(model, {name: one for name, one in tensors.items() if name != "2.weight"}, FILE)
    with pytest.raises(UsageError, match=r"has 'odd' besides"):
        load_parameters(model, {**tensors, "odd": torch.ones(1)}, FILE)
    with pytest.raises(UsageError, match="of another model"):
        load_parameters(model, {**tensors, "2.weight": torch.ones(2)}, FILE)
