"""One fragment's desk, lent services that do what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isles.outer import orders
from isles.outer.desk import FAILURES_MAX, Desk
from isles.outer.optimizer import parameters_digest
from isles.outer.rounds import RETRY_SECONDS
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.codec import encode
from isles.proto.errors import RefusedError
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    BlobRef,
    Commit,
    Committed,
    Contribution,
    Error,
    Fenced,
    LearnerInfo,
    List,
    Listing,
    Message,
    Settle,
    Stored,
    Upload,
)

SYNC = SyncSettings(num_fragments=1, codec_up="fp32", grace_max_seconds=0.0)
PARAMETERS = np.ones(6, np.float32)
STATE = encode("fp32", PARAMETERS)
DELTA = encode("fp32", np.full(6, 0.5, np.float32))


class FakeServices:
    """Remembers what is asked and fetched; works at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.asked: list[tuple[Message, Callable[[Message], None]]] = []
        self.fetched: list[tuple[BlobRef, Callable[[bytes | None, str], None]]] = []

    def now(self) -> float:
        return self.clock.now()

    def draw_token(self) -> str:
        return "ab" * 8

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        self.asked.append((message, then))

    def fetch(self, blob: BlobRef, then: Callable[[bytes | None, str], None], *, bytes_max: int) -> None:
        self.fetched.append((blob, then))

    def work(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(call())

    def answer(self, kind: type[Message], reply: Message) -> Message:
        """Answers the oldest ask of a kind."""
        index = next(index for index, (message, _) in enumerate(self.asked) if isinstance(message, kind))
        message, then = self.asked.pop(index)
        then(reply)
        return message

    def deliver(self, payload: bytes | None, text: str = "") -> None:
        """Delivers the oldest fetch."""
        _, then = self.fetched.pop(0)
        then(payload, text)

    def asks(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message, _ in self.asked)


class Place:
    """A desk that has its lease and one row, still to be fetched."""

    def __init__(self, listing: Listing) -> None:
        self.services = FakeServices()
        self.logger = ListLogger()
        self.listing = listing
        manifest = Manifest.build([TensorSpec("a", (6,), "float32", "parameter")], {}, 1)
        self.desk = Desk(0, SYNC, Budget(rounds=100), manifest, self.services, self.logger, list_seconds=2.0)
        self.desk.handle(orders.LeaseGranted(1))
        self.services.answer(List, listing)

    def store_everything(self) -> None:
        while self.services.asks(Upload):
            self.services.answer(Upload, Stored(digest="0" * 64))

    def next_attempt(self) -> None:
        self.services.answer(List, self.listing)
        self.services.clock.advance(RETRY_SECONDS)
        self.desk.tick()


@pytest.fixture
def place(
    make_listing: Callable[..., Listing],
    make_contribution: Callable[..., Contribution],
    make_learner: Callable[..., LearnerInfo],
) -> Place:
    row = make_contribution("a", codec="fp32")
    return Place(make_listing([row], [make_learner("a")], parameters_sha256=parameters_digest(PARAMETERS)))


def test_a_merge_is_uploaded_before_it_is_committed(place: Place) -> None:
    place.services.deliver(DELTA)
    place.services.deliver(STATE)
    assert place.services.asks(Upload) == 4
    assert place.services.asks(Commit) == 0
    place.store_everything()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    assert "round.merged" in place.logger.events()
    assert place.services.asks(List) == 1


def test_the_verdict_on_a_payload_that_nobody_wants_any_more_is_dropped(place: Place) -> None:
    place.desk.handle(orders.LeaseLost())
    place.services.deliver(DELTA)
    assert place.services.fetched == []
    assert place.services.asks(Upload) == 0


def test_a_merge_of_a_lost_lease_is_dropped_whatever_arrives(place: Place) -> None:
    place.services.deliver(DELTA)
    place.desk.handle(orders.LeaseLost())
    place.services.deliver(STATE)
    assert place.services.asks(Upload) == 0


def test_an_answer_to_an_older_lease_means_nothing(place: Place) -> None:
    place.services.deliver(None, "no such blob")
    place.desk.handle(orders.LeaseGranted(2))
    place.services.answer(Settle, Fenced(epoch=2))
    assert not place.desk.rounds.is_standing_by


def test_an_answer_that_should_not_have_come_is_logged(place: Place) -> None:
    place.services.deliver(None, "no such blob")
    place.services.answer(Settle, Error(code="internal", text="a mistake"))
    assert "message.refused" in place.logger.events()


def test_a_version_that_the_broker_does_not_store_is_made_again(place: Place) -> None:
    place.services.deliver(DELTA)
    place.services.deliver(STATE)
    place.services.answer(Upload, Error(code="internal", text="disk"))
    assert "round.abandoned" in place.logger.events()
    place.next_attempt()
    assert place.desk.is_busy


def test_a_version_that_is_too_large_for_the_broker_ends_the_outer_with_the_remedy(place: Place) -> None:
    place.services.deliver(DELTA)
    place.services.deliver(STATE)
    with pytest.raises(RefusedError, match="raise that limit"):
        place.services.answer(Upload, Error(code="too-large", text="blob_bytes_max"))


@pytest.mark.parametrize("state", [None, b"no payload at all, just bytes of somebody", encode("fp32", 2 * PARAMETERS)])
def test_a_head_whose_state_cannot_be_used_ends_the_outer_after_some_attempts(
    state: bytes | None, place: Place
) -> None:
    place.services.deliver(DELTA)
    for _ in range(FAILURES_MAX - 1):
        place.services.deliver(state, "gone")
        place.next_attempt()
    with pytest.raises(RefusedError, match="attempts failed"):
        place.services.deliver(state, "gone")
