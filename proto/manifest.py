"""The tensor manifest: every tensor of a model, what is done with it, and which fragment carries it.

All processes of a run hold the same manifest; its digest is compared before anything is sent. Tensors are keyed by
name and sorted by it, so that neither the order of registration nor a frozen parameter in between moves a value.
A fragment's values travel as one flat vector: its tensors, flattened, one after the other in manifest order. The
parameters make up P fragments; buffers that are merged make up one more, the last.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from isles.proto.agreement import MANIFEST_CHARACTERS_MAX, SyncSettings
from isles.proto.codec_names import CodecName
from isles.proto.errors import ManifestError, MessageError
from isles.proto.ids import FRAGMENTS_MAX

Role = Literal["parameter", "embedding", "frozen", "buffer_average", "buffer_maximum", "buffer_skip"]
"""What is done with a tensor.

A `parameter` is synchronised, and so is an `embedding`: a parameter of which a step touches few rows, merged by plain
mean whatever the merge rule. A `frozen` one is equal everywhere and is not sent. Of the buffers some are merged by
weighted mean (`buffer_average`), some by the largest advance (`buffer_maximum`), and the others are each learner's own.
"""

PARAMETER_ROLES: Final[frozenset[Role]] = frozenset({"parameter", "embedding"})
BUFFER_ROLES: Final[frozenset[Role]] = frozenset({"buffer_average", "buffer_maximum"})
"""Of buffers that are merged."""

FORMAT_VERSION: Final = 2
"""1 had no embeddings, did not merge buffers, and did not compare frozen values."""

BUFFER_CODEC: Final[CodecName] = "fp32"
"""Both ways: buffers are few, and a variance must not be rounded below zero."""

VALUES_DIGEST_CHARACTERS: Final = 16
"""Hexadecimal digits that tell the values of frozen tensors apart: 64 bits, against accidents, not malice."""

TENSORS_MAX: Final = 50_000
"""Most tensors and aliases of a model, each: the text of that many fits a message."""

NAME_CHARACTERS_MAX: Final = 256
"""Longest tensor name; module paths of real models stay under 150."""

DIMENSIONS_MAX: Final = 16
"""Most dimensions of a tensor; more have no use in a model."""

VALUES_MAX: Final = 1 << 42
"""Most values of a tensor and of a model: above the largest model there is, far below what overflows an offset."""

FLOAT_DTYPES: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Types that a parameter may have; it is synchronised in float32 whatever its type."""

INTEGER_DTYPES: Final = frozenset({"uint8", "int8", "int16", "int32", "int64"})
"""Types that a counter may have."""

COUNTER_EXACT_MAX: Final = 1 << 24
"""Counters are merged in float32: exactly up to here, to 7 digits beyond."""

DTYPES: Final = (
    FLOAT_DTYPES
    | INTEGER_DTYPES
    | {"bool", "complex32", "complex64", "complex128", "uint16", "uint32", "uint64"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}
)
"""Types that a tensor of a manifest may have, named as torch does, without the prefix."""

