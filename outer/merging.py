"""One merge, from its plan to an update that is in the store: feeds the payloads, takes the step, uploads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from isles.outer.accumulators import Peaks, Taker, Vector, start_merge
from isles.outer.conduct import reason_of
from isles.outer.feed import Feed, FeedFailure
from isles.outer.orders import Plan
from isles.outer.screen import NOT_FINITE
from isles.outer.services import Services, Stock
from isles.outer.turns import Leave
from isles.outer.workshop import Held, Product, produce
from isles.proto.agreement import SyncSettings
from isles.proto.client import as_error
from isles.proto.errors import RefusedError
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Message, Rejection, Stored, Upload


@dataclass(frozen=True)
class Failure:
    """A merge that gave no version, and the contribution that spoiled it, if one did."""

    reason: str
    rejections: tuple[Rejection, ...] = ()


class Merging:
    """A merge under way. It waits for its turn first, as memory for an accumulator is limited."""

    def __init__(
        self,
        plan: Plan,
        start: Held,
        sync: SyncSettings,
        slices: Sequence[TensorSlice],
        services: Services,
        stock: Stock,
        *,
        bytes_max: int,
        then: Callable[[Product | Failure], None],
    ) -> None:
        """`start` is the state of the plan's head and stays its owner's. `then` is called once, on the calling thread,
        unless `cancel` is called before; it then owns the product's slot.
        """
        self.plan = plan
        self._start_state = start
        self._sync = sync
        self._slices = slices
        self._services = services
        self._stock = stock
        self._bytes_max = bytes_max
        self._then = then
        self._feed: Feed | None = None
        self._leave: Leave | None = None
        self._product: Product | None = None
        self._is_over = False
        stock.states.share(start.slot)

    def begin(self) -> None:
        """Asks for its turn."""
        self._stock.merges.join(self._start)

    def cancel(self) -> None:
        """Nothing is called back any more, and what was made is let go."""
        if self._is_over:
            return
        self._end()
        if self._product is not None:
            self._stock.states.drop(self._product.held.slot)

    def _start(self, leave: Leave) -> None:
        if self._is_over:
            leave()
            return
        self._leave = leave
        merge = start_merge(self.plan.recipe, self._slices, self._sync)
        call = partial(
            produce, merge, self._start_state, self.plan.recipe, self._sync, self._slices, self._stock.states
        )
        self._start_feed(merge, partial(self._take_fed, call))

    def _start_feed(self, taker: Taker, then: Callable[[FeedFailure | None], None]) -> None:
        contributions = self.plan.contributions
        self._feed = Feed(
            taker,
            [contribution.blob for contribution in contributions],
            self._services,
            num_values=self._slices[-1].stop,
            bytes_max=self._bytes_max,
            find=lambda index: self._stock.payloads.get(contributions[index].id),
            then=then,
        )
        self._feed.start()

    def _take_fed(self, call: Callable[[Sequence[Vector]], Product | str], failure: FeedFailure | None) -> None:
        if failure is not None:
            self._fail_without(failure)
            return
        assert self._feed is not None, "what was fed came from a feed"
        self._stock.states.share(self._start_state.slot)  # until the worker thread has read it
        self._services.work(partial(call, self._feed.take_memory()), self._take_product)

    def _fail_without(self, failure: FeedFailure) -> None:
        kind = "payload" if failure.is_unreadable else "lost"
        rejection = self._reject(failure.index, kind, failure.reason)
        self._fail(Failure(rejection.reason, (rejection,) if failure.is_lost else ()))

    def _take_product(self, product: Product | str) -> None:
        self._stock.states.drop(self._start_state.slot)
        if self._is_over:
            if isinstance(product, Product):
                self._stock.states.drop(product.held.slot)
            return
        if isinstance(product, str):
            peaks = Peaks()
            self._start_feed(peaks, partial(self._take_peaks, product, peaks))
            return
        self._product, self._feed = product, None
        self._leave_turn()
        self._services.ask(Upload(blob=product.blob), partial(self._take_stored, product), product.update)

    def _take_peaks(self, what: str, peaks: Peaks, failure: FeedFailure | None) -> None:
        """Every delta was read once more, to see which is the largest."""
        if failure is not None:
            self._fail_without(failure)
        else:
            self._fail(Failure(what, (self._blame(peaks.found, what),)))

    def _take_stored(self, product: Product, reply: Message) -> None:
        if self._is_over:
            return
        if isinstance(reply, Stored):
            self._end()
            self._then(product)
            return
        error = as_error(reply)
        if error.code == "too-large":
            raise RefusedError(
                f"the broker does not take the new version of fragment {self.plan.fragment}: {error.text}; raise that "
                "limit there, or split the model into more fragments"
            )
        self._fail(Failure(f"the broker did not store the new version: {error.text}"))

    def _fail(self, failure: Failure) -> None:
        self.cancel()
        self._then(failure)

    def _end(self) -> None:
        self._is_over = True
        self._stock.states.drop(self._start_state.slot)
        if self._feed is not None:
            self._feed.cancel()
            self._feed = None
        self._leave_turn()

    def _leave_turn(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    # ------------------------------------------------------------------------------------------------------ whose fault

    def _blame(self, peaks: Sequence[float], what: str) -> Rejection:
        """Rejects the largest contribution: each payload is finite, but the step is not.

        If the fault were the state's, each round would still settle one contribution, so no round repeats itself for
        ever.
        """
        text = (
            f"{what}, and of what was merged this contribution is the largest, reaching {max(peaks):.3g} (the step is "
            f"{NOT_FINITE} or out of range)"
        )
        return self._reject(peaks.index(max(peaks)), "step", text)

    def _reject(self, index: int, kind: str, text: str) -> Rejection:
        blamed = self.plan.contributions[index].id
        return Rejection(id=blamed, reason=reason_of(blamed, text), kind=kind)
