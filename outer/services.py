"""What everybody who works on a fragment is lent by the outer: ways to ask, fetch and compute, and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from isles.outer.payload_cache import Payload, PayloadCache
from isles.outer.turns import Turns
from isles.proto.messages import BlobRef, Message

if TYPE_CHECKING:
    from isles.outer.state_cache import StateCache

_Result = TypeVar("_Result")

LOST_CODES: Final = frozenset({"not-found", "damaged", "too-large"})
"""What a broker says of a blob that it will never have, and what is said of one whose size cannot be right."""

SCREENINGS_MAX: Final = 16
SCREENED_BYTES_MAX: Final = 256 << 20
"""Of payloads that are being fetched and screened: enough to keep a fast link and the worker thread busy."""

MERGES_MAX: Final = 2
"""Fragments that are merged at a time: while one computes, the next one is fetched."""

RECOVERIES_MAX: Final = 1
"""A recovery holds a whole state and uses the worker thread to the full."""

CHECKPOINTS_MAX: Final = 1
"""Rounds go on meanwhile, so nobody waits for more; each holds a payload as large as a fragment."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A blob that could not be fetched."""

    code: str
    """That of the broker's Error, or as in `isles.proto.client.FetchFailed`."""
    text: str

    @property
    def is_lost(self) -> bool:
        """Whether it is gone for good, not only put off."""
        return self.code in LOST_CODES


class Services(Protocol):
    """The outer, as its desks see it. Everything is called back on the calling thread, perhaps at once."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def draw_token(self) -> str:
        """A random name that nobody else draws."""

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        """Asks the broker until answered."""

    def fetch(self, blob: BlobRef, then: Callable[[Payload | Unavailable], None], *, bytes_max: int) -> None:
        """Brings a blob of at most `bytes_max` bytes."""

    def work(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Does what rounds wait for on the worker thread, one thing after the other."""

    def work_aside(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Does what no round waits for on another thread."""


@dataclass
class Stock:
    """Memory that all fragments share, and the lines in front of what takes more of it."""

    states: StateCache
    payloads: PayloadCache
    screenings: Turns = field(default_factory=lambda: Turns(SCREENINGS_MAX, SCREENED_BYTES_MAX))
    merges: Turns = field(default_factory=lambda: Turns(MERGES_MAX))
    recoveries: Turns = field(default_factory=lambda: Turns(RECOVERIES_MAX))
    checkpoints: Turns = field(default_factory=lambda: Turns(CHECKPOINTS_MAX))
