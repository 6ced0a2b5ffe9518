"""How the deltas of a round become one outer gradient D: in sorted id order, few deltas in memory at a time.

    mean   D = sum of s_m c_m d_m                                           s_m = w_m / sum of w, c_m the clip factor
    rda    D = (sum of s_m c_m n_m) u / |u|,   u = sum of s_m d_m / |d_m|   tensor by tensor

`rda`, radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), averages lengths and directions apart: the
mean of deltas that disagree is short, which makes each outer step the smaller the more learners there are. n_m is the
norm that the learner measured before quantisation, d_m what its payload decodes to. Embeddings always take the plain
mean: a row is only as long as its token was frequent, so a length common to all rows would say nothing.

Sums are float32, one vector however many deltas there are; norms are float64, those that a delta is divided by float32.
Equal orders give equal bits, however many deltas are added at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from isles.outer.weights import shares
from isles.proto.agreement import SyncSettings
from isles.proto.manifest import TensorSlice
from isles.proto.messages import Recipe

Vector = npt.NDArray[np.float32]
Rule = Literal["mean", "rda", "advance"]

CHUNK_VALUES: Final = 1 << 16
"""Values handled at a time: 256 KiB of singles and their scratch fit a second-level cache."""

SINGLE_MIN: Final = 2.0**-100
SINGLE_MAX: Final = 2.0**100
"""Factors and sums of squares between these are as good in single precision: they lie far enough from the ends of its
range, 2^-126 and 2^128, that what is lost there is no digit of theirs. Others, as of deltas that are almost zero, are
computed in double precision."""

SQUARES_AT_ONCE: Final = 256
"""So few that their sum in single precision keeps six digits even if they are all equal and all round alike."""

DIRECTION_NORM_MIN: Final = 1e-6
"""A |u| below this (it is at most 1) is what rounding leaves of directions that cancel: D is zero then. Directions of a
thousand learners that have nothing in common still give 0.03."""


class Taker(Protocol):
    """Whatever deltas can be handed to, in their order."""

    def add(self, *deltas: Vector) -> None:
        """Takes the deltas ([n] float32 each) of the next ingredients.

        Raises ValueError for a delta of another length or type, or more of them than the recipe has ingredients.
        """


class Accumulator(Taker, Protocol):
    """Deltas that become one outer gradient.

    Memory does not grow with their number. The order of the deltas is the order of the sums, so equal orders give equal
    bits; two that are added at once spare reading and writing the sum once.
    """

    def result(self) -> Vector:
        """The outer gradient [n] float32; not finite where the sums went beyond single precision.

        Raises ValueError if deltas are missing.
        """


def start_merge(recipe: Recipe, slices: Sequence[TensorSlice], sync: SyncSettings) -> Accumulator:
    """Begins the merge of a recipe's ingredients by its rule; `slices` are those of the fragment.

    Raises ValueError if the rule is rda and an ingredient does not have one norm for each tensor.
    """
    parts = shares([ingredient.weight for ingredient in recipe.ingredients])
    clips = [ingredient.clip for ingredient in recipe.ingredients]
    regions: list[_Region] = []
    for tensor, one in enumerate(slices):
        rule = tensor_rule(one, sync)
        if regions and rule == regions[-1].rule != "rda":
            regions[-1] = regions[-1]._replace(stop=one.stop)
        else:
            regions.append(_Region(one.start, one.stop, rule, tensor))
    norms = [ingredient.norms for ingredient in recipe.ingredients]
    if any(region.rule == "rda" for region in regions) and any(len(one) != len(slices) for one in norms):
        raise ValueError(f"merging by rda takes {len(slices)} norms of each ingredient, one for each tensor")
    return _Merge(parts, clips, norms, regions)


def tensor_rule(one: TensorSlice, sync: SyncSettings) -> Rule:
    """How a tensor's deltas are merged; `advance` takes the one that goes farthest up, for counters."""
    if one.role == "buffer_maximum":
        return "advance"
    return "rda" if one.role == "parameter" and sync.merge_rule == "rda" else "mean"


class _Region(NamedTuple):
    """Values that are merged together: one tensor by rda, or neighbours by another rule."""

    start: int
    stop: int
    rule: Rule
    tensor: int
    """Index of the first one."""


