"""When a checkpoint is made, and what becomes of one that comes to nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isles.outer.checkpointer import Checkpointer
from isles.outer.optimizer import FragmentState
from isles.outer.recovery import StatePoint
from isles.outer.services import Stock
from isles.outer.workshop import Held
from isles.proto.codec import decode
from isles.proto.logs import ListLogger
from isles.proto.messages import Checkpoint, Done, Error, Fenced, Message, Stored, Upload

STORED = Stored(digest="0" * 64)
REFUSAL = Error(code="internal", text="disk")


class Bench:
    """A checkpointer and the head that it sees."""

    def __init__(self, services: Any, stock: Stock) -> None:
        self.services, self.stock = services, stock
        self.logger = ListLogger()
        self.num_ended = 0
        self.held: Held | None = None
        self.checkpointer = self.make()

    def make(self) -> Checkpointer:
        return Checkpointer(
            0,
            self.services,
            self.stock,
            self.logger,
            versions_max=4,
            bytes_max=100,
            head=lambda: self.held,
            then=self.count,
        )

    def count(self) -> None:
        self.num_ended += 1

    def commit(self, version: int, payload_bytes: int = 1, *, has_momentum: bool = True) -> None:
        vectors = [np.full(4, version + part, np.float32) for part in (0.0, 0.25, 0.5)]
        state = FragmentState(vectors[0], vectors[1] if has_momentum else None, vectors[2])
        old, self.held = self.held, Held(StatePoint(version, "1" * 64, "2" * 64), self.stock.states.put(state))
        if old is not None:
            self.stock.states.drop(old.slot)
        self.checkpointer.count({version: payload_bytes})

    def payload(self) -> bytes:
        [payload] = [payload for message, _, payload in self.services.asked if isinstance(message, Upload)]
        assert payload is not None
        return payload


@pytest.fixture
def bench(services: Any, stock: Stock) -> Bench:
    bench = Bench(services, stock)
    bench.checkpointer.learn(2)
    bench.commit(3)
    return bench


def test_so_many_versions_make_one_due(bench: Bench) -> None:
    bench.commit(5)
    assert not bench.checkpointer.is_due
    bench.commit(6)
    assert bench.checkpointer.is_due


def test_so_many_bytes_make_one_due_and_those_it_covers_no_longer_count(bench: Bench) -> None:
    bench.commit(4, 98)
    assert not bench.checkpointer.is_due
    bench.commit(5, 1)
    assert bench.checkpointer.is_due
    bench.checkpointer.learn(4)
    assert not bench.checkpointer.is_due
    assert bench.checkpointer.is_behind


def test_nothing_is_due_before_the_store_has_said_what_it_has(services: Any, stock: Stock) -> None:
    bench = Bench(services, stock)
    bench.commit(100, 10**6)
    assert not bench.checkpointer.is_due
    assert not bench.checkpointer.is_behind


def test_one_part_after_the_other_is_stored_and_then_confirmed(bench: Bench) -> None:
    bench.checkpointer.begin(7)
    for value in (3.0, 3.25, 3.5):
        assert decode(bench.payload(), num_values=4).tolist() == [value] * 4
        bench.services.answer(Upload, STORED)
    said = bench.services.answer(Checkpoint, Done())
    assert (said.epoch, said.version, bench.checkpointer.version, bench.num_ended) == (7, 3, 3, 1)
    assert len({said.parameters.digest, said.momentum.digest, said.remainder.digest}) == 3
    assert not bench.checkpointer.is_busy


def test_zeros_are_left_out(bench: Bench) -> None:
    bench.commit(4, has_momentum=False)
    bench.checkpointer.begin(7)
    for _ in range(2):
        bench.services.answer(Upload, STORED)
    said = bench.services.answer(Checkpoint, Done())
    assert said.momentum is None
    assert said.remainder is not None


def test_the_version_that_was_begun_with_is_finished_although_the_head_moves_on(bench: Bench) -> None:
    bench.checkpointer.begin(7)
    bench.services.answer(Upload, STORED)
    bench.commit(4)
    assert decode(bench.payload(), num_values=4).tolist() == [3.25] * 4
    assert bench.stock.states.bytes_in_memory == 2 * 48
    for _ in range(2):
        bench.services.answer(Upload, STORED)
    assert bench.services.answer(Checkpoint, Done()).version == 3
    assert bench.stock.states.bytes_in_memory == 48


def test_only_one_is_under_way_and_other_fragments_wait_for_their_turn(bench: Bench) -> None:
    bench.checkpointer.begin(7)
    bench.checkpointer.begin(7)
    other = bench.make()
    other.begin(7)
    assert bench.services.asks(Upload) == 1
    bench.checkpointer.drop()
    assert bench.services.asks(Upload) == 2


def test_one_that_waits_for_its_turn_takes_the_head_of_then(bench: Bench) -> None:
    other = bench.make()
    other.begin(7)
    bench.checkpointer.begin(7)
    bench.commit(4)
    other.drop()
    bench.services.asked.pop(0)
    assert decode(bench.payload(), num_values=4).tolist() == [4.0] * 4


@pytest.mark.parametrize("num_stored", range(4))
def test_one_that_is_dropped_goes_no_further_wherever_it_is(num_stored: int, bench: Bench) -> None:
    bench.checkpointer.begin(7)
    for _ in range(num_stored):
        bench.services.answer(Upload, STORED)
    bench.checkpointer.drop()
    last = Checkpoint if num_stored == 3 else Upload
    bench.services.answer(last, Done() if num_stored == 3 else STORED)
    assert bench.services.asked == []
    assert (bench.checkpointer.version, bench.num_ended) == (2, 0)
    assert bench.stock.checkpoints.num_started == 0
    assert bench.stock.states.bytes_in_memory == 48


@pytest.mark.parametrize(
    ("num_stored", "answer"),
    [(0, REFUSAL), (0, Fenced(epoch=9)), (0, Done()), (3, REFUSAL), (3, Fenced(epoch=9)), (3, STORED)],
)
def test_an_answer_that_is_no_yes_ends_it_and_the_next_commit_tries_again(
    num_stored: int, answer: Message, bench: Bench
) -> None:
    asked = Checkpoint if num_stored == 3 else Upload
    bench.checkpointer.begin(7)
    for _ in range(num_stored):
        bench.services.answer(Upload, STORED)
    bench.services.answer(asked, answer)
    assert not bench.checkpointer.is_busy
    assert bench.logger.events() == ([] if isinstance(answer, Fenced) else ["message.refused"])
    assert bench.stock.states.bytes_in_memory == 48
    bench.checkpointer.begin(7)
    assert bench.services.asks(Upload) == 1


def test_one_without_a_state_at_hand_is_given_up(bench: Bench) -> None:
    bench.held = None
    bench.checkpointer.begin(7)
    assert not bench.checkpointer.is_busy
    assert bench.stock.checkpoints.num_started == 0
