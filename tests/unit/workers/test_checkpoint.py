"""A checkpoint comes back as it was, or is reported and treated as absent."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.proto.clock import ManualClock
from isles.proto.errors import ConfigError
from isles.proto.ids import ContributionId
from isles.proto.logs import ListLogger
from isles.workers.books import FragmentBooks, OpenContribution
from isles.workers.checkpoint import Checkpoint, CheckpointWriter, read_checkpoint, write_checkpoint

OPEN = ContributionId("us-0", 0, "aaaaaaaa", 3)
LAST = ContributionId("us-0", 1, "bbbbbbbb", 9)


def make_checkpoint(**changes: Any) -> Checkpoint:
    fields: dict[str, Any] = {
        "learner": "us-0",
        "run": "toy",
        "manifest_digest": "d" * 64,
        "incarnation": "aaaaaaaa",
        "num_steps": 12,
        "tokens": 480,
        "cursor": {3: 17, 900: 2},
        "books": (
            FragmentBooks(0, base=4, tokens_total=99, open=OpenContribution(OPEN, 20, 2, 1.5), tokens=30, seconds=2.5),
            FragmentBooks(1, base=5, last=LAST, hold=6, clock=3),
        ),
        "thetas": {0: torch.tensor([1.0, float("nan")]), 1: torch.arange(3.0)},
        "anchors": {0: torch.tensor([2.0, 3.0]), 1: torch.zeros(3)},
        "residuals": {1: torch.tensor([0.5, -0.5, 0.0])},
        "payloads": {OPEN: b"\x00payload\xff"},
        "lives": {"scale": torch.tensor(1.5, dtype=torch.bfloat16)},
        "lags": {"scale": torch.tensor(-1e-3)},
        "buffers": {"norm.running_mean": torch.ones(2), "norm.num_batches_tracked": torch.tensor(7)},
        "optimizer_name": "AdamW",
        "optimizer_state": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}, 1: {"count": 5}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "foreach": None, "amsgrad": False, "params": [0, 1]}],
        },
    }
    return Checkpoint(**{**fields, **changes})


def read(folder: Path, log: ListLogger | None = None, **changes: str) -> Checkpoint | None:
    owner = {"learner": "us-0", "run": "toy", "manifest_digest": "d" * 64, **changes}
    return read_checkpoint(folder, log=log or ListLogger(), **owner)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left.nan_to_num(9e9), right.nan_to_num(9e9)) and left.dtype == right.dtype
    if isinstance(left, dict):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    written = make_checkpoint()
    write_checkpoint(tmp_path / "new" / "folder", written)
    found = read(tmp_path / "new" / "folder")
    assert found is not None
    for name, value in vars(written).items():
        assert same(value, getattr(found, name)), name
    assert found.books[0].open is not None
    assert isinstance(found.books[0].open.id, ContributionId)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_state_of_an_optimizer_survives(tmp_path: Path, kind: Any) -> None:
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(2))]
    optimizer = kind(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    write_checkpoint(tmp_path, make_checkpoint(optimizer_state=optimizer.state_dict()))
    found = read(tmp_path)
    assert found is not None
    other = kind(parameters, lr=0.5)
    other.load_state_dict(found.optimizer_state)
    assert same(dict(optimizer.state_dict()), dict(other.state_dict()))


def test_a_newer_checkpoint_replaces_the_older_and_nothing_is_left_over(tmp_path: Path) -> None:
    for num_steps in (1, 2, 2, 3):
        write_checkpoint(tmp_path, make_checkpoint(num_steps=num_steps))
    found = read(tmp_path)
    assert found is not None
    assert found.num_steps == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_has_no_checkpoint_and_that_is_no_fault(tmp_path: Path) -> None:
    log = ListLogger()
    assert read(tmp_path / "nothing here", log) is None
    assert log.records == []


def test_a_crash_before_the_index_was_replaced_leaves_the_older_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_checkpoint(num_steps=1))
    (tmp_path / "checkpoint-2-00000000.safetensors").write_bytes(b"whole, but named by no index")
    (tmp_path / "checkpoint-3-00000000.tmp").write_bytes(b"half")
    (tmp_path / "checkpoint.tmp").write_bytes(b"half")
    (tmp_path / ".tmpAbC").write_bytes(b"half")
    found = read(tmp_path)
    assert found is not None
    assert found.num_steps == 1
    write_checkpoint(tmp_path, make_checkpoint(num_steps=4))
    assert len(list(tmp_path.iterdir())) == 2


@settings(max_examples=25)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, make_checkpoint())
    path = data.draw(st.sampled_from(sorted(folder.iterdir(), key=lambda one: one.suffix)))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    log = ListLogger()
    assert read(folder, log) is None
    assert log.events() == ["checkpoint.damaged"]


@pytest.mark.parametrize("keep", [0, 1, 64, 65, 200])
def test_a_file_that_was_cut_off_is_noticed(tmp_path: Path, keep: int) -> None:
    for pattern in ("checkpoint.json", "*.safetensors"):
        write_checkpoint(tmp_path, make_checkpoint())
        (path,) = tmp_path.glob(pattern)
        os.truncate(path, keep)
        assert read(tmp_path) is None


def test_a_missing_tensors_file_is_noticed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_checkpoint())
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    log = ListLogger()
    assert read(tmp_path, log) is None
    assert "cannot be read" in log.records[0][2]["text"]


def rewrite(folder: Path, **changes: Any) -> None:
    """Changes the index and gives it the right digest: what a newer or hostile program might leave."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_bytes().split(b"\n")[1])
    text = json.dumps({**content, **changes}).encode()
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n")


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"cursor": {"x": 1}},
        {"books": [{"fragment": "zero"}]},
        {"optimizer_state": {"tensor": "no such tensor"}},
        {"tensors_file": "../../etc/passwd"},
        {"extra": 1},
    ],
)
def test_an_index_of_another_form_is_noticed(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, make_checkpoint())
    rewrite(tmp_path, **changes)
    log = ListLogger()
    assert read(tmp_path, log) is None
    assert log.events() == ["checkpoint.damaged"]