_DIGEST_PATTERN: Final = re.compile(rf"[0-9a-f]{{{VALUES_DIGEST_CHARACTERS}}}")
_ROLES: Final = frozenset(get_args(Role))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the model owns it. Raises ManifestError for what no manifest may hold."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    values_digest: str = ""
    """Of the values of a frozen tensor, which must be equal everywhere; "" = not known, or not frozen."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        if type(self.shape) is not tuple or not all(map(_is_size, self.shape)):
            raise ManifestError(f"tensor {self.name!r}: its shape must be a tuple of sizes, not {self.shape!r:.80}")
        if len(self.shape) > DIMENSIONS_MAX:
            raise ManifestError(f"tensor {self.name!r} has {len(self.shape)} dimensions, {DIMENSIONS_MAX} is the limit")
        if self.num_values > VALUES_MAX:
            raise ManifestError(f"tensor {self.name!r} has {self.num_values} values, {VALUES_MAX} is the limit")
        if self.dtype not in DTYPES:
            raise ManifestError(
                f"tensor {self.name!r} has type {self.dtype!r:.80}; known are {', '.join(sorted(DTYPES))}"
            )
        if self.role not in _ROLES:
            raise ManifestError(
                f"tensor {self.name!r} has role {self.role!r:.80}; known are {', '.join(sorted(_ROLES))}"
            )
        mergeable = INTEGER_DTYPES if self.role == "buffer_maximum" else FLOAT_DTYPES
        if self.role in PARAMETER_ROLES | BUFFER_ROLES and self.dtype not in mergeable:
            raise ManifestError(
                f"tensor {self.name!r} of type {self.dtype} cannot be merged as {self.role}, that takes one of "
                f"{', '.join(sorted(mergeable))}; freeze it or keep it as a buffer that is skipped"
            )
        if type(self.values_digest) is not str or not (
            not self.values_digest or (self.role == "frozen" and _DIGEST_PATTERN.fullmatch(self.values_digest))
        ):
            raise ManifestError(
                f"tensor {self.name!r} has the digest {self.values_digest!r:.80}: a frozen tensor may have "
                f"{VALUES_DIGEST_CHARACTERS} lower-case hexadecimal digits, any other tensor none"
            )

    @property
    def num_values(self) -> int:
        """Product of the shape; 1 for a scalar, 0 for an empty tensor."""
        return math.prod(self.shape)

    @property
    def is_synchronised(self) -> bool:
        """Whether some fragment of parameters carries it: a trainable tensor that has values."""
        return self.role in PARAMETER_ROLES and self.num_values > 0

    @property
    def is_merged_buffer(self) -> bool:
        """Whether the fragment of buffers carries it."""
        return self.role in BUFFER_ROLES and self.num_values > 0


class Codecs(NamedTuple):
    """In what form a fragment's values travel."""

    up: CodecName
    """Of contributions."""
    down: CodecName
    """Of updates."""


