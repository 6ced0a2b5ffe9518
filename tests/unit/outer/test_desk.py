"""One fragment's desk, lent services that do what a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isles.outer import orders
from isles.outer.desk import FAILURES_MAX, QUIET_SECONDS, Desk
from isles.outer.optimizer import parameters_digest
from isles.outer.payload_cache import Payload, PayloadCache
from isles.outer.rounds import RETRY_SECONDS
from isles.outer.services import Stock, Unavailable
from isles.outer.settings import CHECKPOINT_VERSIONS_MAX, OuterSettings
from isles.outer.state_cache import StateCache
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.codec import encode
from isles.proto.errors import RefusedError, StoreError
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    AskHistory,
    BlobRef,
    Checkpoint,
    Commit,
    Committed,
    Contribution,
    Done,
    Error,
    Fenced,
    LearnerInfo,
    List,
    Listing,
    Settle,
    Stale,
    Stored,
    Upload,
)

SYNC = SyncSettings(num_fragments=1, merge_rule="mean", codec_up="fp32", grace_max_seconds=0.0)
PARAMETERS = np.ones(6, np.float32)
STATE = encode("fp32", PARAMETERS)
DELTA = encode("fp32", np.full(6, 0.5, np.float32))
GONE = Unavailable("not-found", "no such blob")
PUT_OFF = Unavailable("internal", "not now")
FAR_AWAY = CHECKPOINT_VERSIONS_MAX
LIST_SECONDS = OuterSettings().list_seconds


class Place:
    """A desk that has its lease and one row; its head is version 0, which is also the newest checkpoint."""

    def __init__(self, listing: Listing, services: Any, checkpoint_versions: int, payload_cache_bytes: int) -> None:
        self.services = services
        self.logger = ListLogger()
        self.listing = listing
        self.row = listing.pending[0]
        manifest = Manifest.build([TensorSpec("a", (6,), "float32", "parameter")], {}, 1)
        record = RunRecord(
            run="trial",
            seed=1,
            sync=SYNC,
            budget=Budget(tokens=1000),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )
        settings = OuterSettings(checkpoint_versions=checkpoint_versions)
        self.stock = Stock(StateCache(1 << 20), PayloadCache(payload_cache_bytes))
        self.desk = Desk(0, record, manifest, settings, self.services, self.stock, self.logger)
        self.desk.handle(orders.LeaseGranted(1))
        self.services.answer(List, listing)

    def deliver_state(self, payload: Payload | Unavailable = STATE) -> None:
        assert self.listing.head.parameters is not None
        self.services.deliver(payload, self.listing.head.parameters.digest)

    def deliver_delta(self, payload: Payload | Unavailable = DELTA) -> None:
        self.services.deliver(payload, self.row.blob.digest)

    def make_version(self) -> Commit:
        """Goes as far as COMMIT, which is not answered yet."""
        self.deliver_state()
        self.deliver_delta()
        self.services.answer(Upload, Stored(digest="0" * 64))
        [commit] = [message for message, _, _ in self.services.asked if isinstance(message, Commit)]
        return commit

    def next_attempt(self) -> None:
        self.services.clock.advance(RETRY_SECONDS)
        self.services.answer(List, self.listing)
        self.desk.tick()

    def look_again(self) -> None:
        self.services.clock.advance(LIST_SECONDS)
        self.desk.tick()
        self.services.answer(List, self.listing)

    @property
    def bytes_held(self) -> int:
        return self.stock.states.bytes_in_memory


@pytest.fixture
def make_place(
    services: Any,
    make_listing: Callable[..., Listing],
    make_contribution: Callable[..., Contribution],
    make_learner: Callable[..., LearnerInfo],
) -> Callable[..., Place]:
    def make(checkpoint_versions: int = FAR_AWAY, payload_cache_bytes: int = 1 << 20) -> Place:
        row = make_contribution("a", codec="fp32")
        listing = make_listing([row], [make_learner("a")], parameters_sha256=parameters_digest(PARAMETERS))
        return Place(
            listing.model_copy(update={"checkpoint": listing.head}), services, checkpoint_versions, payload_cache_bytes
        )

    return make


@pytest.fixture
def place(make_place: Callable[..., Place]) -> Place:
    return make_place()


def test_an_update_is_uploaded_before_it_is_committed_and_the_state_is_not_uploaded(place: Place) -> None:
    place.deliver_state()
    place.deliver_delta()
    assert place.services.asks(Upload) == 1
    assert place.services.asks(Commit) == 0
    place.services.answer(Upload, Stored(digest="0" * 64))
    commit = place.services.answer(Commit, Committed(fragment=0, version=1))
    assert commit.optimizer_sha256 is not None
    assert "round.merged" in place.logger.events()
    assert place.services.asks(List) == 1
    assert place.services.asks(Upload) == 0


def test_the_state_is_recovered_while_rows_are_still_awaited(
    place: Place, make_listing: Callable[..., Listing]
) -> None:
    assert place.services.is_fetching(place.listing.head.parameters.digest)  # type: ignore[union-attr]
    place.deliver_state()
    assert place.logger.events() == ["round.opened", "state.recovered"]
    place.deliver_delta()
    assert place.services.asks(Upload) == 1


def test_the_next_merge_starts_from_the_state_that_was_committed(place: Place) -> None:
    commit = place.make_version()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    head = place.listing.head.model_copy(
        update={
            "version": 1,
            "parameters": None,
            "parameters_sha256": commit.parameters_sha256,
            "optimizer_sha256": commit.optimizer_sha256,
        }
    )
    row = place.row.model_copy(
        update={"id": place.row.id._replace(number=2), "blob": BlobRef(digest="7" * 64, size_bytes=9)}
    )
    place.services.answer(List, place.listing.model_copy(update={"head": head, "pending": (row,)}))
    assert [blob.digest for blob, _ in place.services.fetched] == ["7" * 64]
    place.services.deliver(DELTA)
    assert place.services.asks(Upload) == 1
    assert place.bytes_held == 2 * 72


def test_a_payload_that_did_not_fit_is_fetched_again_for_the_merge(make_place: Callable[..., Place]) -> None:
    place = make_place(payload_cache_bytes=0)
    place.deliver_state()
    place.deliver_delta()
    assert place.services.asks(Upload) == 0
    place.deliver_delta()
    assert place.services.asks(Upload) == 1


@pytest.mark.parametrize("again", [GONE, b"not a payload any more, whatever its digest may say"])
def test_a_payload_that_is_not_had_a_second_time_abandons_the_round_and_is_settled(
    again: Payload | Unavailable, make_place: Callable[..., Place]
) -> None:
    place = make_place(payload_cache_bytes=0)
    place.deliver_state()
    place.deliver_delta()
    place.deliver_delta(again)
    assert place.logger.events()[-1] == "round.abandoned"
    place.services.answer(List, place.listing)
    assert place.services.asks(Settle) == 1


def test_a_payload_that_is_put_off_a_second_time_abandons_the_round_and_is_not_rejected(
    make_place: Callable[..., Place],
) -> None:
    place = make_place(payload_cache_bytes=0)
    place.deliver_state()
    place.deliver_delta()
    place.deliver_delta(PUT_OFF)
    assert place.logger.events()[-1] == "round.abandoned"
    place.next_attempt()
    assert place.services.asks(Settle) == 0
    place.deliver_delta()
    assert place.services.asks(Upload) == 1


def test_a_payload_that_is_gone_is_rejected_and_one_that_is_put_off_is_asked_for_again(place: Place) -> None:
    place.deliver_delta(PUT_OFF)
    assert place.services.asks(Settle) == 0
    place.look_again()
    place.deliver_delta(GONE)
    assert place.services.asks(Settle) == 1


def test_the_verdict_on_a_payload_that_nobody_wants_any_more_is_dropped(place: Place) -> None:
    place.deliver_state()
    place.desk.handle(orders.LeaseLost())
    place.deliver_delta()
    assert place.services.fetched == []
    assert place.services.asks(Upload) == 0
    assert place.stock.payloads.bytes_held == 0
    assert place.stock.screenings.num_started == 0


def test_a_merge_of_a_lost_lease_is_dropped_whatever_arrives(place: Place) -> None:
    place.deliver_delta()
    place.desk.handle(orders.LeaseLost())
    place.deliver_state()
    assert place.services.asks(Upload) == 0
    assert place.bytes_held == 0
    assert place.stock.recoveries.num_started == place.stock.merges.num_started == 0


def test_a_version_that_was_made_and_not_committed_takes_no_memory_once_the_lease_is_gone(place: Place) -> None:
    place.make_version()
    assert place.bytes_held == 24 + 72
    place.desk.handle(orders.LeaseLost())
    assert place.bytes_held == 24
    place.services.answer(Commit, Committed(fragment=0, version=1))
    assert place.bytes_held == 24


def test_a_stale_commit_lets_go_of_what_was_made(place: Place) -> None:
    place.make_version()
    place.services.answer(Commit, Stale(fragment=0, head=1, reason="the head is 1"))
    assert place.bytes_held == 24
    assert "round.abandoned" in place.logger.events()


def test_an_answer_to_an_older_lease_means_nothing(place: Place) -> None:
    place.deliver_delta(GONE)
    place.desk.handle(orders.LeaseGranted(2))
    place.services.answer(Settle, Fenced(epoch=2))
    assert not place.desk.rounds.is_standing_by


def test_an_answer_that_should_not_have_come_is_logged(place: Place) -> None:
    place.deliver_delta(GONE)
    place.services.answer(Settle, Error(code="internal", text="a mistake"))
    assert "message.refused" in place.logger.events()


def test_a_version_that_the_broker_does_not_store_is_made_again(place: Place) -> None:
    place.deliver_state()
    place.deliver_delta()
    place.services.answer(Upload, Error(code="internal", text="disk"))
    assert "round.abandoned" in place.logger.events()
    assert place.bytes_held == 24
    place.next_attempt()
    assert place.desk.is_busy


def test_a_version_that_is_too_large_for_the_broker_ends_the_outer_with_the_remedy(place: Place) -> None:
    place.deliver_state()
    place.deliver_delta()
    with pytest.raises(RefusedError, match="raise that limit"):
        place.services.answer(Upload, Error(code="too-large", text="blob_bytes_max"))


# ------------------------------------------------------------------------------------------------------------ recovery


def test_a_listing_that_was_overtaken_by_a_commit_makes_nobody_go_back(place: Place) -> None:
    place.make_version()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    place.services.answer(List, place.listing)
    assert place.services.fetched == []
    assert place.bytes_held == 72


def test_a_head_whose_state_is_put_off_ends_the_outer_after_some_attempts(place: Place) -> None:
    place.deliver_delta()
    for _ in range(FAILURES_MAX - 1):
        place.deliver_state(PUT_OFF)
        place.next_attempt()
    with pytest.raises(RefusedError, match="attempts failed"):
        place.deliver_state(PUT_OFF)


def test_a_head_whose_state_is_gone_by_two_listings_ends_the_outer_with_what_to_do(place: Place) -> None:
    """The first listing may have been of a tape that another outer has moved on meanwhile."""
    place.deliver_delta()
    place.deliver_state(GONE)
    place.next_attempt()
    with pytest.raises(StoreError, match=r"checkpoint of fragment 0, version 0 .* no such blob.*`isles export`"):
        place.deliver_state(GONE)


def test_a_listing_that_was_asked_for_before_the_loss_was_found_proves_nothing(place: Place) -> None:
    """A broker learns of damage by being asked for the blob; only then it lists another way around it."""
    place.services.clock.advance(LIST_SECONDS)
    place.desk.tick()
    place.deliver_state(GONE)
    place.services.clock.advance(RETRY_SECONDS)
    place.services.answer(List, place.listing)
    place.deliver_state(GONE)
    place.look_again()
    with pytest.raises(StoreError, match="no such blob"):
        place.deliver_state(GONE)


def test_a_loss_that_a_later_listing_goes_around_ends_nothing(place: Place) -> None:
    place.deliver_delta()
    place.deliver_state(GONE)
    place.next_attempt()
    place.deliver_state(PUT_OFF)
    place.next_attempt()
    place.deliver_state()
    assert "state.recovered" in place.logger.events()


def test_a_listing_that_the_broker_cannot_read_ends_the_outer_with_its_words(place: Place) -> None:
    place.services.clock.advance(LIST_SECONDS)
    place.desk.tick()
    with pytest.raises(StoreError, match="cannot be merged any more: the entry of version 3"):
        place.services.answer(List, Error(code="damaged", text="the entry of version 3 of fragment 0 is damaged"))


def test_a_state_that_fails_without_a_row_to_merge_is_tried_again_at_the_next_look(place: Place) -> None:
    place.deliver_state(PUT_OFF)
    assert "recovery.failed" in place.logger.events()
    place.look_again()
    place.deliver_state()
    assert "state.recovered" in place.logger.events()


@pytest.mark.parametrize("state", [b"no payload at all, just bytes of somebody", encode("fp32", 2 * PARAMETERS)])
def test_a_state_that_is_not_what_was_committed_ends_the_outer_at_once(state: bytes, place: Place) -> None:
    with pytest.raises(RefusedError, match="fragment 0, version 0"):
        place.deliver_state(state)


def test_a_tape_that_cannot_be_read_is_tried_again(place: Place) -> None:
    place.deliver_state(PUT_OFF)
    place.services.clock.advance(2 * RETRY_SECONDS)
    place.desk.tick()
    head = place.listing.head.model_copy(update={"version": 1, "parameters": None, "parameters_sha256": "5" * 64})
    place.services.answer(List, place.listing.model_copy(update={"head": head}))
    place.deliver_state()
    place.services.answer(AskHistory, Error(code="internal", text="a mistake"))
    [reason] = [fields["reason"] for _, event, fields in place.logger.records if event == "recovery.failed"][1:]
    assert "tape of fragment 0 cannot be read: a mistake" in reason


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_follows_the_commit_that_makes_it_due_and_rounds_go_on(make_place: Callable[..., Place]) -> None:
    place = make_place(checkpoint_versions=1)
    place.make_version()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    assert place.services.asks(List) == 1
    for _ in range(3):
        assert place.services.asks(Upload) == 1
        place.services.answer(Upload, Stored(digest="0" * 64))
    checkpoint = place.services.answer(Checkpoint, Done())
    assert (checkpoint.version, checkpoint.epoch) == (1, 1)
    assert "checkpoint.stored" in place.logger.events()
    assert not place.desk.is_busy


def test_a_head_that_has_been_quiet_gets_a_checkpoint_as_nobody_may_be_able_to_join_without(place: Place) -> None:
    place.make_version()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    place.services.answer(List, place.listing)
    for _ in range(int(QUIET_SECONDS / LIST_SECONDS) - 1):
        place.look_again()
    assert place.services.asks(Upload) == 0
    place.look_again()
    while place.services.asks(Upload):
        place.services.answer(Upload, Stored(digest="0" * 64))
    assert place.services.answer(Checkpoint, Done()).version == 1
    place.look_again()
    assert place.services.asks(Upload) == 0


def test_a_desk_that_is_told_to_stop_leaves_a_checkpoint_behind(place: Place) -> None:
    place.make_version()
    place.desk.stop()
    assert not place.desk.is_retired
    place.services.answer(Commit, Committed(fragment=0, version=1))
    assert place.desk.is_retired
    assert place.desk.is_busy
    while place.services.asks(Upload):
        place.services.answer(Upload, Stored(digest="0" * 64))
    place.services.answer(Checkpoint, Done())
    assert not place.desk.is_busy


def test_a_desk_that_has_done_nothing_stops_at_once(place: Place) -> None:
    place.desk.stop()
    assert not place.desk.is_busy
    assert place.desk.rounds.is_standing_by


def test_a_desk_that_loses_its_lease_while_it_stops_drops_its_checkpoint(place: Place) -> None:
    place.make_version()
    place.services.answer(Commit, Committed(fragment=0, version=1))
    place.desk.stop()
    assert place.desk.is_busy
    place.desk.handle(orders.LeaseLost())
    assert not place.desk.is_busy
    place.services.answer(Upload, Stored(digest="0" * 64))
    assert place.services.asks(Upload) == place.services.asks(Checkpoint) == 0
