"""The synthetic model and what synthetic learners make of it: everything follows from a seed, fragment by fragment.

Nobody here holds more than one fragment at a time, so a model of any size takes the memory of its largest fragment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.scale.crowd import Crowd, expect
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.codec import encode
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSlice, TensorSpec
from isles.proto.messages import BlobRef, Contribution, Init, Initialised, Stored, Upload, VersionInfo

Vector = npt.NDArray[np.float32]

CHUNK_VALUES: Final = 1 << 20
"""Values drawn at a time."""
WIDTH_MAX: Final = 4096
"""Columns of the matrices of a large model."""
PARAMETER_SCALE: Final = 0.02
DELTA_SCALE: Final = 1e-3
"""Standard deviations of the first parameters and of a learner's work."""
ROUNDS_MAX: Final = 1_000_000
"""Budget of the run: never spent, so nobody drains."""
ASK_SECONDS: Final = 120.0
"""Longest wait for one answer of the broker, uploads of whole fragments included."""
TOKENS: Final = 4096
STEPS: Final = 48
SECONDS: Final = 10.0


def block_shapes(num_values: int, num_fragments: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a model of at least `num_values` values: two matrices and a vector a block.

    Raises SystemExit for a model too small to be split so.
    """
    width = WIDTH_MAX
    while width > 1 and num_values < 64 * width * num_fragments:
        width //= 2
    rows = -(-num_values // (num_fragments * width)) - 1
    if rows < 3:
        raise SystemExit(f"{num_values} values are too few for {num_fragments} fragments: give --size a larger number")
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(num_fragments):
        shapes[f"blocks.{block}.narrow"] = (rows // 3, width)
        shapes[f"blocks.{block}.scale"] = (width,)
        shapes[f"blocks.{block}.wide"] = (rows - rows // 3, width)
    return shapes


def make_manifest(num_values: int, num_fragments: int) -> Manifest:
    """The manifest of that model."""
    specs = [
        TensorSpec(name, shape, "float32", "parameter")
        for name, shape in block_shapes(num_values, num_fragments).items()
    ]
    return Manifest.build(specs, {}, num_fragments)


def draw(seed: Sequence[int], out: Vector, scale: float) -> Vector:
    """Normal values [n] with this standard deviation, in `out`."""
    generator = np.random.default_rng(seed)
    for start in range(0, out.size, CHUNK_VALUES):
        part = out[start : start + CHUNK_VALUES]
        generator.standard_normal(dtype=np.float32, out=part)
        part *= np.float32(scale)
    return out


def first_parameters(seed: int, fragment: int, out: Vector) -> Vector:
    """Version 0 of a fragment, in `out` [n]."""
    return draw((seed, 0, fragment), out, PARAMETER_SCALE)


def delta(seed: int, learner: int, fragment: int, round_number: int, out: Vector) -> Vector:
    """What a learner hands in for a fragment in a round, in `out` [n]."""
    return draw((seed, 1 + learner, fragment, round_number), out, DELTA_SCALE)


def contribution(
    name: ContributionId, base_version: int, values: Vector, slices: Sequence[TensorSlice], codec: str
) -> tuple[Contribution, bytes]:
    """A delta [n] with its books, and its payload."""
    payload = encode(codec, values)
    norms = tuple(float(np.linalg.norm(values[one.start : one.stop])) for one in slices)
    blob = BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
    books = Contribution(
        id=name,
        base_version=base_version,
        blob=blob,
        codec=codec,
        tokens=TOKENS,
        steps=STEPS,
        seconds=SECONDS,
        norms=norms,
    )
    return books, payload


def start_run(crowd: Crowd, manifest: Manifest, seed: int, quorum: int) -> None:
    """The first member writes version 0 of every fragment, and the run's record: rounds of `quorum` and no grace."""
    member, versions = crowd.members[0], []
    values = np.empty(max(fragment.num_values for fragment in manifest.fragments), np.float32)
    for fragment in manifest.fragments:
        part = first_parameters(seed, fragment.fragment_id, values[: fragment.num_values])
        payload = encode("fp32", part)
        blob = BlobRef(digest=hashlib.sha256(payload).hexdigest(), size_bytes=len(payload))
        expect(crowd.ask(member, Upload(blob=blob), ASK_SECONDS, payload), Stored)
        digest = hashlib.sha256(part.astype("<f4", copy=False).data).hexdigest()
        info = VersionInfo(fragment=fragment.fragment_id, version=0, parameters_sha256=digest, parameters=blob)
        versions.append(info)
    sync = SyncSettings(
        num_fragments=len(manifest.fragments),
        quorum=quorum,
        grace_max_seconds=0.0,
        interval_steps=ROUNDS_MAX,
        has_cues=False,
        apply_rule="rebase",
    )
    record = RunRecord(
        run="scale",
        seed=seed,
        sync=sync,
        budget=Budget(rounds=ROUNDS_MAX),
        manifest_digest=manifest.digest,
        manifest=manifest.to_text(),
    )
    expect(crowd.ask(member, Init(run_record=record, versions=tuple(versions)), ASK_SECONDS), Initialised)
