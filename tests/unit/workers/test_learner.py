"""What the public door promises before anything is started."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from isles.proto.errors import ConfigError, UsageError
from isles.workers import Learner


def make_learner(**arguments: object) -> Learner:
    model = nn.Linear(2, 2)
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), learner="us-0", **arguments)  # type: ignore[arg-type]


def test_the_constructor_starts_nothing() -> None:
    def connect() -> None:
        raise AssertionError("a connection was made")

    before = threading.active_count()
    make_learner(connect=connect)
    assert threading.active_count() == before


def test_before_the_start_everything_is_refused_with_what_to_do() -> None:
    learner = make_learner()
    for ask in (lambda: learner.progress, lambda: learner.shards, lambda: learner.step(1), learner.drain):
        with pytest.raises(UsageError, match="with learner"):
            ask()
    learner.close()


def test_a_wrong_address_is_refused_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match="is no broker address"):
        make_learner(broker="somewhere").start()


def test_the_pure_parts_of_the_package_load_no_tensor_library() -> None:
    program = "import isles.workers.session, isles.workers.account, sys; print({'torch', 'numpy'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "set()"
