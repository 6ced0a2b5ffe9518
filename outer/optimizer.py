"""The outer step and what it publishes: from a version's state and deltas to the next version, float32 throughout.

The merge and `finish_version` are the only arithmetic there is: the outer uses them, and so does whoever recomputes a
version from its recipe. Equal inputs give equal bytes on one build of numpy and zstd.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isles.outer.accumulators import CHUNK_VALUES, spans, start_merge
from isles.outer.ledger import recipe_fault
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode, encode
from isles.proto.errors import NonFiniteError, PayloadError
from isles.proto.manifest import TensorSlice, codecs_of
from isles.proto.messages import Recipe

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class FragmentState:
    """What the outer step of one fragment starts from: three [n] float32 vectors, None standing for zeros."""

    parameters: Vector
    momentum: Vector | None = None
    remainder: Vector | None = None
    """What the updates so far have left out of the parameters."""


@dataclass(frozen=True)
class NewVersion:
    """The state after one outer step, and the bytes that take a learner there."""

    state: FragmentState
    update: bytes
    """Payload in the run's downward codec: its decoded values, added to the old parameters, are the new ones."""
    parameters_sha256: str
    optimizer_sha256: str


def make_version(
    state: FragmentState,
    deltas: Iterable[Vector],
    recipe: Recipe,
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
) -> NewVersion:
    """Version v + 1 from the state of version v and the deltas of the recipe's ingredients, in their order.

    Deltas are [n] float32 and taken one at a time; `slices` are those of the fragment. Raises what `finish_version`
    raises, and ValueError for deltas of another length or number.
    """
    merge = start_merge(recipe, slices, sync)
    for delta in deltas:
        merge.add(delta)
    return finish_version(state, merge.result(), recipe, sync, slices)


def finish_version(
    state: FragmentState,
    gradient: Vector,
    recipe: Recipe,
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
    spares: Sequence[Vector] = (),
) -> NewVersion:
    """Version v + 1 from the state of version v and the outer gradient D, whose memory becomes the version's.

    So does that of the `spares` ([n] float32 each), up to two: fresh memory costs as much as several passes over it.

        buf       <- mu^f buf + f D
        step       = lr f (D + mu buf)
        exact      = parameters + remainder - step
        update     = Q(exact - parameters)
        parameters <- parameters + dec(update)
        remainder <- exact - parameters

    lr is the recipe's, or the settings' if it has none. With f = 1 the step is that of Nesterov's method as in
    `torch.optim.SGD`. Buffers have no momentum, and lr = 1 in their recipes.

    Raises NonFiniteError if any new value is NaN or infinite, RangeError if the codec cannot carry the update.
    """
    for_wanted, for_decoded = (*spares, None, None)[:2]
    momentum, wanted = take_step(state, gradient, recipe, sync, slices, for_wanted)
    update = encode(codecs_of(slices[0], sync).down, wanted)
    parameters, remainder = advance(state, wanted, decode(update, num_values=wanted.size, out=for_decoded))
    new_state = FragmentState(parameters, momentum, remainder)
    return NewVersion(new_state, update, parameters_digest(parameters), optimizer_digest(new_state))


