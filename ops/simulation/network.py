"""The links of the simulated world: when a message arrives, how often, and whether it does."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final, Literal

from isles.ops.simulation.faults import Weather
from isles.proto.messages import Channel

Direction = Literal["up", "down"]
"""Toward the broker, and away from it."""

REGIONS: Final = ("near", "far", "farthest")
LATENCY_SECONDS: Final = {"near": (0.001, 0.01), "far": (0.02, 0.08), "farthest": (0.1, 0.3)}
"""Of one way, at least and at most; each seed draws its own."""
JITTER_SHARE: Final = 0.3
LOSS_CHANCE: Final = 0.3
DUPLICATION_CHANCE: Final = 0.3
REORDERING_SECONDS: Final = 1.5
DELAY_SECONDS: Final = 4.0


@dataclass(frozen=True, slots=True)
class Episode:
    """Bad weather on the links of one region, or of one process."""

    kind: Weather
    place: str
    """A region or the name of a process."""
    until: float
    direction: Direction | None = None
    """None: both."""

    def __str__(self) -> str:
        way = "" if self.direction is None else f", {self.direction} only"
        return f"{self.kind} at {self.place} until {self.until:.1f}{way}"


@dataclass
class Network:
    """All links; each runs between the broker and one process."""

    chance: random.Random
    num_lost: int = 0
    num_duplicated: int = 0
    _episodes: list[Episode] = field(default_factory=list)
    _places: frozenset[str] = frozenset()
    """Where the weather is bad."""
    _until: float = math.inf
    """When the first episode ends."""
    _arrived: dict[tuple[bytes, Direction, Channel], float] = field(default_factory=dict)
    """Link -> when the last message arrives that was sent on it in good weather: later ones do not overtake it."""

    def __post_init__(self) -> None:
        self._latency = {region: self.chance.uniform(*LATENCY_SECONDS[region]) for region in REGIONS}

    def begin(self, episode: Episode) -> None:
        """Bad weather begins."""
        self._have([*self._episodes, episode])

    def heal(self) -> None:
        """Every episode is over."""
        self._have([])

    def _have(self, episodes: list[Episode]) -> None:
        self._episodes = episodes
        self._places = frozenset(episode.place for episode in episodes)
        self._until = min((episode.until for episode in episodes), default=math.inf)

    def send(
        self, connection: bytes, name: str, region: str, direction: Direction, channel: Channel, time: float
    ) -> list[float]:
        """When a message that is sent now arrives; never, if it is lost."""
        arrives = time + self._latency[region] * (1 + JITTER_SHARE * self.chance.random())
        link = connection, direction, channel
        if time >= self._until:
            self._have([episode for episode in self._episodes if episode.until > time])
        if (places := self._places) and (name in places or region in places):
            around = [
                one for one in self._episodes if one.place in (name, region) and one.direction in (None, direction)
            ]  # fmt: skip
            if around:
                return self._send_in(around, link, arrives)
        before = self._arrived.get(link, 0.0)
        if arrives < before:
            return [before]
        self._arrived[link] = arrives
        return [arrives]

    def _send_in(self, around: list[Episode], link: tuple[bytes, Direction, Channel], arrives: float) -> list[float]:
        """The same in bad weather."""
        chance = self.chance
        num_copies, is_in_order = 1, True
        for episode in around:
            match episode.kind:
                case "partition" | "one-way partition":
                    num_copies = 0
                case "loss" if chance.random() < LOSS_CHANCE:
                    num_copies = 0
                case "duplication" if chance.random() < DUPLICATION_CHANCE:
                    num_copies *= 2
                case "reordering":
                    arrives += chance.random() * REORDERING_SECONDS
                    is_in_order = False
                case "delay":
                    arrives += DELAY_SECONDS * chance.random()
                case "clog":
                    arrives = max(arrives, episode.until)
        if num_copies != 1:
            self.num_lost += num_copies == 0
            self.num_duplicated += num_copies > 1
        if is_in_order:
            arrives = self._arrived[link] = max(arrives, self._arrived.get(link, 0.0))
        later = [arrives + chance.random() * REORDERING_SECONDS for _ in range(num_copies - 1)]
        return [arrives, *later] if num_copies else []
