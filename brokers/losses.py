"""What a shell that owns a broker's sockets says of messages and connections that came to nothing, now and then."""

from __future__ import annotations

from collections import Counter
from typing import Final

from isles.proto.logs import Logger

TOLD_SECONDS: Final = 10.0
"""Shortest time between two lines about one kind of loss: strangers decide how often there is something to say."""


class Losses:
    """Counts them, and tells them."""

    def __init__(self, logger: Logger, now: float) -> None:
        self._logger = logger
        self._num_dropped = 0
        """Messages that a transport did not take since the last line about them."""
        self._dropped_told_at = now
        self._cuts: Counter[str] = Counter()
        """Connections that were hung up on since the last line about them, by the reason."""
        self._cuts_told_at: float | None = None

    def drop(self) -> None:
        """A message was not taken. Some are normal, as when somebody died; whoever lives asks again."""
        self._num_dropped += 1

    def tell(self, cuts: dict[str, int], now: float) -> None:
        """Says what there is to say; `cuts` are the connections that were hung up on since the last call."""
        if self._num_dropped and now - self._dropped_told_at >= TOLD_SECONDS:
            self._logger.info("messages.dropped", unsent=self._num_dropped, unread=0, hints=0)
            self._num_dropped, self._dropped_told_at = 0, now
        self._cuts.update(cuts)
        if self._cuts and (self._cuts_told_at is None or now - self._cuts_told_at >= TOLD_SECONDS):
            counts = {reason: self._cuts[reason] for reason in ("stranger", "surplus", "overfull")}
            self._logger.warning("connections.cut", **counts)
            self._cuts.clear()
            self._cuts_told_at = now