def take_step(
    state: FragmentState,
    gradient: Vector,
    recipe: Recipe,
    sync: SyncSettings,
    slices: Sequence[TensorSlice],
    spare: Vector | None = None,
) -> tuple[Vector | None, Vector]:
    """The new momentum, None without one, and remainder - step: how far the parameters shall move. Both [n] float32.

    The gradient's memory is theirs afterwards, and that of `spare`, [n] float32. In pieces that stay in the processor's
    cache. Raises NonFiniteError.
    """
    mu = 0.0 if slices[0].is_buffers else sync.outer_momentum
    rate = sync.outer_learning_rate if recipe.learning_rate is None else recipe.learning_rate
    fraction, decay = np.float32(recipe.fraction), np.float32(mu**recipe.fraction)
    ahead, factor = np.float32(mu), np.float32(-rate * recipe.fraction)
    wanted = gradient if not mu else np.empty_like(gradient) if spare is None else spare
    scratch = np.empty((2, min(CHUNK_VALUES, gradient.size)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for span in spans(gradient.size):
            part, step = gradient[span], wanted[span]
            momentum, product = scratch[:, : part.size]
            np.multiply(part, fraction, out=momentum)
            if state.momentum is not None:
                momentum += np.multiply(state.momentum[span], decay, out=product)
            np.add(part, np.multiply(momentum, ahead, out=product), out=step)
            step *= factor
            if state.remainder is not None:
                step += state.remainder[span]
            # What is not finite in a gradient or momentum is not finite in the step, whatever the factors.
            ways = {"merged delta": part, "momentum": momentum} if mu else {}
            _check_finite(step, span.start, ways | {"step": step})
            if mu:
                part[:] = momentum
    return gradient if mu else None, wanted


def advance(state: FragmentState, wanted: Vector, decoded: Vector) -> tuple[Vector, Vector]:
    """The new parameters and remainder, made in the memory of `decoded` and of `wanted`: all [n] float32.

    `wanted` is how far the parameters shall move, `decoded` how far the update moves them. Raises NonFiniteError.
    """
    spare = np.empty(min(CHUNK_VALUES, wanted.size), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for span in spans(wanted.size):
            before, parameters, remainder = state.parameters[span], decoded[span], wanted[span]
            parameters += before
            # exact - parameters, without first rounding the small `wanted` to the precision of the large parameters.
            remainder -= np.subtract(parameters, before, out=spare[: before.size])
            _check_finite(remainder, span.start, {"parameters": parameters, "remainder": remainder})
    return decoded, wanted


def recompute(
    state_payloads: Mapping[str, bytes | bytearray],
    payloads: Iterable[bytes | bytearray],
    recipe: Recipe,
    sync: SyncSettings,
    *,
    slices: Sequence[TensorSlice],
) -> NewVersion:
    """Makes a version again from the stored bytes of the one before it and of what was merged.

    `state_payloads` has `parameters` and, where the version before had them, `momentum` and `remainder`; `payloads` are
    those of the recipe's ingredients, in their order. Raises PayloadError if the recipe is not of this run or a payload
    cannot be decoded, and what `make_version` raises.
    """
    if (fault := recipe_fault(recipe, sync)) is not None:
        raise PayloadError(f"this version cannot be recomputed: {fault}")
    if "parameters" not in state_payloads:
        raise PayloadError("this version cannot be recomputed: the parameters of the version before it are missing")
    num_values = slices[-1].stop
    vectors = {name: decode(payload, num_values=num_values) for name, payload in state_payloads.items()}
    state = FragmentState(vectors["parameters"], vectors.get("momentum"), vectors.get("remainder"))
    return make_version(state, (decode(payload, num_values=num_values) for payload in payloads), recipe, sync, slices)


def parameters_digest(parameters: Vector) -> str:
    """Hexadecimal SHA-256 of the little-endian single-precision bytes of a flat vector."""
    return hashlib.sha256(np.ascontiguousarray(parameters, "<f4").data).hexdigest()


def optimizer_digest(state: FragmentState) -> str:
    """Hexadecimal SHA-256 of the little-endian single-precision bytes of momentum and remainder, zeros left out."""
    digest = hashlib.sha256()
    for vector in (state.momentum, state.remainder):
        if vector is not None:
            digest.update(np.ascontiguousarray(vector, "<f4").data)
    return digest.hexdigest()


def _check_finite(result: Vector, start: int, ways: Mapping[str, Vector]) -> None:
    """Raises NonFiniteError, naming the first of the `ways` to a result that is not finite, unless the result is.

    All are pieces of vectors, from their value `start` on.
    """
    if math.isfinite(result.sum()):  # NaN and infinity last in sums; finite values that overflow here are looked at
        return
    for what, vector in ways.items():
        finite = np.isfinite(vector)
        if not finite.all():
            place = int(np.argmin(finite))
            raise NonFiniteError(
                f"the outer step is not finite: value {start + place} of the {what} is {vector[place]}"
            )
