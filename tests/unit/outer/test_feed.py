"""Payloads on their way into an accumulator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from isles.outer.accumulators import Vector
from isles.outer.feed import AHEAD_MAX, AT_ONCE_MAX, Feed, FeedFailure
from isles.outer.payload_cache import Payload
from isles.outer.services import Unavailable
from isles.proto.codec import encode
from isles.proto.messages import BlobRef


class Notes:
    """An accumulator that only remembers the first value of what it was given, and how much of it at a time."""

    def __init__(self) -> None:
        self.added: list[float] = []
        self.at_once: list[int] = []

    def add(self, *deltas: Vector) -> None:
        self.added += [float(delta[0]) for delta in deltas]
        self.at_once.append(len(deltas))

    def result(self) -> Vector:
        raise NotImplementedError


class Table:
    """A feed of some payloads, and what came of it. Payload n is all n + 1."""

    def __init__(self, services: Any, num: int, at_hand: tuple[int, ...] = ()) -> None:
        self.services = services
        self.notes = Notes()
        self.ended: list[FeedFailure | None] = []
        self.payloads = [encode("fp32", np.full(4, n + 1, np.float32)) for n in range(num)]
        self.feed = Feed(
            self.notes,
            [BlobRef(digest=f"{n:064x}", size_bytes=len(self.payloads[n])) for n in range(num)],
            services,
            num_values=4,
            bytes_max=1000,
            find=lambda index: self.payloads[index] if index in at_hand else None,
            then=self.ended.append,
        )
        self.feed.start()

    def deliver(self, index: int, found: Payload | Unavailable | None = None) -> None:
        self.services.deliver(self.payloads[index] if found is None else found, f"{index:064x}")

    @property
    def fetching(self) -> list[int]:
        return [int(blob.digest, 16) for blob, _ in self.services.fetched]


@pytest.mark.parametrize("seed", range(30))
def test_payloads_are_added_in_order_however_they_arrive_and_few_are_fetched_at_a_time(
    seed: int, services: Any
) -> None:
    chance = random.Random(seed)
    num = chance.randint(1, 12)
    at_hand = tuple(index for index in range(num) if chance.random() < 0.3)
    table = Table(services, num, at_hand)
    while table.fetching:
        assert len(table.fetching) <= 1 + AHEAD_MAX
        table.deliver(chance.choice(table.fetching))
    assert table.notes.added == [n + 1 for n in range(num)]
    assert max(table.notes.at_once) <= AT_ONCE_MAX
    assert len(table.feed.take_memory()) == max(table.notes.at_once)
    assert table.ended == [None]


def test_many_that_are_at_hand_need_no_deep_calls(services: Any) -> None:
    table = Table(services, 3000, tuple(range(3000)))
    assert len(table.notes.added) == 3000
    assert len(table.ended) == 1


@pytest.mark.parametrize(("code", "is_lost"), [("not-found", True), ("damaged", True), ("internal", False)])
def test_one_that_cannot_be_had_ends_it_and_says_whether_that_is_for_good(
    code: str, is_lost: bool, services: Any
) -> None:
    table = Table(services, 4)
    table.deliver(1, Unavailable(code, "said the broker"))
    assert table.ended == [FeedFailure(1, "its payload cannot be had: said the broker", is_lost)]
    table.deliver(0)
    assert table.notes.added == []


def test_one_that_cannot_be_read_ends_it(services: Any) -> None:
    table = Table(services, 2)
    table.deliver(0, encode("fp32", np.ones(5, np.float32)))
    [failure] = table.ended
    assert isinstance(failure, FeedFailure)
    assert (failure.index, failure.is_lost, failure.is_unreadable) == (0, True, True)


def test_of_several_that_are_added_at_once_the_one_that_cannot_be_read_is_named(services: Any) -> None:
    table = Table(services, 4)
    table.deliver(2, encode("fp32", np.ones(5, np.float32)))
    table.deliver(1)
    table.deliver(0)
    [failure] = table.ended
    assert isinstance(failure, FeedFailure)
    assert failure.index == 2
    assert table.notes.added == [1.0, 2.0]


def test_those_that_wait_for_an_earlier_one_are_added_with_it(services: Any) -> None:
    table = Table(services, 3)
    table.deliver(1)
    table.deliver(2)
    assert table.notes.at_once == []
    table.deliver(0)
    assert table.notes.at_once == [2, 1]


def test_memory_is_handed_over_once(services: Any) -> None:
    table = Table(services, 2, (0, 1))
    assert [vector.size for vector in table.feed.take_memory()] == [4] * max(table.notes.at_once)
    assert table.feed.take_memory() == []


def test_nothing_is_said_after_it_was_cancelled(services: Any) -> None:
    table = Table(services, 2)
    table.feed.cancel()
    table.deliver(0)
    table.deliver(1, Unavailable("damaged", "said the broker"))
    assert table.notes.added == []
    assert table.ended == []