class _Merge:
    """Every region by its rule, in one vector that at the end is D.

    Roundings to single precision, per value and delta: of the factor, s_m c_m or s_m / |d_m|, of its product with the
    delta, and of the sum; of rda once more at the end, when u is scaled to its length.
    """

    def __init__(
        self,
        parts: Sequence[float],
        clips: Sequence[float],
        norms: Sequence[Sequence[float]],
        regions: Sequence[_Region],
    ) -> None:
        """`parts`, `clips` and `norms` are those of each ingredient; norms are read where a rule is rda."""
        self._parts, self._clips, self._norms, self._regions = parts, clips, norms, regions
        self._num_added = 0
        self._is_scaled = False
        self._vector: Vector = np.empty(regions[-1].stop, np.float32)
        self._radii = [0.0] * len(regions)
        """sum of s_m c_m n_m of each region, so far."""

    def add(self, *deltas: Vector) -> None:
        """As `Accumulator` says."""
        for delta in deltas:
            if delta.shape != self._vector.shape or delta.dtype != np.float32:
                raise ValueError(
                    f"a delta of {self._vector.size} float32 values was expected, not {delta.dtype} of shape "
                    f"{delta.shape}"
                )
        first = self._num_added
        if first + len(deltas) > len(self._parts):
            raise ValueError(f"the recipe has {len(self._parts)} ingredients, and here is one more delta")
        self._num_added += len(deltas)
        with np.errstate(over="ignore", invalid="ignore"):  # whoever takes the result looks for what is not finite
            for index, region in enumerate(self._regions):
                running = self._vector[region.start : region.stop]
                parts = [delta[region.start : region.stop] for delta in deltas]
                if region.rule == "advance":
                    for number, part in enumerate(parts, first):  # the sign of a delta is anchor - current
                        np.minimum(running, part, out=running) if number else np.copyto(running, part)
                    continue
                factors = [self._factor(index, number, part) for number, part in enumerate(parts, first)]
                _add_scaled(running, parts, factors, is_first=first == 0)

    def _factor(self, index: int, number: int, part: Vector) -> float:
        """What a region of the delta of that number counts in its sum; by rda, its length counts from now on."""
        region, share, clip = self._regions[index], self._parts[number], self._clips[number]
        if region.rule == "mean":
            return share * clip
        self._radii[index] += share * clip * self._norms[number][region.tensor]
        norm = _single_norm(part)
        return share / norm if norm else 0.0

    def result(self) -> Vector:
        """As `Accumulator` says."""
        if self._num_added != len(self._parts):
            raise ValueError(f"the recipe has {len(self._parts)} ingredients, but {self._num_added} deltas came")
        if not self._is_scaled:
            self._is_scaled = True
            with np.errstate(over="ignore", invalid="ignore"):
                for region, radius in zip(self._regions, self._radii, strict=True):
                    if region.rule == "rda":
                        _set_norm(self._vector[region.start : region.stop], radius)
        return self._vector


def l2_norm(values: Vector) -> float:
    """The Euclidean norm of [n] float32 in double precision; the same bits whatever the threads of a linear algebra."""
    wide = np.empty(min(CHUNK_VALUES, values.size), np.float64)
    total = 0.0
    for span in spans(values.size):
        part = values[span]
        squares = wide[: part.size]
        squares[:] = part  # converted first: a product that converts on the way is several times slower
        squares *= squares
        total += float(squares.sum())
    return math.sqrt(total)


class Peaks:
    """A `Taker` that only looks how large deltas are."""

    def __init__(self) -> None:
        self.found: list[float] = []
        """The largest magnitude of each."""

    def add(self, *deltas: Vector) -> None:
        """As `Taker` says."""
        self.found += [float(max(-delta.min(), delta.max())) for delta in deltas]


def spans(size: int) -> Iterator[slice]:
    """`size` values in pieces of at most CHUNK_VALUES, in order."""
    for start in range(0, size, CHUNK_VALUES):
        yield slice(start, min(start + CHUNK_VALUES, size))


def _add_scaled(running: Vector, parts: Sequence[Vector], factors: Sequence[float], *, is_first: bool) -> None:
    """Adds factor * part of each in turn; the first one becomes the sum."""
    product = np.empty(min(CHUNK_VALUES, running.size), np.float32)
    for span in spans(running.size):
        total = running[span]
        for number, (part, factor) in enumerate(zip(parts, factors, strict=True)):
            if is_first and number == 0:
                _scaled(part[span], factor, out=total)
            else:
                total += _scaled(part[span], factor, out=product[: total.size])


def _single_norm(values: Vector) -> float:
    """`l2_norm` to single precision, several times faster; that one where squares are near the ends of singles.

    Single precision sums up SQUARES_AT_ONCE, and double precision those sums. The order within them is that of the
    build of numpy.
    """
    whole = values.size - values.size % SQUARES_AT_ONCE
    rows, rest = values[:whole].reshape(-1, SQUARES_AT_ONCE), values[whole:]
    total = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)) + float(np.einsum("i,i->", rest, rest))
    return math.sqrt(total) if SINGLE_MIN <= total <= SINGLE_MAX else l2_norm(values)


def _set_norm(values: Vector, radius: float) -> None:
    """Scales u to the length `radius` in place."""
    norm = _single_norm(values)
    if norm < DIRECTION_NORM_MIN:
        values[:] = 0
        return
    for span in spans(values.size):
        _scaled(values[span], radius / norm, out=values[span])


def _scaled(piece: Vector, factor: float, *, out: Vector) -> Vector:
    """`factor` times a piece, in `out`, which may be the piece itself."""
    if factor == 0 or SINGLE_MIN <= abs(factor) <= SINGLE_MAX:
        return np.multiply(piece, np.float32(factor), out=out)
    out[:] = piece.astype(np.float64) * factor
    return out
