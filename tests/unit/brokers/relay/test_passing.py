"""Questions on their way through a relay: each has one number, one answer, and a limit."""

from __future__ import annotations

import pytest

from isles.brokers.relay import passing
from isles.brokers.relay.passing import PASSED_REQUESTS_FROM, PASSED_SECONDS, Passing
from isles.brokers.vocabulary import MessageArrived
from isles.proto.messages import AskHeads, Channel, Hello, Message


def arrival(request: int, connection: bytes = b"a", message: Message | None = None) -> MessageArrived:
    asked = (message or AskHeads()).addressed(request=request, session="cd" * 8)
    return MessageArrived(Channel.CONTROL, connection, asked)


def test_a_question_that_is_repeated_keeps_its_number_and_any_answer_will_do() -> None:
    waiting = Passing()
    first = waiting.pass_on(arrival(7), "", 0.0)
    again = waiting.pass_on(arrival(7), "", 1.0)
    assert first is not None
    assert first == again
    assert first.session == "cd" * 8
    found = waiting.answered(first.request)
    assert found is not None
    assert (found.connection, found.request) == (b"a", 7)
    assert waiting.answered(first.request) is None


def test_the_same_number_of_two_connections_is_two_questions() -> None:
    waiting = Passing()
    numbers = {waiting.pass_on(arrival(7, connection), "", 0.0).request for connection in (b"a", b"b")}
    assert len(numbers) == 2
    assert min(numbers) >= PASSED_REQUESTS_FROM


def test_what_is_asked_again_is_not_forgotten_and_what_is_not_is() -> None:
    waiting = Passing()
    waiting.pass_on(arrival(1), "", 0.0)
    waiting.pass_on(arrival(2), "", 0.0)
    waiting.pass_on(arrival(1), "", PASSED_SECONDS - 1.0)
    waiting.forget_old(PASSED_SECONDS)
    assert len(waiting) == 1
    waiting.forget_old(2 * PASSED_SECONDS)
    assert len(waiting) == 0


def test_a_key_that_asks_too_much_is_put_off_and_hinders_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "PASSED_PER_KEY_MAX", 3)
    waiting = Passing()
    taken = [waiting.pass_on(arrival(number), "us-1", 0.0) for number in range(5)]
    assert [message is not None for message in taken] == [True, True, True, False, False]
    assert waiting.pass_on(arrival(9), "us-2", 0.0) is not None
    assert taken[0] is not None
    waiting.answered(taken[0].request)
    assert waiting.pass_on(arrival(5), "us-1", 0.0) is not None


def test_long_questions_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "PASSED_BYTES_MAX", 10_000)
    waiting = Passing()
    hello = Hello(role="worker", id="us-1", incarnation="ab" * 8, stated={"key": "x" * 1900})
    taken = [waiting.pass_on(arrival(number, message=hello), "", 0.0) for number in range(8)]
    assert sum(message is not None for message in taken) == 5
    waiting.forget_old(2 * PASSED_SECONDS)
    assert waiting.pass_on(arrival(9, message=hello), "", 2 * PASSED_SECONDS) is not None
