"""Which of two ways a process takes to its run: through the relay of its region, or to the home broker itself. Pure.

    the relay answers                              that is the way
    it has been silent for a while                 the home broker is asked, too; if it answers, that is the way
    the home broker is the way                     now and then the relay is asked, too; if it answers, back to it

The other way is taken only once somebody there has answered: where both are silent nothing is changed. What is asked is
the status, which a relay passes on, so a relay that has lost its own link does not answer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

LOOK_SECONDS: Final = 60.0
"""Between two looks after a relay that was left: coming back a minute later costs little, and each look a handshake."""
LOOK_FOR_SECONDS: Final = 10.0
"""How long a relay may take to answer such a look: dialling, and a question that crosses the WAN twice."""
PAUSE_SECONDS: Final = 1.0
"""A process that did not listen for longer than this was busy with something else: nobody was silent meanwhile."""


class Way(StrEnum):
    """Whom a process talks to."""

    RELAY = "relay"
    HOME = "home"

    @property
    def other(self) -> Way:
        """The way that is not taken."""
        return Way.HOME if self is Way.RELAY else Way.RELAY


class Ways:
    """The way that is taken, and whether somebody is to ask on the other one. Times in seconds, monotonic."""

    def __init__(self, timeout_seconds: float, now: float) -> None:
        """It begins at the relay, which may be silent for `timeout_seconds`."""
        self.present = Way.RELAY
        self._timeout_seconds = timeout_seconds
        self._heard_at = self._listened_at = now
        self._look_at = 0.0
        self._is_shut = False

    def attend(self, now: float) -> None:
        """The process begins to listen."""
        if now - self._listened_at > PAUSE_SECONDS:
            self._heard_at += now - self._listened_at
        self._listened_at = now

    def listened(self, now: float, *, is_heard: bool, is_denied: bool) -> None:
        """It has listened: whether something came by the present way, and whether that lets nobody in."""
        self._listened_at = now
        self._is_shut = is_denied
        if is_heard:
            self._heard_at = now

    def silent_seconds(self, now: float) -> float:
        """For how long nothing came by the present way while the process listened."""
        return now - self._heard_at

    def should_ask(self, now: float) -> bool:
        """Whether the other way is to be asked at this moment."""
        if self._is_shut or self.silent_seconds(now) > self._timeout_seconds:
            return True
        if self.present is Way.RELAY or now < self._look_at:
            return False
        if now >= self._look_at + LOOK_FOR_SECONDS:
            self._look_at = now + LOOK_SECONDS
            return False
        return True

    def answered(self, now: float) -> None:
        """The other way has answered, so it is taken."""
        self.present = self.present.other
        self._heard_at, self._is_shut = now, False
        self._look_at = now + LOOK_SECONDS
