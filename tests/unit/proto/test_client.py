"""The client's protocol core, driven by hand: every wait, every repetition, every end."""

from __future__ import annotations

import hashlib

import pytest

from isles.proto.client import (
    RETRY_SECONDS,
    STALL_SECONDS,
    Answered,
    Client,
    Fetched,
    FetchFailed,
    Hinted,
    Instruction,
    Refused,
    Send,
    Welcomed,
    as_error,
)
from isles.proto.messages import (
    AskHeads,
    AskStatus,
    BlobRef,
    Channel,
    Chunk,
    Credit,
    Done,
    Error,
    ErrorCode,
    Fenced,
    Fetch,
    Grant,
    Heads,
    Hello,
    Hint,
    Limits,
    Message,
    Progress,
    RetryAfter,
    Stored,
    Upload,
    Welcome,
)

CHUNK_BYTES = 4096
INCARNATION = "ab" * 8


def make_client() -> Client:
    return Client(Hello(role="worker", id="us-0", incarnation=INCARNATION))


def welcome(request: int, session: str = "cd" * 8, credit_chunks: int = 2) -> Welcome:
    limits = Limits(chunk_bytes=CHUNK_BYTES, credit_chunks=credit_chunks)
    return Welcome(
        request=request, new_session=session, protocol=(1, 0), broker_incarnation="ee" * 8, seq=0, limits=limits
    )


def sent(instructions: list[Instruction]) -> list[Message]:
    return [instruction.message for instruction in instructions if isinstance(instruction, Send)]


def joined(client: Client, now: float = 0.0, **kwargs: int) -> Client:
    [hello] = sent(client.start(now))
    client.handle(welcome(hello.request, **kwargs), now)
    return client


def blob_of(data: bytes) -> BlobRef:
    return BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def test_hello_is_repeated_until_there_is_a_welcome() -> None:
    client = make_client()
    [hello] = sent(client.start(0.0))
    assert isinstance(hello, Hello)
    assert client.tick(0.01) == []
    deadline = client.next_deadline
    assert deadline is not None
    assert sent(client.tick(deadline)) == [hello]
    assert client.handle(welcome(hello.request), 1.0) == [Welcomed(welcome(hello.request))]
    assert client.next_deadline is None


def test_a_welcome_that_answers_an_older_hello_is_ignored() -> None:
    client = make_client()
    [old] = sent(client.start(0.0))
    [new] = sent(client.start(1.0))
    assert client.handle(welcome(old.request), 1.1) == []
    assert client.handle(welcome(new.request), 1.2) != []
    assert client.handle(welcome(new.request), 1.3) == []


@pytest.mark.parametrize("code", ["protocol", "run", "manifest", "settings"])
def test_a_refused_hello_ends_the_client(code: ErrorCode) -> None:
    client = make_client()
    [hello] = sent(client.start(0.0))
    client.ask(AskHeads(), 0.0)
    assert client.handle(Error(request=hello.request, code=code, text="no"), 0.1) == [Refused(code, "no")]
    assert client.next_deadline is None
    assert client.tick(1e9) == []


def test_a_damaged_store_turns_away_who_is_not_in_yet_and_keeps_others_dialling() -> None:
    client = make_client()
    [hello] = sent(client.start(0.0))
    damaged = Error(request=hello.request, code="damaged", text="the entry of version 3 is damaged")
    assert client.handle(damaged, 0.1) == [Refused("damaged", damaged.text)]
    client = make_client()
    [hello] = sent(client.start(0.0))
    client.handle(welcome(hello.request), 0.1)
    [again] = sent(client.handle(Error(code="unknown-session", text=""), 1.0))
    assert client.handle(damaged.model_copy(update={"request": again.request}), 1.1) == []
    assert client.next_deadline is not None


def test_what_is_asked_before_there_is_a_session_is_sent_when_there_is_one() -> None:
    client = make_client()
    [hello] = sent(client.start(0.0))
    assert client.ask(AskHeads(), 0.0) == []
    asks = sent(client.handle(welcome(hello.request), 0.1))
    assert [type(ask) for ask in asks] == [AskHeads]
    assert asks[0].session == "cd" * 8


def test_status_is_asked_without_a_session() -> None:
    client = make_client()
    assert [type(message) for message in sent(client.ask(AskStatus(), 0.0))] == [AskStatus]


def test_an_ask_is_repeated_with_the_same_number_until_it_is_answered() -> None:
    client = joined(make_client())
    ask = AskHeads()
    [first] = sent(client.ask(ask, 10.0))
    assert client.tick(10.0 + RETRY_SECONDS / 2) == []
    [second] = sent(client.tick(10.0 + RETRY_SECONDS))
    assert second == first
    reply = Heads(request=first.request, broker_incarnation="ee" * 8, seq=1, heads=())
    assert client.handle(reply, 12.0) == [Answered(ask, reply)]
    assert client.handle(reply, 12.1) == []
    assert client.tick(1e9) == []


