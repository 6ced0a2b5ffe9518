"""What is prepared beside the training thread is what the account would have added, or it is not used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.agreement import ApplyRule
from isles.proto.clock import ManualClock
from isles.proto.ids import ContributionId
from isles.proto.logs import SilentLogger
from isles.proto.manifest import Manifest
from isles.workers.account import Account, Add
from isles.workers.description import describe
from isles.workers.flat import FlatModel
from isles.workers.increment import Increment, increment_in, prepare
from isles.workers.mailbox import Arrival, Mailbox
from isles.workers.orders import ApplyVersion, VersionArrived
from isles.workers.performer import Performer

RULES: tuple[ApplyRule, ...] = ("rebase", "overwrite", "blend", "hybrid")
OWN = ContributionId("us-0", 0, "aaaaaaaa", 1)


class OnePayload:
    """A courier that decodes one open contribution, and counts how often it has to."""

    def __init__(self, decoded: torch.Tensor) -> None:
        self.mailbox = Mailbox()
        self._decoded = decoded
        self.num_decoded = 0

    def decode_own(self, named: ContributionId) -> torch.Tensor:
        assert named == OWN
        self.num_decoded += 1
        return self._decoded.clone()


class World:
    """A learner's fragment, a twin of it that applies versions at once, and a version that is about to arrive."""

    def __init__(
        self, rule: ApplyRule = "rebase", dtype: torch.dtype = torch.float32, *, has_residual: bool = False
    ) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)).to(dtype)
        model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=dtype)))
        self.flat, self.twin = make_flat(model), make_flat(copy.deepcopy(model))
        count = self.flat.num_values[0]
        start = self.flat.gather(0)
        self.values = start + 0.1 * torch.randn(count)
        self.decoded = 0.01 * torch.randn(count)
        residual = 0.01 * torch.randn(count) if has_residual else None
        self.account = Account(start + 0.01 * torch.randn(count), residual, rule=rule)
        self.twin_account = copy.deepcopy(self.account)
        self.courier = OnePayload(self.decoded)
        nothing: Any = None
        self.performer = Performer(
            nothing,
            self.flat,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {},
            should_stop=lambda: False,
            clock=ManualClock(),
            log=SilentLogger(),
        )
        courier: Any = self.courier
        self.performer.courier = courier
        self.performer.accounts[0] = self.account

    def arrive(self, *, is_own: bool) -> Increment | None:
        """The version with these values is prepared and comes, with or without the own contribution."""
        decode = self.decoded.clone if is_own else None
        prepared = prepare(self.flat, 0, self.account, self.values, decode)
        self.performer._arrivals[0] = Arrival(VersionArrived(0, 1, None), self.values, *prepared)
        return prepared[1]

    def apply(self, *, is_own: bool) -> None:
        """The session orders what arrived to be applied; the twin does it without any preparation."""
        self.performer._apply(ApplyVersion(0, 1, OWN if is_own else None))
        theta = self.twin.gather(0)
        change = self.twin_account.apply(self.values, self.decoded if is_own else None, lambda: theta)
        if isinstance(change, Add):
            self.twin.add(0, change.increment)
        else:
            self.twin.scatter(0, change.values)

    def check(self) -> None:
        """Both hold the same bits."""
        assert torch.equal(self.flat.gather(0), self.twin.gather(0))
        assert self.account.anchor is self.values
        for one, other in (
            (self.account.anchor, self.twin_account.anchor),
            (self.account.residual, self.twin_account.residual),
        ):
            assert (one is None) is (other is None)
            assert one is None or other is None or torch.equal(one, other)


