"""Looking at a run from outside: asks a broker for its status again and again, and never minds its absence.

A broker that refuses this process is not asked again: `wait` raises that, whoever only polls sees it in `refusal`.
"""

from __future__ import annotations

import secrets
from typing import Final

from isles.ops.reach import Reach
from isles.proto.agreement import RunRecord
from isles.proto.client import Refused, Welcomed
from isles.proto.clock import Clock, SystemClock
from isles.proto.connection import Connection, raise_if_refused
from isles.proto.errors import unanswered
from isles.proto.messages import AskStatus, Hello, Message, ReportInfo, Status
from isles.proto.transport.interface import ClientTransport

FIRST_RETRY_SECONDS: Final = 0.1
"""Until the broker has been heard: what is sent before the connection stands is dropped."""
RETRY_SECONDS: Final = 2.0
"""A lost answer is asked for again."""


def operator_hello(name: str = "operator") -> Hello:
    """A HELLO that disturbs nobody: each operator is its own incarnation of a name that no learner has."""
    token = secrets.token_hex(8)
    return Hello(role="operator", id=f"{name}-{token[:8]}", incarnation=token)


class StatusWatch:
    """The newest status of a broker and all figures reported so far. Belongs to one thread."""

    def __init__(
        self,
        transport: ClientTransport,
        *,
        every_seconds: float = 1.0,
        wants_newest: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """With `wants_newest`, older figures than one answer holds are left out; else all come, the oldest first."""
        self._clock: Clock = clock or SystemClock()
        self._connection = Connection(operator_hello(), transport, self._clock)
        self._every_seconds = every_seconds
        self._wants_newest = wants_newest
        self._asked_at: float | None = None
        self._is_waiting = False
        self.status: Status | None = None
        self.status_asked_at = 0.0
        """When the newest status was asked for: it is no older than this."""
        self.status_at: float | None = None
        """When the newest status arrived."""
        self.reports: list[ReportInfo] = []
        self.record: RunRecord | None = None
        """The run's, some time after it was asked for."""
        self.refusal: Refused | None = None
        """Why the broker will not have this process, if it said so."""

    def poll(self, timeout_seconds: float) -> bool:
        """Waits at most so long; whether a new status has arrived."""
        now = self._clock.now()
        retry = FIRST_RETRY_SECONDS if self.status is None else RETRY_SECONDS
        wait = retry if self._is_waiting else self._every_seconds
        is_due = self._asked_at is None or now - self._asked_at >= wait
        if is_due and self.refusal is None:
            self._ask(now)
        is_new = False
        for news in self._connection.poll(min(timeout_seconds, FIRST_RETRY_SECONDS if self.status is None else 1.0)):
            if isinstance(news, Welcomed):
                self.record = news.welcome.run_record
            if isinstance(news, Refused):
                self.refusal = news
            reply: Message | None = getattr(news, "reply", None)
            if isinstance(reply, Status):
                self._take(reply)
                is_new = True
        return is_new

    def wait(self, timeout_seconds: float, *, address: str) -> Status:
        """The first status. Raises UnreachableError after the timeout, RefusedError if the broker refuses."""
        deadline = self._clock.now() + timeout_seconds
        while self.status is None:
            left = deadline - self._clock.now()
            if left <= 0:
                raise unanswered(address, timeout_seconds)
            self.poll(left)
            if self.refusal is not None:
                raise_if_refused(self.refusal, address)
        return self.status

    def ask_record(self) -> None:
        """Asks for the run's record, which may be long; `poll` takes the answer."""
        self._connection.start()

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _ask(self, now: float) -> None:
        self._connection.client.forget(lambda message: isinstance(message, AskStatus))
        after = self.reports[-1].seq if self.reports else 0
        self._connection.ask(AskStatus(reports_after=after, wants_newest=self._wants_newest))
        self._asked_at, self._is_waiting = now, True

    def _take(self, status: Status) -> None:
        known = self.reports[-1].seq if self.reports else 0
        self.reports += [report for report in sorted(status.reports, key=lambda one: one.seq) if report.seq > known]
        self.status, self._is_waiting = status, False
        self.status_asked_at = self._asked_at or 0.0
        self.status_at = self._clock.now()


def watch(reach: Reach, *, every_seconds: float = 1.0, wants_newest: bool = False) -> StatusWatch:
    """A watch over ZeroMQ. Raises ConfigError for an address or a key file that cannot be used."""
    return StatusWatch(reach.dial(), every_seconds=every_seconds, wants_newest=wants_newest)
