"""The books balance under every schedule of faults, and each rule that makes them balance is needed.

A failing seed prints itself; `World(seed, rule).run()` replays it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers import retained, versions
from isles.brokers.leases import Leases
from isles.brokers.store.sqlite_index import SqliteIndex
from isles.ops.simulation.conservation import LawBrokenError, World
from isles.outer import quorum
from isles.proto.agreement import ApplyRule
from isles.proto.messages import Settle
from isles.workers import session
from isles.workers.session import Session

RULES: tuple[ApplyRule, ...] = ("rebase", "overwrite", "blend", "hybrid")
SEEDS_PER_BLOCK = 25
BLOCKS = 80
SEEDS_PER_MUTATION = 400
"""Within so many seeds every missing rule shows; most do within ten."""


def world(seed: int) -> World:
    return World(seed, RULES[seed % 4], num_learners=2 + seed % 2, num_fragments=1 + seed // 4 % 2)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_piece_of_accepted_work_counts_exactly_once(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        world(seed).run()


def test_a_seed_replays_exactly() -> None:
    first, second = world(7), world(7)
    first.run()
    second.run()
    assert first.laws.heads == second.laws.heads
    assert first.laws.merged == second.laws.merged
    assert first.now == second.now


def test_outers_that_crash_recover_from_checkpoints_and_recipes() -> None:
    worlds = [world(seed) for seed in range(SEEDS_PER_BLOCK)]
    for each in worlds:
        each.run()
    assert sum(each.laws.num_checkpoints for each in worlds) > 5
    assert sum(len(each.remade) for each in worlds) > 5


def run_seeds(num_seeds: int) -> None:
    for seed in range(num_seeds):
        world(seed).run()


def without_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every outer may merge every fragment at any time."""
    monkeypatch.setattr(Leases, "grant", lambda self, fragments, *args: (dict.fromkeys(fragments, 1), False))
    monkeypatch.setattr(Leases, "epoch", lambda *args: 1)


def test_commits_are_safe_without_leases_which_only_save_work(monkeypatch: pytest.MonkeyPatch) -> None:
    without_leases(monkeypatch)
    run_seeds(SEEDS_PER_BLOCK)


# ---------------------------------------------------------------------------------------------- a rule is taken away


def without_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained, "is_retired", lambda *args: False)


def comparing_numbers_at_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(books: Any, row: Any) -> str:
        if books.base is None:
            return "start over"
        number = None if row is None else row.id.number
        if books.open is not None and number == books.open.id.number:
            return "go on"
        return "drop open" if number == (None if books.last is None else books.last.number) else "start over"

    monkeypatch.setattr(session, "compare_at_restart", compare)


def without_comparing_ids_at_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(books: Any, row: Any) -> str:
        return "start over" if books.base is None else "go on"

    monkeypatch.setattr(session, "compare_at_restart", compare)


def forgetting_rows_that_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    original = retained.is_answered

    def is_answered(index: Any, contribution_id: Any) -> bool:
        row = index.row(contribution_id.learner, contribution_id.fragment)
        return row is not None and row.state == "pending" and original(index, contribution_id)

    monkeypatch.setattr(retained, "is_answered", is_answered)


def without_the_row_in_the_version_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    original = versions.version_reply

    def version_reply(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).model_copy(update={"row": None})

    monkeypatch.setattr(versions, "version_reply", version_reply)


def without_the_states_in_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    without_leases(monkeypatch)
    monkeypatch.setattr(retained, "row_fault", lambda *args: None)


def without_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(index: Any, message: Settle) -> list[Any]:
        return []

    monkeypatch.setattr(retained, "settle", settle)


def without_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_reset", lambda *args: [])


def waiting_for_more_learners_than_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "num_needed", lambda wanted, num_able: max(1, wanted))


def superseding_an_open_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Session._is_able

    def is_able(self: Session, books: Any) -> bool:
        open_one, books.open = books.open, None
        able = original(self, books)
        books.open = open_one
        return able

    monkeypatch.setattr(Session, "_is_able", is_able)


def subtracting_before_the_version_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        session, "is_merged", lambda row, open_one, version: row is not None and open_one and row.id == open_one.id
    )


def letting_payloads_go_before_a_checkpoint_covers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_from(*args: Any, versions_kept: int, **kwargs: Any) -> int:
        return max(0, int(args[2]) - versions_kept)

    monkeypatch.setattr(versions, "keep_from", keep_from)


def letting_payloads_go_as_they_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteIndex, "move_references", lambda self, owner, new_owner: self.drop_references(owner))


def leaving_an_old_checkpoint_before_there_is_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = versions.let_go

    def let_go(index: Any, fragment: int, head: int, **kwargs: Any) -> None:
        original(index, fragment, head, **kwargs)
        first = versions.keep_from(index, fragment, head, **kwargs)
        if first:
            index.drop_references(versions._state_owner(fragment, first))

    monkeypatch.setattr(versions, "let_go", let_go)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    without_the_fence,
    comparing_numbers_at_restart,
    without_comparing_ids_at_restart,
    forgetting_rows_that_are_settled,
    without_the_row_in_the_version_reply,
    without_the_states_in_commit,
    without_settle,
    without_reset,
    waiting_for_more_learners_than_live,
    superseding_an_open_contribution,
    subtracting_before_the_version_is_applied,
    letting_payloads_go_before_a_checkpoint_covers_them,
    letting_payloads_go_as_they_are_merged,
    leaving_an_old_checkpoint_before_there_is_a_later_one,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_law_breaks(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    monkeypatch.setattr("isles.ops.simulation.conservation.TURNS_CALM_MAX", 200)
    with pytest.raises((LawBrokenError, AssertionError, KeyError)):
        run_seeds(SEEDS_PER_MUTATION)
