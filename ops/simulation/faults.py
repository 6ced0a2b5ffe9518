"""What may happen to a simulated run, and how much of it happens to the run of one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

Weather = Literal["loss", "duplication", "reordering", "delay", "partition", "one-way partition", "clog"]
"""What a link does to messages, for a while."""
Blow = Literal[
    "kill learner", "kill outer", "kill broker", "power failure", "blackout", "freeze", "zombie", "slow disk",
    "full disk", "bit rot",
]  # fmt: skip
"""What happens to a process or its machine."""
Trait = Literal["clocks", "poison"]
"""What is wrong all the time: clocks that are off and run fast or slow, contributions that fail the screen."""
Kind = Weather | Blow | Trait

WEATHERS: Final[tuple[Weather, ...]] = (
    "loss", "duplication", "reordering", "delay", "partition", "one-way partition", "clog",
)  # fmt: skip
BLOWS: Final[tuple[Blow, ...]] = (
    "kill learner", "kill outer", "kill broker", "power failure", "blackout", "freeze", "zombie", "slow disk",
    "full disk", "bit rot",
)  # fmt: skip
TRAITS: Final[tuple[Trait, ...]] = ("clocks", "poison")
KINDS: Final[tuple[Kind, ...]] = (*WEATHERS, *BLOWS, *TRAITS)

ON_CHANCE: Final = 0.6
"""That a kind of fault happens at all in a seed: what one kind hides, another seed shows."""
FAULTS_MIN: Final = 20
FAULTS_MAX: Final = 28
GAP_SECONDS: Final = 3.0
"""Between two faults on average, if few versions are made."""
BLACKOUT_SHARE: Final = 0.2
"""How much seldomer than others a fault is that ends all processes."""
POISON_CHANCE: Final = 0.004
"""That an outer dislikes an item."""


@dataclass(frozen=True)
class Faults:
    """What one seed's run has to bear."""

    kinds: frozenset[Kind]
    num_faults: int

    @classmethod
    def draw(cls, chance: random.Random) -> Faults:
        """A kind is on or wholly off; some kind that happens from time to time always is on."""
        on: set[Kind] = {kind for kind in KINDS if chance.random() < ON_CHANCE}
        on.add(chance.choice((*WEATHERS, *BLOWS)))
        return cls(frozenset(on), chance.randint(FAULTS_MIN, FAULTS_MAX))

    def next_kind(self, chance: random.Random) -> Weather | Blow:
        """What happens next."""
        able = [kind for kind in (*WEATHERS, *BLOWS) if kind in self.kinds]
        weights = [BLACKOUT_SHARE if kind == "blackout" else 1.0 for kind in able]
        return chance.choices(able, weights)[0]