def make_flat(model: nn.Module) -> FlatModel:
    tensors = describe(model)
    return FlatModel(tensors, Manifest.build(tensors.specs, tensors.aliases, 1))


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_an_increment_in_chunks_has_the_bits_of_the_accounts(
    is_in_place: bool, is_own: bool, has_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isles.workers.increment.CHUNK_VALUES", 8)
    generator = torch.Generator().manual_seed(4)
    anchor, theta_w, own, residual = torch.randn(4, 37, generator=generator)
    decoded = own if is_own else None
    account = Account(anchor, residual if has_residual else None)
    expected = account.increment(theta_w, decoded).clone()
    out = own if is_in_place else torch.empty(37)
    assert increment_in(out, account, theta_w, decoded) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_prepared_version_leaves_the_bits_of_one_that_is_applied_without(
    rule: ApplyRule, has_residual: bool, is_own: bool, dtype: torch.dtype
) -> None:
    world = World(rule, dtype, has_residual=has_residual)
    increment = world.arrive(is_own=is_own)
    assert (increment is not None) is (rule == "rebase" or (rule == "hybrid" and not is_own))
    world.apply(is_own=is_own)
    world.check()
    assert world.courier.num_decoded == 0


def move_on(world: World) -> None:
    """An older version was applied while this one was being prepared."""
    older = world.account.anchor + 1
    for account in (world.account, world.twin_account):
        account.apply_prepared(older, older)


def reset(world: World) -> None:
    for account in (world.account, world.twin_account):
        account.reset()
        account.anchor = account.anchor.clone()


def take_residual(world: World) -> None:
    for account in (world.account, world.twin_account):
        account.residual = torch.ones_like(account.anchor)


@pytest.mark.parametrize("change", [move_on, reset, take_residual])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("was_own", [False, True])
def test_what_was_prepared_for_another_state_of_the_account_is_not_used(
    was_own: bool, is_own: bool, change: Callable[[World], None]
) -> None:
    world = World()
    assert world.arrive(is_own=was_own) is not None
    change(world)
    world.apply(is_own=is_own)
    world.check()
    assert world.courier.num_decoded == is_own


@pytest.mark.parametrize("is_own", [False, True])
def test_what_was_prepared_for_another_verdict_is_not_used(is_own: bool) -> None:
    world = World()
    world.arrive(is_own=not is_own)
    world.apply(is_own=is_own)
    world.check()


def test_nothing_is_prepared_or_decoded_of_a_version_that_the_account_holds() -> None:
    world = World()

    def refuse() -> torch.Tensor:
        raise AssertionError("a payload was decoded for nothing")

    assert prepare(world.flat, 0, world.account, world.account.anchor, refuse) == (None, None)


def test_without_an_account_a_version_comes_as_it_is() -> None:
    world = World()
    decoded, increment = prepare(world.flat, 0, None, world.values, lambda: world.decoded)
    assert decoded is world.decoded
    assert increment is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_of_a_vector_are_gathered_and_added_as_the_whole_of_it(dtype: torch.dtype) -> None:
    world = World(dtype=dtype)
    memory = torch.full((world.flat.num_values[0] + 9,), 7.0)
    parted = world.flat.parted(0, memory)
    world.flat.gather_parted(0, parted)
    assert torch.equal(parted.values, world.twin.gather(0))
    assert torch.equal(memory[-9:], torch.full((9,), 7.0))
    world.flat.add_parted(0, world.flat.parted(0, world.decoded))
    world.twin.add(0, world.decoded)
    assert torch.equal(world.flat.gather(0), world.twin.gather(0))


@pytest.mark.parametrize("rule", RULES)
def test_what_was_prepared_of_a_version_that_is_held_by_now_is_not_kept(rule: ApplyRule) -> None:
    world = World(rule)
    world.arrive(is_own=True)
    world.courier.mailbox.arrive(world.performer._arrivals.pop(0))
    world.account.apply_prepared(world.values, world.values)
    world.performer.tell = lambda event: None  # type: ignore[method-assign]
    world.performer.take_mail()
    kept = world.performer._arrivals[0]
    assert kept.values is world.values
    assert kept.increment is None
    assert kept.decoded is None


def test_adding_a_prepared_increment_takes_no_memory() -> None:
    world = World()
    increment = world.arrive(is_own=True)
    assert increment is not None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        world.flat.add_parted(0, increment.added)
    assert sum(max(0, event.self_cpu_memory_usage) for event in seen.key_averages()) == 0
