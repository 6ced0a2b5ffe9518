"""What is done with each kind of tensor, and what is refused, in which words."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from isles.proto.errors import ManifestError
from isles.workers.description import BufferSlot, check_optimizer, describe


def roles(model: nn.Module) -> dict[str, str]:
    return {spec.name: spec.role for spec in describe(model).specs}


class With(nn.Module):
    """A module with one trainable weight and whatever else it is given."""

    def __init__(self, **members: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)


@pytest.mark.parametrize(
    ("buffer", "role"),
    [
        (torch.zeros(3), "buffer_average"),
        (torch.zeros(3, dtype=torch.bfloat16), "buffer_average"),
        (torch.zeros(3, dtype=torch.float64), "buffer_average"),
        (torch.zeros(0), "buffer_average"),
        (torch.full((2, 2), float("-inf")).triu(1), "buffer_skip"),
        (torch.tensor(float("nan")), "buffer_skip"),
        (torch.zeros(1).expand(4), "buffer_skip"),
        (torch.tensor(0), "buffer_maximum"),
        (torch.tensor(0, dtype=torch.uint8), "buffer_maximum"),
        (torch.arange(4), "buffer_skip"),
        (torch.tensor([0]), "buffer_skip"),
        (torch.tensor(True), "buffer_skip"),
        (torch.ones(2, 2, dtype=torch.bool), "buffer_skip"),
        (torch.ones(2, dtype=torch.complex64), "buffer_skip"),
        (torch.ones(2, 2).to_sparse(), "buffer_skip"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.dtype}-{tuple(value.shape)}",
)
def test_a_buffer_is_merged_by_what_it_is(buffer: torch.Tensor, role: str) -> None:
    assert roles(With(buffer=buffer))["buffer"] == role


def test_a_buffer_that_is_not_persistent_is_no_part_of_the_model() -> None:
    model = With()
    model.register_buffer("table", torch.ones(3), persistent=False)
    tensors = describe(model)
    assert [spec.name for spec in tensors.specs] == ["weight"]
    assert tensors.buffers == {}


def test_buffers_that_share_their_values_have_one_owner() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": norm, "b": norm})
    tensors = describe(model)
    assert tensors.aliases["b.running_mean"] == "a.running_mean"
    assert sorted(tensors.buffers) == ["a.num_batches_tracked", "a.running_mean", "a.running_var"]


def test_a_buffer_that_shows_a_parameter_belongs_to_it() -> None:
    model = With()
    model.register_buffer("shown", model.weight.data)
    tensors = describe(model)
    assert tensors.aliases == {"shown": "weight"}
    assert tensors.buffers == {}


def test_the_weights_of_embeddings_are_marked_even_when_a_head_is_tied_to_them() -> None:
    model = nn.ModuleDict({"body": nn.Embedding(5, 3), "bag": nn.EmbeddingBag(5, 3), "head": nn.Linear(3, 5)})
    model["head"].weight = model["body"].weight
    assert roles(model) == {"bag.weight": "embedding", "body.weight": "embedding", "head.bias": "parameter"}
    model = nn.ModuleDict({"a_head": nn.Linear(3, 5, bias=False), "body": nn.Embedding(5, 3)})
    model["a_head"].weight = model["body"].weight
    assert roles(model) == {"a_head.weight": "embedding"}


def test_a_parametrised_weight_is_synchronised_as_what_is_really_trained() -> None:
    model = nn.Linear(3, 3)
    parametrizations.weight_norm(model)
    assert set(roles(model)) == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}


def test_frozen_values_are_told_apart_whatever_their_type_and_layout() -> None:
    def digest(values: torch.Tensor) -> str:
        model = With(frozen=nn.Parameter(values, requires_grad=False))
        return {spec.name: spec.values_digest for spec in describe(model).specs}["frozen"]

    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    for dtype in kinds:
        values = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
        assert digest(values) == digest(values.clone()) == digest(values.t().contiguous().t())
        assert digest(values) != digest(torch.ones(3, 2).to(dtype))
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(-1.0))
    assert len(digest(torch.empty(0))) == 16


def test_only_frozen_tensors_are_hashed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    hashed = {spec.name for spec in describe(model).specs if spec.values_digest}
    assert hashed == {"2.weight", "2.bias"}


def overlapping() -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 2, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data[1:])
    return model


def overlapping_frozen() -> nn.Module:
    model = overlapping()
    model["b"].weight.requires_grad_(False)
    return model


def half_tied() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    model["a"].weight.requires_grad_(False)
    return model


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that such tensors will go
        codes = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    return With(q=nn.Parameter(codes, requires_grad=False))


def unmaterialised_buffer() -> nn.Module:
    return With(norm=nn.LazyBatchNorm1d())


REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("no values", lambda: nn.Linear(2, 2, device="meta"), "parameter 'bias' has no values yet: materialise"),
    ("frozen without values", lambda: With(m=nn.Linear(2, 2, device="meta").requires_grad_(False)), "'m.bias' has no"),
    ("lazy", lambda: nn.LazyLinear(2), "'bias' has no values yet"),
    ("buffer without values", lambda: With(mean=torch.empty(2, device="meta")), "buffer 'mean' has no values yet"),
    ("lazy buffer", unmaterialised_buffer, "has no values yet"),
    ("complex", lambda: With(c=nn.Parameter(torch.ones(2, dtype=torch.complex64))), "'c' is complex64, .*view_as_real"),
    (
        "float8",
        lambda: With(c=nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))),
        "'c' is float8_e4m3fn, only .*: freeze it",
    ),
    ("sparse", lambda: With(s=nn.Parameter(torch.ones(2, 2).to_sparse())), "'s' is sparse .*: keep it dense"),
    ("quantised", quantised, "'q' is a quantised tensor: dequantise it"),
    ("expanded", lambda: With(e=nn.Parameter(torch.ones(1).expand(3))), "'e' shows the same memory .*: make it a"),
    ("overlapping", overlapping, r"'a\.weight' and 'b\.weight' overlap in memory .*; give each its own storage"),
    ("overlapping frozen", overlapping_frozen, r"'a\.weight' and 'b\.weight' overlap"),
    ("half tied", half_tied, r"'b\.weight' and 'a\.weight' share .* only one .*: freeze both"),
]


@pytest.mark.parametrize(("build", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_synchronised_is_refused_by_name_with_what_to_do(
    build: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(ManifestError, match=sentence):
        describe(build())


def test_frozen_parameters_may_lie_on_top_of_each_other() -> None:
    model = overlapping()
    model.requires_grad_(False)
    model["c"] = nn.Linear(2, 2)
    assert roles(model)["a.weight"] == roles(model)["b.weight"] == "frozen"


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = nn.Linear(3, 3)
    check_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    check_optimizer(model, torch.optim.SGD([*model.parameters(), frozen], lr=0.1))
    with pytest.raises(ManifestError, match=r"a parameter of shape \(3, 3\) that is not in the model"):
        check_optimizer(nn.Linear(3, 3), torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_made_before_a_parametrisation_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parametrizations.weight_norm(model)
    assert parametrize.is_parametrized(model)
    with pytest.raises(ManifestError, match="after the last change of the model"):
        check_optimizer(model, optimizer)


def test_saved_buffers_come_back_whatever_their_type_or_shape() -> None:
    model = With(phase=torch.tensor([1 + 2j, 3j]), mask=torch.tensor([True]), cache=torch.ones(2))
    slots = {key: BufferSlot(model, key) for key in ("phase", "mask", "cache")}
    model.cache = torch.ones(3)
    saved = {key: slot.saved() for key, slot in slots.items()}
    other = With(phase=torch.tensor([0j, 0j]), mask=torch.tensor([False]), cache=torch.zeros(2))
    for key, values in saved.items():
        assert values is not None
        assert not values.is_complex()
        BufferSlot(other, key).put(values)
    assert all(torch.equal(getattr(model, key), getattr(other, key)) for key in slots)
    assert BufferSlot(With(odd=torch.ones(2, 2).to_sparse()), "odd").saved() is None


def test_a_buffer_that_is_gone_is_named() -> None:
    model = With(mean=torch.ones(1))
    slot = BufferSlot(model, "mean")
    model.register_buffer("mean", None)
    with pytest.raises(ManifestError, match="buffer 'mean' of a With is gone"):
        slot.saved()
