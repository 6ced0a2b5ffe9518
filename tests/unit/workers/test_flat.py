"""From a model to flat vectors and back, for the models that people have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isles.proto.agreement import ApplyRule
from isles.proto.errors import ManifestError
from isles.proto.manifest import COUNTER_EXACT_MAX, Manifest
from isles.workers.account import Account, Add
from isles.workers.description import describe
from isles.workers.flat import FlatModel


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
    assert sum(flat.num_values[:2]) == sum(one.numel() for one in trainable.values())
    assert flat.num_values[2:] == (3 + 3 + 1,)
    assert manifest.aliases == {"head.weight": "embedding.weight"}
    roles = {spec.name: spec.role for spec in manifest.tensors}
    assert roles["frozen"] == "frozen"
    assert (roles["norm.running_mean"], roles["norm.num_batches_tracked"]) == ("buffer_average", "buffer_maximum")


def test_gathered_values_are_the_flattened_tensors_in_manifest_order() -> None:
    model = Odd()
    flat, manifest = make_flat(model)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
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


NARROW = [torch.bfloat16, torch.float16]
"""Types that hold less than float32."""


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64])
def test_what_is_scattered_and_added_is_gathered_to_the_last_bit(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8, bias=False).to(dtype)
    flat, _ = make_flat(model, 1)
    values, increment = torch.randn(64), 1e-3 * torch.randn(64)
    flat.scatter(0, values)
    assert torch.equal(flat.gather(0), values)
    flat.add(0, increment)
    assert torch.equal(flat.gather(0), values + increment) or dtype == torch.float64
    assert torch.allclose(flat.gather(0), values + increment, rtol=0, atol=1e-7)
    assert torch.equal(model.weight.flatten(), (values + increment).to(dtype)) or dtype == torch.float64


@pytest.mark.parametrize("dtype", NARROW)
def test_many_tiny_updates_of_a_narrow_type_add_up(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False).to(dtype)
    flat, _ = make_flat(model, 1)
    flat.scatter(0, torch.ones(16))
    tiny = torch.full((16,), 2.0**-14)
    assert torch.equal((torch.ones(16, dtype=dtype) + tiny.to(dtype)).float(), torch.ones(16)), "the type loses it"
    for _ in range(2**14):
        flat.add(0, tiny)
    assert torch.equal(flat.gather(0), torch.full((16,), 2.0))
    assert torch.equal(model.weight.detach().float(), torch.full((4, 4), 2.0))


@pytest.mark.parametrize("dtype", NARROW)
def test_steps_of_the_inner_optimizer_and_updates_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False).to(dtype)
    flat, _ = make_flat(model, 1)
    flat.scatter(0, torch.ones(16) + 2.0**-13)
    with torch.no_grad():
        model.weight += 0.5
    assert torch.equal(flat.gather(0), torch.full((16,), 1.5 + 2.0**-13))
    flat.add(0, torch.full((16,), -0.5))
    assert torch.equal(flat.gather(0), torch.ones(16) + 2.0**-13)


def test_a_value_beyond_the_range_of_a_narrow_type_is_kept_although_the_model_computes_with_another() -> None:
    model = nn.Linear(1, 2, bias=False).to(torch.float16)
    flat, _ = make_flat(model, 1)
    flat.scatter(0, torch.tensor([1e6, -1e6]))
    assert model.weight.flatten().tolist() == [65504.0, -65504.0]
    assert flat.gather(0).tolist() == [1e6, -1e6]
    assert flat.is_finite(0)
    flat.scatter(0, torch.tensor([math.nan, 0.0]))
    assert not flat.is_finite(0)


class Counting(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.tensor(0, dtype=dtype))

    count: torch.Tensor


def test_a_counter_is_rounded_and_the_fraction_is_not_lost() -> None:
    model = Counting()
    flat, _ = make_flat(model, 1)
    for _ in range(8):
        flat.add(1, torch.tensor([0.25]))
    assert model.count == torch.tensor(2)
    flat.add(1, torch.tensor([0.25]))
    assert (model.count.item(), flat.gather(1).tolist()) == (2, [2.25])


def test_a_counter_beyond_what_a_single_counts_is_right_to_seven_digits() -> None:
    model = Counting()
    flat, _ = make_flat(model, 1)
    flat.scatter(1, torch.tensor([COUNTER_EXACT_MAX - 1.0]))
    flat.add(1, torch.tensor([1.0]))
    assert model.count.item() == COUNTER_EXACT_MAX
    model.count += 1
    assert flat.gather(1).tolist() == [COUNTER_EXACT_MAX]
    flat.add(1, torch.tensor([6.0]))
    assert model.count.item() == COUNTER_EXACT_MAX + 6
    flat.scatter(1, torch.tensor([1e30]))
    assert model.count.item() == 2**53


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_a_counter_stops_at_the_end_of_its_type(dtype: torch.dtype) -> None:
    model = Counting(dtype)
    flat, _ = make_flat(model, 1)
    flat.scatter(1, torch.tensor([1e12]))
    assert model.count.item() == torch.iinfo(dtype).max or dtype == torch.int32
    assert model.count.item() > 0
    assert flat.gather(1).tolist() == [torch.tensor(1e12).item()]


def test_a_buffer_that_its_module_replaces_is_the_new_one() -> None:
    model = Counting()
    flat, _ = make_flat(model, 1)
    model.count = torch.tensor(7)
    assert flat.gather(1).tolist() == [7.0]
    flat.scatter(1, torch.tensor([9.0]))
    assert model.count.item() == 9
    model.count = torch.tensor([1, 2])
    with pytest.raises(ManifestError, match=r"buffer 'count' was torch.int64 of shape \(\) .* persistent=False"):
        flat.gather(1)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64])
def test_a_fragment_is_restored_to_the_last_bit(dtype: torch.dtype) -> None:
    first, second = (nn.Linear(4, 4, bias=False).to(dtype) for _ in range(2))
    flat, _ = make_flat(first, 1)
    flat.scatter(0, torch.randn(16))
    with torch.no_grad():
        first.weight += torch.randn(4, 4, dtype=torch.float64) / 64
    lives, lags = flat.rounded(0)
    assert bool(lives) == (dtype != torch.float32)
    assert bool(lags) == (dtype in NARROW)
    other, _ = make_flat(second, 1)
    other.scatter(0, torch.randn(16))
    other.restore(0, flat.gather(0), lives, lags)
    assert torch.equal(first.weight, second.weight)
    for one in (flat, other):
        one.add(0, torch.full((16,), 1e-4))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(flat.gather(0), other.gather(0))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float64)])
def test_a_model_on_another_device_is_gathered_there_and_moved_once(dtypes: tuple[torch.dtype, ...]) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False).to(dtype) for dtype in dtypes))
    flat, _ = make_flat(model, 1)
    values = torch.randn(18)
    flat.scatter(0, values)
    buffer = torch.empty(18)
    flat.device = torch.device("cpu", 0)  # equal to no device that is taken for the host
    assert flat.gather(0, buffer) is buffer
    assert torch.equal(buffer, values)


RULES: list[ApplyRule] = ["rebase", "overwrite", "blend", "hybrid"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64])
def test_no_rule_loses_work_of_a_narrow_model_to_rounding(dtype: torch.dtype, rule: ApplyRule) -> None:
    generator = torch.Generator().manual_seed(3)
    model = nn.Linear(16, 16, bias=False).to(dtype)
    flat, _ = make_flat(model, 1)
    account: Account[torch.Tensor] = Account(torch.randn(256, generator=generator), rule=rule)
    flat.scatter(0, account.anchor)
    owed = torch.zeros(256, dtype=torch.float64)
    for turn in range(200):
        before = flat.gather(0).double()
        with torch.no_grad():
            model.weight += (torch.randn(16, 16, generator=generator) / 64).to(dtype)
        owed += before - flat.gather(0).double()  # what the inner step did, its own rounding included
        decoded = account.contribution(flat.gather(0)) * 0.75 if turn % 3 else None
        newer = account.anchor + torch.randn(256, generator=generator) / 4096  # less than a bfloat16 sees
        change = account.apply(newer, decoded, lambda: flat.gather(0))
        if isinstance(change, Add):
            flat.add(0, change.increment)
        else:
            flat.scatter(0, change.values)
        owed -= 0.0 if decoded is None else decoded.double()
        assert torch.allclose(account.contribution(flat.gather(0)).double(), owed, rtol=0, atol=2e-5 * (turn + 1) / 10)


def test_a_float32_model_has_no_lag_and_its_values_are_copied_once() -> None:
    model = nn.Linear(4, 4)
    flat, _ = make_flat(model)
    for fragment in (0, 1):
        flat.scatter(fragment, torch.ones(flat.num_values[fragment]))
        flat.add(fragment, torch.ones(flat.num_values[fragment]))
        assert flat.rounded(fragment) == ({}, {})


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
