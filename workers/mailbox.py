"""What the courier thread has for the training thread, and what the training thread has for the courier.

Nothing here grows while one side is slow: a newer version replaces an unapplied older one of its fragment, a cue
replaces a cue, and a fragment has at most one contribution that facts can be about.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isles.workers.increment import Increment
from isles.workers.orders import Cued, Event, PaceTold, VersionArrived


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version that can be applied."""

    event: VersionArrived
    values: torch.Tensor
    """[num_values] float32 on the host, never changed."""
    decoded: torch.Tensor | None
    """The decoded payload of the own contribution that the row says is merged, if its payload is here; none if the
    increment contains it."""
    increment: Increment | None = None
    """What is to be added to the live parameters, if that is known."""


class Mailbox:
    """Facts for the session, in order, with the values that belong to them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._facts: list[Event] = []
        self._arrivals: dict[int, Arrival] = {}
        self._cues: dict[int, Cued] = {}
        self._pace: PaceTold | None = None
        self._failure: Exception | None = None
        self._is_rung = False

    def post(self, fact: Event) -> None:
        """Adds a fact about a contribution."""
        with self._condition:
            self._facts.append(fact)
            self._condition.notify_all()

    def arrive(self, arrival: Arrival) -> None:
        """Replaces what has arrived for the fragment and was not taken."""
        with self._condition:
            self._arrivals[arrival.event.fragment] = arrival
            self._condition.notify_all()

    def cue(self, cue: Cued) -> None:
        """Replaces the fragment's cue."""
        with self._condition:
            self._cues[cue.fragment] = cue
            self._condition.notify_all()

    def tell_pace(self, pace: PaceTold) -> None:
        """Replaces the pace; nobody is woken for it."""
        with self._condition:
            self._pace = pace

    def fail(self, failure: Exception) -> None:
        """What ends this process; the first one counts."""
        with self._condition:
            self._failure = self._failure or failure
            self._condition.notify_all()

    def ring(self) -> None:
        """Something changed that is no fact for the session, such as the leased shards."""
        with self._condition:
            self._is_rung = True
            self._condition.notify_all()

    @property
    def failure(self) -> Exception | None:
        """What ends this process, if anything does."""
        return self._failure

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take; asked without a lock, so what comes meanwhile is seen the next time."""
        return not self._has_news() and self._pace is None

    def take(self) -> tuple[Sequence[Event], Sequence[Arrival]]:
        """Everything that has come; does not wait."""
        with self._condition:
            self._is_rung = False
            facts = [*self._facts, *self._cues.values()]
            facts += [self._pace] if self._pace is not None else []
            arrivals = list(self._arrivals.values())
            self._facts.clear()
            self._cues.clear()
            self._pace = None
            self._arrivals.clear()
            return facts, arrivals

    def wait(self, timeout_seconds: float) -> bool:
        """Waits until there is something to take; False after the timeout."""
        with self._condition:
            return self._condition.wait_for(self._has_news, max(0.0, timeout_seconds))

    def _has_news(self) -> bool:
        return bool(self._facts or self._arrivals or self._cues or self._failure or self._is_rung)