def codecs_of(part: Fragment | TensorSlice, sync: SyncSettings) -> Codecs:
    """The codecs of a fragment, or of any tensor in it, under the settings of a run."""
    return Codecs(BUFFER_CODEC, BUFFER_CODEC) if part.is_buffers else Codecs(sync.codec_up, sync.codec_down)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tensors that are synchronised together, in manifest order, and the length of their flat vector."""

    fragment_id: int
    tensor_names: tuple[str, ...]
    num_values: int
    is_buffers: bool = False
    """Whether these are the buffers that are merged; else they are parameters."""


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a tensor lies in its fragment's flat vector: values `start` to `stop`, to be viewed as `shape`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    role: Role = "parameter"

    @property
    def is_buffers(self) -> bool:
        """Whether it lies in the fragment of buffers."""
        return self.role in BUFFER_ROLES


@dataclass(frozen=True)
class Manifest:
    """All tensors of a model sorted by name, the fragments that carry them, and which names are the same storage.

    `aliases` maps a second name of a tied tensor to the one name that owns it; only owners are tensors here.
    Constructing checks everything, above all that every value of every parameter is in exactly one fragment of
    parameters and every value of every merged buffer in the last fragment, and raises ManifestError.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    aliases: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", MappingProxyType(dict(sorted(self.aliases.items()))))
        _check_tensors(self.tensors)
        _check_aliases(self.aliases, {spec.name for spec in self.tensors})
        _check_fragments(self.fragments, self.tensors)
        if len(self.to_text()) > MANIFEST_CHARACTERS_MAX:
            raise ManifestError(f"the manifest takes more than {MANIFEST_CHARACTERS_MAX} characters; shorten its names")

    @classmethod
    def build(cls, specs: Iterable[TensorSpec], aliases: Mapping[str, str], num_fragments: int) -> Self:
        """Splits a model's parameters into `num_fragments` fragments of nearly equal size.

        Equal models give equal manifests. If there are buffers to merge, they make up one more fragment, the last.

        Greedy bin packing: the largest tensor left goes to the emptiest fragment (Graham's longest-processing-time
        rule). A tensor of at least a fair share, as an embedding often is, ends up by itself, since the emptiest
        fragment is never one that already holds a fair share. Raises ManifestError, with what to change.
        """
        tensors = tuple(sorted(specs, key=lambda spec: spec.name))
        synchronised = [spec for spec in tensors if spec.is_synchronised]
        if not synchronised:
            raise ManifestError("the model has no trainable parameter with values; unfreeze what it shall learn")
        if not 1 <= num_fragments <= min(len(synchronised), FRAGMENTS_MAX):
            raise ManifestError(
                f"{len(synchronised)} trainable tensors cannot be split into {num_fragments} fragments; set the number "
                f"of fragments to 1..{min(len(synchronised), FRAGMENTS_MAX)}"
            )
        emptiest = [(0, fragment_id) for fragment_id in range(num_fragments)]
        fragment_of: dict[str, int] = {}
        for spec in sorted(synchronised, key=lambda spec: (-spec.num_values, spec.name)):
            num_values, fragment_of[spec.name] = emptiest[0]
            heapq.heapreplace(emptiest, (num_values + spec.num_values, fragment_of[spec.name]))
        fragment_of |= {spec.name: num_fragments for spec in tensors if spec.is_merged_buffer}
        return cls(tensors, _fragments(tensors, fragment_of), aliases)

    @cached_property
    def digest(self) -> str:
        """Lower-case hexadecimal SHA-256 of the canonical text."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def num_values(self) -> int:
        """Trainable values: those of all fragments of parameters."""
        return sum(fragment.num_values for fragment in self.fragments if not fragment.is_buffers)

    @property
    def num_parameter_fragments(self) -> int:
        """P: fragments without the one of buffers, which has the number P if there is one."""
        return sum(not fragment.is_buffers for fragment in self.fragments)

    def slices(self, fragment_id: int) -> tuple[TensorSlice, ...]:
        """Where the tensors of a fragment lie in its flat vector, in its order. Raises ManifestError."""
        if not 0 <= fragment_id < len(self.fragments):
            raise ManifestError(f"there is no fragment {fragment_id}, the manifest has 0..{len(self.fragments) - 1}")
        slices, start = [], 0
        for name in self.fragments[fragment_id].tensor_names:
            spec = self._by_name[name]
            slices.append(TensorSlice(name, start, start + spec.num_values, spec.shape, spec.role))
            start += spec.num_values
        return tuple(slices)

    def difference(self, other: Manifest) -> str | None:
        """One sentence about the first thing in which `other` differs, by tensor name; None if the two are equal."""
        for name in sorted(self._by_name.keys() | other._by_name.keys()):
            ours, theirs = self._by_name.get(name), other._by_name.get(name)
            if ours is None or theirs is None:
                only = other._by_name[name] if ours is None else self._by_name[name]
                return f"tensor {name!r} ({only.role}) is only in the {'other' if ours is None else 'own'} model"
            for what in ("shape", "dtype", "role"):
                own_value, other_value = getattr(ours, what), getattr(theirs, what)
                if own_value != other_value:
                    return f"tensor {name!r} has {what} {own_value} in the own model and {other_value} in the other"
            if ours.values_digest != theirs.values_digest:
                return (
                    f"the frozen tensor {name!r} has other values in the own model than in the other: they are never "
                    "sent, so every learner must load the same ones; a table that is computed can be a buffer"
                )
        for name in sorted(self.aliases.keys() | other.aliases.keys()):
            if self.aliases.get(name) != other.aliases.get(name):
                own_owner, other_owner = self.aliases.get(name), other.aliases.get(name)
                return f"tensor {name!r} is tied to {own_owner!r} in the own model and to {other_owner!r} in the other"
        if self.num_parameter_fragments != other.num_parameter_fragments:
            own, others = self.num_parameter_fragments, other.num_parameter_fragments
            return f"the own model has {own} fragments, the other {others}"
        for name, fragment_id in self._fragment_of.items():
            if other._fragment_of[name] != fragment_id:
                return f"tensor {name!r} is in fragment {fragment_id} here and {other._fragment_of[name]} in the other"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for msgpack or JSON, the tensors as rows of name, shape, type, role, fragment or None, digest."""
        return {
            "format": FORMAT_VERSION,
            "num_fragments": self.num_parameter_fragments,
            "tensors": [[*_row(spec), self._fragment_of.get(spec.name), spec.values_digest] for spec in self.tensors],
            "aliases": dict(self.aliases),
        }

    def to_text(self) -> str:
        """The canonical text: ASCII JSON of `to_dict` without spaces; equal manifests have equal texts."""
        return self._text

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Reads what `to_dict` of a peer made; raises MessageError for anything else."""
        try:
            return cls(*_parse(data))
        except ManifestError as error:
            raise MessageError(f"a peer's manifest was refused: {error}") from error

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Reads the canonical text of a peer's manifest; raises MessageError for anything else."""
        if len(text) > MANIFEST_CHARACTERS_MAX:
            raise MessageError(f"a peer's manifest has {len(text)} characters, {MANIFEST_CHARACTERS_MAX} is the limit")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MessageError(f"a peer's manifest is no JSON ({error})") from error
        manifest = cls.from_dict(data)
        if manifest.to_text() != text:
            raise MessageError("a peer's manifest is not in its canonical form, so its digest would mean nothing")
        return manifest

    @cached_property
    def _text(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=True, separators=(",", ":"), sort_keys=True)

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def _fragment_of(self) -> dict[str, int]:
        return {name: fragment.fragment_id for fragment in self.fragments for name in fragment.tensor_names}


