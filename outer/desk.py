"""One fragment's shell: performs what its rounds order, and tells them what came of it.

It owns no socket and no thread; its maker lends it ways to ask, to fetch and to work, each of which calls back on the
same thread. Everything here is a cache of the store: payloads that passed the screen, and the state of the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from isles.outer import orders
from isles.outer.optimizer import Vector
from isles.outer.orders import Plan
from isles.outer.rounds import Rounds, State
from isles.outer.screen import screen_books, screen_payload
from isles.outer.workshop import STATE_CODEC, Failure, Payload, Product, produce, state_blobs
from isles.proto.agreement import Budget, SyncSettings
from isles.proto.codec import bound_bytes
from isles.proto.errors import RefusedError
from isles.proto.ids import ContributionId
from isles.proto.logs import Logger
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    BlobRef,
    Commit,
    Committed,
    Contribution,
    Error,
    Fenced,
    List,
    Listing,
    Message,
    Settle,
    Settled,
    Stale,
    Stored,
    Upload,
)

_Result = TypeVar("_Result")

FAILURES_MAX: Final = 10
"""Merges of one fragment that fail one after the other, for want of blobs, before the outer gives up: with a second
between them a broker has had time to come back."""


class Services(Protocol):
    """What a desk is lent."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def draw_token(self) -> str:
        """A random name that nobody else draws."""

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        """Asks the broker until answered."""

    def fetch(self, blob: BlobRef, then: Callable[[Payload | None, str], None], *, bytes_max: int) -> None:
        """Brings a blob, or None and the reason."""

    def work(self, call: Callable[[], _Result], then: Callable[[_Result], None]) -> None:
        """Does what takes long on the worker thread."""


@dataclass
class _Merge:
    """A merge under way: what it still needs, then what is still being stored."""

    plan: Plan
    state: dict[str, Vector | Payload]
    missing: set[str]
    unstored: set[str]
    blobs: orders.NewBlobs | None = None


