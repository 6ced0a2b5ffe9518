"""The broker's core among clients that know every message and keep no rule: it counts what they cost, makes no mistake,
and those who keep the rules go on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import GarbageArrived, MessageArrived, ReadChunk, WriteChunk
from isles.proto.agreement import RunRecord
from isles.proto.errors import MessageError
from isles.proto.ids import ContributionId
from isles.proto.keys import AllowedKey, AllowList, KeyRole
from isles.proto.messages import (
    Accepted,
    BlobRef,
    Channel,
    Chunk,
    Commit,
    Committed,
    Contribution,
    Credit,
    Error,
    Fetch,
    Ingredient,
    Init,
    Initialised,
    Lease,
    Leased,
    Merged,
    Message,
    Offer,
    Recipe,
    Stored,
    Upload,
    VersionInfo,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from tests.fuzz.conftest import Spoiler

Spoilers = Callable[[int], "Spoiler"]

SETTINGS = RoutingSettings(
    chunk_bytes=4096,
    credit_chunks=2,
    num_shards=8,
    versions_kept=3,
    flight_bytes_max=64 << 10,
    sessions_per_key_max=8,
    learners_per_key_max=6,
    uploads_per_key_max=12,
    downloads_per_key_max=12,
)
KEYS: dict[str, tuple[str, KeyRole]] = {
    "h": ("honest", "worker"),
    "o": ("outer", "outer"),
    "a": ("admin", "operator"),
    "w": ("evil-worker", "worker"),
    "v": ("evil-operator", "operator"),
    "r": ("evil-relay", "relay"),
}
"""The first three keep the rules. An outer's key decides what the model becomes, so no outer is among the hostile."""
PARAMETERS = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)


def open_run(run_record: RunRecord) -> Stage:
    allowed = AllowList(keys=tuple(AllowedKey(name=n, role=r, public=letter * 40) for letter, (n, r) in KEYS.items()))
    stage = Stage(SETTINGS, allowed=allowed)
    admin = stage.member("operator", "admin", key="a" * 40)
    admin.join()
    for data in PARAMETERS:
        assert isinstance(admin.send(Upload(blob=blob_of(data)), data), Stored)
    versions = tuple(
        VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(data))
        for number, data in enumerate(PARAMETERS)
    )
    assert isinstance(admin.ask(Init(run_record=run_record, versions=versions)), Initialised)
    return stage


class Hostile:
    """One process with a key that is let in: says anything in any session that it ever saw, forges the others'."""

    def __init__(
        self, stage: Stage, letter: str, spoiler: Spoiler, known: list[Any], samples: tuple[Message, ...]
    ) -> None:
        self.stage, self.letter, self.spoiler, self.known, self.samples = stage, letter, spoiler, known, samples
        self.num_incarnations = 0
        self.said: list[tuple[Message, bytes | None, Channel]] = []
        self.come()

    def come(self) -> None:
        chance = self.spoiler.chance
        self.num_incarnations += 1
        role = {"w": "worker", "v": chance.choice(("operator", "evaluator")), "r": "worker"}[self.letter]
        name = chance.choice(("honest", "outer", "evil-1", "evil-2", "evil-3", f"evil-{self.num_incarnations}", ""))
        incarnation = chance.choice(("aa" * 8, f"{ord(self.letter):08x}{self.num_incarnations:08x}"))
        self.member = self.stage.member(role, name, incarnation, key=self.letter * 40)  # type: ignore[arg-type]
        self.member.join()

    def act(self) -> None:
        chance = self.spoiler.chance
        match chance.randrange(10):
            case 0:
                self.come()
            case 1:
                self.say_header(self.spoiler.spoil_message(chance.choice(self.samples)))
            case 2 | 3:
                self.say(chance.choice(self.samples))
            case 4 if self.said:
                self.say_again(*chance.choice(self.said))
            case 5:
                data = chance.randbytes(chance.choice((1, 4096, 30_000)))
                learner = chance.choice((self.member.id or "evil-1", "honest"))
                name = ContributionId(learner, 0, self.member.incarnation, chance.randrange(9))
                offer = offer_of(name, data, chance.choice((0, 0, 9)))
                self.say(chance.choice((Upload(blob=blob_of(data)), offer)))
            case 6 | 7:
                open_ones = [*self.stage.router.state.uploads._open, 1, 2**53 - 1]
                chunk = Chunk(transfer=chance.choice(open_ones), offset=chance.choice((0, 4096, 8192, 2**53 - 1)))
                self.say(chunk, bytes(chance.choice((0, 1, 4096, 4097, 60_000))), Channel.BULK)
            case 8:
                digest = chance.choice(sorted(self.stage.index.digests()))
                self.say(Fetch(transfer=chance.randrange(4), digest=digest, credit_chunks=1024), channel=Channel.BULK)
            case _:
                offset = chance.choice((1, 24, 960, 4096, 8192, 2**53 - 1))
                self.say(Credit(transfer=chance.randrange(4), offset=offset), channel=Channel.BULK)

    def say(self, message: Message, payload: bytes | None = None, channel: Channel | None = None) -> None:
        chance = self.spoiler.chance
        session = chance.choice((self.member.session, self.member.session, *self.known, "00" * 16))
        spoken = message.model_copy(update={"session": session, "request": chance.randrange(1000)})
        self.say_again(spoken, payload, channel or chance.choice((Channel.CONTROL, Channel.CONTROL, Channel.BULK)))

    def say_again(self, message: Message, payload: bytes | None, channel: Channel) -> None:
        self.said.append((message, payload, channel))
        arrival = MessageArrived(channel, self.member.connection, unpack(pack(message)), payload, self.letter * 40)
        self.stage.hear(arrival)

    def say_header(self, header: bytes) -> None:
        try:
            message = unpack(header)
        except MessageError as error:
            self.stage.hear(GarbageArrived(Channel.CONTROL, self.member.connection, str(error), self.letter * 40))
        else:
            self.say(message)


