"""One table of models, of every kind that people have: each goes through a whole round of two learners.

Both learners take a few steps on data of their own and hand everything in, in one round or in two. What comes of it is
compared with the same mathematics in double precision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest, Role
from isles.proto.messages import AskHistory, History, Recipe
from isles.workers.parameters import GlobalParameters

NUM_STEPS = 3
MOMENTUM, RATE = 0.5, 0.7


class Table(nn.Module):
    """The base of the models below: one that sees numbers [rows, 4], and answers with [rows, anything]."""


class Mlp(Table):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.to(self.layers[0].weight.dtype))
        return out


class TiedGpt(Table):
    """An embedding that is the output map as well, under a name that comes first in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 4).long().clamp(0, 7)
        out: Tensor = self.head(self.block(self.wte(ids)))
        return out


class BatchNorm(Table):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


class FrozenBackbone(BatchNorm):
    """The last map learns; the norm's statistics move with the data although its gain is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.first, self.norm):
            part.requires_grad_(False)


class Lora(Table):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x.bfloat16()).float()
        out: Tensor = base + self.up(self.down(x))
        return out


class Mixed(Table):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6).to(torch.float64)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 4).to(torch.bfloat16)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.narrow(self.norm(self.wide(x.double()).float()).bfloat16()).float())
        return out


class Odd(Table):
    """A scalar, an empty and a transposed parameter; one of these that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.unused = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.turned) + self.empty.sum()


class Shared(Table):
    """One module at two places, buffers included."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


class Buffers(Table):
    """Buffers of every kind, which each step changes as if nobody else had them."""

    moved: Tensor
    steps: Tensor
    pointer: Tensor
    phase: Tensor
    seen: Tensor
    mask: Tensor
    cache: Tensor
    wide: Tensor
    narrow: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 2)
        self.register_buffer("moved", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(5, dtype=torch.int16))
        self.register_buffer("pointer", torch.tensor([0]))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("wide", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("narrow", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        mean = float(x.detach().mean())
        self.moved = 0.9 * self.moved + 0.1 * x.detach().mean(0)
        self.steps += 1 + int(mean > 0)
        self.pointer += 1
        self.phase += mean * 1j
        self.seen.fill_(True)
        self.cache += 1
        self.wide += mean
        self.narrow += mean
        out: Tensor = self.map(x)
        return out


class Bag(Table):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bag((x * 4).long().clamp(0, 7))
        return out


@dataclass(frozen=True)
class Kind:
    """A row of the table: a model, and what is done with its tensors; those not named are plain parameters."""

    name: str
    build: Callable[[], nn.Module]
    roles: Mapping[Role, str] = field(default_factory=dict)
    """Role -> the names of its tensors, separated by spaces."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    num_fragments: int = 2
    adds: Any = torch.optim.SGD


NORM: Mapping[Role, str] = {
    "buffer_average": "norm.running_mean norm.running_var",
    "buffer_maximum": "norm.num_batches_tracked",
}
PAIRS = ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")

KINDS = [
    Kind("a plain model", Mlp),
    Kind("a plain model with Adam", Mlp, adds=torch.optim.AdamW),
    Kind("a bfloat16 model", lambda: Mlp().to(torch.bfloat16)),
    Kind("a float16 model", lambda: Mlp().to(torch.float16)),
    Kind("a float64 model", lambda: Mlp().to(torch.float64)),
    Kind("mixed types", Mixed, NORM, num_fragments=3),
    Kind("a tied embedding", TiedGpt, {"embedding": "head.weight"}, {"wte.weight": "head.weight"}, num_fragments=3),
    Kind("an embedding bag", Bag, {"embedding": "bag.weight"}, num_fragments=1),
    Kind("batch norm", BatchNorm, NORM),
    Kind(
        "a frozen backbone",
        FrozenBackbone,
        {**NORM, "frozen": "first.weight first.bias norm.weight norm.bias"},
    ),
    Kind("low-rank adapters", Lora, {"frozen": "base.weight base.bias"}),
    Kind("scalar, empty and transposed parameters", Odd),
    Kind(
        "a module used twice",
        Shared,
        {"buffer_average": "a.1.running_mean a.1.running_var", "buffer_maximum": "a.1.num_batches_tracked"},
        {f"b.{name}": f"a.{name}" for name in PAIRS},
    ),
    Kind(
        "buffers of all kinds",
        Buffers,
        {"buffer_average": "moved wide narrow", "buffer_maximum": "steps", "buffer_skip": "pointer phase seen mask"},
    ),
]
by_name = pytest.mark.parametrize("kind", KINDS, ids=[kind.name.replace(" ", "-") for kind in KINDS])


