"""The heavy work of a merge, done on the outer's worker thread: decode, merge, step, encode. Touches nothing shared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from isles.outer.optimizer import FragmentState, NewVersion, Vector, make_version, parameters_digest
from isles.outer.orders import NewBlobs, Plan
from isles.outer.screen import NOT_FINITE
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.errors import NonFiniteError, PayloadError, RangeError
from isles.proto.manifest import TensorSlice
from isles.proto.messages import BlobRef, Rejection, VersionInfo

Payload = bytes | bytearray

STATE_CODEC: Final = "fp32"
"""Of parameters, momentum and remainder: the outer's state is exact."""


@dataclass(frozen=True)
class Product:
    """A merge that succeeded: the bytes to store, and the vectors to go on with."""

    blobs: NewBlobs
    payloads: Mapping[str, bytes]
    """Digest -> bytes of every blob."""
    vectors: Mapping[str, Vector]
    """Digest -> [n] float32 of the blobs that the next step starts from."""


@dataclass(frozen=True)
class Failure:
    """A merge that gave no version, and the contribution that spoiled it, if one did."""

    reason: str
    rejections: tuple[Rejection, ...] = ()


def state_blobs(head: VersionInfo) -> list[BlobRef]:
    """What the outer step needs of a version, besides its books."""
    return [blob for blob in (head.parameters, head.momentum, head.remainder) if blob is not None]


def produce(
    plan: Plan,
    state: Mapping[str, Vector | Payload],
    payloads: Sequence[Payload],
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
) -> Product | Failure:
    """Makes the version of a plan.

    `state` maps the digest of each of `state_blobs(plan.head)` to its vector, or to its payload where it was fetched;
    `payloads` are those of the plan's contributions, in their order, and have passed the screen.
    """
    num_values = slices[-1].stop
    try:
        start = _read_state(plan.head, state, num_values)
    except PayloadError as error:
        return Failure(f"the state of version {plan.head.version} cannot be used: {error}")
    try:
        deltas = (decode(payload, num_values=num_values) for payload in payloads)
        made = make_version(start, deltas, plan.recipe, sync, slices)
    except (NonFiniteError, RangeError) as error:
        return Failure(str(error), (_blame(plan, payloads, num_values, str(error)),))
    return _pack(made)


def _read_state(head: VersionInfo, state: Mapping[str, Vector | Payload], num_values: int) -> FragmentState:
    def read(blob: BlobRef | None) -> Vector | None:
        if blob is None:
            return None
        found = state[blob.digest]
        return found if isinstance(found, np.ndarray) else decode(found, num_values=num_values)

    parameters = read(head.parameters)
    if parameters is None:
        raise PayloadError("its parameters are not in the store")
    is_fetched = head.parameters is not None and not isinstance(state[head.parameters.digest], np.ndarray)
    if is_fetched and parameters_digest(parameters) != head.parameters_sha256:
        raise PayloadError("its parameters do not have the digest that was committed")
    return FragmentState(parameters, read(head.momentum), read(head.remainder))


def _blame(plan: Plan, payloads: Sequence[Payload], num_values: int, what: str) -> Rejection:
    """Rejects the largest contribution: each payload is finite, but the step is not.

    If the fault were the state's, each round would still settle one contribution, so no round repeats itself for ever.
    """
    peaks = [float(np.abs(decode(payload, num_values=num_values)).max()) for payload in payloads]
    culprit = plan.contributions[peaks.index(max(peaks))]
    reason = (
        f"learner {culprit.id.learner}, fragment {plan.fragment}: {what}, and of what was merged this contribution is "
        f"the largest, reaching {max(peaks):.3g} (the step is {NOT_FINITE} or out of range)"
    )
    return Rejection(id=culprit.id, reason=reason)


def _pack(made: NewVersion) -> Product:
    payloads: dict[str, bytes] = {}
    vectors: dict[str, Vector] = {}

    def keep(payload: bytes) -> BlobRef:
        blob = BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
        payloads[blob.digest] = payload
        return blob

    def keep_vector(vector: Vector | None) -> BlobRef | None:
        if vector is None:
            return None
        blob = keep(encode(STATE_CODEC, vector))
        vectors[blob.digest] = vector
        return blob

    blobs = NewBlobs(
        parameters_sha256=made.parameters_sha256,
        update=keep(made.update),
        parameters=keep_vector(made.state.parameters),
        momentum=keep_vector(made.state.momentum),
        remainder=keep_vector(made.state.remainder),
    )
    return Product(blobs, payloads, vectors)
