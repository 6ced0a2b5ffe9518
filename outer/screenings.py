"""Brings the payloads of one fragment's rows and has them screened, before anybody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from isles.outer import orders
from isles.outer.conduct import reason_of
from isles.outer.payload_cache import Payload
from isles.outer.screen import Screening, screen_books, screen_payload
from isles.outer.services import Services, Stock, Unavailable
from isles.outer.turns import Leave
from isles.proto.agreement import RunRecord
from isles.proto.ids import ContributionId
from isles.proto.logs import Logger
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Contribution


class Screenings:
    """The screenings under way, and which of them are still of use."""

    def __init__(
        self,
        fragment: int,
        record: RunRecord,
        slices: Sequence[TensorSlice],
        services: Services,
        stock: Stock,
        logger: Logger,
        *,
        bytes_max: int,
        tell: Callable[[orders.Event], None],
    ) -> None:
        """`tell` hears of a PayloadScreened or ScreenPutOff for each; `bytes_max` bounds one payload."""
        self._fragment = fragment
        self._sync, self._past = record.sync, record.past_sync
        self._slices = slices
        self._services = services
        self._stock = stock
        self._logger = logger
        self._bytes_max = bytes_max
        self._tell = tell
        self._wanted: set[ContributionId] = set()
        """Contributions whose payload or verdict is awaited, or may still be merged."""

    def want(self, contributions: Iterable[Contribution], *, head_version: int) -> None:
        """Screens these; payloads that pass are kept as far as there is room."""
        contributions = tuple(contributions)
        self._wanted.update(contribution.id for contribution in contributions)
        for contribution in contributions:
            reason = screen_books(
                contribution, head_version=head_version, slices=self._slices, sync=self._sync, past=self._past
            )
            if reason:
                self._tell(orders.PayloadScreened(contribution.id, reason, "books"))
            else:
                self._stock.screenings.join(partial(self._fetch, contribution), contribution.blob.size_bytes)

    def forget(self, ids: Iterable[ContributionId]) -> None:
        """These will not be merged by us."""
        for contribution_id in ids:
            self._wanted.discard(contribution_id)
            self._stock.payloads.drop(contribution_id)

    def _fetch(self, contribution: Contribution, leave: Leave) -> None:
        if contribution.id not in self._wanted:
            leave()
            return
        then = partial(self._take_payload, contribution, leave)
        self._services.fetch(contribution.blob, then, bytes_max=self._bytes_max)

    def _take_payload(self, contribution: Contribution, leave: Leave, payload: Payload | Unavailable) -> None:
        if contribution.id not in self._wanted:
            leave()
            return
        if isinstance(payload, Unavailable):
            leave()
            self._take_unavailable(contribution, payload)
            return
        call = partial(screen_payload, contribution, payload, slices=self._slices, sync=self._sync, past=self._past)
        self._services.work(call, partial(self._take_verdict, contribution.id, payload, leave))

    def _take_unavailable(self, contribution: Contribution, why: Unavailable) -> None:
        """What is gone is rejected; what was only put off is asked for again when the rows are looked at next."""
        self._logger.warning(
            "blob.unavailable", digest=contribution.blob.digest, text=why.text, fragment=self._fragment
        )
        if not why.is_lost:
            self._tell(orders.ScreenPutOff(contribution.id))
            return
        reason = reason_of(contribution.id, f"its payload cannot be had: {why.text}")
        self._tell(orders.PayloadScreened(contribution.id, reason, "lost"))

    def _take_verdict(self, contribution_id: ContributionId, payload: Payload, leave: Leave, found: Screening) -> None:
        if not found.reason and contribution_id in self._wanted:
            self._stock.payloads.put(contribution_id, payload)
        leave()
        self._tell(orders.PayloadScreened(contribution_id, *found))