def test_the_waits_between_repetitions_grow_and_are_bounded() -> None:
    client = joined(make_client())
    client.ask(AskHeads(), 0.0)
    waits, now = [], 0.0
    for _ in range(8):
        deadline = client.next_deadline
        assert deadline is not None
        waits.append(deadline - now)
        now = deadline
        assert len(sent(client.tick(now))) == 1
    assert waits == sorted(waits)
    assert waits[-1] == waits[-2] == 8.0


def test_after_a_forgotten_session_everything_unanswered_is_asked_again() -> None:
    client = joined(make_client())
    client.ask(AskHeads(), 0.0)
    client.fetch(blob_of(b"x"), 0.0, bytes_max=10)
    [hello] = sent(client.handle(Error(code="unknown-session", text=""), 1.0))
    assert isinstance(hello, Hello)
    assert client.handle(Error(code="unknown-session", text=""), 1.0) == []  # one HELLO is enough
    news = client.handle(welcome(hello.request, session="99" * 8), 1.1)
    assert isinstance(news[0], Welcomed)
    assert [(type(message), message.session) for message in sent(news)] == [(AskHeads, "99" * 8), (Fetch, "99" * 8)]


def test_a_newer_incarnation_ends_the_client() -> None:
    client = joined(make_client())
    [ask] = sent(client.ask(Progress(), 0.0))
    [news] = client.handle(Fenced(request=ask.request), 0.1)
    assert isinstance(news, Refused)
    assert news.code == "fenced"


def test_an_old_epoch_is_an_answer_and_not_the_end() -> None:
    client = joined(make_client())
    ask = AskHeads()
    [message] = sent(client.ask(ask, 0.0))
    fenced = Fenced(request=message.request, epoch=3)
    assert client.handle(fenced, 0.1) == [Answered(ask, fenced)]
    assert not client.is_refused


def test_retry_after_is_obeyed() -> None:
    client = joined(make_client())
    [message] = sent(client.ask(AskHeads(), 0.0))
    assert client.handle(RetryAfter(request=message.request, seconds=30.0, reason="disk"), 1.0) == []
    assert client.tick(30.9) == []
    assert sent(client.tick(31.0)) == [message]


def test_a_forgotten_ask_is_not_repeated() -> None:
    client = joined(make_client())
    client.ask(AskHeads(), 0.0)
    assert client.is_asking(AskHeads)
    client.forget(lambda message: isinstance(message, AskHeads))
    assert not client.is_asking(AskHeads)
    assert client.tick(1e9) == []


# ------------------------------------------------------------------------------------------------------------ uploads


def pieces(instructions: list[Instruction]) -> list[tuple[int, bytes]]:
    return [
        (instruction.message.offset, bytes(instruction.payload or b""))
        for instruction in instructions
        if isinstance(instruction, Send) and isinstance(instruction.message, Chunk)
    ]


def test_an_upload_sends_no_more_than_its_credit_and_every_byte_once() -> None:
    client = joined(make_client())
    data = bytes(range(256)) * 80  # five chunks
    upload = Upload(blob=blob_of(data))
    [ask] = sent(client.ask(upload, 0.0, data))
    arrived = b""
    instructions = client.handle(Grant(request=ask.request, transfer=5, offset=0, credit_chunks=2), 0.1)
    while len(arrived) < len(data):
        chunks = pieces(instructions)
        assert 1 <= len(chunks) <= 2
        instructions = []
        for offset, piece in chunks:
            assert offset == len(arrived)
            arrived += piece
            instructions += client.handle(Credit(transfer=5, offset=len(arrived)), 0.2)
    assert arrived == data
    stored = Stored(request=ask.request, digest=upload.blob.digest)
    assert client.handle(stored, 0.3) == [Answered(upload, stored)]


