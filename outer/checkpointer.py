"""Puts the whole state of a fragment into the store now and then, in the background.

A commit stores what a version was made from; a checkpoint spares a new outer the recomputing, and lets the store drop
the payloads behind it. Rounds go on meanwhile, and nothing is lost with a checkpoint that comes to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from isles.outer.services import Services, Stock
from isles.outer.state_cache import PARTS, Slot
from isles.outer.turns import Leave
from isles.outer.workshop import Encoded, Held, encode_part
from isles.proto.client import as_error
from isles.proto.logs import Logger
from isles.proto.messages import BlobRef, Checkpoint, Done, Fenced, Message, Stored, Upload


class _Attempt:
    """One checkpoint, from the moment it is wanted."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.leave: Leave | None = None
        self.version = 0
        self.slot: Slot | None = None
        self.blobs: dict[str, BlobRef] = {}
        self.began_at = 0.0


class Checkpointer:
    """The checkpoints of one fragment, one at a time."""

    def __init__(
        self,
        fragment: int,
        services: Services,
        stock: Stock,
        logger: Logger,
        *,
        versions_max: int,
        bytes_max: int,
        head: Callable[[], Held | None],
        then: Callable[[], None],
    ) -> None:
        """`head` gives the newest committed state at hand; `then` is called when a checkpoint is in the store.

        `bytes_max` is at least the size of a state, so that a checkpoint never costs more than it lets go.
        """
        self.version: int | None = None
        """The newest version whose checkpoint is in the store; None = not known yet."""
        self._fragment = fragment
        self._services = services
        self._stock = stock
        self._logger = logger
        self._versions_max = versions_max
        self._bytes_max = bytes_max
        self._head = head
        self._then = then
        self._payload_bytes: dict[int, int] = {}
        self._attempt: _Attempt | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way or waiting for its turn."""
        return self._attempt is not None

    def learn(self, version: int) -> None:
        """The store says that this is the newest checkpoint."""
        self.version = version
        self._payload_bytes = {number: size for number, size in self._payload_bytes.items() if number > version}

    def count(self, payload_bytes: dict[int, int]) -> None:
        """What versions were made from, in bytes of payloads."""
        self._payload_bytes.update(payload_bytes)

    @property
    def is_due(self) -> bool:
        """Whether so many versions, or so many bytes of payloads, have come since the last one."""
        held = self._head()
        if held is None or self.version is None or held.point.version <= self.version:
            return False
        num_versions = held.point.version - self.version
        return num_versions >= self._versions_max or sum(self._payload_bytes.values()) >= self._bytes_max

    @property
    def is_behind(self) -> bool:
        """Whether the head has no checkpoint."""
        held = self._head()
        return held is not None and self.version is not None and held.point.version > self.version

    def begin(self, epoch: int) -> None:
        """Wants a checkpoint of whatever is the head when its turn comes, under this epoch of the lease."""
        if self._attempt is None:
            self._attempt = _Attempt(epoch)
            self._stock.checkpoints.join(partial(self._start, self._attempt))

    def drop(self) -> None:
        """Ends the checkpoint under way: the lease is gone, and the next holder makes its own."""
        if self._attempt is not None:
            self._end(self._attempt)

    def _start(self, attempt: _Attempt, leave: Leave) -> None:
        held = self._head()
        if attempt is not self._attempt or held is None:
            leave()
            if attempt is self._attempt:
                self._attempt = None
            return
        attempt.leave, attempt.version = leave, held.point.version
        attempt.slot, attempt.began_at = self._stock.states.share(held.slot), self._services.now()
        self._store_next(attempt, list(PARTS))

    def _store_next(self, attempt: _Attempt, parts: list[str]) -> None:
        """Encodes and uploads one part after the other, so that no more than one is in memory."""
        assert attempt.slot is not None
        if not parts:
            self._confirm(attempt)
            return
        call = partial(encode_part, self._stock.states, self._stock.states.share(attempt.slot), parts[0])
        self._services.work_aside(call, partial(self._take_encoded, attempt, attempt.slot, parts))

    def _take_encoded(self, attempt: _Attempt, slot: Slot, parts: list[str], encoded: Encoded | None) -> None:
        self._stock.states.drop(slot)
        if attempt is not self._attempt:
            return
        if encoded is None:
            self._store_next(attempt, parts[1:])
            return
        attempt.blobs[parts[0]] = encoded.blob
        upload = Upload(blob=encoded.blob)
        self._services.ask(upload, partial(self._take_stored, attempt, parts), encoded.payload)

    def _take_stored(self, attempt: _Attempt, parts: list[str], reply: Message) -> None:
        if attempt is not self._attempt:
            return
        if isinstance(reply, Stored):
            self._store_next(attempt, parts[1:])
        else:
            self._fail(attempt, reply)

    def _confirm(self, attempt: _Attempt) -> None:
        message = Checkpoint(
            fragment=self._fragment,
            epoch=attempt.epoch,
            version=attempt.version,
            parameters=attempt.blobs["parameters"],
            momentum=attempt.blobs.get("momentum"),
            remainder=attempt.blobs.get("remainder"),
        )
        self._services.ask(message, partial(self._take_done, attempt))

    def _take_done(self, attempt: _Attempt, reply: Message) -> None:
        if attempt is not self._attempt:
            return
        if not isinstance(reply, Done):
            self._fail(attempt, reply)
            return
        self.learn(attempt.version)
        self._logger.info(
            "checkpoint.stored",
            fragment=self._fragment,
            version=attempt.version,
            bytes=sum(blob.size_bytes for blob in attempt.blobs.values()),
            seconds=round(self._services.now() - attempt.began_at, 6),
        )
        self._end(attempt)
        self._then()

    def _fail(self, attempt: _Attempt, reply: Message) -> None:
        """The next commit tries again; of a lease that is gone its renewal tells."""
        self._end(attempt)
        if isinstance(reply, Fenced):
            return
        error = as_error(reply)
        self._logger.warning(
            "message.refused", code=error.code, text=error.text, fragment=self._fragment, ask="checkpoint"
        )

    def _end(self, attempt: _Attempt) -> None:
        self._attempt = None
        if attempt.slot is not None:
            self._stock.states.drop(attempt.slot)
        if attempt.leave is not None:
            attempt.leave()
