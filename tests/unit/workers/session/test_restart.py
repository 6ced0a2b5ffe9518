"""A restarted learner compares its checkpoint's books with the store's rows."""

from __future__ import annotations

from typing import Any

from isles.proto.agreement import SyncSettings
from isles.proto.messages import Head, Row
from isles.workers.session import (
    ApplyVersion,
    AskVersion,
    ForgetPayload,
    FragmentBooks,
    Instruction,
    Log,
    OpenContribution,
    Reset,
    Session,
    Stop,
    TakeAccount,
    Welcomed,
)


def restart(kit: Any, books: FragmentBooks, row: Row | None, head: int = 5) -> tuple[Session, list[Instruction]]:
    session = kit.make_session(restored=[books])
    return session, session.handle(Welcomed([Head(fragment=0, version=head)], [row] if row else []), 0.0)


def checkpoint_books(kit: Any, **fields: Any) -> FragmentBooks:
    defaults = {"base": 3, "open": OpenContribution(kit.OLDER, 20, 2, 1.0), "tokens": 30, "steps": 3, "seconds": 1.5}
    return FragmentBooks(0, **{**defaults, **fields})


def test_a_checkpoint_whose_open_contribution_is_in_the_store_goes_on_with_it(kit: Any) -> None:
    session, orders = restart(kit, checkpoint_books(kit), kit.row_of(kit.OLDER))
    assert orders == [AskVersion(0, 3)]
    assert kit.without_logs(kit.arrive(session, 5, kit.row_of(kit.OLDER, "merged", 5)))[0] == ApplyVersion(
        0, 5, kit.OLDER
    )
    assert session.books[0].tokens == 10


def test_a_checkpoint_whose_open_contribution_was_never_accepted_keeps_its_work(kit: Any) -> None:
    for last, row in ((kit.OTHER, kit.row_of(kit.OTHER, "merged", 2)), (None, None)):
        session, orders = restart(kit, checkpoint_books(kit, last=last), row)
        assert orders == [ForgetPayload(kit.OLDER), AskVersion(0, 3)]
        assert (session.books[0].open, session.books[0].tokens) == (None, 30)


def test_nothing_is_contributed_before_the_first_welcome_whose_rows_could_not_tell_whose_it_was(kit: Any) -> None:
    session = kit.make_session(restored=[checkpoint_books(kit, open=None)])
    orders = [one for _ in range(3 * session.interval_steps) for one in kit.take_step(session)]
    assert not [one for one in orders if isinstance(one, TakeAccount)]
    assert session.books[0].open is None
    session.handle(Welcomed([Head(fragment=0, version=5)], []), 0.0)
    assert kit.contribute(session).tokens == 30 + 10 * (3 * session.interval_steps + 1)


def test_a_checkpoint_behind_the_store_starts_over_from_the_head_and_the_loss_is_logged(kit: Any) -> None:
    session, orders = restart(kit, checkpoint_books(kit), kit.row_of(kit.OTHER, "merged", 4))
    assert kit.without_logs(orders) == [ForgetPayload(kit.OLDER), AskVersion(0, None)]
    assert [one.fields["tokens"] for one in orders if isinstance(one, Log)] == [30]
    assert kit.arrive(session, 5, kit.row_of(kit.OTHER, "merged", 4)) == [Reset(0, 5)]
    books = session.books[0]
    assert (books.base, books.last, books.open, books.tokens) == (5, kit.OTHER, None, 0)


def test_equal_numbers_of_two_branches_are_not_the_same_contribution(kit: Any) -> None:
    assert kit.OLDER.number == kit.OTHER.number
    session, _ = restart(kit, checkpoint_books(kit), kit.row_of(kit.OTHER))
    assert session.books[0].base is None


def test_a_store_without_a_row_is_not_the_store_of_a_checkpoint_that_knows_one(kit: Any) -> None:
    session, _ = restart(kit, checkpoint_books(kit, last=kit.OTHER), None)
    assert session.books[0].base is None


def test_a_pending_row_found_at_a_restart_is_open_with_nothing_to_subtract(kit: Any) -> None:
    session, _ = restart(kit, checkpoint_books(kit), kit.row_of(kit.OTHER))
    assert kit.arrive(session, 5, kit.row_of(kit.OTHER)) == [Reset(0, 5)]
    assert [kit.accounts(kit.take_step(session)) for _ in range(8)] == [[]] * 8
    orders = kit.without_logs(kit.arrive(session, 6, kit.row_of(kit.OTHER, "merged", 6)))
    assert orders[:2] == [ApplyVersion(0, 6, None), ForgetPayload(kit.OTHER)]
    assert kit.accounts(orders) == [0]
    assert session.books[0].last == kit.OTHER
    assert session.books[0].tokens == 80


def test_a_pending_row_found_at_a_restart_and_rejected_later_is_just_dropped(kit: Any) -> None:
    session, _ = restart(kit, checkpoint_books(kit), kit.row_of(kit.OTHER))
    kit.arrive(session, 5, kit.row_of(kit.OTHER))
    kit.take_step(session)
    assert kit.without_logs(kit.arrive(session, 5, kit.row_of(kit.OTHER, "rejected", reason="norm"))) == [
        ForgetPayload(kit.OTHER)
    ]
    assert (session.books[0].tokens, session.books[0].last) == (10, kit.OTHER)


def test_a_pending_row_that_was_settled_before_the_head_came_is_not_open(kit: Any) -> None:
    session, _ = restart(kit, checkpoint_books(kit), kit.row_of(kit.OTHER))
    kit.arrive(session, 6, kit.row_of(kit.OTHER, "merged", 6))
    assert (session.books[0].open, session.books[0].last) == (None, kit.OTHER)


def test_each_fragment_decides_for_itself_and_the_largest_cursor_counts(kit: Any) -> None:
    first = checkpoint_books(kit)
    second = FragmentBooks(1, base=2, last=kit.OTHER._replace(fragment=1))
    sync = SyncSettings(num_fragments=2, interval_steps=4)
    session = Session(sync, "us-0", kit.INCARNATION, restored=[first, second], cursor={1: 10, 2: 5})
    rows = [kit.row_of(kit.OLDER, cursor={1: 8, 2: 9}), kit.row_of(kit.OLDER._replace(fragment=1), cursor={3: 4})]
    session.handle(Welcomed([Head(fragment=0, version=3), Head(fragment=1, version=3)], rows), 0.0)
    assert [books.base for books in session.books] == [3, None]
    assert session.cursor == {1: 10, 2: 9, 3: 4}


def test_a_store_older_than_the_checkpoint_is_refused_in_one_sentence(kit: Any) -> None:
    _, orders = restart(kit, checkpoint_books(kit, base=9), None, head=4)
    (stop,) = orders
    assert isinstance(stop, Stop)
    assert "version 9" in stop.text
    assert "newest is 4" in stop.text


def test_a_later_welcome_changes_nothing(kit: Any) -> None:
    session = kit.make_started()
    kit.contribute(session)
    assert session.handle(Welcomed([Head(fragment=0, version=0)], [kit.row_of(kit.OTHER)]), 0.0) == []
    assert session.books[0].open is not None


def test_the_books_of_a_checkpoint_are_copies(kit: Any) -> None:
    session = kit.make_started()
    books = session.checkpoint_books()
    kit.take_step(session)
    assert books[0].tokens == 0
