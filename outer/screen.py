"""What a contribution must pass before it may be merged. A reason names learner, fragment and, if one is to blame,
tensor: it is what the learner and the log are told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from isles.outer.accumulators import l2_norm
from isles.outer.conduct import reason_of
from isles.outer.norms import wrong_norm
from isles.outer.sketch import sketch
from isles.proto.agreement import SyncSettings
from isles.proto.codec import decode_with_scales, inspect
from isles.proto.codec.table import codec_named
from isles.proto.errors import PayloadError
from isles.proto.manifest import TensorSlice, codecs_of
from isles.proto.messages import Contribution

Vector = npt.NDArray[np.float32]

NOT_FINITE: Final = "not finite"
"""In a reason these words say that NaN or infinity was found: the learner's optimizer is then suspect, too."""


class Screening(NamedTuple):
    """What came of decoding a payload: a reason and its kind if it cannot be merged, else what it is judged by."""

    reason: str = ""
    kind: str = ""
    norm: float | None = None
    """L2 norm of the delta that it decodes to, counters left out."""
    sketch: bytes = b""
    """Of its direction; buffers have none."""


def screen_books(
    contribution: Contribution,
    *,
    head_version: int,
    slices: Sequence[TensorSlice],
    sync: SyncSettings,
    past: Sequence[SyncSettings] = (),
) -> str:
    """Why a contribution cannot be merged by what is said of it, before its payload is fetched; "" if it may.

    It may have been made under any of the `past` settings of the run: those of its learner's checkpoint were.
    """
    faults = _book_faults(contribution, head_version, slices, _codecs(slices, sync, past))
    return reason_of(contribution.id, faults[0]) if faults else ""


def screen_payload(
    contribution: Contribution,
    payload: bytes | bytearray,
    *,
    slices: Sequence[TensorSlice],
    sync: SyncSettings,
    past: Sequence[SyncSettings] = (),
) -> Screening:
    """Why a payload cannot be merged, after decoding all of it, or how long its delta is.

    `slices` are those of its fragment: they say how many values there are, and where each tensor lies. `past` as above.
    """
    num_values = slices[-1].stop
    try:
        codec = inspect(payload).codec
        if fault := _codec_fault("its payload", codec, _codecs(slices, sync, past)):
            return Screening(reason_of(contribution.id, fault), "payload")
        decoded = decode_with_scales(payload, num_values=num_values, allow_nonfinite=True)
    except PayloadError as error:
        return Screening(reason_of(contribution.id, str(error)), "payload")
    vector = decoded.values
    tensor = _first_not_finite(vector, slices)
    if tensor:
        return Screening(reason_of(contribution.id, f"tensor {tensor} is {NOT_FINITE}"), "finite")
    norm = _norm(vector, slices)
    if sync.merge_rule == "rda":
        if fault := wrong_norm(contribution.norms, decoded, codec_named(codec), slices):
            return Screening(reason_of(contribution.id, fault), "norm")
        norm = max(norm, math.hypot(*contribution.norms))
    return Screening(norm=norm, sketch=b"" if slices[0].is_buffers else sketch(vector))


def _codecs(slices: Sequence[TensorSlice], sync: SyncSettings, past: Sequence[SyncSettings]) -> list[str]:
    """The codecs that contributions to this fragment may be in, that of today first."""
    return list(dict.fromkeys(codecs_of(slices[0], one).up for one in (sync, *reversed(past))))


def _codec_fault(what: str, codec: str, codecs: Sequence[str]) -> str:
    before = f", and before {' or '.join(codecs[1:])}" if codecs[1:] else ""
    return "" if codec in codecs else f"{what} is in codec {codec}, the run's is {codecs[0]}{before}"


def _book_faults(
    contribution: Contribution, head_version: int, slices: Sequence[TensorSlice], codecs: Sequence[str]
) -> list[str]:
    faults = []
    if contribution.base_version > head_version:
        faults.append(f"its base version {contribution.base_version} is newer than the head {head_version}")
    if fault := _codec_fault("it", contribution.codec, codecs):
        faults.append(fault)
    if len(contribution.norms) != len(slices):
        faults.append(f"it carries {len(contribution.norms)} norms, the fragment has {len(slices)} tensors")
    faults += [
        f"the norm of tensor {part.name} is {NOT_FINITE}"
        for part, norm in zip(slices, contribution.norms, strict=False)
        if not math.isfinite(norm)
    ]
    return faults


def _first_not_finite(vector: Vector, slices: Sequence[TensorSlice]) -> str:
    """The name of the first tensor with NaN or infinity; "" if all values are finite."""
    for part in slices:
        if not np.isfinite(vector[part.start : part.stop]).all():
            return part.name
    return ""


def _norm(vector: Vector, slices: Sequence[TensorSlice]) -> float:
    """Of everything but counters, which grow with every step and are not added up."""
    return math.hypot(*(l2_norm(vector[one.start : one.stop]) for one in slices if one.role != "buffer_maximum"))
