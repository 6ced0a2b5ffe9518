"""Models with everything in them: many rounds under coarse codecs, restarts, and who is not let in."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.proto.agreement import Budget
from isles.proto.errors import ManifestError, ManifestMismatchError
from isles.proto.logs import ListLogger


class Everything(nn.Module):
    """Narrow and wide types, batch norm, a tie, a frozen table, a counter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6).to(torch.float64)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 4).to(torch.bfloat16)
        self.last = nn.Linear(4, 2)
        self.tied = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        self.tied_again = nn.Linear(4, 4, bias=False)
        self.tied_again.weight = self.tied.weight
        self.table = nn.Parameter(torch.arange(4.0).to(torch.bfloat16), requires_grad=False)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.tied_again(self.tied(x.bfloat16() + self.table))
        normed = self.norm(self.wide(seen.double()).float())
        out: Tensor = self.last(self.narrow(normed.bfloat16()).float())
        return out


def test_a_model_of_everything_trains_for_many_rounds_under_coarse_codecs(make_world: Callable[..., Any]) -> None:
    world = make_world(num_fragments=3, codec_up="int4", codec_down="int4")
    torch.manual_seed(11)
    models = [Everything() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    toys = [world.make(f"us-{index}", model=model) for index, model in enumerate(models)]

    def work(toy: Any) -> None:
        with toy:
            toy.train_to(4)
            toy.train(60)

    threads = [threading.Thread(target=work, args=(toy,)) for toy in toys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = world.status()
    assert status.totals.tokens_merged == status.totals.tokens_produced > 0
    assert (status.totals.rejected, len(status.fragments)) == (0, 4)
    trained = [head for head in status.fragments if head.fragment < 3]
    assert status.totals.rounds_committed == sum(head.version for head in trained), "rounds of buffers are not counted"
    assert status.totals.tokens_merged == sum(head.tokens_total for head in trained) / 3
    merged = world.parameters(toys[0].learner.record).tensors()
    assert all(bool(torch.isfinite(one).all()) for one in merged.values())
    assert bool((merged["norm.running_var"] > 0).all())
    counts = sum(toy.learner.num_steps for toy in toys)
    assert 0 < int(merged["norm.num_batches_tracked"]) <= counts


def test_a_drained_learner_restarts_with_every_bit_of_a_model_of_everything(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    world = make_world(num_fragments=3)
    torch.manual_seed(11)
    model, other = Everything(), Everything()
    other.table.data.copy_(model.table.data)
    with world.make(model=model, checkpoint_dir=tmp_path) as first:
        first.train_to(3)
    log = ListLogger()
    with world.make(model=other, checkpoint_dir=tmp_path, log=log) as second:
        assert not {"learner.reset", "checkpoint.damaged"} & set(log.events())
        assert second.learner.num_steps == first.learner.num_steps
        for name, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name
        flats = [toy.learner._running.performer._flat for toy in (first, second)]
        for fragment in range(4):
            assert torch.equal(*(flat.gather(fragment) for flat in flats)), "exact values, too"
        lags = flats[1].rounded(0)[1] | flats[1].rounded(1)[1] | flats[1].rounded(2)[1]
        assert any(bool(lag.any()) for lag in lags.values())


@pytest.mark.parametrize("has_norm", [True, False], ids=["changing", "still"])
def test_a_deterministic_run_gives_equal_bits_twice_whether_or_not_buffers_change(
    make_world: Callable[..., Any], has_norm: bool
) -> None:
    results = []
    for _ in range(2):
        world = make_world(num_fragments=2, is_deterministic=True, overlap_steps=2.0)
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3) if has_norm else nn.Tanh(), nn.Linear(3, 1))
        model.register_buffer("still", torch.ones(2))
        with world.make(model=model, budget=Budget(tokens=120)) as toy:
            torch.manual_seed(3)
            while not toy.learner.is_finished:
                toy.train()
        results.append([world.digests(fragment) for fragment in range(3)])
    assert results[0] == results[1]
    assert min(map(len, results[0][:2])) > 2
    assert (len(results[0][2]) > 1) == has_norm


def test_frozen_values_that_differ_are_refused_by_name(make_world: Callable[..., Any]) -> None:
    world = make_world()
    model = Everything()
    with world.make(model=model):
        other = copy.deepcopy(model)
        other.table.data[3] = 3.5
        late = world.make("us-1", model=other)
        with pytest.raises(ManifestMismatchError, match=r"the frozen tensor 'table' has other values"):
            late.learner.start()


def test_an_optimizer_of_another_model_is_refused_before_anything_is_said(make_world: Callable[..., Any]) -> None:
    world = make_world()
    other = nn.Linear(4, 6)
    toy = world.make(optimizer=lambda _, lr: torch.optim.SGD(other.parameters(), lr))
    with pytest.raises(ManifestError, match=r"of shape \(6, 4\) that is not in the model"):
        toy.learner.start()
    assert world.status().run == ""