class Desk:
    """Where one fragment is merged."""

    def __init__(
        self,
        fragment: int,
        sync: SyncSettings,
        budget: Budget,
        manifest: Manifest,
        services: Services,
        logger: Logger,
        *,
        list_seconds: float,
    ) -> None:
        self.rounds = Rounds(fragment, sync, budget, list_seconds=list_seconds)
        self.timer_at: float | None = None
        self._fragment = fragment
        self._sync = sync
        self._slices = manifest.slices(fragment)
        self._num_values = manifest.fragments[fragment].num_values
        self._services = services
        self._logger = logger
        self._events: deque[orders.Event] = deque()
        self._is_handling = False
        self._head_version = 0
        self._payloads: dict[ContributionId, Payload] = {}
        """Those that are being screened or have passed."""
        self._wanted: set[ContributionId] = set()
        """Contributions whose payload or verdict is awaited, or may still be merged."""
        self._vectors: dict[str, Vector] = {}
        """Digest -> state that was last merged from, and what came of it: one of the two is the head's."""
        self._merge: _Merge | None = None
        self._num_failures = 0

    @property
    def is_busy(self) -> bool:
        """Whether a merge or a commit is under way."""
        return self.rounds.state in (State.MERGING, State.COMMITTING)

    def handle(self, event: orders.Event) -> None:
        """Tells the rounds what happened and performs what they order; also when called from within itself."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._events:
                for instruction in self.rounds.handle(self._events.popleft(), self._services.now()):
                    self._perform(instruction)
            if self.rounds.is_standing_by:
                self._merge = None
        finally:
            self._is_handling = False

    def tick(self) -> None:
        """Fires the timer when it is time."""
        if self.timer_at is not None and self._services.now() >= self.timer_at:
            self.timer_at = None
            self.handle(orders.TimerFired())

    def _perform(self, instruction: orders.Instruction) -> None:
        match instruction:
            case orders.List():
                self._services.ask(List(fragment=self._fragment), self._take_listing)
            case orders.FetchPayloads():
                self._wanted.update(contribution.id for contribution in instruction.contributions)
                for contribution in instruction.contributions:
                    self._fetch_payload(contribution)
            case orders.ForgetPayloads():
                self._wanted.difference_update(instruction.ids)
                for contribution_id in instruction.ids:
                    self._payloads.pop(contribution_id, None)
            case orders.Settle():
                message = Settle(fragment=self._fragment, epoch=instruction.epoch, rejections=instruction.rejections)
                self._services.ask(message, partial(self._take_answer, "settle", instruction.epoch))
            case orders.Merge():
                self._begin_merge(instruction.plan)
            case orders.Commit():
                self._commit(instruction.plan, instruction.blobs)
            case orders.SetTimer():
                self.timer_at = instruction.at
            case orders.Log():
                getattr(self._logger, instruction.level)(instruction.event, **instruction.fields)

    # ------------------------------------------------------------------------------------------------- broker's answers

    def _take_listing(self, reply: Message) -> None:
        if isinstance(reply, Listing):
            self._head_version = reply.head.version
            self.handle(orders.Listed(reply))
        else:
            self._take_answer("list", self.rounds.epoch, reply)

    def _take_answer(self, ask: Any, epoch: int, reply: Message) -> None:
        """An answer that was meant for an older lease says nothing about this one."""
        if epoch != self.rounds.epoch:
            return
        match reply:
            case Settled() | Committed() | Stale() | Fenced():
                if isinstance(reply, Committed):
                    self._num_failures = 0
                self.handle(reply)
            case _:
                text = reply.text if isinstance(reply, Error) else f"the answer is {type(reply).__name__}"
                code = reply.code if isinstance(reply, Error) else "bad-message"
                self._logger.warning("message.refused", code=code, text=text, fragment=self._fragment, ask=ask)
                self.handle(orders.AskFailed(ask, text))

    # -------------------------------------------------------------------------------------------------------- screening

    def _fetch_payload(self, contribution: Contribution) -> None:
        reason = screen_books(contribution, head_version=self._head_version, slices=self._slices, sync=self._sync)
        if reason:
            self.handle(orders.PayloadScreened(contribution.id, reason))
            return
        bytes_max = bound_bytes(self._sync.codec_up, self._num_values)
        self._services.fetch(contribution.blob, partial(self._take_payload, contribution), bytes_max=bytes_max)

    def _take_payload(self, contribution: Contribution, payload: Payload | None, text: str) -> None:
        if contribution.id not in self._wanted:
            return
        if payload is None:
            self._logger.warning(
                "blob.unavailable", digest=contribution.blob.digest, text=text, fragment=self._fragment
            )
            reason = f"learner {contribution.id.learner}, fragment {self._fragment}: its payload cannot be had: {text}"
            self.handle(orders.PayloadScreened(contribution.id, reason[:2000]))
            return
        self._payloads[contribution.id] = payload
        call = partial(screen_payload, contribution, payload, slices=self._slices, sync=self._sync)
        self._services.work(call, partial(self._take_verdict, contribution.id))

    def _take_verdict(self, contribution_id: ContributionId, reason: str) -> None:
        if reason:
            self._payloads.pop(contribution_id, None)
        self.handle(orders.PayloadScreened(contribution_id, reason))

    # ---------------------------------------------------------------------------------------------------------- merging

    def _begin_merge(self, plan: Plan) -> None:
        blobs = state_blobs(plan.head)
        known: dict[str, Vector | Payload] = {
            blob.digest: self._vectors[blob.digest] for blob in blobs if blob.digest in self._vectors
        }
        self._vectors = {digest: vector for digest, vector in self._vectors.items() if digest in known}
        self._merge = _Merge(plan, known, {blob.digest for blob in blobs} - known.keys(), set())
        for blob in blobs:
            if blob.digest not in known:
                bytes_max = bound_bytes(STATE_CODEC, self._num_values)
                self._services.fetch(blob, partial(self._take_state, self._merge, blob), bytes_max=bytes_max)
        if not self._merge.missing:
            self._produce(self._merge)

    def _take_state(self, merge: _Merge, blob: BlobRef, payload: Payload | None, text: str) -> None:
        if merge is not self._merge or blob.digest not in merge.missing:
            return
        if payload is None:
            self._logger.error("blob.unavailable", digest=blob.digest, text=text, fragment=self._fragment)
            self._fail(merge, Failure(f"the state of version {merge.plan.head.version} cannot be had: {text}"))
            return
        merge.missing.remove(blob.digest)
        merge.state[blob.digest] = payload
        if not merge.missing:
            self._produce(merge)

    def _produce(self, merge: _Merge) -> None:
        payloads = [self._payloads[contribution.id] for contribution in merge.plan.contributions]
        call = partial(produce, merge.plan, merge.state, payloads, self._sync, self._slices)
        self._services.work(call, partial(self._take_product, merge))

    def _take_product(self, merge: _Merge, product: Product | Failure) -> None:
        if merge is not self._merge:
            return
        if isinstance(product, Failure):
            self._fail(merge, product)
            return
        merge.blobs, merge.unstored = product.blobs, set(product.payloads)
        self._vectors.update(product.vectors)
        for digest, payload in product.payloads.items():
            blob = BlobRef(digest=digest, size_bytes=len(payload))
            self._services.ask(Upload(blob=blob), partial(self._take_stored, merge, digest), payload)

    def _take_stored(self, merge: _Merge, digest: str, reply: Message) -> None:
        if merge is not self._merge or merge.blobs is None:
            return
        if isinstance(reply, Error) and reply.code == "too-large":
            raise RefusedError(
                f"the broker does not take the new version of fragment {self._fragment}: {reply.text}; raise that "
                "limit there, or split the model into more fragments"
            )
        if not isinstance(reply, Stored):
            text = reply.text if isinstance(reply, Error) else type(reply).__name__
            self._fail(merge, Failure(f"the broker did not store the new version: {text}"))
            return
        merge.unstored.discard(digest)
        if not merge.unstored:
            self._merge = None
            self.handle(orders.Merged(merge.plan, merge.blobs))

    def _fail(self, merge: _Merge, failure: Failure) -> None:
        self._merge = None
        if not failure.rejections:
            self._num_failures += 1
        if self._num_failures >= FAILURES_MAX:
            raise RefusedError(
                f"fragment {self._fragment} cannot be merged, {FAILURES_MAX} attempts failed: {failure.reason}; the "
                "broker's log says what is wrong with its store"
            )
        self.handle(orders.MergeFailed(merge.plan, failure.reason, failure.rejections))

    def _commit(self, plan: Plan, blobs: orders.NewBlobs) -> None:
        message = Commit(
            commit_id=self._services.draw_token(),
            fragment=self._fragment,
            epoch=plan.epoch,
            base_version=plan.head.version,
            parameters_sha256=blobs.parameters_sha256,
            update=blobs.update,
            parameters=blobs.parameters,
            momentum=blobs.momentum,
            remainder=blobs.remainder,
            recipe=plan.recipe,
        )
        self._services.ask(message, partial(self._take_answer, "commit", plan.epoch))