def _row(spec: TensorSpec) -> list[Any]:
    return [spec.name, list(spec.shape), spec.dtype, spec.role]


def _fragments(tensors: tuple[TensorSpec, ...], fragment_of: Mapping[str, int]) -> tuple[Fragment, ...]:
    """The fragments that carry `tensors`, each in the order of `tensors`; ids must be 0 and up."""
    members: list[list[TensorSpec]] = [[] for _ in range(max(fragment_of.values(), default=-1) + 1)]
    for spec in tensors:
        if spec.name in fragment_of:
            members[fragment_of[spec.name]].append(spec)
    return tuple(
        Fragment(
            fragment_id,
            tuple(spec.name for spec in specs),
            sum(spec.num_values for spec in specs),
            any(spec.is_merged_buffer for spec in specs),
        )
        for fragment_id, specs in enumerate(members)
    )


def _is_size(size: object) -> bool:
    return type(size) is int and 0 <= size <= VALUES_MAX


def _check_name(name: object) -> None:
    if type(name) is not str or not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise ManifestError(f"a tensor's name must be 1..{NAME_CHARACTERS_MAX} printable characters, not {name!r:.80}")


def _check_tensors(tensors: tuple[TensorSpec, ...]) -> None:
    if len(tensors) > TENSORS_MAX:
        raise ManifestError(f"the model has {len(tensors)} tensors, {TENSORS_MAX} is the limit")
    for before, after in pairwise(tensors):
        if before.name == after.name:
            raise ManifestError(f"tensor {after.name!r} is listed twice")
        if before.name > after.name:
            raise ManifestError(f"tensor {after.name!r} is listed after {before.name!r}; tensors are sorted by name")
    if sum(spec.num_values for spec in tensors) > VALUES_MAX:
        raise ManifestError(f"the model has more than {VALUES_MAX} values")


def _check_aliases(aliases: Mapping[str, str], names: set[str]) -> None:
    if len(aliases) > TENSORS_MAX:
        raise ManifestError(f"the model has {len(aliases)} aliases, {TENSORS_MAX} is the limit")
    for alias, owner in aliases.items():
        _check_name(alias)
        if alias in names:
            raise ManifestError(f"{alias!r} is both a tensor and an alias of {owner!r}; one storage has one owner")
        if owner not in names:
            raise ManifestError(f"alias {alias!r} is tied to {owner!r}, which is no tensor of the model")


