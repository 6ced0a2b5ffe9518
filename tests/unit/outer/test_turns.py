"""Lines in front of memory."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from isles.outer.turns import Leave, Turns


class Guests:
    """Who has started, by name, with the way to end each."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leave] = {}

    def start(self, name: str) -> Callable[[Leave], None]:
        return lambda leave: self.leaves.__setitem__(name, leave)


def test_only_so_many_run_at_a_time_and_the_others_follow_in_order() -> None:
    turns, guests = Turns(2), Guests()
    for name in "abcd":
        turns.join(guests.start(name))
    assert list(guests.leaves) == ["a", "b"]
    guests.leaves["b"]()
    assert list(guests.leaves) == ["a", "b", "c"]
    guests.leaves["a"]()
    assert list(guests.leaves) == ["a", "b", "c", "d"]


def test_a_turn_ends_once_however_often_that_is_said() -> None:
    turns, guests = Turns(1), Guests()
    for name in "abc":
        turns.join(guests.start(name))
    guests.leaves["a"]()
    guests.leaves["a"]()
    assert list(guests.leaves) == ["a", "b"]


def test_a_turn_that_ends_at_once_makes_room_without_deep_calls() -> None:
    turns, guests = Turns(1), Guests()
    turns.join(guests.start("first"))
    for _ in range(5000):
        turns.join(lambda leave: leave())
    turns.join(guests.start("last"))
    guests.leaves["first"]()
    assert list(guests.leaves) == ["first", "last"]


def test_one_that_is_larger_than_all_there_is_runs_alone() -> None:
    turns, guests = Turns(9, bytes_max=10), Guests()
    turns.join(guests.start("small"), 4)
    turns.join(guests.start("huge"), 100)
    turns.join(guests.start("next"), 4)
    assert list(guests.leaves) == ["small"]
    guests.leaves["small"]()
    assert list(guests.leaves) == ["small", "huge"]
    guests.leaves["huge"]()
    assert list(guests.leaves) == ["small", "huge", "next"]


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.integers(1, 4))
def test_the_sums_are_exact_and_nobody_waits_for_ever(joins: list[tuple[int, bool]], num_max: int) -> None:
    turns = Turns(num_max, bytes_max=10)
    running: list[tuple[int, Leave]] = []
    for size, should_end in joins:
        turns.join(lambda leave, size=size: running.append((size, leave)), size)
        assert turns.bytes_started == sum(size for size, _ in running) <= max([10, *(size for size, _ in running)])
        assert turns.num_started == len(running) <= num_max
        if should_end and running:
            _, leave = running.pop(0)
            leave()
    num_left = 0
    while running:
        _, leave = running.pop()
        leave()
        num_left += 1
    assert (turns.num_started, turns.bytes_started) == (0, 0)
