"""From VERSION replies to values: the chain of updates, snapshots, and what cannot be trusted."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from isles.proto.client import Answered, Fetched, FetchFailed
from isles.proto.codec.torch_codec import decode, encode
from isles.proto.logs import ListLogger
from isles.proto.messages import AskVersion, BlobRef, Error, Message, VersionInfo, VersionReply
from isles.workers.parameters import parameters_digest
from isles.workers.versions import FETCHES_AHEAD, Built, Held, VersionBuilder

COUNT = 300


class FakeConnection:
    """Remembers what was asked and fetched."""

    def __init__(self) -> None:
        self.asked: list[AskVersion] = []
        self.fetched: list[BlobRef] = []
        self.bounds: list[int] = []

    def ask(self, message: Message) -> None:
        assert isinstance(message, AskVersion)
        self.asked.append(message)

    def fetch(self, blob: BlobRef, *, bytes_max: int) -> None:
        self.fetched.append(blob)
        self.bounds.append(bytes_max)


class History:
    """Versions of one fragment as an outer would publish them: exact values and int8 updates."""

    def __init__(self, seed: int = 0, fragment: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.fragment = fragment
        self.values = [torch.randn(COUNT, generator=generator)]
        self.updates = [b""]
        for _ in range(5):
            self.updates.append(encode("int8", torch.randn(COUNT, generator=generator) * 0.1))
            self.values.append(self.values[-1] + decode(self.updates[-1], num_values=COUNT))

    def info(self, version: int, **changes: Any) -> VersionInfo:
        whole = encode("fp32", self.values[version])
        fields = {"parameters_sha256": parameters_digest(self.values[version]), "tokens_total": 10 * version}
        fields |= {"fragment": self.fragment, "version": version, "parameters": blob_of(whole), **changes}
        return VersionInfo.model_validate(fields)

    def reply(self, version: int, base: int | None, snapshot: int | None = None, **changes: Any) -> VersionReply:
        """The way from `base` to `version`; without one from the checkpoint `snapshot`, which may be the same."""
        begin = None if base is not None else self.info(version if snapshot is None else snapshot)
        first = base if begin is None else begin.version
        assert first is not None
        updates = tuple(map(blob_of, self.updates[first + 1 : version + 1]))
        return VersionReply(head=self.info(version, **changes), updates=updates, snapshot=begin)


def blob_of(payload: bytes) -> BlobRef:
    return BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))


def make(held: dict[int, Held] | None = None, count: int = 1) -> tuple[VersionBuilder, FakeConnection, ListLogger]:
    connection, log = FakeConnection(), ListLogger()
    builder = VersionBuilder(connection, [COUNT] * count, log, held or {})  # type: ignore[arg-type]
    return builder, connection, log


def answer(builder: VersionBuilder, connection: FakeConnection, reply: Message) -> list[Built]:
    return builder.handle(Answered(connection.asked[-1], reply))


def deliver(builder: VersionBuilder, payload: bytes) -> list[Built]:
    return builder.handle(Fetched(blob_of(payload), bytearray(payload)))


def test_the_first_version_comes_whole_and_later_ones_by_updates_bit_by_bit() -> None:
    history = History()
    builder, connection, _ = make()
    assert builder.version(0) == -1
    builder.want(0)
    assert connection.asked == [AskVersion(fragment=0, base_version=None)]
    assert answer(builder, connection, history.reply(1, None)) == []
    (built,) = deliver(builder, encode("fp32", history.values[1]))
    assert (built.held.version, built.tokens_total) == (1, 10)
    builder.want(0)
    assert connection.asked[-1].base_version == 1
    answer(builder, connection, history.reply(4, 1))
    assert [deliver(builder, history.updates[number]) for number in (3, 2, 4)][:2] == [[], []]
    assert builder.version(0) == 4
    builder.want(0)
    (again,) = answer(builder, connection, history.reply(4, 4))
    assert torch.equal(again.held.values, history.values[4])


def test_values_that_were_handed_out_are_never_changed() -> None:
    history = History()
    builder, connection, _ = make({0: Held(0, history.values[0])})
    before = history.values[0].clone()
    builder.want(0)
    answer(builder, connection, history.reply(2, 0))
    for payload in history.updates[1:3]:
        deliver(builder, payload)
    assert builder.version(0) == 2
    assert torch.equal(history.values[0], before)


def test_a_wish_during_a_build_is_granted_afterwards_once() -> None:
    history = History()
    builder, connection, _ = make({0: Held(0, history.values[0])})
    for _ in range(3):
        builder.want(0)
    assert len(connection.asked) == 1
    answer(builder, connection, history.reply(1, 0))
    builder.want(0)
    deliver(builder, history.updates[1])
    assert [ask.base_version for ask in connection.asked] == [0, 1]


def test_nothing_is_fetched_that_is_larger_than_the_fragment_can_be() -> None:
    history = History()
    builder, connection, _ = make({0: Held(0, history.values[0])})
    builder.want(0)
    answer(builder, connection, history.reply(1, 0))
    assert connection.bounds[0] < 4 * COUNT + 1000


@pytest.mark.parametrize("fault", ["gone", "damaged", "another value"])
def test_what_cannot_be_built_by_updates_is_fetched_whole_the_next_time(fault: str) -> None:
    history = History()
    builder, connection, log = make({0: Held(0, history.values[0])})
    builder.want(0)
    changes = {"parameters_sha256": "0" * 64} if fault == "another value" else {}
    answer(builder, connection, history.reply(1, 0, **changes))
    if fault == "gone":
        builder.handle(FetchFailed(blob_of(history.updates[1]), "retention has removed it"))
    else:
        payload = history.updates[1][:-1] + b"\x00" if fault == "damaged" else history.updates[1]
        builder.handle(Fetched(blob_of(history.updates[1]), bytearray(payload)))
    assert log.events() == ["blob.unavailable"]
    assert builder.version(0) == 0
    builder.want(0)
    assert connection.asked[-1].base_version is None
    answer(builder, connection, history.reply(2, None))
    (built,) = deliver(builder, encode("fp32", history.values[2]))
    assert torch.equal(built.held.values, history.values[2])


def test_a_checkpoint_is_brought_forward_by_the_updates_after_it_bit_by_bit() -> None:
    history = History()
    builder, connection, _ = make()
    builder.want(0)
    answer(builder, connection, history.reply(4, None, snapshot=1))
    delivered = 0
    while builder.version(0) < 0:
        assert len(connection.fetched) - delivered <= FETCHES_AHEAD, "a long chain is not held in memory"
        payload = encode("fp32", history.values[1]) if delivered == 0 else history.updates[delivered + 1]
        assert connection.fetched[delivered] == blob_of(payload)
        deliver(builder, payload)
        delivered += 1
    assert delivered == 4
    builder.want(0)
    (built,) = answer(builder, connection, history.reply(4, 4))
    assert torch.equal(built.held.values, history.values[4])


def test_a_checkpoint_that_is_not_what_was_committed_is_left_at_once() -> None:
    history = History()
    builder, connection, log = make()
    builder.want(0)
    reply = history.reply(4, None, snapshot=1)
    assert reply.snapshot is not None
    wrong = reply.snapshot.model_copy(update={"parameters_sha256": "0" * 64})
    answer(builder, connection, reply.model_copy(update={"snapshot": wrong}))
    assert deliver(builder, encode("fp32", history.values[1])) == []
    assert "version 1: not the values" in log.records[-1][2]["text"]


def test_the_two_ways_to_the_head_are_tried_in_turn() -> None:
    history = History()
    builder, connection, _ = make({0: Held(0, history.values[0])})
    for base, payload in ((0, history.updates[1]), (None, encode("fp32", history.values[1]))) * 2:
        builder.want(0)
        assert connection.asked[-1].base_version == base
        answer(builder, connection, history.reply(1, base))
        builder.handle(FetchFailed(blob_of(payload), "gone"))
    builder.want(0)
    answer(builder, connection, history.reply(1, 0))
    (built,) = deliver(builder, history.updates[1])
    assert torch.equal(built.held.values, history.values[1])


def test_an_update_that_comes_twice_in_one_chain_is_added_twice() -> None:
    history = History()
    same = history.updates[1]
    values = history.values[0].clone()
    for _ in range(3):
        values += decode(same, num_values=COUNT)
    history.updates[1:4], history.values[3] = [same] * 3, values
    builder, connection, _ = make({0: Held(0, history.values[0])})
    builder.want(0)
    answer(builder, connection, history.reply(3, 0))
    built = deliver(builder, same)
    while not built:
        built = deliver(builder, same)
    assert torch.equal(built[0].held.values, values)


def test_a_reply_that_is_no_way_to_the_head_is_not_followed() -> None:
    history = History()
    builder, connection, _ = make({0: Held(0, history.values[0])})
    builder.want(0)
    assert answer(builder, connection, history.reply(3, 1)) == []
    assert connection.fetched == []
    builder.want(0)
    assert connection.asked[-1].base_version is None


def test_a_head_that_went_back_is_ignored() -> None:
    history = History()
    builder, connection, _ = make({0: Held(3, history.values[3])})
    builder.want(0)
    assert answer(builder, connection, history.reply(2, 2)) == []
    assert builder.version(0) == 3


def test_an_error_ends_the_question_and_the_next_one_can_be_asked() -> None:
    builder, connection, _ = make()
    builder.want(0)
    assert answer(builder, connection, Error(code="not-found", text="no such fragment")) == []
    builder.want(0)
    assert len(connection.asked) == 2


def test_one_blob_may_serve_two_fragments() -> None:
    histories = [History(seed=1), History(seed=1, fragment=1)]
    builder, connection, _ = make({f: Held(0, histories[f].values[0]) for f in range(2)}, count=2)
    for fragment in range(2):
        builder.want(fragment)
        answer(builder, connection, histories[fragment].reply(1, 0))
    assert [built.fragment for built in deliver(builder, histories[0].updates[1])] == [0, 1]


def test_news_about_other_things_is_ignored() -> None:
    builder, _, _ = make()
    assert builder.handle(Fetched(blob_of(b"x"), bytearray(b"x"))) == []
    assert builder.handle(FetchFailed(blob_of(b"x"), "gone")) == []


def test_payloads_beyond_the_limit_are_fetched_when_others_have_been_used(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = [History(seed=fragment, fragment=fragment) for fragment in range(3)]
    monkeypatch.setattr("isles.workers.versions.FETCH_BYTES_MAX", 2 * len(histories[0].updates[1]) + 100)
    builder, connection, _ = make({f: Held(0, histories[f].values[0]) for f in range(3)}, count=3)
    for fragment in range(3):
        builder.want(fragment)
        answer(builder, connection, histories[fragment].reply(1, 0))
    assert connection.fetched == [blob_of(histories[fragment].updates[1]) for fragment in range(2)]
    assert [built.fragment for built in deliver(builder, histories[1].updates[1])] == [1]
    assert connection.fetched[2:] == [blob_of(histories[2].updates[1])]


def test_a_fragment_over_the_limit_is_fetched_alone_and_a_failure_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = [History(seed=fragment, fragment=fragment) for fragment in range(2)]
    monkeypatch.setattr("isles.workers.versions.FETCH_BYTES_MAX", 1)
    builder, connection, _ = make({f: Held(0, histories[f].values[0]) for f in range(2)}, count=2)
    for fragment in range(2):
        builder.want(fragment)
        answer(builder, connection, histories[fragment].reply(1, 0))
    assert connection.fetched == [blob_of(histories[0].updates[1])]
    builder.handle(FetchFailed(connection.fetched[0], "gone"))
    assert connection.fetched[1:] == [blob_of(histories[1].updates[1])]


def test_whoever_joins_has_a_version_after_one_way_however_fast_the_head_moves_on() -> None:
    history = History()
    builder, connection, _ = make()
    builder.want(0)
    answer(builder, connection, history.reply(2, None, snapshot=0))
    found: list[Built] = []
    for payload in (encode("fp32", history.values[0]), history.updates[1], history.updates[2]):
        builder.want(0)  # with every blob that arrives there is a newer version
        found += deliver(builder, payload)
    assert [built.held.version for built in found] == [2]
    assert connection.asked[-1].base_version == 2, "and goes on from there, not from the beginning"
    answer(builder, connection, history.reply(5, 2))
    for payload in history.updates[3:]:
        builder.want(0)
        found += deliver(builder, payload)
    assert [built.held.version for built in found] == [2, 5]
