"""Which relays there are, by their own word. Pure; nothing here is durable."""

from __future__ import annotations

from dataclasses import dataclass, field

from isles.proto.messages import RELAYS_MAX, RelayFacts, RelayInfo


@dataclass
class _Heard:
    facts: RelayFacts
    heard_at: float
    unix: float
    has_left: bool = False


@dataclass
class RelayWatch:
    """All relays that were heard since the broker started; of too many, those silent longest are forgotten."""

    lease_seconds: float
    """A relay that is silent for this long is no longer live."""
    _heard: dict[str, _Heard] = field(default_factory=dict)

    def hear(self, relay: str, facts: RelayFacts, now: float, unix: float) -> None:
        """A relay beat."""
        self._heard[relay] = _Heard(facts, now, unix)
        if len(self._heard) > RELAYS_MAX:
            del self._heard[min(self._heard, key=lambda name: self._heard[name].heard_at)]

    def leave(self, relay: str) -> None:
        """A relay has gone, or had to."""
        if relay in self._heard:
            self._heard[relay].has_left = True

    def infos(self, now: float) -> tuple[RelayInfo, ...]:
        """What whoever asks for the status is told, in order of the names."""
        return tuple(
            RelayInfo(
                relay=name,
                is_live=not one.has_left and now - one.heard_at < self.lease_seconds,
                last_seen_unix=max(0.0, one.unix),
                facts=one.facts,
            )
            for name, one in sorted(self._heard.items())
        )
