"""What one key may have of a broker's memory, sessions and time; and that honest learners never meet a limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.quotas import RELAY_SHARES, Flight, OfferRates
from isles.brokers.sessions import Owner
from isles.brokers.stage import Member, Stage, blob_of
from isles.brokers.vocabulary import MessageArrived, WriteChunk
from isles.proto.client import Answered, Client, Fetched, Instruction, Send
from isles.proto.ids import ContributionId
from isles.proto.keys import AllowList
from isles.proto.messages import (
    Accepted,
    AskHeads,
    BlobRef,
    Channel,
    Chunk,
    Contribution,
    Credit,
    Error,
    Fetch,
    Grant,
    Heads,
    Hello,
    Initialised,
    Leave,
    Message,
    Offer,
    RetryAfter,
    Stored,
    Upload,
    Welcome,
)

Allow = Callable[..., AllowList]
Initialise = Callable[[Member], Initialised]

TIGHT = RoutingSettings(chunk_bytes=4096, credit_chunks=2, num_shards=8, flight_bytes_max=32 << 10)
"""16 KiB each way: with three names, one chunk and a bit for each."""


def limited(stage: Stage, **limits: int) -> None:
    """Changes limits of a broker that runs."""
    state = stage.router.state
    settings = state.settings.model_copy(update=limits)
    stage.settings = state.settings = state.uploads.settings = state.downloads.settings = settings
    state.sessions.num_per_key_max = settings.sessions_per_key_max
    state.offers.per_minute_max = settings.offers_per_minute_max


def later(answer: Message) -> str:
    assert isinstance(answer, RetryAfter), answer
    return answer.reason


class Honest:
    """The real core of a client, connected to a stage."""

    def __init__(self, stage: Stage, name: str, key: str, incarnation: str) -> None:
        self.stage = stage
        self.key = key
        self.connection = f"honest/{name}/{incarnation}".encode()
        self.client = Client(Hello(role="worker", id=name, incarnation=incarnation))
        self.news: list[Instruction] = []
        self.num_put_off = 0
        self._num_read = 0
        self.do(self.client.start(stage.now))

    def do(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Send):
                payload = None if one.payload is None else bytes(one.payload)
                self.stage.hear(MessageArrived(one.channel, self.connection, one.message, payload, self.key))
            else:
                self.news.append(one)

    def listen(self) -> None:
        """Takes what the broker has sent since the last time."""
        while self._num_read < len(self.stage.sent):
            send = self.stage.sent[self._num_read]
            self._num_read += 1
            if send.connection == self.connection:
                self.num_put_off += isinstance(send.message, RetryAfter)
                payload = None if send.payload is None else bytes(send.payload)
                self.do(self.client.handle(send.message, self.stage.now, payload))

    def offer(self, data: bytes) -> None:
        hello = self.client.hello
        contribution = Contribution(
            id=ContributionId(hello.id, 0, hello.incarnation, 1),
            base_version=0,
            blob=blob_of(data),
            codec="int4",
            tokens=1,
            steps=1,
            seconds=1.0,
            norms=(1.0,),
        )
        self.do(self.client.ask(Offer(contribution=contribution), self.stage.now, data))

    def fetch(self, blob: BlobRef) -> None:
        self.do(self.client.fetch(blob, self.stage.now, bytes_max=1 << 30))

    @property
    def replies(self) -> list[Message]:
        return [one.reply for one in self.news if isinstance(one, Answered)]


def bound(stage: Stage) -> int:
    """Of payload bytes in memory, each way."""
    flight = stage.router.state.uploads.flight
    return max(flight.bytes_max, flight.num_keys * stage.settings.chunk_bytes)


def bytes_waiting(stage: Stage) -> int:
    return sum(len(order.payload) for order in stage.waiting if isinstance(order, WriteChunk))


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture
def tight(allow: Allow, initialise: Initialise) -> Stage:
    """A broker with very little memory for payloads, and a run."""
    stage = Stage(TIGHT, allowed=allow("sea"))
    founder = stage.member("operator", "founder", key="a" * 40)
    founder.join()
    initialise(founder)
    return stage


class Hostile:
    """A worker that knows the protocol and keeps none of its rules."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self.stage = stage
        self.chance = chance
        self.numbers = count(1)
        self.transfers = [1]
        self.come()

    def come(self) -> None:
        name = f"evil-{self.chance.randrange(3)}"
        self.member = self.stage.member("worker", name, f"{next(self.numbers):016x}", key="s" * 40)
        self.member.join()

    def act(self) -> None:
        chance, size = self.chance, self.stage.settings.chunk_bytes
        match chance.randrange(8):
            case 0:
                self.come()
            case 1 | 2:
                data = chance.randbytes(chance.choice((1, size, 5 * size)))
                answer = self.member.ask(Upload(blob=blob_of(data)))
                if isinstance(answer, Grant):
                    self.transfers.append(answer.transfer)
            case 3 | 4 | 5:
                transfer = chance.choice(self.transfers)
                upload = self.stage.router.state.uploads._open.get(transfer)
                offset, length = (upload.received, size) if upload is not None else (0, size)
                if chance.random() < 0.3:
                    offset, length = chance.choice((0, size, 1 << 40)), chance.choice((0, 1, size, size + 1))
                self.member.say(Chunk(transfer=transfer, offset=offset), bytes(length), Channel.BULK)
            case 6:
                blob = chance.choice(sorted(self.stage.index.digests()))
                fetch = Fetch(transfer=chance.randrange(9), digest=blob, credit_chunks=chance.choice((1, 1024)))
                self.member.say(fetch, channel=Channel.BULK)
            case 7:
                offset = chance.choice((0, size, 1 << 40))
                self.member.say(Credit(transfer=chance.randrange(9), offset=offset), channel=Channel.BULK)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_sent_the_payloads_in_memory_stay_within_the_bound_and_others_go_on(
    tight: Stage, seed: int
) -> None:
    chance = random.Random(seed)
    big = chance.randbytes(60_000)
    founder = tight.member("operator", "founder", key="a" * 40)
    founder.join()
    assert isinstance(founder.send(Upload(blob=blob_of(big)), big), Stored)
    tight.is_disk_slow = True
    enemies = [Hostile(tight, chance) for _ in range(4)]
    honest = Honest(tight, "eu-1", "e" * 40, "ee" * 8)
    honest.listen()
    honest.offer(chance.randbytes(30_000))
    honest.fetch(blob_of(big))
    state = tight.router.state
    for _ in range(400):
        chance.choice(enemies).act()
        honest.listen()
        assert bytes_waiting(tight) <= bound(tight)
        assert state.uploads.flight.total == bytes_waiting(tight)
        assert state.downloads.flight.total <= bound(tight)
        if chance.random() < 0.3:
            now_done, tight.waiting = tight.waiting[:2], tight.waiting[2:]
            later_done, tight.waiting = tight.waiting, now_done
            tight.work()
            tight.waiting = later_done + tight.waiting
        if chance.random() < 0.05:
            tight.advance(1.0)
            honest.do(honest.client.tick(tight.now))
    while tight.waiting:
        tight.work()
        honest.listen()
    for _ in range(30):  # whatever a full broker put off is asked for again
        tight.advance(1.0)
        honest.do(honest.client.tick(tight.now))
        honest.listen()
        while tight.waiting:
            tight.work()
            honest.listen()
    assert any(isinstance(reply, Accepted) for reply in honest.replies)
    assert any(isinstance(one, Fetched) for one in honest.news)
    tight.advance(tight.settings.session_idle_seconds + tight.settings.upload_idle_seconds)
    assert (state.uploads.flight.total, state.downloads.flight.total) == (0, 0), "everything is given back"


