"""One fragment's shell: performs what its rounds order, and tells them what came of it.

It owns no socket and no thread. Everything here is a cache of the store: payloads that passed the screen, and the state
of the head. Rounds go by the books alone; that state is recovered meanwhile where it is not at hand.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from isles.outer import orders
from isles.outer.checkpointer import Checkpointer
from isles.outer.keeper import Keeper
from isles.outer.merging import Failure, Merging
from isles.outer.orders import Plan
from isles.outer.payload_cache import ANY_CODEC
from isles.outer.restoration import Restored
from isles.outer.rounds import RETRY_SECONDS, Rounds, State
from isles.outer.screenings import Screenings
from isles.outer.services import Services, Stock
from isles.outer.settings import OuterSettings
from isles.outer.workshop import Held, Product
from isles.proto.agreement import RunRecord
from isles.proto.client import as_error
from isles.proto.codec import bound_bytes
from isles.proto.errors import RefusedError, StoreError
from isles.proto.logs import Logger
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    Committed,
    Fenced,
    List,
    Listing,
    Message,
    Settle,
    Settled,
    Stale,
    VersionInfo,
)

FAILURES_MAX: Final = 10
"""Merges and recoveries of one fragment that fail one after the other, for want of blobs, before the outer gives up:
with a second between them a broker has had time to come back."""
QUIET_SECONDS: Final = 300.0
"""After so long without a new version a head without a checkpoint gets one: were an update on the way to it damaged,
nobody could join, and who cannot join brings no round about. Rounds that are only slow shall not each pay for a state,
which is a few times as large as a payload; so it is longer than most of them."""
EXPORTING: Final = "`isles export` what is there and begin another run from it with `isles init`"
MENDING: Final = f"put a copy of the store back, or {EXPORTING}"

STATE_BYTES_PER_VALUE: Final = 12
"""Parameters, momentum and remainder, in single precision."""


@dataclass(frozen=True)
class _Made:
    """A state, and the bytes of payloads that went into its version."""

    held: Held
    payload_bytes: int


class Desk:
    """Where one fragment is merged."""

    def __init__(
        self,
        fragment: int,
        record: RunRecord,
        manifest: Manifest,
        settings: OuterSettings,
        services: Services,
        stock: Stock,
        logger: Logger,
    ) -> None:
        self.rounds = Rounds(
            fragment,
            record.sync,
            record.budget,
            list_seconds=settings.list_seconds,
            num_required=settings.require_learners,
            limits=settings.limits,
            is_buffers=manifest.fragments[fragment].is_buffers,
        )
        self.timer_at: float | None = None
        self._fragment = fragment
        self._sync = record.sync
        self._slices = manifest.slices(fragment)
        self._num_values = manifest.fragments[fragment].num_values
        self._payload_bytes_max = bound_bytes(ANY_CODEC, self._num_values)
        self._services = services
        self._stock = stock
        self._logger = logger
        self._events: deque[orders.Event] = deque()
        self._is_handling = False
        self._is_stopping = False
        self._listing: Listing | None = None
        """The newest one of this lease."""
        self._plan: Plan | None = None
        """What shall be merged as soon as the state of its head is at hand."""
        self._merging: Merging | None = None
        self._made: _Made | None = None
        """The state of a version that was made and is not known to be committed."""
        self._num_failures = 0
        self._num_asked = 0
        """Listings that were asked for."""
        self._listing_number = 0
        """Which of them is the newest one."""
        self._recovery_number = 0
        """Which of them the newest recovery goes by."""
        self._lost: tuple[str, int] = "", 0
        """What a recovery found to be gone, and how many listings had been asked for then."""
        self._recover_at = 0.0
        """No recovery begins before this moment."""
        self._quiet_since = 0.0
        """When the head was new, or a checkpoint of it was begun because nothing else happened."""
        self._screenings = Screenings(
            fragment,
            record,
            self._slices,
            services,
            stock,
            logger,
            bytes_max=self._payload_bytes_max,
            tell=self.handle,
        )
        self._keeper = Keeper(fragment, record, self._slices, services, stock, logger, self._take_recovered)
        self._checkpointer = Checkpointer(
            fragment,
            services,
            stock,
            logger,
            versions_max=settings.checkpoint_versions,
            bytes_max=max(settings.checkpoint_bytes, STATE_BYTES_PER_VALUE * self._num_values),
            head=lambda: self._keeper.held,
            then=self._take_checkpointed,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a merge, a commit or a checkpoint is under way."""
        return self._is_merging or self._checkpointer.is_busy

    @property
    def is_retired(self) -> bool:
        """Whether it was told to stop and begins no more rounds."""
        return self._is_stopping and not self._is_merging

    @property
    def _is_merging(self) -> bool:
        return self.rounds.state in (State.MERGING, State.COMMITTING)

    def handle(self, event: orders.Event) -> None:
        """Tells the rounds what happened and performs what they order; also when called from within itself."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                self._take(self._events.popleft())
        finally:
            self._is_handling = False
        self._wind_down()

    def stop(self) -> None:
        """Begins no more rounds, finishes what is under way, and leaves a checkpoint behind; then it is not busy."""
        self._is_stopping = True
        self._wind_down()

    def close(self) -> None:
        """Ends everything; answers that are still to come mean nothing any more."""
        self._is_stopping = False
        self.handle(orders.LeaseLost())

    def tick(self) -> None:
        """Fires the timer when it is time."""
        if self.timer_at is not None and self._services.now() >= self.timer_at:
            self.timer_at = None
            self.handle(orders.TimerFired())

    def _take(self, event: orders.Event) -> None:
        is_new_lease = isinstance(event, orders.LeaseGranted) and event.epoch != self.rounds.epoch
        if is_new_lease or isinstance(event, orders.LeaseLost | Fenced):
            self._let_go()
        for instruction in self.rounds.handle(event, self._services.now()):
            self._perform(instruction)

    def _let_go(self) -> None:
        """The lease is gone: what was going on is of no use, and the store knows better what is true."""
        self._drop_merge()
        self._keeper.cancel()
        self._checkpointer.drop()
        self._listing = None

    def _wind_down(self) -> None:
        """Once told to stop, goes as far as it can be gone now."""
        if not self._is_stopping or self._is_merging or self.rounds.is_standing_by:
            return
        epoch = self.rounds.epoch
        for instruction in self.rounds.handle(orders.LeaseLost(), self._services.now()):
            self._perform(instruction)
        self._keeper.cancel()
        if self._checkpointer.is_behind:
            self._checkpointer.begin(epoch)

    def _perform(self, instruction: orders.Instruction) -> None:
        match instruction:
            case orders.List():
                self._num_asked += 1
                then = partial(self._take_listing, self.rounds.epoch, self._num_asked)
                self._services.ask(List(fragment=self._fragment), then)
            case orders.FetchPayloads():
                head_version = 0 if self._listing is None else self._listing.head.version
                self._screenings.want(instruction.contributions, head_version=head_version)
            case orders.ForgetPayloads():
                self._screenings.forget(instruction.ids)
            case orders.Settle():
                message = Settle(fragment=self._fragment, epoch=instruction.epoch, rejections=instruction.rejections)
                self._services.ask(message, partial(self._take_answer, "settle", instruction.epoch))
            case orders.Merge():
                self._plan = instruction.plan
                self._go_on()
            case orders.Commit():
                self._commit(instruction.plan, instruction.blobs)
            case orders.SetTimer():
                self.timer_at = instruction.at
            case orders.Log():
                getattr(self._logger, instruction.level)(instruction.event, **instruction.fields)

    # ------------------------------------------------------------------------------------------------- broker's answers

    def _take_listing(self, epoch: int, number: int, reply: Message) -> None:
        if not isinstance(reply, Listing):
            self._take_answer("list", epoch, reply)
            return
        if not self.rounds.is_standing_by:
            self._listing, self._listing_number = reply, number
            self._checkpointer.learn(_checkpoint_of(reply).version)
            self._recover(reply)
            self._consider_quiet()
        self.handle(orders.Listed(reply))

    def _take_answer(self, ask: Any, epoch: int, reply: Message) -> None:
        """An answer that was meant for an older lease says nothing about this one."""
        if epoch != self.rounds.epoch:
            return
        match reply:
            case Committed():
                self._take_committed(reply)
            case Settled() | Fenced():
                self.handle(reply)
            case Stale():
                self._drop_made()
                self.handle(reply)
            case _:
                error = as_error(reply)
                if ask == "list" and error.code == "damaged":
                    raise StoreError(
                        f"fragment {self._fragment} cannot be merged any more: {error.text}; or {EXPORTING}"
                    )
                self._logger.warning(
                    "message.refused", code=error.code, text=error.text, fragment=self._fragment, ask=ask
                )
                if ask == "commit":
                    self._drop_made()
                self.handle(orders.AskFailed(ask, error.text))

    # -------------------------------------------------------------------------------------------- the state of the head

    def _recover(self, listing: Listing) -> None:
        """Brings the state of the head before it is needed; not for a listing that was overtaken by a commit."""
        held = self._keeper.held
        is_overtaken = held is not None and listing.head.version < held.point.version
        is_ours = self._merging is not None or self._made is not None
        if not is_overtaken and not is_ours and self._services.now() >= self._recover_at:
            self._bring(listing.head, listing)

    def _bring(self, head: VersionInfo, listing: Listing) -> None:
        if not self._keeper.is_bringing:
            self._recovery_number = self._listing_number
        self._keeper.bring(head, _checkpoint_of(listing))

    def _take_recovered(self, restored: Restored, payload_bytes: dict[int, int]) -> None:
        """What had to be made again is checkpointed at once: the next recovery is short, and whoever cannot follow the
        tape, because something on it is damaged, need not wait for a round.
        """
        self._checkpointer.count(payload_bytes)
        reason = restored.reason
        if reason:
            self._recover_at = self._services.now() + RETRY_SECONDS
            self._logger.error("recovery.failed", fragment=self._fragment, reason=reason)
            if restored.is_lost:
                self._take_loss(reason)
            self._count_failure(reason)
        else:
            self._lost = "", 0
            self._quiet_since = self._services.now()
        self._go_on(reason)
        if not reason and self._checkpointer.is_behind and not self.rounds.is_standing_by:
            self._checkpointer.begin(self.rounds.epoch)

    def _go_on(self, reason: str = "") -> None:
        """Merges what was planned, once the state of its head is at hand; `reason` says why it could not be had."""
        plan = self._plan
        if plan is None or self._keeper.is_bringing:
            return
        if self._keeper.has(plan.head):
            self._plan = None
            self._merge(plan)
        elif reason:
            self._plan = None
            text = f"the state of version {plan.head.version} cannot be had: {reason}"
            self.handle(orders.MergeFailed(plan, text))
        else:
            assert self._listing is not None, "a plan is made from a listing"
            self._bring(plan.head, self._listing)

    def _take_checkpointed(self) -> None:
        """Rounds went on meanwhile; the last state of this process shall be in the store, too."""
        if self._is_stopping and self._checkpointer.is_behind:
            self._checkpointer.begin(self.rounds.epoch)

    def _consider_checkpoint(self) -> None:
        if self._checkpointer.is_due and not self.rounds.is_standing_by:
            self._checkpointer.begin(self.rounds.epoch)

    def _consider_quiet(self) -> None:
        now = self._services.now()
        if self._checkpointer.is_behind and now - self._quiet_since >= QUIET_SECONDS:
            self._quiet_since = now
            self._checkpointer.begin(self.rounds.epoch)

    # ---------------------------------------------------------------------------------------------------------- merging

    def _merge(self, plan: Plan) -> None:
        assert self._keeper.held is not None
        self._merging = Merging(
            plan,
            self._keeper.held,
            self._sync,
            self._slices,
            self._services,
            self._stock,
            bytes_max=self._payload_bytes_max,
            then=partial(self._take_merged, plan),
        )
        self._merging.begin()

    def _take_merged(self, plan: Plan, made: Product | Failure) -> None:
        self._merging = None
        if isinstance(made, Failure):
            if not made.rejections:
                self._count_failure(made.reason)
            self.handle(orders.MergeFailed(plan, made.reason, made.rejections))
            return
        self._made = _Made(made.held, sum(contribution.blob.size_bytes for contribution in plan.contributions))
        point = made.held.point
        self.handle(orders.Merged(plan, orders.NewBlobs(point.parameters_sha256, point.optimizer_sha256, made.blob)))

    def _commit(self, plan: Plan, blobs: orders.NewBlobs) -> None:
        message = orders.commit_message(plan, blobs, self._services.draw_token())
        self._services.ask(message, partial(self._take_answer, "commit", plan.epoch))

    def _take_committed(self, reply: Committed) -> None:
        self._num_failures = 0
        made, self._made = self._made, None
        if made is not None:
            self._keeper.keep(made.held)
            self._quiet_since = self._services.now()
            self._checkpointer.count({made.held.point.version: made.payload_bytes})
        self.handle(reply)
        self._consider_checkpoint()

    def _drop_merge(self) -> None:
        self._plan = None
        merging, self._merging = self._merging, None
        if merging is not None:
            merging.cancel()
        self._drop_made()

    def _drop_made(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            self._stock.states.drop(made.held.slot)

    def _take_loss(self, reason: str) -> None:
        """What is still gone by a listing that was asked for after it had been missed is gone for good: only by being
        missed does the broker learn of it, and it may have another way then.
        """
        lost, num_asked = self._lost
        if lost == reason and num_asked < self._recovery_number:
            raise StoreError(
                f"fragment {self._fragment} cannot be merged any more, as its store is damaged and no later checkpoint "
                f"is in it: {reason}; {MENDING}, which loses momentum and remainder"
            )
        if lost != reason:
            self._lost = reason, self._num_asked

    def _count_failure(self, reason: str) -> None:
        self._num_failures += 1
        if self._num_failures >= FAILURES_MAX:
            raise RefusedError(
                f"fragment {self._fragment} cannot be merged, {FAILURES_MAX} attempts failed: {reason}; the broker's "
                f"log says what is wrong with its store: {MENDING}"
            )


def _checkpoint_of(listing: Listing) -> VersionInfo:
    """The newest checkpoint. A broker that has none lists a head without a state, which recovery then complains of."""
    return listing.checkpoint or listing.head
