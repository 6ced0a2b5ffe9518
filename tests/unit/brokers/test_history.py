"""What HISTORY gives: the tape, in parts that fit a message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers import reading, retained, versions
from isles.brokers.stage import Member, Stage
from isles.proto.messages import HEADER_BYTES_MAX, AskHistory, AskVersion, History, List, Listing, VersionReply, pack

Advance = Callable[[int, int], None]


def test_a_reply_does_not_grow_with_the_participants_of_a_round(
    worker: Member, outer: Member, advance: Advance
) -> None:
    advance(0, 1)
    reply, listing = worker.ask(AskVersion(fragment=0)), outer.ask(List(fragment=0))
    assert isinstance(reply, VersionReply)
    assert isinstance(listing, Listing)
    for head in (reply.head, listing.head):
        assert head.recipe is not None
        assert (head.recipe.fraction, head.recipe.ingredients) == (0.5, ())


def test_a_long_history_comes_in_parts_that_fit_a_header(
    stage: Stage, outer: Member, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance(0, 6)
    whole = outer.ask(AskHistory(fragment=0, first=1))
    assert isinstance(whole, History)
    assert len(whole.versions) == 6
    monkeypatch.setattr(reading, "HISTORY_BYTES_MAX", len(pack(whole)) // 2)
    found: list[int] = []
    while len(found) < 6:
        part = outer.ask(AskHistory(fragment=0, first=len(found) + 1))
        assert isinstance(part, History)
        assert 0 < len(part.versions) < 6
        assert len(pack(part)) < len(pack(whole)) * 0.6
        found += [info.version for info in part.versions]
    assert found == [1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(reading, "HISTORY_BYTES_MAX", 1)
    one = outer.ask(AskHistory(fragment=0, first=3))
    assert isinstance(one, History)
    assert [info.version for info in one.versions] == [3], "never none, or the asker would ask for ever"


def test_the_largest_permitted_recipe_fits_a_header() -> None:
    assert retained.RECIPE_BYTES_MAX + reading.HISTORY_BYTES_MAX > HEADER_BYTES_MAX, "so a large one comes alone"
    assert retained.RECIPE_BYTES_MAX < HEADER_BYTES_MAX
    assert versions.UPDATES_MAX <= 4096, "as many as a VERSION reply may have"