def test_many_of_one_key_send_and_fetch_more_than_fits_at_once_and_all_arrive(tight: Stage) -> None:
    chance = random.Random(1)
    tight.is_disk_slow = True
    crowd = [Honest(tight, f"us-{number}", "s" * 40, f"{number:016x}") for number in range(12)]
    [head] = [info for info in tight.index.heads() if info.fragment == 0]
    assert head.parameters is not None
    for one in crowd:
        one.listen()
        one.offer(chance.randbytes(20_000))
        one.fetch(head.parameters)
    num_turns = 0
    while not all(one.replies and any(isinstance(news, Fetched) for news in one.news) for one in crowd):
        num_turns += 1
        assert num_turns < 2000, "somebody is forgotten"
        assert bytes_waiting(tight) <= bound(tight)
        first, tight.waiting = tight.waiting[:1], tight.waiting[1:]
        rest, tight.waiting = tight.waiting, first
        tight.work()
        tight.waiting = rest + tight.waiting
        for one in crowd:
            one.listen()
    assert all(isinstance(one.replies[0], Accepted) for one in crowd)
    assert {one.num_put_off for one in crowd} == {0}, "nobody is told to come later"


def test_the_share_of_a_key_is_its_own(tight: Stage) -> None:
    flight = Flight(bytes_max=900, share_bytes_min=100, num_keys=3)
    flight.take("a", 300)
    assert (flight.room("a"), flight.room("b"), flight.room("c")) == (0, 300, 300)
    flight.num_keys = 30
    assert (flight.share_bytes, flight.room("a")) == (100, -200)
    flight.give_back("a", 300)
    assert (flight.total, flight.room("a")) == (0, 100)


