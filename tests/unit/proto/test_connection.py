"""The shell around the client: performing orders, waiting, giving up."""

from __future__ import annotations

import pytest

from isles.proto.client import Answered, Hinted, Welcomed
from isles.proto.clock import ManualClock, SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import FencedError, RefusedError, UnreachableError
from isles.proto.messages import (
    AskHeads,
    AskStatus,
    Channel,
    Error,
    Fenced,
    Heads,
    Hello,
    Hint,
    Limits,
    Message,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.memory import MemoryBroker, MemoryClient

HELLO = Hello(role="operator", id="me", incarnation="ab" * 8)
WELCOME = Welcome(new_session="cd" * 8, protocol=(1, 0), broker_incarnation="ee" * 8, seq=0, limits=Limits())


class Scripted(MemoryBroker):
    """Answers each message of a client at once, as a script says."""

    def __init__(self, *replies: Message) -> None:
        super().__init__()
        self.replies = list(replies)
        self.heard: list[Message] = []

    def receive(self, arrival: object) -> None:
        message = unpack(arrival.header)  # type: ignore[attr-defined]
        self.heard.append(message)
        if self.replies:
            reply = self.replies.pop(0).model_copy(update={"request": message.request})
            self.send(arrival.channel, arrival.connection, pack(reply))  # type: ignore[attr-defined]


def test_a_connection_joins_asks_and_hands_on_what_it_hears() -> None:
    heads = Heads(broker_incarnation="ee" * 8, seq=1, heads=())
    broker = Scripted(WELCOME, heads)
    connection = Connection(HELLO, broker.connect(), ManualClock())
    assert isinstance(connection.wait_for_welcome(1.0, address="here"), Welcomed)
    ask = AskHeads()
    connection.ask(ask)
    [answered] = connection.poll(0.0)
    assert isinstance(answered, Answered)
    assert answered.ask is ask
    broker.publish(pack(Hint(broker_incarnation="ee" * 8, seq=2, kind="beat")))
    assert [type(news) for news in connection.poll(0.0)] == [Hinted]


def test_bytes_that_are_no_message_are_skipped() -> None:
    broker = Scripted(WELCOME)
    connection = Connection(HELLO, broker.connect(), ManualClock())
    connection.wait_for_welcome(1.0, address="here")
    broker.send(Channel.CONTROL, b"1", b"\xc1garbage")
    assert connection.poll(0.0) == []


def test_a_broker_that_never_answers_is_unreachable_after_the_given_time() -> None:
    connection = Connection(HELLO, MemoryBroker().connect(), SystemClock())
    with pytest.raises(UnreachableError, match=r"tcp://here:1 within 0\.02 s"):
        connection.wait_for_welcome(0.02, address="tcp://here:1")
    with pytest.raises(UnreachableError):
        connection.ask_and_wait(AskStatus(), 0.02, address="tcp://here:1")


def test_a_refusal_is_raised_with_the_brokers_own_words() -> None:
    broker = Scripted(Error(code="run", text="this broker serves demo"))
    connection = Connection(HELLO, broker.connect(), ManualClock())
    with pytest.raises(RefusedError, match="this broker serves demo"):
        connection.wait_for_welcome(1.0, address="here")


def test_a_fence_is_raised_as_what_it_is() -> None:
    broker = Scripted(WELCOME, Fenced())
    connection = Connection(HELLO, broker.connect(), ManualClock())
    connection.wait_for_welcome(1.0, address="here")
    with pytest.raises(FencedError):
        connection.ask_and_wait(AskHeads(), 1.0, address="here")


class Forgetful(MemoryBroker):
    """Takes nothing from its clients for as long as it is told so."""

    is_full = False

    def connect(self, key: str = "") -> MemoryClient:
        client, broker = super().connect(key), self
        send = client.send
        client.send = lambda *message: not broker.is_full and send(*message)  # type: ignore[method-assign]
        return client


def test_whatever_is_dropped_on_either_way_is_counted_once_and_repeated() -> None:
    broker, clock = Forgetful(), ManualClock()
    connection = Connection(HELLO, broker.connect(), clock)
    broker.is_full = True
    connection.start()
    assert connection.take_dropped() == {"unsent": 1, "unread": 0, "hints": 0}
    broker.is_full = False
    clock.advance(9.0)
    connection.poll(0.0)
    assert [type(unpack(arrival.header)) for arrival in broker.poll(0.0)] == [Hello]
    assert connection.take_dropped() == {}

    broker.send(Channel.CONTROL, b"1", b"\xc1garbage")
    for incarnation, seq in (("ee", 7), ("ee", 8), ("ee", 12), ("ee", 12), ("dd", 900), ("dd", 901), ("dd", 903)):
        broker.publish(pack(Hint(broker_incarnation=incarnation * 8, seq=seq, kind="beat")))
    connection.poll(0.0)
    assert connection.take_dropped() == {"unsent": 0, "unread": 1, "hints": 4}
    assert connection.take_dropped() == {}
