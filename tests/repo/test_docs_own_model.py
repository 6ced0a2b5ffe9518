"""The guide's tables of tensors say what the code does: each row is tried with a tensor of its kind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from isles.proto.errors import ManifestError
from isles.workers.description import describe

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/own-model.md"


class Holder(nn.Module):
    """A module with one more tensor, named `one`."""

    def __init__(self, one: torch.Tensor, *, is_persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if isinstance(one, nn.Parameter):
            self.one = one
        else:
            self.register_buffer("one", one, persistent=is_persistent)


def parameter(values: torch.Tensor, *, is_frozen: bool = False) -> Holder:
    return Holder(nn.Parameter(values, requires_grad=not is_frozen))


def shared(start: int, *, is_frozen: bool = False) -> nn.Module:
    model = parameter(torch.ones(2))
    model.weight = nn.Parameter(model.one.data[start:], requires_grad=not is_frozen)
    return model


def embedding(kind: type[nn.Embedding | nn.EmbeddingBag]) -> nn.Module:
    return nn.ModuleDict({"one": kind(3, 2)})


KINDS: dict[str, list[nn.Module]] = {
    "trainable parameter": [parameter(torch.ones(2)), parameter(torch.tensor(1.0)), parameter(torch.ones(2, 3).t())],
    "trainable parameter of an `nn.Embedding` or `nn.EmbeddingBag`": [
        embedding(nn.Embedding),
        embedding(nn.EmbeddingBag),
    ],
    "trainable parameter without values": [parameter(torch.ones(0, 3))],
    "frozen parameter": [parameter(torch.ones(2), is_frozen=True), parameter(torch.tensor([1, 2]), is_frozen=True)],
    "persistent buffer, floating": [Holder(torch.ones(2)), Holder(torch.ones(2).bfloat16())],
    "persistent buffer, one integer without dimensions": [
        Holder(torch.tensor(1)),
        Holder(torch.tensor(1).to(torch.uint8)),
    ],
    "persistent buffer, floating, with NaN or infinity when the learner starts": [
        Holder(torch.tensor([1.0, torch.inf]))
    ],
    "persistent buffer, any other integer, boolean or complex": [
        Holder(torch.arange(3)),
        Holder(torch.tensor(True)),
        Holder(torch.ones(2, dtype=torch.complex64)),
    ],
    "buffer that is not persistent": [Holder(torch.ones(2), is_persistent=False)],
}

REFUSED: dict[str, list[Callable[[], nn.Module]]] = {
    "a parameter or buffer on the `meta` device, or of a lazy module": [
        lambda: nn.Linear(2, 2, device="meta"),
        lambda: Holder(torch.ones(2, device="meta")),
        lambda: nn.LazyLinear(2),
    ],
    "a trainable parameter of complex numbers": [lambda: parameter(torch.ones(2, dtype=torch.complex64))],
    "a trainable parameter of 8 bits": [lambda: parameter(torch.ones(2).to(torch.float8_e5m2))],
    "a sparse parameter": [lambda: parameter(torch.ones(2, 2).to_sparse())],
    "a quantised parameter": [],
    "an expanded trainable parameter": [lambda: parameter(torch.ones(1).expand(2))],
    "parameters that overlap without being the same": [lambda: shared(1)],
    "a frozen and a trainable parameter that are the same": [lambda: shared(0, is_frozen=True)],
}
"""Making a quantised tensor warns that there will be none soon; the unit tests of `describe` have one."""


def rows(heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, as stripped cells."""
    text = GUIDE.read_text(encoding="utf-8")
    table = re.search(rf"^\| {heading} \|.*?\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()[1:]]


def test_each_kind_of_tensor_has_the_role_that_the_guide_says() -> None:
    table = rows("tensor")
    assert [kind for kind, *_ in table] == list(KINDS)
    for kind, role, _ in table:
        for model in KINDS[kind]:
            roles = {spec.name.removesuffix(".weight"): spec.role for spec in describe(model).specs}
            assert roles.get("one", "") == role.strip("`"), kind


def test_what_the_guide_says_is_refused_is_refused_in_these_words() -> None:
    table = rows("refused")
    assert [kind for kind, *_ in table] == list(REFUSED)
    for kind, because, _ in table:
        for build in REFUSED[kind]:
            with pytest.raises(ManifestError, match=re.escape(because.strip("`"))):
                describe(build())