def test_an_upload_that_stalls_is_asked_for_again_and_resumes_where_the_broker_says() -> None:
    client = joined(make_client())
    data = bytes(5 * CHUNK_BYTES)
    [ask] = sent(client.ask(Upload(blob=blob_of(data)), 0.0, data))
    client.handle(Grant(request=ask.request, transfer=5, offset=0, credit_chunks=2), 0.0)
    assert sent(client.tick(STALL_SECONDS - 0.1)) == []
    assert sent(client.tick(STALL_SECONDS)) == [ask]
    chunks = pieces(client.handle(Grant(request=ask.request, transfer=6, offset=CHUNK_BYTES, credit_chunks=2), 20.0))
    assert [offset for offset, _ in chunks] == [CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_a_grant_beyond_the_end_sends_nothing() -> None:
    client = joined(make_client())
    [ask] = sent(client.ask(Upload(blob=blob_of(b"abc")), 0.0, b"abc"))
    assert client.handle(Grant(request=ask.request, transfer=5, offset=3, credit_chunks=2), 0.1) == []
    assert client.handle(Credit(transfer=5, offset=1 << 40), 0.1) == []


def test_an_upload_that_arrives_damaged_is_repeated_and_then_given_up() -> None:
    client = joined(make_client())
    upload = Upload(blob=blob_of(b"abc"))
    [ask] = sent(client.ask(upload, 0.0, b"abc"))
    damaged = Error(request=ask.request, code="damaged", text="digest")
    for _ in range(3):
        assert sent(client.handle(damaged, 0.1)) == [ask]
    assert client.handle(damaged, 0.1) == [Answered(upload, damaged)]


# ---------------------------------------------------------------------------------------------------------- downloads


def test_a_fetched_blob_is_whole_and_has_its_digest() -> None:
    client = joined(make_client())
    data = bytes(range(256)) * 40
    blob = blob_of(data)
    [fetch] = sent(client.fetch(blob, 0.0, bytes_max=1 << 20))
    assert isinstance(fetch, Fetch)
    news: list[Instruction] = []
    for offset in range(0, len(data), CHUNK_BYTES):
        news = client.handle(Chunk(transfer=fetch.transfer, offset=offset), 0.1, data[offset : offset + CHUNK_BYTES])
        assert isinstance(sent(news)[0], Credit)
    assert news[-1] == Fetched(blob, bytearray(data))
    assert client.next_deadline is None


def test_a_chunk_that_is_not_the_next_one_is_dropped_and_the_rest_fetched_again() -> None:
    client = joined(make_client())
    data = bytes(3 * CHUNK_BYTES)
    [fetch] = sent(client.fetch(blob_of(data), 0.0, bytes_max=1 << 20))
    assert isinstance(fetch, Fetch)
    client.handle(Chunk(transfer=fetch.transfer, offset=0), 0.1, data[:CHUNK_BYTES])
    assert client.handle(Chunk(transfer=fetch.transfer, offset=2 * CHUNK_BYTES), 0.2, data[:CHUNK_BYTES]) == []
    [again] = sent(client.tick(0.1 + STALL_SECONDS))
    assert isinstance(again, Fetch)
    assert again.offset == CHUNK_BYTES


def test_a_blob_larger_than_its_asker_allows_is_not_asked_for() -> None:
    client = joined(make_client())
    [news] = client.fetch(BlobRef(digest="0" * 64, size_bytes=1 << 50), 0.0, bytes_max=1 << 20)
    assert isinstance(news, FetchFailed)
    assert client.next_deadline is None


def test_a_blob_that_runs_past_its_size_or_has_another_digest_is_given_up_after_a_few_tries() -> None:
    for payload in (b"toolong", b"xyz"):
        client = joined(make_client())
        [fetch] = sent(client.fetch(blob_of(b"abc"), 0.0, bytes_max=10))
        assert isinstance(fetch, Fetch)
        news: list[Instruction] = []
        for _ in range(4):
            news = client.handle(Chunk(transfer=fetch.transfer, offset=0), 0.1, payload)
        assert isinstance(news[-1], FetchFailed)


def test_the_same_blob_is_fetched_once_however_often_it_is_asked_for() -> None:
    client = joined(make_client())
    assert len(client.fetch(blob_of(b"abc"), 0.0, bytes_max=10)) == 1
    assert client.fetch(blob_of(b"abc"), 0.0, bytes_max=10) == []


def test_a_blob_the_broker_does_not_have_is_reported() -> None:
    client = joined(make_client())
    blob = blob_of(b"abc")
    [fetch] = sent(client.fetch(blob, 0.0, bytes_max=10))
    news = client.handle(Error(request=fetch.request, code="not-found", text="gone"), 0.1)
    assert news == [FetchFailed(blob, "gone", "not-found")]


def test_a_blob_that_is_put_off_is_asked_for_again_when_the_broker_says() -> None:
    client = joined(make_client())
    [fetch] = sent(client.fetch(blob_of(b"abc"), 0.0, bytes_max=10))
    assert client.handle(RetryAfter(request=fetch.request, seconds=2.0, reason="busy"), 0.1) == []
    assert client.tick(2.0) == []
    [again] = sent(client.tick(2.1))
    assert isinstance(again, Fetch)


def test_hints_are_handed_on_and_strangers_ignored() -> None:
    client = joined(make_client())
    hint = Hint(broker_incarnation="ee" * 8, seq=1, kind="beat")
    assert client.handle(hint, 0.1) == [Hinted(hint)]
    assert client.heard_at == 0.1
    for stray in (Done(request=77), Credit(transfer=77, offset=1), Chunk(transfer=77, offset=0)):
        assert client.handle(stray, 0.2, b"x") == []


def test_the_channels_are_control_for_asks_and_bulk_for_bytes() -> None:
    client = joined(make_client())
    channels = {}
    for instruction in client.ask(AskHeads(), 0.0) + client.fetch(blob_of(b"abc"), 0.0, bytes_max=10):
        assert isinstance(instruction, Send)
        channels[type(instruction.message)] = instruction.channel
    assert channels == {AskHeads: Channel.CONTROL, Fetch: Channel.BULK}


def test_an_answer_of_another_kind_is_an_error_and_the_brokers_own_error_stays_what_it_is() -> None:
    own = Error(code="damaged", text="blob 12 is damaged")
    assert as_error(own) is own
    assert (as_error(Done()).code, as_error(Done()).text) == ("bad-message", "the answer is Done")