def test_more_names_in_the_list_make_the_shares_smaller(stage: Stage, allow: Allow) -> None:
    share = stage.router.state.uploads.flight
    assert share.num_keys == 5 + RELAY_SHARES, "five names, and a relay"
    assert share.share_bytes == share.bytes_max // (5 + RELAY_SHARES)
    assert share.share_of("relay-1") == RELAY_SHARES * share.share_bytes
    stage.admit(allow("s", u=("us-1", "worker"), v=("us-1", "worker")))
    assert share.num_keys == 2, "two keys of one name are one"
    assert share.share_bytes == share.bytes_max // 2


# -------------------------------------------------------------------------------------------------------------- limits


def test_the_open_uploads_of_a_key_are_bounded_and_anothers_are_not_its(
    stage: Stage, come: Callable[..., Member]
) -> None:
    limited(stage, uploads_per_key_max=2)
    first, second, other = come("s", name="a"), come("s", name="b"), come("u", name="c")
    for number, member in enumerate((first, second)):
        assert isinstance(member.ask(Upload(blob=blob_of(b"%d" % number))), Grant)
    assert "uploads_per_key_max" in later(second.ask(Upload(blob=blob_of(b"one more"))))
    assert isinstance(other.ask(Upload(blob=blob_of(b"another"))), Grant)
    stage.advance(stage.settings.upload_idle_seconds + 1)
    assert isinstance(second.ask(Upload(blob=blob_of(b"one more"))), Grant), "nothing was lost by waiting"


def test_the_fetches_of_a_key_are_bounded(stage: Stage, come: Callable[..., Member]) -> None:
    limited(stage, downloads_per_key_max=2)
    blob = blob_of(b"parameters of fragment 0" * 40)
    stage.is_disk_slow = True
    first, second, other = come("s", name="a"), come("s", name="b"), come("u", name="c")
    for member in (first, second):
        assert member.say(Fetch(transfer=1, digest=blob.digest), channel=Channel.BULK) == []
    [send] = second.say(Fetch(transfer=2, digest=blob.digest), channel=Channel.BULK)
    assert "downloads_per_key_max" in later(send.message)
    assert other.say(Fetch(transfer=1, digest=blob.digest), channel=Channel.BULK) == []


def test_the_sessions_of_a_key_are_bounded(stage: Stage, come: Callable[..., Member]) -> None:
    limited(stage, sessions_per_key_max=2)
    first, _ = come("s", name="a"), come("s", name="b")
    third = stage.member("worker", "c", "cc" * 8, key="s" * 40)
    assert "sessions_per_key_max" in later(third.join())
    assert isinstance(come("u", name="d").ask(AskHeads()), Heads)
    assert isinstance(first.join(), Welcome), "a repeated HELLO opens no other one"
    stage.advance(stage.settings.session_idle_seconds + 1)
    assert isinstance(third.join(), Welcome)


def test_a_hello_that_is_put_off_retires_nobody(stage: Stage, come: Callable[..., Member]) -> None:
    limited(stage, sessions_per_key_max=1)
    member = come("s", name="a")
    later(stage.member("worker", "a", "cc" * 8, key="s" * 40).join())
    assert isinstance(member.ask(AskHeads()), Heads)


def test_the_offers_of_a_learner_in_a_minute_are_bounded(
    stage: Stage, come: Callable[..., Member], contribute: Callable[..., Contribution]
) -> None:
    limited(stage, offers_per_minute_max=5)
    first, second = come("s", name="a"), come("s", name="b")
    for number in range(5):
        first.ask(Offer(contribution=contribute(first, number)))
    stage.now += 20.0
    answer = first.ask(Offer(contribution=contribute(first, 5)))
    assert isinstance(answer, RetryAfter)
    assert ("offers_per_minute_max" in answer.reason, answer.seconds) == (True, 40.0)
    assert not isinstance(second.ask(Offer(contribution=contribute(second, 0))), RetryAfter), "of each learner its own"
    stage.now += 40.0
    assert not isinstance(first.ask(Offer(contribution=contribute(first, 5))), RetryAfter)


def test_minutes_that_are_over_are_forgotten() -> None:
    rates = OfferRates(1)
    for number in range(100):
        rates.count(Owner("worker", f"l-{number}", "key"), now=float(number))
    rates.forget(now=120.0)
    assert len(rates._counted) == 39, "those that began less than a minute ago"


