"""Small messages on their way through a relay: renumbered on the way up, and back on the way down. Pure.

    client      request 7 of one connection  ->  relay  request 2**40 + 1  ->  home
    client      answer to 7                  <-  relay  answer to 2**40 + 1  <-  home

A question that is repeated keeps its number, so any of its answers will do. What is not answered is forgotten after a
while: who still wants to know asks again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from isles.brokers.vocabulary import MessageArrived
from isles.proto.messages import Channel, Hello, Leave, Message, pack

PASSED_REQUESTS_FROM: Final = 1 << 40
"""The relay's own questions have lower numbers: it would have to ask a million a second for twelve days."""
PASSED_SECONDS: Final = 60.0
"""An answer that comes later than this meets nobody: who asked has repeated it seven times."""
PASSED_MAX: Final = 65_536
"""Of all keys, some 40 MB: sixteen questions of each of the most sessions there may be."""
PASSED_PER_KEY_MAX: Final = 16_384
"""Of the processes with keys of one name: a quarter, so that none takes all of it."""
PASSED_BYTES_MAX: Final = 64 << 20
"""Of all questions together: what waits for a link that is cut stays in memory, and an INIT may have 8 MiB."""


@dataclass(frozen=True, slots=True)
class Passed:
    """One question that waits for its answer."""

    number: int
    channel: Channel
    connection: bytes
    """Where it came from."""
    request: int
    """Its number there."""
    key: str
    """The public key (z85) that its sender proved."""
    key_name: str
    num_bytes: int
    at: float
    asked: Hello | Leave | None
    """What it was, where the answer says something to the relay, too."""


@dataclass
class Passing:
    """All questions that were passed on, those first that were asked longest ago."""

    _waiting: dict[int, Passed] = field(default_factory=dict)
    _numbers: dict[tuple[bytes, int], int] = field(default_factory=dict)
    """Connection and request number -> number upstream."""
    _per_key: Counter[str] = field(default_factory=Counter)
    _num_bytes: int = 0
    _num_passed: int = 0

    def pass_on(self, arrival: MessageArrived, key_name: str, now: float) -> Message | None:
        """The message as it goes to the home broker; None if too many wait."""
        message = arrival.message
        number = self._numbers.get((arrival.connection, message.request))
        num_bytes = len(pack(message))
        if number is not None:
            self._forget(self._waiting[number])
        elif self._is_full(key_name, num_bytes):
            return None
        else:
            number = PASSED_REQUESTS_FROM + self._num_passed
            self._num_passed += 1
        self._waiting[number] = Passed(
            number=number,
            channel=arrival.channel,
            connection=arrival.connection,
            request=message.request,
            key=arrival.key,
            key_name=key_name,
            num_bytes=num_bytes,
            at=now,
            asked=message if isinstance(message, Hello | Leave) else None,
        )
        self._numbers[arrival.connection, message.request] = number
        self._per_key[key_name] += 1
        self._num_bytes += num_bytes
        return message.addressed(request=number, session=message.session)

    def _is_full(self, key_name: str, num_bytes: int) -> bool:
        if len(self._waiting) >= PASSED_MAX or self._num_bytes + num_bytes > PASSED_BYTES_MAX:
            return True
        return bool(key_name) and self._per_key[key_name] >= PASSED_PER_KEY_MAX

    def answered(self, number: int) -> Passed | None:
        """Who asked what has this number; it is forgotten now."""
        passed = self._waiting.get(number)
        if passed is not None:
            self._forget(passed)
        return passed

    def forget_old(self, now: float) -> None:
        """Lets go of what nobody will answer any more."""
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now - oldest.at < PASSED_SECONDS:
                return
            self._forget(oldest)

    def __len__(self) -> int:
        return len(self._waiting)

    def _forget(self, passed: Passed) -> None:
        del self._waiting[passed.number]
        del self._numbers[passed.connection, passed.request]
        self._num_bytes -= passed.num_bytes
        self._per_key[passed.key_name] -= 1
        if not self._per_key[passed.key_name]:
            del self._per_key[passed.key_name]
