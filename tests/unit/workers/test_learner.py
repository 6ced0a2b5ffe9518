"""What the public door promises before anything is started."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.errors import ConfigError, UsageError
from isles.workers import Learner


def make_learner(**arguments: Any) -> Learner:
    model = nn.Linear(2, 2)
    return Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"learner": "us-0", **arguments})


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


@pytest.mark.parametrize("what", ["learner", "region", "run"])
def test_a_name_that_is_none_is_refused_with_the_rule(what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} = 'US 0' is no name: up to 64"):
        make_learner(**{what: "US 0"})


@pytest.mark.parametrize("numbers", [{"tokens": -1}, {"tokens": 1.5}, {"tokens": 1, "cursor": {5000: 1}}])
def test_numbers_that_cannot_be_right_are_refused_at_once(numbers: Any) -> None:
    with pytest.raises(UsageError, match="tokens is a count"):
        make_learner().step(**numbers)


def test_a_wrong_address_is_refused_when_it_is_used() -> None:
    with pytest.raises(ConfigError, match="is no broker address"):
        make_learner(broker="somewhere").start()


def test_the_pure_parts_of_the_package_load_no_tensor_library() -> None:
    program = "import isles.workers.session, isles.workers.account, sys; print({'torch', 'numpy'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "set()"
