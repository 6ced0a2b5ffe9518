"""How a process is called in its log."""

from __future__ import annotations

from isles.ops.options import load_config
from isles.ops.processes import _named
from isles.outer.settings import OuterSettings
from isles.proto.config import Stated


def test_two_outers_without_names_are_told_apart_by_their_logs() -> None:
    config = load_config(["outer", "log"], file=None, stated=[])
    names = [_named(config).section("outer", OuterSettings).id for _ in range(2)]
    assert all(name.startswith("outer-") for name in names)
    assert names[0] != names[1]


def test_an_outer_that_has_a_name_is_called_by_it() -> None:
    config = load_config(["outer", "log"], file=None, stated=[Stated("outer.id", "merger", "the flag --id")])
    assert _named(config).section("outer", OuterSettings).id == "merger"