def test_stored_bytes_that_nothing_refers_to_are_bounded(stage: Stage, come: Callable[..., Member]) -> None:
    limited(stage, unused_bytes_per_key_max=1000)
    worker = come("s", name="a")
    assert isinstance(worker.send(Upload(blob=blob_of(b"a" * 900)), b"a" * 900), Stored)
    assert "unused_bytes_per_key_max" in later(worker.ask(Upload(blob=blob_of(b"b" * 200))))
    assert isinstance(come("u", name="c").ask(Upload(blob=blob_of(b"b" * 200))), Grant)
    stage.advance(stage.settings.unused_blob_seconds + 1)
    stage.advance(stage.settings.flush_seconds)
    worker.join()
    assert isinstance(worker.ask(Upload(blob=blob_of(b"b" * 200))), Grant), "once they are gone there is room again"


def test_stored_blobs_that_nothing_refers_to_are_counted_however_short_they_are(
    stage: Stage, come: Callable[..., Member]
) -> None:
    limited(stage, unused_blobs_per_key_max=3)
    worker = come("s", name="a")
    for text in (b"a", b"b"):
        assert isinstance(worker.send(Upload(blob=blob_of(text)), text), Stored)
    assert isinstance(worker.ask(Upload(blob=blob_of(b"c"))), Grant)
    assert "unused_blobs_per_key_max" in later(worker.ask(Upload(blob=blob_of(b"d")))), "one is under way"
    assert isinstance(worker.send(Upload(blob=blob_of(b"a")), b"a"), Stored), "what is there costs nothing more"
    assert isinstance(come("u", name="c").ask(Upload(blob=blob_of(b"d"))), Grant)
    stage.advance(stage.settings.unused_blob_seconds + 1)
    stage.advance(stage.settings.flush_seconds)
    worker.join()
    assert isinstance(worker.ask(Upload(blob=blob_of(b"d"))), Grant), "once they are gone there is room again"


def test_no_contribution_is_longer_than_its_fragment_can_make_it(
    stage: Stage, worker: Member, contribute: Callable[..., Contribution]
) -> None:
    huge = contribute(worker, 1).model_copy(update={"blob": BlobRef(digest="5e" * 32, size_bytes=(16 << 20) + 100)})
    answer = worker.ask(Offer(contribution=huge))
    assert isinstance(answer, Error)
    assert answer.code == "too-large"


def test_one_client_with_many_fetches_reads_them_in_turn_without_being_put_off(
    stage: Stage, come: Callable[..., Member]
) -> None:
    limited(stage, window_bytes_per_client_max=4 * 4096)
    data = [bytes([number]) * 40_000 for number in range(6)]
    outer = come("o", "outer", "outer-1")
    for one in data:
        assert isinstance(outer.send(Upload(blob=blob_of(one)), one), Stored)
    honest = Honest(stage, "us-1", "u" * 40, "ab" * 8)
    stage.is_disk_slow = True
    honest.listen()
    for one in data:
        honest.fetch(blob_of(one))
    flight = stage.router.state.downloads.flight
    while stage.waiting:
        assert flight.total <= 4 * 4096 + 4 * 4096
        stage.work()
        honest.listen()
    fetched = [one.data for one in honest.news if isinstance(one, Fetched)]
    assert sorted(bytes(one) for one in fetched) == data
    assert honest.num_put_off == 0


def test_256_learners_that_share_a_key_never_meet_a_limit(
    allow: Allow, initialise: Initialise, payload: Callable[[Member, int], bytes]
) -> None:
    stage = Stage(RoutingSettings(chunk_bytes=4096, num_shards=256), allowed=allow("sa"))
    founder = stage.member("operator", "founder", key="a" * 40)
    founder.join()
    initialise(founder)
    crowd: list[Member] = []
    for number in range(256):
        member = stage.member("worker", "", f"{number:016x}", key="s" * 40)
        answer = member.join()
        assert isinstance(answer, Welcome)
        member.id = answer.learner
        crowd.append(member)
    assert len({member.id for member in crowd}) == 256
    stage.is_disk_slow = True
    for number, member in enumerate(crowd):
        honest = blob_of(b"%d" % number)
        contribution = Contribution(
            id=ContributionId(member.id, 0, member.incarnation, 1),
            base_version=0,
            blob=honest,
            codec="int4",
            tokens=1,
            steps=1,
            seconds=1.0,
            norms=(1.0,),
        )
        assert isinstance(member.send(Offer(contribution=contribution), b"%d" % number), Grant)
        blob = blob_of(b"parameters of fragment 0" * 40)
        assert member.say(Fetch(transfer=1, digest=blob.digest), channel=Channel.BULK) == []
    stage.work()
    while stage.waiting:
        stage.work()
    assert [send for send in stage.sent if isinstance(send.message, RetryAfter | Error)] == []
    assert sum(isinstance(send.message, Accepted) for send in stage.sent) == 256
    for member in crowd:
        member.ask(Leave())
