"""Performs what a recovery orders: reads a checkpoint, reads the tape, makes versions again.

In memory are one state, one accumulator and a few payloads, however long the tape is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from isles.outer.accumulators import start_merge
from isles.outer.feed import Feed, FeedFailure
from isles.outer.optimizer import FragmentState, NewVersion, Vector
from isles.outer.payload_cache import ANY_CODEC, Payload
from isles.outer.recovery import (
    AskTape,
    GiveUp,
    Instruction,
    Prevented,
    ReadCheckpoint,
    Recovered,
    Recovery,
    Remake,
    StateMade,
    StatePoint,
    TapeRead,
)
from isles.outer.services import LOST_CODES, Services, Stock, Unavailable
from isles.outer.state_cache import PARTS, Slot
from isles.outer.workshop import STATE_CODEC, Held, digests, finish, read_vector
from isles.proto.client import as_error
from isles.proto.codec import bound_bytes
from isles.proto.errors import RefusedError
from isles.proto.manifest import TensorSlice
from isles.proto.messages import AskHistory, BlobRef, History, Message, VersionInfo


@dataclass(frozen=True)
class Restored:
    """What came of it: the state that was come to, if any, and why it is not the head's, if it is not."""

    held: Held | None
    reason: str = ""
    is_lost: bool = False
    """Whether what it takes is gone, as far as the listing knew it."""