@pytest.mark.parametrize(
    "changes", [{"learner": "us-1"}, {"run": "other"}, {"manifest_digest": "e" * 64}], ids=["learner", "run", "model"]
)
def test_a_whole_checkpoint_of_somebody_else_is_refused_and_kept(tmp_path: Path, changes: dict[str, str]) -> None:
    write_checkpoint(tmp_path, make_checkpoint())
    with pytest.raises(ConfigError, match="another checkpoint folder"):
        read(tmp_path, **changes)
    assert read(tmp_path) is not None


@pytest.mark.parametrize("state", [{"a": {1, 2}}, {"a": object()}, {(1, 2): 3}])
def test_an_optimizer_whose_state_is_no_plain_data_is_refused_with_what_to_do(tmp_path: Path, state: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be checkpointed"):
        write_checkpoint(tmp_path, make_checkpoint(optimizer_state=OrderedDict(state)))


def test_a_disk_that_takes_nothing_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("in the way")
    log = ListLogger()
    writer = CheckpointWriter(occupied, learner="us-0", clock=ManualClock(), log=log)
    writer.start(make_checkpoint())
    writer.wait()
    assert not writer.is_busy
    assert log.events() == ["checkpoint.failed"]


def test_a_write_in_the_background_says_where_and_how_long(tmp_path: Path) -> None:
    log = ListLogger()
    writer = CheckpointWriter(tmp_path, learner="us-0", clock=ManualClock(), log=log)
    writer.start(make_checkpoint())
    writer.wait()
    (record,) = log.records
    assert record[1] == "checkpoint.written"
    assert read(tmp_path) is not None


@pytest.mark.parametrize("changes", [{"learner": "us-1"}, {"run": "other"}, {"manifest_digest": "e" * 64}])
def test_two_checkpoints_of_one_step_share_no_file_and_none_of_somebody_else_is_replaced(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    write_checkpoint(tmp_path, make_checkpoint())
    (first,) = tmp_path.glob("*.safetensors")
    write_checkpoint(tmp_path, make_checkpoint(incarnation="cccccccc"))
    (second,) = tmp_path.glob("*.safetensors")
    assert first != second, "a crash between two writes must leave one of them whole"
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="give it another checkpoint folder"):
        write_checkpoint(tmp_path, make_checkpoint(**changes))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_damaged_checkpoint_of_somebody_else_may_be_replaced_since_nobody_can_use_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, make_checkpoint(learner="us-1"))
    path.write_bytes(path.read_bytes()[:-9])
    write_checkpoint(tmp_path, make_checkpoint())
    assert read(tmp_path) is not None
