"""The benchmark of hostile learners, in small: a stranger with a worker's key joins, lies, and is told apart."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.agreement import SyncSettings
from isles.proto.codec.torch_codec import decode
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest
from isles.workers.account import Account
from isles.workers.description import describe
from isles.workers.encoding import Encode
from isles.workers.flat import FlatModel
from isles.workers.orders import TakeAccount

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "hostile_demo.py"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_learner_that_lies_is_found_out_and_the_run_ends_as_without_it(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(PROGRAM), "--short", "--only", "finite", "--keep", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=870, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    honest, absent, hostile = rows[1:]
    assert honest.startswith("| none |")
    assert absent.startswith("| absent |")
    assert "| 0 | 0 | 0 |" in honest, "nothing rejected, nothing clipped"
    assert hostile.startswith("| not finite |")
    assert "| finite " in hostile
    assert "nothing of the others rejected" in result.stdout


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("hostile_demo", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostile_demo"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_lie_is_about_the_work_that_was_done_and_its_learner_knows_the_truth(program: Any, codec: Any) -> None:
    tensors = describe(nn.Linear(20, 10))
    flat = FlatModel(tensors, Manifest.build(tensors.specs, tensors.aliases, 1))
    [count] = flat.num_values
    anchor, work = torch.full((count,), 3.0), torch.linspace(-1.0, 1.0, count)
    lies = {}
    for attack in ("sign-flipped", "scaled x100", "random"):
        liar = program.Liar(attack, seed=1)
        take = TakeAccount(0, ContributionId("eu-3", 0, "ab" * 8, 1), 3, 30, 3, 1.5, {})
        sent = liar.encode_account(Encode(take, Account(anchor), anchor - work), flat, SyncSettings(codec_up=codec))
        lies[attack] = decode(sent.payload, num_values=count)
        assert torch.allclose(liar.decode(sent.payload, num_values=count), work, atol=0.1)
    assert torch.allclose(lies["sign-flipped"], -work, atol=0.1)
    assert torch.allclose(lies["scaled x100"], 100.0 * work, atol=10.0)
    norm = torch.linalg.vector_norm
    assert torch.isclose(norm(lies["random"]), norm(work), rtol=0.05)
