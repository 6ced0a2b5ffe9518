"""How a process is called in its log."""

from __future__ import annotations

import pytest

from isles.ops.options import load_config
from isles.ops.processes import PROCESSES, _named, build
from isles.outer.settings import OuterSettings
from isles.proto.config import Stated
from isles.proto.errors import ConfigError
from isles.workers.settings import WorkerSettings


def test_two_outers_without_names_are_told_apart_by_their_logs() -> None:
    config = load_config(["outer", "log"], file=None, stated=[])
    names = [_named(config).section("outer", OuterSettings).id for _ in range(2)]
    assert all(name.startswith("outer-") for name in names)
    assert names[0] != names[1]


def test_a_task_of_ones_own_is_given_its_settings_by_assignments() -> None:
    config = load_config(
        ["worker", "run", "task", "log"],
        file=None,
        stated=[Stated("run.task", "module:function", "the flag --task")],
        assignments=["task.width=32", "worker.threads=3"],
    )
    assert config.sections["task"].model_dump() == {"width": 32}
    assert config.section("worker", WorkerSettings).threads == 3


def test_an_assignment_to_a_section_that_a_process_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set sync\.quorum=2: this command takes no setting of the section sync"):
        load_config(["broker", "log"], file=None, stated=[], assignments=["sync.quorum=2"])


@pytest.mark.parametrize("name", PROCESSES)
def test_every_process_takes_any_setting_of_its_own_by_an_assignment(name: str) -> None:
    assert any("--set" in parameter.opts for parameter in build(name).params)


def test_an_outer_that_has_a_name_is_called_by_it() -> None:
    config = load_config(["outer", "log"], file=None, stated=[Stated("outer.id", "merger", "the flag --id")])
    assert _named(config).section("outer", OuterSettings).id == "merger"
