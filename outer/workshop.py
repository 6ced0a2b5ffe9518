"""The heavy work of a fragment, done on the outer's worker threads: decode, add, step, encode. Touches nothing shared
but the cache of states, which locks itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from isles.outer.accumulators import Accumulator, Taker
from isles.outer.optimizer import FragmentState, NewVersion, Vector, finish_version, optimizer_digest, parameters_digest
from isles.outer.payload_cache import Payload
from isles.outer.recovery import StatePoint
from isles.outer.state_cache import Slot, StateCache
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.errors import NonFiniteError, PayloadError, RangeError
from isles.proto.manifest import TensorSlice
from isles.proto.messages import BlobRef, Recipe

STATE_CODEC: Final = "fp32"
"""Of parameters, momentum and remainder: the outer's state is exact."""


@dataclass(frozen=True)
class Held:
    """A state in the cache, and what it is of."""

    point: StatePoint
    slot: Slot


@dataclass(frozen=True)
class Product:
    """A version that was made and is not committed yet."""

    held: Held
    """Owned by whoever is given it."""
    update: bytes
    blob: BlobRef
    """Of the update."""


@dataclass(frozen=True)
class Encoded:
    """Some bytes, and their name."""

    payload: bytes
    blob: BlobRef


@dataclass(frozen=True)
class Unreadable:
    """Something that is no delta of its fragment."""

    index: int
    """Among those that were to be added at once."""
    reason: str


class Adder:
    """Hands deltas to whatever takes them, in their order.

    All are decoded to the same memory: a fragment of fresh memory would cost more time than decoding.
    """

    def __init__(self, taker: Taker, num_values: int) -> None:
        self._taker, self._num_values = taker, num_values
        self._memory: list[Vector] = []

    def add(self, *payloads: Payload) -> Unreadable | None:
        """Adds the next deltas at once, or says which is none, and why; it takes memory for as many."""
        while len(self._memory) < len(payloads):
            self._memory.append(np.empty(self._num_values, np.float32))
        deltas = self._memory[: len(payloads)]
        for index, (payload, delta) in enumerate(zip(payloads, deltas, strict=True)):
            try:
                decode(payload, num_values=self._num_values, out=delta)
            except PayloadError as error:
                return Unreadable(index, str(error))
        self._taker.add(*deltas)
        return None

    def take_memory(self) -> list[Vector]:
        """What deltas were decoded to: [n] float32 each, of no meaning, and the caller's now."""
        memory, self._memory = self._memory, []
        return memory


def finish(
    merge: Accumulator,
    start: FragmentState | Slot,
    recipe: Recipe,
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
    states: StateCache,
    spares: Sequence[Vector],
) -> NewVersion | str:
    """Takes the outer step from a state, or says why that gives no version. `spares` are memory for it.

    Raises StoreError if the scratch file did not keep the state.
    """
    state = states.read(start) if isinstance(start, Slot) else start
    try:
        return finish_version(state, merge.result(), recipe, sync, slices, spares)
    except (NonFiniteError, RangeError) as error:
        return str(error)


def produce(
    merge: Accumulator,
    start: Held,
    recipe: Recipe,
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
    states: StateCache,
    spares: Sequence[Vector],
) -> Product | str:
    """Makes the version after `start` and keeps its state, or says why there is none. `spares` are memory for it.

    Raises StoreError if the scratch file did not keep a state, UsageError if it cannot take one more.
    """
    made = finish(merge, start.slot, recipe, sync, slices, states, spares)
    if isinstance(made, str):
        return made
    point = StatePoint(start.point.version + 1, made.parameters_sha256, made.optimizer_sha256)
    encoded = named(made.update)
    return Product(Held(point, states.put(made.state)), made.update, encoded.blob)


def read_vector(payload: Payload, num_values: int) -> Vector | str:
    """A part of a checkpoint, or why it is none."""
    try:
        return decode(payload, num_values=num_values)
    except PayloadError as error:
        return str(error)


def digests(state: FragmentState) -> tuple[str, str]:
    """The digest of the parameters, and that of momentum and remainder."""
    return parameters_digest(state.parameters), optimizer_digest(state)


def encode_part(states: StateCache, slot: Slot, name: str) -> Encoded | None:
    """A part of a checkpoint as bytes; None for zeros, which are left out.

    Raises StoreError if the scratch file did not keep it.
    """
    vector = states.read_part(slot, name)
    return None if vector is None else named(encode(STATE_CODEC, vector))


def named(payload: bytes) -> Encoded:
    """Some bytes with their name."""
    return Encoded(payload, BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload)))