class Pair:
    """Two learners of one model, after some steps and before their work is merged."""

    def __init__(self, world: Any, kind: Kind) -> None:
        self.logs = [ListLogger(), ListLogger()]
        self.toys = [
            world.make(f"us-{index}", model=self._model(kind, index), optimizer=kind.adds, log=self.logs[index])
            for index in range(2)
        ]
        for toy in self.toys:
            toy.learner.start()
        self.first = [exact(toy.model) for toy in self.toys]
        generator = torch.Generator().manual_seed(7)
        for toy in self.toys:
            for _ in range(NUM_STEPS):
                step(toy, torch.randn(16, 4, generator=generator))
        self.last = [exact(toy.model) for toy in self.toys]

    @staticmethod
    def _model(kind: Kind, index: int) -> nn.Module:
        """Frozen values are equal; all others of the second learner must give way to those of the first."""
        torch.manual_seed(11)
        model = kind.build()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(index)
        return model

    def merge(self) -> None:
        """Hands in everything, at the same time."""
        threads = [threading.Thread(target=toy.learner.drain) for toy in self.toys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def step(toy: Any, inputs: Tensor) -> None:
    outputs = toy.model(inputs).float()
    loss = functional.mse_loss(outputs, torch.ones_like(outputs))
    loss.backward()
    toy.optimizer.step()
    toy.optimizer.zero_grad()
    toy.learner.step(tokens=16)


def exact(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model's state, in double precision."""
    return {name: one.detach().to(torch.complex128 if one.is_complex() else torch.float64, copy=True)
            for name, one in model.state_dict().items()}  # fmt: skip


def assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    """To five digits, or to the precision of the found tensor's own type."""
    relative = 1e-5
    if found.is_floating_point():
        relative = max(relative, torch.finfo(found.dtype).eps)
    else:
        expected = expected.round()
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=1e-6, msg=lambda text: f"{name}: {text}")


def recipes(world: Any, fragment: int) -> list[Recipe]:
    """Of version 1 and up."""
    reply = world.ask(AskHistory(fragment=fragment, first=1, num_max=9))
    assert isinstance(reply, History)
    return [info.recipe for info in reply.versions if info.recipe is not None]


def reference(role: Role, first: Tensor, work: Mapping[str, Tensor], made_by: list[Recipe]) -> list[Tensor]:
    """Versions 0 and up in double precision, from what the learners had before and after their steps.

    `work` is learner -> what it had before minus what it had after, all of which is in its one contribution.
    """
    values, buffer = [first], torch.zeros_like(first)
    for recipe in made_by:
        part, ingredients = recipe.fraction, recipe.ingredients
        deltas = [work[ingredient.id.learner] for ingredient in ingredients]
        total = sum(ingredient.weight for ingredient in ingredients)
        mean = torch.zeros_like(first)
        for one, delta in zip(ingredients, deltas, strict=True):
            mean = mean + one.weight / total * delta
        if role == "buffer_maximum":
            step = part * torch.stack(deltas).amin(0)
        elif role == "buffer_average":
            step = part * mean
        else:
            buffer = MOMENTUM**part * buffer + part * mean
            step = RATE * part * (mean + MOMENTUM * buffer)
        values.append(values[-1] - step)
    return values


@pytest.fixture
def make_pair(make_world: Callable[..., Any]) -> Callable[[Kind], tuple[Any, Pair]]:
    """A world whose only rounds are those of the drain, and the two learners in it."""

    def make(kind: Kind) -> tuple[Any, Pair]:
        world = make_world(
            num_fragments=kind.num_fragments,
            interval_steps=1000,
            codec_up="fp32",
            codec_down="fp32",
            quorum=2,
            outer_learning_rate=RATE,
            outer_momentum=MOMENTUM,
        )
        return world, Pair(world, kind)

    return make


def check_versions(world: Any, pair: Pair, manifest: Manifest, merged: GlobalParameters) -> dict[str, list[Tensor]]:
    """Compares the global values with the reference; returns tensor -> its version 0 and up, in double precision."""
    values: dict[str, list[Tensor]] = {}
    for fragment in manifest.fragments:
        made_by = recipes(world, fragment.fragment_id)
        assert sum(len(recipe.ingredients) for recipe in made_by) == 2
        for place in manifest.slices(fragment.fragment_id):
            first, name = pair.first[0][place.name], place.name
            work = {toy.name: first - last[name] for toy, last in zip(pair.toys, pair.last, strict=True)}
            values[name] = reference(place.role, first, work, made_by)
            found = merged.fragments[fragment.fragment_id].values[place.start : place.stop].view(place.shape)
            assert_close(found, values[name][-1], name)
        assert any(bool((values[name][-1] != pair.first[0][name]).any()) for name in fragment.tensor_names)
    return values


@by_name
def test_a_round_of_two_learners_is_what_double_precision_says(
    make_pair: Callable[[Kind], tuple[Any, Pair]], kind: Kind
) -> None:
    world, pair = make_pair(kind)
    manifest = Manifest.from_text(pair.toys[0].learner.record.manifest)
    roles = {spec.name: spec.role for spec in manifest.tensors}
    special = {name: role for role, names in kind.roles.items() for name in names.split()}
    assert roles == {name: special.get(name, "parameter") for name in roles}
    assert manifest.aliases == kind.aliases
    fragment_of = {name: one.fragment_id for one in manifest.fragments for name in one.tensor_names}
    assert all(torch.equal(pair.first[0][name], pair.first[1][name]) for name in fragment_of), "all begin alike"

    pair.merge()
    merged = world.parameters(pair.toys[0].learner.record)
    values = check_versions(world, pair, manifest, merged)
    exported = merged.tensors()
    assert exported.keys() == values.keys() | {alias for alias, owner in kind.aliases.items() if owner in values}
    for toy, log, last in zip(pair.toys, pair.logs, pair.last, strict=True):
        state = toy.model.state_dict()
        for name, versions in values.items():
            assert_close(state[name], versions[toy.learner.versions[fragment_of[name]]], name)
        for name in state.keys() - exported.keys():
            assert torch.equal(exact(toy.model)[name], last[name]), f"{name} is the learner's own"
        (policy,) = [fields for _, event, fields in log.records if event == "model.described"]
        assert policy["num_averaged"] == len(kind.roles.get("buffer_average", "").split())
        assert "learner.reset" not in log.events()

    model = kind.build()
    merged.load_into(model)
    for name, tensor in exported.items():
        loaded = model.state_dict()[name]
        assert torch.equal(loaded, tensor), name
        assert loaded.dtype == tensor.dtype
