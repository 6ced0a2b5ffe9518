"""An entry of the index that is not what was written there is named by everybody who reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from isles.brokers.stage import Member, Stage
from isles.brokers.store.index import DamagedEntryError
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.proto.messages import AskHistory, History, Report

Read = Callable[[SqliteIndex], Any]

READERS_OF_VERSIONS: dict[str, Read] = {
    "head": lambda index: index.head(0),
    "heads": lambda index: index.heads(),
    "version": lambda index: index.version(0, 2),
    "versions": lambda index: index.versions(0, 1, 9, 1 << 20),
}
READERS_OF_ROWS: dict[str, Read] = {
    "row": lambda index: index.row("us-1", 0),
    "rows_of": lambda index: index.rows_of("us-1"),
}
SPOILT = [b"", b"\xc1", b"\xa3abc", msgpack.packb({"fragment": 0}), msgpack.packb([1, 2]), b"\x81\xa6recipe\xc0"]


@pytest.fixture
def index(stage: Stage, advance: Callable[[int, int], None]) -> SqliteIndex:
    """Of a run whose fragment 0 has the versions 0, 1 and 2."""
    advance(0, 2)
    return stage.index


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("reader", READERS_OF_VERSIONS)
def test_a_damaged_version_is_named(reader: str, spoilt: bytes, index: SqliteIndex) -> None:
    index._do("UPDATE versions SET info = ? WHERE fragment = 0 AND version = 2", spoilt)
    with pytest.raises(DamagedEntryError, match=r"entry of version 2 of fragment 0 .* is damaged .* from a copy"):
        READERS_OF_VERSIONS[reader](index)


def test_a_checkpoint_whose_entry_is_damaged_is_named(index: SqliteIndex) -> None:
    index._do("UPDATE versions SET info = x'c1' WHERE fragment = 0 AND version = 0")
    with pytest.raises(DamagedEntryError, match="version 0 of fragment 0"):
        index.checkpoints(0, 2)


def test_a_version_in_the_place_of_another_is_damage(index: SqliteIndex) -> None:
    index._do("UPDATE versions SET info = (SELECT info FROM versions WHERE fragment = 0 AND version = 1) "
              "WHERE fragment = 0 AND version = 2")  # fmt: skip
    with pytest.raises(DamagedEntryError, match="version 2 of fragment 0"):
        index.head(0)


def test_only_who_asks_for_the_ingredients_notices_that_they_are_damaged(index: SqliteIndex) -> None:
    index._do("UPDATE versions SET ingredients = x'c1' WHERE fragment = 0 AND version = 2")
    assert index.head(0) is not None
    with pytest.raises(DamagedEntryError, match="version 2 of fragment 0"):
        index.versions(0, 0, 9, 1 << 20)


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("reader", READERS_OF_ROWS)
def test_a_damaged_row_is_named(reader: str, spoilt: bytes, index: SqliteIndex) -> None:
    index._do("UPDATE rows SET contribution = ?", spoilt)
    with pytest.raises(DamagedEntryError, match="entry of learner us-1's row of fragment 0 in the index"):
        READERS_OF_ROWS[reader](index)


def test_a_damaged_figure_is_named(stage: Stage) -> None:
    onlooker = stage.member("evaluator", "e")
    onlooker.join()
    onlooker.ask(Report(name="validation_loss", value=1.0, versions={0: 0}))
    stage.index._do("UPDATE reports SET info = x'c1'")
    with pytest.raises(DamagedEntryError, match="entry of figure 1 "):
        stage.index.reports(0, 9, 999)


def test_entries_beside_a_damaged_one_are_still_given(index: SqliteIndex, outer: Member) -> None:
    index._do("UPDATE versions SET info = x'c1' WHERE fragment = 0 AND version = 2")
    found = outer.ask(AskHistory(fragment=0, first=0, num_max=2))
    assert isinstance(found, History)
    assert [info.version for info in found.versions] == [0, 1]
