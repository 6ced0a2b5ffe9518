"""Keeps the state of one fragment's head, and brings it back where it was lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from isles.outer.recovery import Recovery
from isles.outer.restoration import Restoration, Restored
from isles.outer.services import Services, Stock
from isles.outer.turns import Leave
from isles.outer.workshop import Held
from isles.proto.agreement import RunRecord
from isles.proto.logs import Logger
from isles.proto.manifest import TensorSlice
from isles.proto.messages import VersionInfo


class Keeper:
    """The newest state that is known to be on the tape, and the recovery of a newer one."""

    def __init__(
        self,
        fragment: int,
        record: RunRecord,
        slices: Sequence[TensorSlice],
        services: Services,
        stock: Stock,
        logger: Logger,
        then: Callable[[Restored, dict[int, int]], None],
    ) -> None:
        """`then` is called after each recovery: with what came of it, whose state is the keeper's, and with the payload
        bytes of the versions that it read from the tape.
        """
        self.held: Held | None = None
        self._fragment = fragment
        self._record = record
        self._slices = slices
        self._services = services
        self._stock = stock
        self._logger = logger
        self._then = then
        self._restoration: Restoration | None = None
        self._leave: Leave | None = None

    @property
    def is_bringing(self) -> bool:
        """Whether a recovery is under way."""
        return self._restoration is not None

    def has(self, head: VersionInfo) -> bool:
        """Whether the state of this version is at hand."""
        return self.held is not None and self.held.point.is_of(head)

    def bring(self, head: VersionInfo, checkpoint: VersionInfo) -> None:
        """Recovers the state of the head, both of one listing, unless it is at hand or being recovered."""
        if self.is_bringing or self.has(head):
            return
        held = self.held
        recovery = Recovery(head, checkpoint, None if held is None else held.point, self._record.sync_of)
        restoration = Restoration(
            recovery,
            self._fragment,
            self._slices,
            self._services,
            self._stock,
            partial(self._take_restored, head, checkpoint, self._services.now()),
        )
        self._restoration = restoration
        self._stock.recoveries.join(partial(self._start, restoration))

    def keep(self, held: Held) -> None:
        """This is the head's state from now on; its slot is the keeper's."""
        if self.held is not None:
            self._stock.states.drop(self.held.slot)
        self.held = held

    def cancel(self) -> None:
        """Stops a recovery; what is held stays."""
        if self._restoration is not None:
            self._restoration.cancel()
            self._end()

    def _start(self, restoration: Restoration, leave: Leave) -> None:
        if restoration is not self._restoration:
            leave()
            return
        self._leave = leave
        restoration.start(None if self.held is None else self.held.slot)

    def _end(self) -> None:
        self._restoration = None
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _take_restored(self, head: VersionInfo, checkpoint: VersionInfo, began_at: float, restored: Restored) -> None:
        assert self._restoration is not None
        recovery = self._restoration.recovery
        if restored.held is not None:
            self.keep(restored.held)
        if not restored.reason:
            say = self._logger.info if recovery.num_remade else self._logger.debug
            say(
                "state.recovered",
                fragment=self._fragment,
                version=head.version,
                checkpoint=checkpoint.version,
                num_versions=recovery.num_remade,
                seconds=round(self._services.now() - began_at, 6),
            )
        self._end()
        self._then(restored, recovery.payload_bytes)
