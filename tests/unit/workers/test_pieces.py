"""A version that is applied piece by piece leaves the same bits as one that is applied at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.agreement import ApplyRule, Books
from isles.proto.clock import ManualClock
from isles.proto.logs import SilentLogger
from isles.proto.manifest import Manifest
from isles.workers.account import Account
from isles.workers.description import describe
from isles.workers.flat import FlatModel
from isles.workers.performer import Performer

RULES: tuple[ApplyRule, ...] = ("rebase", "overwrite", "blend", "hybrid")


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)
    model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=dtype)))
    return model


def make_flat(model: nn.Module) -> FlatModel:
    tensors = describe(model)
    return FlatModel(tensors, Manifest.build(tensors.specs, tensors.aliases, 1))


def make_performer(flat: FlatModel, model: nn.Module) -> Performer:
    session: Any = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Performer(session, flat, optimizer, {}, should_stop=lambda: False, clock=ManualClock(), log=SilentLogger())


@pytest.mark.parametrize("piece_values", [1, 8, 30])
def test_pieces_are_whole_tensors_and_cover_a_fragment_once(piece_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isles.workers.flat.PIECE_VALUES", piece_values)
    flat = make_flat(make_model(torch.float32))
    for fragment, count in enumerate(flat.num_values):
        pieces = flat.pieces(fragment)
        ends = [0, *(piece.values.stop for piece in pieces)]
        assert [piece.values.start for piece in pieces] == ends[:-1]
        assert ends[-1] == count
        assert set(ends[1:]) <= {stop for _, stop in flat.bounds(fragment)}
        assert all(piece.values.stop - piece.values.start >= piece_values for piece in pieces[:-1])
        found = torch.cat([flat.gather_piece(piece) for piece in pieces])
        assert torch.equal(found, flat.gather(fragment))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("books", ["exact", "published"])
@pytest.mark.parametrize("rule", RULES)
def test_pieces_leave_no_trace_in_what_is_applied(
    rule: ApplyRule, books: Books, is_own: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(dtype)
    flat, other = make_flat(model), make_flat(twin := copy.deepcopy(model))
    first, count = flat.gather(0), flat.num_values[0]
    versions = [first + 0.1 * torch.randn(count) for _ in range(3)]
    decoded = 0.01 * torch.randn(count)
    account: Account[torch.Tensor] = Account(first + 0.01 * torch.randn(count), rule=rule, alpha=0.5, books=books)
    whole = copy.deepcopy(account)
    performer = make_performer(flat, model)
    performer.accounts[0] = account
    monkeypatch.setattr("isles.workers.flat.PIECE_VALUES", 1)
    for number, values in enumerate(versions):
        own = decoded if is_own and number == 1 else None
        performer._apply_in_pieces(0, values, None if own is None else own.clone())
        theta = other.gather(0)
        change = whole.apply(values, own, lambda: theta)  # noqa: B023
        if hasattr(change, "increment"):
            other.add(0, change.increment)
        else:
            other.scatter(0, change.values)
        assert torch.equal(flat.gather(0), other.gather(0))
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert account.anchor is values
        assert (account.residual is None) is (whole.residual is None)
        if account.residual is not None and whole.residual is not None:
            assert torch.equal(account.residual, whole.residual)
