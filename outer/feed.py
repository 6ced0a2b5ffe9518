"""The payloads of a recipe on their way into a merge: in order, fetched a little ahead, few in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from isles.outer.accumulators import Taker, Vector
from isles.outer.payload_cache import Payload
from isles.outer.services import Services, Unavailable
from isles.outer.workshop import Adder, Unreadable
from isles.proto.messages import BlobRef

AHEAD_MAX: Final = 2
"""Payloads that are fetched while an earlier one is decoded and added."""

AT_ONCE_MAX: Final = 2
"""Deltas that are added at once, if their payloads are there: a fragment of memory for each, which the version is made
in afterwards. It has room for two."""


@dataclass(frozen=True, slots=True)
class FeedFailure:
    """A payload that could not be added, and why."""

    index: int
    reason: str
    is_lost: bool
    """Whether it will never be had; otherwise a later attempt may succeed."""
    is_unreadable: bool = False
    """Whether it was had, and is no delta of this fragment."""


class Feed:
    """Adds all payloads of a recipe to a merge, or to whatever else takes deltas."""

    def __init__(
        self,
        taker: Taker,
        blobs: Sequence[BlobRef],
        services: Services,
        *,
        num_values: int,
        bytes_max: int,
        find: Callable[[int], Payload | None],
        then: Callable[[FeedFailure | None], None],
    ) -> None:
        """`blobs` are in the order of the ingredients; `find` gives the payload of an index if it is at hand.

        `then` is called once, on the calling thread, unless `cancel` is called before; with None if all were added.
        """
        self._adder = Adder(taker, num_values)
        self._blobs = blobs
        self._services = services
        self._bytes_max = bytes_max
        self._find = find
        self._then = then
        self._ready: dict[int, Payload] = {}
        self._num_asked = self._num_added = self._num_adding = 0
        self._is_over = False
        self._is_advancing = False
        self._has_news = False

    def start(self) -> None:
        """Begins to fetch and to add."""
        self._advance()

    def cancel(self) -> None:
        """Nothing is called back any more."""
        self._is_over = True
        self._ready.clear()

    def take_memory(self) -> list[Vector]:
        """Once all were added: the memory that deltas were decoded to, [n] float32 each, which is the caller's now."""
        return self._adder.take_memory()

    def _advance(self) -> None:
        """Orders whatever can be ordered; answers that come at once are taken by the same loop."""
        self._has_news = True
        if self._is_advancing:
            return
        self._is_advancing = True
        while self._has_news and not self._is_over:
            self._has_news = False
            self._fetch_ahead()
            self._add_next()
        self._is_advancing = False

    def _fetch_ahead(self) -> None:
        while self._num_asked < min(len(self._blobs), self._num_added + 1 + AHEAD_MAX):
            index = self._num_asked
            self._num_asked += 1
            payload = self._find(index)
            if payload is not None:
                self._ready[index] = payload
            else:
                self._services.fetch(self._blobs[index], partial(self._take, index), bytes_max=self._bytes_max)

    def _take(self, index: int, payload: Payload | Unavailable) -> None:
        if self._is_over:
            return
        if isinstance(payload, Unavailable):
            self._fail(FeedFailure(index, f"its payload cannot be had: {payload.text}", payload.is_lost))
            return
        self._ready[index] = payload
        self._advance()

    def _add_next(self) -> None:
        index = self._num_added
        if index == len(self._blobs):
            self._is_over = True
            self._then(None)
        elif index in self._ready and not self._num_adding:
            payloads: list[Payload] = []
            while len(payloads) < AT_ONCE_MAX and (payload := self._ready.pop(index + len(payloads), None)) is not None:
                payloads.append(payload)
            self._num_adding = len(payloads)
            self._services.work(partial(self._adder.add, *payloads), self._take_added)

    def _take_added(self, fault: Unreadable | None) -> None:
        num_added, self._num_adding = self._num_adding, 0
        if self._is_over:
            return
        if fault is not None:
            index = self._num_added + fault.index
            self._fail(FeedFailure(index, fault.reason, is_lost=True, is_unreadable=True))
            return
        self._num_added += num_added
        self._advance()

    def _fail(self, failure: FeedFailure) -> None:
        self.cancel()
        self._then(failure)
