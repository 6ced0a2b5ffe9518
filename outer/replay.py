"""Recomputing what a run has done, version by version, from its tape: recipes, payloads and the oldest checkpoint.

Whatever the tape says of a version is compared with what comes out: the update, the parameters, the momentum and the
remainder. Memory is that of one fragment's state and of one payload, however long the tape is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from isles.outer.ledger import recipe_fault
from isles.outer.optimizer import FragmentState, NewVersion, Vector, make_version, optimizer_digest, parameters_digest
from isles.outer.payload_cache import ANY_CODEC, Payload
from isles.proto.agreement import RunRecord, SyncSettings
from isles.proto.codec import bound_bytes, decode
from isles.proto.errors import IslesError, NonFiniteError, PayloadError, RangeError, RemoteDataError, UsageError
from isles.proto.manifest import Manifest
from isles.proto.messages import BlobRef, Ingredient, Recipe, VersionInfo

PAGE_VERSIONS: Final = 64
"""Versions that are read at a time: with their recipes a few hundred kilobytes."""
MOVES_MAX: Final = 4
"""How often a tape may let go of what is being recomputed before that is given up: it is then too short to follow."""


Kind = Literal["differs", "unreadable", "outrun"]
"""Why a version did not come out: what was computed, or what is on tape, is not what was committed; something that it
takes is missing or damaged; or a running broker let go of it before it was reached."""


class Tape(Protocol):
    """Where versions and blobs are read from: a stopped store, or a running broker."""

    def versions(self, fragment: int, first: int, num_max: int) -> Sequence[VersionInfo]:
        """Contiguous versions from `first` on; empty behind the head. Raises RemoteDataError for damaged entries."""

    def read(self, blob: BlobRef, *, bytes_max: int) -> Payload:
        """A blob that has its digest. Raises PayloadError if it is missing or damaged; size 0 = not known."""


@dataclass(frozen=True)
class Stretch:
    """What can be recomputed of a fragment: from the state of version `start` on, up to version `last`."""

    fragment: int
    start: VersionInfo
    last: int
    to_version: int | None = None
    """Where whoever asked wants it to end; None = at the head."""

    @property
    def num_versions(self) -> int:
        """Versions to recompute."""
        return max(0, self.last - self.start.version)


@dataclass(frozen=True)
class Difference:
    """The first version that did not come out bit-equal, and why."""

    version: int
    """Where the tape was too fast: the one that should have been reached."""
    kind: Kind
    text: str


@dataclass(frozen=True)
class Replayed:
    """What came of one fragment: versions `first`..`last` were recomputed, and perhaps one more did not come out."""

    fragment: int
    checkpoint: int
    """The version whose state was the beginning."""
    last: int
    """The last version that came out bit-equal; the checkpoint itself if none did."""
    difference: Difference | None = None

    @property
    def first(self) -> int:
        return self.checkpoint + 1

    @property
    def num_versions(self) -> int:
        return self.last - self.checkpoint


class _DiffersError(IslesError):
    """What was recomputed, or what is needed for it, is not what was committed."""


class _MovedError(IslesError):
    """The tape has let go of a version meanwhile."""


def find_stretch(tape: Tape, fragment: int, *, to_version: int | None = None) -> Stretch:
    """The longest stretch of a fragment that can be recomputed up to the head, or up to `to_version` if that is less.

    Raises UsageError if there is none, or if `to_version` is older than all of it.
    """
    start: VersionInfo | None = None
    last = -1
    for info in _entries(tape, fragment, 0):
        last = info.version
        if info.version and info.update is None:
            start = None
        if start is None and info.parameters is not None:
            start = info
    if start is None:
        raise UsageError(f"fragment {fragment} has nothing on tape that could be recomputed")
    if to_version is not None and to_version < start.version:
        raise UsageError(
            f"version {to_version} of fragment {fragment} is not on tape any more: what can be recomputed are versions "
            f"{start.version}..{last}; a run that is to be replayed as a whole needs a larger broker.versions_kept"
        )
    return Stretch(fragment, start, last if to_version is None else min(last, to_version), to_version)


@dataclass
class Replay:
    """Recomputes stretches of one run."""

    tape: Tape
    record: RunRecord
    on_version: Callable[[int, int], None] = lambda _fragment, _version: None
    """Called with fragment and version when one came out bit-equal."""
    _manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        self._manifest = Manifest.from_text(self.record.manifest)

    def run(self, stretch: Stretch) -> Replayed:
        """Recomputes a stretch up to its end or the first difference.

        Where the tape of a running broker lets go of versions meanwhile, it goes on from the checkpoint they let go
        for. Raises UnreachableError if the broker stops answering.
        """
        for _ in range(MOVES_MAX):
            try:
                return self._run(stretch)
            except _MovedError:
                try:
                    stretch = find_stretch(self.tape, stretch.fragment, to_version=stretch.to_version)
                except UsageError as error:
                    return self._outrun(stretch, str(error))
        text = "the run moves on faster than this machine recomputes: stop it first, or raise broker.versions_kept"
        return self._outrun(stretch, text)

    @staticmethod
    def _outrun(stretch: Stretch, text: str) -> Replayed:
        start = stretch.start.version
        return Replayed(stretch.fragment, start, start, Difference(stretch.last, "outrun", text))

    def _run(self, stretch: Stretch) -> Replayed:
        fragment, before = stretch.fragment, stretch.start
        version = before.version
        try:
            state = self._state_of(before)
            entries = _entries(self.tape, fragment, before.version + 1)
            while before.version < stretch.last:
                version = before.version + 1
                info = next(entries, None)
                if info is None:
                    raise PayloadError("it is not on tape")
                state = self._step(before, info, state)
                before = info
                self.on_version(fragment, version)
        except (_DiffersError, RemoteDataError) as error:
            self._check_kept(fragment, version)
            kind: Kind = "differs" if isinstance(error, _DiffersError) else "unreadable"
            return Replayed(fragment, stretch.start.version, before.version, Difference(version, kind, str(error)))
        return Replayed(fragment, stretch.start.version, before.version)

    def _check_kept(self, fragment: int, version: int) -> None:
        """Raises _MovedError if the tape no longer has what a version is recomputed from."""
        try:
            found = next(iter(self.tape.versions(fragment, version, 1)), None) if version else None
        except RemoteDataError:
            return  # its entry is what is damaged
        if found is not None and found.update is None:
            raise _MovedError(f"version {version} of fragment {fragment} is not on tape any more")

    # ------------------------------------------------------------------------------------------------- one version

    def _step(self, before: VersionInfo, info: VersionInfo, state: FragmentState) -> FragmentState:
        """The state of a version from that of the one before it. Raises _DiffersError, RemoteDataError."""
        if info.recipe is None or info.update is None:
            raise PayloadError("it has no recipe or no update on tape")
        if info.recipe_sha256 not in (None, info.recipe.digest()):
            raise _DiffersError("its recipe is not the one that was committed: its entry was changed or damaged")
        sync = self._settings_of(info.recipe)
        if fault := recipe_fault(info.recipe, sync) or _book_fault(before, info, info.recipe):
            raise _DiffersError(fault)
        try:
            deltas = self._deltas(info.fragment, info.recipe)
            made = make_version(state, deltas, info.recipe, sync, self._manifest.slices(info.fragment))
        except (NonFiniteError, RangeError, ValueError) as error:
            raise _DiffersError(str(error)) from error
        _compare(info, made)
        self._read(info.update, info.fragment, "its update")
        if info.parameters is not None:
            self._state_of(info)
        return made.state

    def _settings_of(self, recipe: Recipe) -> SyncSettings:
        sync = self.record.sync_of(recipe.settings_digest)
        if sync is None:
            raise _DiffersError(
                f"its recipe names settings (digest {recipe.settings_digest[:12]}) that this run never had"
            )
        return sync

    def _deltas(self, fragment: int, recipe: Recipe) -> Iterator[Vector]:
        num_values = self._manifest.fragments[fragment].num_values
        for one in recipe.ingredients:
            blob = BlobRef(digest=one.digest, size_bytes=one.size_bytes)
            what = f"the payload of {one.id.learner}'s contribution {one.id.number}"
            yield decode(self._read(blob, fragment, what), num_values=num_values)

    def _state_of(self, info: VersionInfo) -> FragmentState:
        """The stored state of a checkpoint. Raises _DiffersError if it is not that of its version, PayloadError."""
        parameters = self._read_vector(info.parameters, info.fragment, "the parameters of its checkpoint")
        if parameters is None or parameters_digest(parameters) != info.parameters_sha256:
            raise _DiffersError("the parameters of its checkpoint are not those that were committed")
        momentum = self._read_vector(info.momentum, info.fragment, "the momentum of its checkpoint")
        remainder = self._read_vector(info.remainder, info.fragment, "the remainder of its checkpoint")
        state = FragmentState(parameters, momentum, remainder)
        if info.optimizer_sha256 is not None and optimizer_digest(state) != info.optimizer_sha256:
            raise _DiffersError("the momentum or the remainder of its checkpoint is not the one that was committed")
        return state

    def _read_vector(self, blob: BlobRef | None, fragment: int, what: str) -> Vector | None:
        if blob is None:
            return None
        return decode(self._read(blob, fragment, what), num_values=self._manifest.fragments[fragment].num_values)

    def _read(self, blob: BlobRef, fragment: int, what: str) -> Payload:
        bytes_max = bound_bytes(ANY_CODEC, self._manifest.fragments[fragment].num_values)
        try:
            return self.tape.read(blob, bytes_max=bytes_max)
        except PayloadError as error:
            raise PayloadError(f"{what} cannot be read: {error}") from error


def _entries(tape: Tape, fragment: int, first: int) -> Iterator[VersionInfo]:
    """All versions from `first` on, page by page. Raises RemoteDataError for a gap."""
    while page := tape.versions(fragment, first, PAGE_VERSIONS):
        for info in page:
            if info.fragment != fragment or info.version != first:
                raise PayloadError(
                    f"the tape has version {info.version} of fragment {info.fragment} where version {first} of "
                    f"fragment {fragment} belongs"
                )
            yield info
            first += 1


def _book_fault(before: VersionInfo, info: VersionInfo, recipe: Recipe) -> str | None:
    """What contradicts itself in the books of a version; None if nothing does."""
    ingredients = recipe.ingredients
    if len(ingredients) != info.num_participants:
        return f"it counts {info.num_participants} participants, its recipe has {len(ingredients)}"
    tokens = sum(one.tokens for one in ingredients)
    if before.tokens_total + tokens != info.tokens_total:
        return f"its recipe adds {tokens} tokens, its total grows by {info.tokens_total - before.tokens_total}"
    return next((fault for one in ingredients if (fault := _ingredient_fault(info, one))), None)


def _ingredient_fault(info: VersionInfo, one: Ingredient) -> str | None:
    if one.id.fragment != info.fragment:
        return f"its recipe has a contribution of {one.id.learner} to fragment {one.id.fragment}"
    if one.base_version >= info.version:
        return f"its recipe has a contribution of {one.id.learner} with the later base version {one.base_version}"
    return None


def _compare(info: VersionInfo, made: NewVersion) -> None:
    """Raises _DiffersError if what was recomputed is not what was committed."""
    differing = []
    if made.parameters_sha256 != info.parameters_sha256:
        differing.append("parameters")
    if info.update is not None and hashlib.sha256(made.update).hexdigest() != info.update.digest:
        differing.append("update")
    if info.optimizer_sha256 is not None and made.optimizer_sha256 != info.optimizer_sha256:
        differing.append("momentum and remainder")
    if differing:
        raise _DiffersError(
            f"recomputed, its {', '.join(differing)} differ from those committed: something in its recipe was changed, "
            "or this build of numpy or zstd is not the one that made it"
        )
