"""Small words that every answer is made of. Pure."""

from __future__ import annotations

from typing import Any, Literal

from isles.brokers.sessions import Session
from isles.brokers.vocabulary import GarbageArrived, Instruction, Log, MessageArrived, Send
from isles.proto.ids import ContributionId
from isles.proto.messages import Error, Message

Level = Literal["debug", "info", "warning", "error"]


def reply(arrival: MessageArrived, message: Message) -> list[Instruction]:
    """Answers where the question came from, with its number."""
    answer = message.addressed(request=arrival.message.request)
    return [Send(arrival.channel, arrival.connection, answer)]


def refuse(arrival: MessageArrived | GarbageArrived, error: Error, *, level: Level = "warning") -> list[Instruction]:
    """Answers with an error and says so in the log."""
    request = arrival.message.request if isinstance(arrival, MessageArrived) else 0
    answer = error.addressed(request=request)
    return [Send(arrival.channel, arrival.connection, answer), refusal_log(error.code, error.text, level=level)]


def respond(arrival: MessageArrived, message: Message) -> list[Instruction]:
    """A reply, or a refusal if it is an error."""
    return refuse(arrival, message) if isinstance(message, Error) else reply(arrival, message)


def log(level: Level, event: str, /, **fields: Any) -> Log:
    """An event of `isles.proto.events` with its fields."""
    return Log(level, event, fields)


def refusal_log(code: str, text: str, *, level: Level = "warning") -> Log:
    """Says what was refused and why."""
    return log(level, "message.refused", code=code, text=text)


def joined_log(session: Session) -> Log:
    """Says who came."""
    return log(
        "info",
        "client.joined",
        role=session.role,
        id=session.id,
        incarnation=session.incarnation,
        region=session.region,
    )


def named(name: ContributionId) -> dict[str, Any]:
    """The fields that say which contribution is meant."""
    return {
        "learner": name.learner,
        "fragment": name.fragment,
        "number": name.number,
        "incarnation": name.incarnation,
    }
