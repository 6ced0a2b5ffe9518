"""Two runs that have one name: a process of one of them never becomes a part of the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.proto.client import Refused
from isles.proto.errors import RefusedError
from isles.workers.checkpoint import origin_of


def found_run(world: Any) -> None:
    """Starts the run of a broker with some learner, which leaves at once."""
    with world.make("founder"):
        pass


def test_a_checkpoint_of_another_run_with_the_same_name_is_refused_and_shown(
    make_world: Callable[..., Any], tmp_path: Path
) -> None:
    mine, other = make_world(), make_world()
    folder = tmp_path / "checkpoint"
    with mine.make(checkpoint_dir=folder) as toy:
        toy.train(6)
    found_run(other)
    assert origin_of(folder)[0] == "toy"
    with pytest.raises(RefusedError, match="two runs with the name toy"):
        other.make(checkpoint_dir=folder).learner.start()
    [warning] = other.status().warnings
    assert (warning.name, warning.subject) == ("run.duplicated", "us-0")
    with mine.make(checkpoint_dir=folder) as toy:
        assert toy.learner.num_steps == 6


def test_a_checkpoint_starts_no_run_in_an_empty_store(make_world: Callable[..., Any], tmp_path: Path) -> None:
    mine, empty = make_world(), make_world()
    folder = tmp_path / "checkpoint"
    with mine.make(checkpoint_dir=folder) as toy:
        toy.train(2)
    with pytest.raises(RefusedError, match="empty checkpoint folder"):
        empty.make(checkpoint_dir=folder).learner.start()
    assert empty.status().run == ""


@pytest.mark.parametrize("role", ["worker", "outer", "evaluator"])
def test_a_process_that_was_let_in_is_refused_by_another_broker_at_the_same_address(
    role: str, make_world: Callable[..., Any]
) -> None:
    mine, other = make_world(), make_world()
    found_run(mine)
    found_run(other)
    connection = mine.connect(role, "us-7")
    connection._transport.close()
    connection._transport = other.transport.connect()
    connection.start()
    news: list[Any] = []
    while not news:
        news = [one for one in connection.poll(1.0) if isinstance(one, Refused)]
    assert news[0].code == "run"
    assert "two runs with the name toy" in news[0].text
    connection.close()