class Restoration:
    """One recovery under way."""

    def __init__(
        self,
        recovery: Recovery,
        fragment: int,
        slices: Sequence[TensorSlice],
        services: Services,
        stock: Stock,
        then: Callable[[Restored], None],
    ) -> None:
        """`then` is called once, on the calling thread, unless `cancel` is called before; it then owns the slot."""
        self.recovery = recovery
        self._fragment = fragment
        self._slices = slices
        self._num_values = slices[-1].stop
        self._services = services
        self._stock = stock
        self._then = then
        self._state: FragmentState | None = None
        self._parts: dict[str, Vector] = {}
        self._feed: Feed | None = None
        self._is_over = False

    def start(self, slot: Slot | None) -> None:
        """Begins; `slot` is that of the state that the recovery may begin with, and stays its owner's."""
        if slot is not None and self.recovery.is_from_held:
            call = partial(self._stock.states.read, self._stock.states.share(slot))
            self._services.work(call, partial(self._take_held, slot))
        else:
            self._perform(self.recovery.start())

    def cancel(self) -> None:
        """Nothing is called back any more, and nothing is kept."""
        self._is_over = True
        self._state = None
        self._parts.clear()
        if self._feed is not None:
            self._feed.cancel()

    def _take_held(self, slot: Slot, state: FragmentState) -> None:
        self._stock.states.drop(slot)
        if not self._is_over:
            self._state = state
            self._perform(self.recovery.start())

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ReadCheckpoint():
                    self._state = None
                    self._read(instruction.info)
                case AskTape():
                    ask = AskHistory(fragment=self._fragment, first=instruction.first, num_max=instruction.num_max)
                    self._services.ask(ask, self._take_history)
                case Remake():
                    self._remake(instruction)
                case Recovered():
                    self._end("")
                case GiveUp():
                    self._end(instruction.reason, is_lost=instruction.is_lost)

    def _prevent(self, reason: str, *, is_lost: bool) -> None:
        self._perform(self.recovery.handle(Prevented(reason, is_lost)))

    # ------------------------------------------------------------------------------------------------------- checkpoint

    def _read(self, info: VersionInfo) -> None:
        """Fetches the parts of a checkpoint that are left, one after the other."""
        where = f"the checkpoint of fragment {self._fragment}, version {info.version}"
        for name in PARTS:
            blob: BlobRef | None = getattr(info, name)
            if blob is not None and name not in self._parts:
                bytes_max = bound_bytes(STATE_CODEC, self._num_values)
                self._services.fetch(blob, partial(self._take_part, info, name, where), bytes_max=bytes_max)
                return
        if "parameters" not in self._parts:
            self._prevent(f"{where} has no parameters in the store", is_lost=True)
            return
        parts, self._parts = self._parts, {}
        self._state = FragmentState(parts["parameters"], parts.get("momentum"), parts.get("remainder"))
        self._services.work(partial(digests, self._state), self._take_digests)

    def _take_part(self, info: VersionInfo, name: str, where: str, payload: Payload | Unavailable) -> None:
        if self._is_over:
            return
        if isinstance(payload, Unavailable):
            self._prevent(f"{where} cannot be had: {payload.text}", is_lost=payload.is_lost)
            return
        then = partial(self._take_vector, info, name, where)
        self._services.work(partial(read_vector, payload, self._num_values), then)

    def _take_vector(self, info: VersionInfo, name: str, where: str, vector: Vector | str) -> None:
        if self._is_over:
            return
        if isinstance(vector, str):
            raise RefusedError(
                f"{where} cannot be read: its {name} are no payload of {self._num_values} values: {vector}"
            )
        self._parts[name] = vector
        self._read(info)

    def _take_digests(self, found: tuple[str, str]) -> None:
        if not self._is_over:
            self._perform(self.recovery.handle(StateMade(*found)))

    # ------------------------------------------------------------------------------------------------------------- tape

    def _take_history(self, reply: Message) -> None:
        if self._is_over:
            return
        if isinstance(reply, History):
            self._perform(self.recovery.handle(TapeRead(reply.versions)))
        else:
            error = as_error(reply)
            is_lost = error.code in LOST_CODES
            self._prevent(f"the tape of fragment {self._fragment} cannot be read: {error.text}", is_lost=is_lost)

    def _remake(self, order: Remake) -> None:
        recipe = order.info.recipe
        assert recipe is not None
        try:
            merge = start_merge(recipe, self._slices, order.sync)
        except ValueError as error:
            raise RefusedError(
                f"fragment {self._fragment}, version {order.info.version} cannot be recomputed: its recipe does not "
                f"fit the model: {error}"
            ) from error
        call = partial(finish, merge, self._state_at_hand(), recipe, order.sync, self._slices, self._stock.states)
        self._feed = Feed(
            merge,
            [BlobRef(digest=part.digest, size_bytes=part.size_bytes) for part in recipe.ingredients],
            self._services,
            num_values=self._num_values,
            bytes_max=bound_bytes(ANY_CODEC, self._num_values),
            find=lambda _: None,
            then=partial(self._take_fed, order, call),
        )
        self._feed.start()

    def _take_fed(
        self, order: Remake, call: Callable[[Sequence[Vector]], NewVersion | str], failure: FeedFailure | None
    ) -> None:
        if failure is not None:
            where = self._where(order, failure.index)
            if failure.is_unreadable:
                raise RefusedError(f"{where} is no delta of this fragment, yet it was merged: {failure.reason}")
            self._prevent(f"{where}: {failure.reason}", is_lost=failure.is_lost)
            return
        assert self._feed is not None, "what was fed came from a feed"
        self._services.work(partial(call, self._feed.take_memory()), partial(self._take_made, order))

    def _take_made(self, order: Remake, made: NewVersion | str) -> None:
        if self._is_over:
            return
        if isinstance(made, str):
            raise RefusedError(
                f"fragment {self._fragment}, version {order.info.version} was committed and cannot be made again: "
                f"{made}; start the outer with the build that made it"
            )
        self._state = made.state
        self._perform(self.recovery.handle(StateMade(made.parameters_sha256, made.optimizer_sha256)))

    def _where(self, order: Remake, index: int) -> str:
        assert order.info.recipe is not None
        learner = order.info.recipe.ingredients[index].id.learner
        return f"what learner {learner} gave for version {order.info.version} of fragment {self._fragment}"

    def _state_at_hand(self) -> FragmentState:
        assert self._state is not None
        return self._state

    # -------------------------------------------------------------------------------------------------------------- end

    def _end(self, reason: str, *, is_lost: bool = False) -> None:
        """Hands over how far it came, so that a later attempt need not begin anew."""
        point, state = self.recovery.point, self._state
        if point is None or state is None:
            self._is_over = True
            self._then(Restored(None, reason, is_lost))
            return
        then = partial(self._take_slot, point, reason, is_lost)
        self._services.work(partial(self._stock.states.put, state), then)

    def _take_slot(self, point: StatePoint, reason: str, is_lost: bool, slot: Slot) -> None:
        if self._is_over:
            self._stock.states.drop(slot)
            return
        self.cancel()
        self._then(Restored(Held(point, slot), reason, is_lost))
