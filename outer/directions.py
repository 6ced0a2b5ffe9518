"""How far the directions of a round's deltas agree, by their sketches (`isles.outer.sketch`). Pure."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping
from operator import add, mul, sub
from typing import Final, TypeVar

SKETCH_VALUES: Final = 509
"""L: chance makes cosines of 0.04 then, and learners of one task agree to some tenths. A sketch has 2 KB."""

COMPANY_MIN: Final = 4
"""Deltas from which on directions are compared: beside one that is opposed, each of the others has two like itself."""

CHANCE_DEVIATIONS: Final = 4.0
"""A cosine within so many standard deviations of what chance makes says nothing; in small fragments it makes much."""

_Key = TypeVar("_Key")


def oppositions(sketches: Mapping[_Key, bytes], limit: float) -> dict[_Key, float]:
    """The deltas whose cosine with the sum of all others, each taken with length 1, is below -`limit`.

    A delta without a direction is not compared. Nothing is, if there are too few.
    """
    vectors = {key: _unpack(sketch) for key, sketch in sketches.items() if sketch}
    if len(vectors) < COMPANY_MIN:
        return {}
    num_values = min(len(vector) for vector in vectors.values())
    limit = max(limit, CHANCE_DEVIATIONS / math.sqrt(num_values))
    total = [0.0] * num_values
    for vector in vectors.values():
        total = list(map(add, total, vector))
    found = {}
    for key, vector in vectors.items():
        rest = list(map(sub, total, vector))
        length = math.sqrt(sum(map(mul, rest, rest)))
        if sum(map(mul, rest, vector)) < -limit * length:
            found[key] = sum(map(mul, rest, vector)) / length
    return found


def _unpack(sketch: bytes) -> array[float]:
    values = array("f")
    values.frombytes(sketch)
    if sys.byteorder == "big":
        values.byteswap()
    return values
