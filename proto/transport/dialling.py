"""What a client makes of the handshakes of its three sockets: try again, try otherwise, or give up. Pure.

libzmq tries for ever, and says nothing. Three things are decided here out of what its monitor reports:

- Whether the broker will never let this process in, and why: then there is a `denial`.
- Which of several public keys of the broker is the right one: they are tried in turn.
- Which socket has to be opened anew, since libzmq gives up by itself after a violation of its protocol, such as one
  damaged byte.

A broker that does not have the key it is dialled with hangs up without a word, and so does a port forwarder whose
broker is away. So before the key is called wrong, a probe without a key must have met a broker that wants one, twice,
with nothing but failures on all three sockets in between.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from isles.proto.keys import ClientKey
from isles.proto.messages import Channel

REFUSALS_MIN: Final = 3
"""Refusals in a row on one socket before they are believed: a key may be made a moment before its process starts, and
the broker reads its allow-list at its next tick."""
TURNS_MIN: Final = 2
"""Times that every public key of the broker failed on every socket before a probe asks who is there."""
PROBES_MIN: Final = 2
"""Probes that met a broker with keys, with failed turns between them, before its key is called another one."""
SWITCH_SECONDS: Final = 0.2
"""Between two public keys of the broker: as long as libzmq waits before it dials again."""
CUT_SECONDS_MAX: Final = 5.0
"""A handshake that ends later ran out of time: whoever has another key hangs up as soon as it is greeted, but a broker
whose disk keeps it waiting answers nobody."""
GIVEN_UP_SECONDS: Final = 0.2
"""A lost connection that libzmq has not begun to restore by now is given up by it: it says at once when it tries."""


class Outcome(StrEnum):
    """What became of one connection."""

    CONNECTED = "connected"
    """The handshake begins."""
    OPENED = "opened"
    """The handshake is done."""
    REFUSED = "refused"
    """The broker knows this key not, or no more."""
    MISMATCHED = "mismatched"
    """One side has keys and the other has none."""
    CUT = "cut"
    """It ended in the middle of its handshake."""
    LOST = "lost"
    RETRIED = "retried"
    """libzmq dials again by itself."""


class Dialling:
    """The state of one client's three sockets."""

    def __init__(self, key: ClientKey | None) -> None:
        self.denial: str | None = None
        """One sentence: why this process will never be let in."""
        self.wants_probe = False
        """Whether a socket without a key should ask who is there; answer with `probed`."""
        self._key = key
        self._present = 0
        self._connected_at: dict[Channel, float] = {}
        self._due_at: dict[Channel, float] = {}
        self._switch_at: float | None = None
        self._refusals: dict[tuple[Channel, Outcome], int] = {}
        self._cut: set[Channel] = set()
        self._num_turns = 0
        self._num_probes = 0

    @property
    def broker_key(self) -> str | None:
        """The public key to dial with; None without keys."""
        return None if self._key is None else self._key.broker[self._present]

    def handle(self, channel: Channel, outcome: Outcome, now: float) -> None:
        """Takes one report of a socket's monitor."""
        if self.denial is not None:
            return
        match outcome:
            case Outcome.CONNECTED:
                self._connected_at[channel] = now
                self._due_at.pop(channel, None)
            case Outcome.OPENED:
                self._take_opened(channel)
            case Outcome.LOST:
                self._due_at.setdefault(channel, now + GIVEN_UP_SECONDS)
            case Outcome.RETRIED:
                self._due_at.pop(channel, None)
            case Outcome.CUT:
                self._take_cut(channel, now)
            case Outcome.REFUSED | Outcome.MISMATCHED:
                self._take_refusal(channel, outcome)

    def due(self, now: float) -> set[Channel]:
        """The sockets to open anew at this moment; each is named once."""
        if self._key is not None and self._switch_at is not None and now >= self._switch_at:
            self._switch_at = None
            self._present = (self._present + 1) % len(self._key.broker)
            self._due_at = dict.fromkeys(Channel, now)
        due = {channel for channel, at in self._due_at.items() if now >= at}
        for channel in due:
            del self._due_at[channel]
        return due

    def wait(self, now: float) -> float | None:
        """Seconds until `due` may have something to say; None = nothing is expected."""
        if self.denial is not None:
            return None
        times = [*self._due_at.values()] + ([] if self._switch_at is None else [self._switch_at])
        return max(0.0, min(times) - now) if times else None

    def probed(self, *, has_keys: bool) -> None:
        """Takes what the probe met: a broker that has keys, or something else, or nobody."""
        self.wants_probe = False
        self._num_turns = 0
        self._cut = set()
        self._num_probes = self._num_probes + 1 if has_keys else 0
        if self._num_probes >= PROBES_MIN:
            self.denial = (
                f"this broker is not the one that {self._named()} was made for, or has another key by now: it hung up "
                "on every attempt; copy the key file from its key folder anew, or dial the broker it belongs to"
            )

    def adopt(self, key: ClientKey, now: float) -> None:
        """Goes on with what stands in the key file by now; sockets are opened anew if this process has another pair."""
        if self._key is None or key.public != self._key.public:
            self._due_at = dict.fromkeys(Channel, now)
        kept = self.broker_key
        self._key = key
        self._present = key.broker.index(kept) if kept in key.broker else 0
        self._refusals.clear()
        self._begin_again()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _take_opened(self, channel: Channel) -> None:
        self._due_at.pop(channel, None)
        self._refusals = {place: count for place, count in self._refusals.items() if place[0] is not channel}
        self._begin_again()

    def _begin_again(self) -> None:
        self._cut = set()
        self._num_turns = self._num_probes = 0
        self._switch_at = None
        self.wants_probe = False

    def _take_cut(self, channel: Channel, now: float) -> None:
        is_late = now - self._connected_at.get(channel, now) > CUT_SECONDS_MAX
        if self._key is None or self._switch_at is not None or is_late:
            return
        self._cut.add(channel)
        if self._cut != set(Channel):
            return
        self._cut = set()
        if self._present == len(self._key.broker) - 1:
            self._num_turns += 1
        if len(self._key.broker) > 1:
            self._switch_at = now + SWITCH_SECONDS
        self.wants_probe = self.wants_probe or self._num_turns >= TURNS_MIN

    def _take_refusal(self, channel: Channel, outcome: Outcome) -> None:
        self._begin_again()  # whoever refuses has the key that it was dialled with
        count = self._refusals.get((channel, outcome), 0) + 1
        self._refusals[channel, outcome] = count
        if count < REFUSALS_MIN:
            return
        if outcome is Outcome.REFUSED:
            self.denial = (
                f"{self._named()} does not stand in the allow-list of this broker, or no more; have one made where "
                "the broker runs (`isles keys new`), and start again with its file"
            )
        elif self._key is None:
            self.denial = (
                "nobody is let in here without a key; have one made where the broker runs (`isles keys new`), and "
                "name its file with --key"
            )
        else:
            self.denial = (
                f"this broker has no keys, but this process was given {self._named()}; start the broker with --keys, "
                "or dial the one that has them"
            )

    def _named(self) -> str:
        assert self._key is not None
        return f"the key of {self._key.role} {self._key.name}"