def offer_of(name: ContributionId, data: bytes, base: int) -> Offer:
    return Offer(
        contribution=Contribution(
            id=name, base_version=base, blob=blob_of(data), codec="int4", tokens=10, steps=1, seconds=1.0, norms=(1.0,)
        )
    )


class Honest:
    """A worker and an outer that do their work: one contribution, one version, and so on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.worker = stage.member("worker", "honest", "ab" * 8, key="h" * 40)
        self.outer = stage.member("outer", "outer", "cd" * 8, key="o" * 40)
        self.worker.join()
        self.outer.join()
        self.version = 0

    def go_on(self) -> None:
        answer = self.outer.ask(Lease(fragments=(0, 1)))
        assert isinstance(answer, Leased)
        data = f"delta on version {self.version} ".encode() * 300
        name = ContributionId("honest", 0, self.worker.incarnation, self.version)
        assert isinstance(self.finish(self.worker, offer_of(name, data, self.version), data), Accepted)
        update = f"update to version {self.version + 1} ".encode() * 300
        assert isinstance(self.finish(self.outer, Upload(blob=blob_of(update)), update), Stored)
        ingredient = Ingredient(
            id=name, digest=blob_of(data).digest, base_version=self.version, tokens=10, steps=1, weight=1.0
        )
        recipe = Recipe(ingredients=(ingredient,), fraction=1.0, merge_rule="mean", settings_digest="2" * 64)
        commit = Commit(
            commit_id=f"{self.version:016x}", fragment=0, epoch=answer.epochs[0], base_version=self.version,
            parameters_sha256="1" * 64, update=blob_of(update), recipe=recipe,
        )  # fmt: skip
        assert isinstance(self.outer.ask(commit), Committed)
        self.version += 1
        assert isinstance(self.finish(self.worker, offer_of(name, data, self.version - 1), data), Merged)
        assert self.fetch(blob_of(update)) == update

    def finish(self, member: Member, ask: Message, data: bytes) -> Message:
        """Sends, while the disk takes its time; the last answer."""
        before = len(self.stage.sent)
        member.send(ask, data)
        for _ in range(50):
            final = [one.message for one in self.stage.sent[before:] if one.connection == member.connection][-1]
            if isinstance(final, Accepted | Stored | Merged):
                return final
            self.stage.work()
            member.send(ask, data)
        return final

    def fetch(self, blob: BlobRef) -> bytes:
        """What a blob holds, taken chunk by chunk."""
        data, before = b"", len(self.stage.sent)
        self.worker.say(Fetch(transfer=1 << 40, digest=blob.digest), channel=Channel.BULK)
        for _ in range(200):
            self.stage.work()
            for send in self.stage.sent[before:]:
                if send.connection == self.worker.connection and isinstance(send.message, Chunk):
                    assert send.message.offset == len(data)
                    data += bytes(send.payload or b"")
            before = len(self.stage.sent)
            if len(data) == blob.size_bytes:
                break
            self.worker.say(Credit(transfer=1 << 40, offset=len(data)), channel=Channel.BULK)
        self.worker.say(Credit(transfer=1 << 40, offset=len(data)), channel=Channel.BULK)
        return data


def check_bounds(stage: Stage) -> None:
    """What docs/concepts/broker.md promises of the memory, by the orders that really wait, not by the books alone."""
    state, settings = stage.router.state, stage.settings
    each_way = max(settings.flight_bytes_max // 2, len(KEYS) * settings.chunk_bytes)
    assert sum(len(one.payload) for one in stage.waiting if isinstance(one, WriteChunk)) <= each_way
    assert sum(one.num_bytes for one in stage.waiting if isinstance(one, ReadChunk)) <= each_way
    assert state.uploads.flight.total <= each_way
    assert state.downloads.flight.total <= each_way
    for name, _ in KEYS.values():
        assert sum(one.key_name == name for one in state.sessions) <= settings.sessions_per_key_max
        assert state.membership.num_learners_of(name) <= settings.learners_per_key_max
        assert state.uploads._num_of_key(name) <= settings.uploads_per_key_max
        assert state.downloads._num_of_key(name) <= settings.downloads_per_key_max
    assert len(state.sessions._by_identity) == len(state.sessions._by_token)


def play(seed: int, num_acts: int, run_record: RunRecord, spoiler: Spoiler, samples: tuple[Message, ...]) -> None:
    chance = random.Random(seed)
    stage = open_run(run_record)
    honest = Honest(stage)
    known = [honest.worker.session, honest.outer.session]
    enemies = [Hostile(stage, letter, spoiler, known, samples) for letter in "wwvvr"]
    stage.is_disk_slow = True
    for number in range(num_acts):
        chance.choice(enemies).act()
        check_bounds(stage)
        if number % 40 == 0:
            honest.go_on()
            check_bounds(stage)
        if chance.random() < 0.2:
            stage.work()
        if chance.random() < 0.05:
            stage.advance(0.5)
            honest.outer.say(Lease(fragments=(0, 1)))
    for _ in range(5):
        stage.work()
    head = stage.index.head(0)
    assert head is not None
    assert (head.version, head.tokens_total) == (honest.version, 10 * honest.version), "the books hold what was done"
    other = stage.index.head(1)
    assert other is not None
    assert other.version == 0
    assert stage.index.row("honest", 0) is not None
    assert not any(isinstance(one.message, Error) and one.message.code == "internal" for one in stage.sent)
    stage.advance(SETTINGS.session_idle_seconds + SETTINGS.upload_idle_seconds)
    stage.work()
    state = stage.router.state
    assert (state.uploads.flight.total, state.downloads.flight.total) == (0, 0), "everything is given back"
    assert list(state.sessions) == []


@pytest.mark.parametrize("seed", range(3))
def test_whatever_others_say_the_honest_go_on_and_the_books_are_right(
    seed: int, run_record: RunRecord, spoilers: Spoilers, every_message: tuple[Message, ...]
) -> None:
    play(seed, 400, run_record, spoilers(seed), every_message)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
def test_the_same_for_much_longer(
    seed: int, run_record: RunRecord, spoilers: Spoilers, every_message: tuple[Message, ...]
) -> None:
    play(seed, 5000, run_record, spoilers(seed), every_message)


def test_a_fetch_that_is_begun_again_and_again_orders_no_more_than_its_share(run_record: RunRecord) -> None:
    stage = open_run(run_record)
    worker = stage.member("worker", "evil-1", "ee" * 8, key="w" * 40)
    worker.join()
    stage.is_disk_slow = True
    for _ in range(500):
        worker.say(Fetch(transfer=1, digest=blob_of(PARAMETERS[0]).digest, credit_chunks=1024), channel=Channel.BULK)
        worker.say(Credit(transfer=1, offset=len(PARAMETERS[0])), channel=Channel.BULK)
    assert sum(one.num_bytes for one in stage.waiting) <= stage.router.state.downloads.flight.share_bytes


def test_credit_for_what_was_not_sent_is_none(run_record: RunRecord) -> None:
    stage = open_run(run_record)
    admin = stage.member("operator", "admin", "ad" * 8, key="a" * 40)
    admin.join()
    data = bytes(200_000)
    assert isinstance(admin.send(Upload(blob=blob_of(data)), data), Stored)
    worker = stage.member("worker", "evil-1", "ee" * 8, key="w" * 40)
    worker.join()
    stage.is_disk_slow = True
    worker.say(Fetch(transfer=1, digest=blob_of(data).digest, credit_chunks=2), channel=Channel.BULK)
    for offset in range(4096, len(data), 4096):
        worker.say(Credit(transfer=1, offset=offset), channel=Channel.BULK)
    assert [one.offset for one in stage.waiting] == [0], "a chunk was ordered, and has not been sent"