def _check_fragments(fragments: tuple[Fragment, ...], tensors: tuple[TensorSpec, ...]) -> None:
    if not 1 <= len(fragments) <= FRAGMENTS_MAX:
        raise ManifestError(f"the manifest has {len(fragments)} fragments, 1..{FRAGMENTS_MAX} are possible")
    fragment_of: dict[str, int] = {}
    for fragment in fragments:
        if not fragment.tensor_names:
            raise ManifestError(f"fragment {fragment.fragment_id} is empty")
        for name in fragment.tensor_names:
            if name in fragment_of:
                raise ManifestError(f"tensor {name!r} is twice in fragments, in {fragment_of[name]} and again")
            fragment_of[name] = fragment.fragment_id
    _check_coverage(fragments, tensors, fragment_of)
    if [fragment.fragment_id for fragment in fragments] != list(range(len(fragments))):
        raise ManifestError("fragments are not numbered 0 and up, in order")
    if fragments != _fragments(tensors, fragment_of):
        raise ManifestError("a fragment's tensors are out of the manifest's order, or its number of values is wrong")


def _check_coverage(
    fragments: tuple[Fragment, ...], tensors: tuple[TensorSpec, ...], fragment_of: Mapping[str, int]
) -> None:
    """Parameters are in the first fragments, merged buffers all in the last one, and nothing else is anywhere."""
    buffers = {spec.name for spec in tensors if spec.is_merged_buffer}
    carried = {spec.name for spec in tensors if spec.is_synchronised} | buffers
    for name in sorted(carried ^ fragment_of.keys()):
        what = "is in no fragment" if name in carried else "is in a fragment but is no parameter with values"
        raise ManifestError(f"tensor {name!r} {what}")
    for name, fragment_id in sorted(fragment_of.items()):
        if (name in buffers) != (bool(buffers) and fragment_id == fragments[-1].fragment_id):
            raise ManifestError(
                f"tensor {name!r} is in fragment {fragment_id}: buffers that are merged have the last fragment for "
                "themselves"
            )
    if len(fragments) == bool(buffers):
        raise ManifestError("no fragment has parameters")


def _parse(data: object) -> tuple[tuple[TensorSpec, ...], tuple[Fragment, ...], dict[str, str]]:
    if type(data) is not dict or data.keys() != {"format", "num_fragments", "tensors", "aliases"}:
        raise ManifestError("it is not a table of format, num_fragments, tensors and aliases")
    if data["format"] != FORMAT_VERSION or type(data["format"]) is not int:
        raise ManifestError(
            f"its format is {data['format']!r:.80}, only {FORMAT_VERSION} is known: another release of isles made it"
        )
    rows, aliases = data["tensors"], data["aliases"]
    if type(rows) is not list or len(rows) > TENSORS_MAX:
        raise ManifestError(f"its tensors are not a list of at most {TENSORS_MAX} rows")
    if type(aliases) is not dict or any(type(text) is not str for pair in aliases.items() for text in pair):
        raise ManifestError("its aliases are not a table of names")
    tensors, fragment_of = [], {}
    for row in rows:
        if type(row) not in (list, tuple) or len(row) != 6 or type(row[1]) not in (list, tuple):
            raise ManifestError("a tensor is not a row of name, shape, type, role, fragment and digest")
        name, shape, dtype, role, fragment_id, digest = row
        if type(dtype) is not str or type(role) is not str:
            raise ManifestError(f"the type or the role of tensor {name!r:.80} is no text")
        tensors.append(TensorSpec(name, tuple(shape), dtype, role, digest))  # type: ignore[arg-type]  # checked by TensorSpec
        if fragment_id is not None:
            if type(fragment_id) is not int or not 0 <= fragment_id < FRAGMENTS_MAX:
                raise ManifestError(f"tensor {name!r:.80} has fragment {fragment_id!r:.80}")
            fragment_of[name] = fragment_id
    fragments = _fragments(tuple(tensors), fragment_of)
    count = sum(not fragment.is_buffers for fragment in fragments)
    if data["num_fragments"] != count or type(data["num_fragments"]) is not int:
        raise ManifestError(f"it has {count} fragments of parameters, but states {data['num_fragments']!r:.80}")
    return tuple(tensors), fragments, aliases
