"""How an outer comes to the state of a fragment's head: from the newest checkpoint, one recipe after the other. Pure.

    start --> ReadCheckpoint --> AskTape <--> Remake ... --> Recovered
          --> AskTape, where a state that is still held begins the way, if it is on the tape

Each state is compared with the digests that its commit wrote down, so what comes out is bit-equal to what was lost or
the outer ends with RefusedError. What may be mended, such as a blob that its broker just then puts off, ends in
`GiveUp`, and a later attempt goes on from where this one came to. So does what is lost: the tape may have moved on
since it was listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from isles.outer.ledger import recipe_fault
from isles.proto.agreement import SyncSettings
from isles.proto.errors import RefusedError
from isles.proto.messages import VersionInfo

TAPE_VERSIONS_MAX: Final = 64
"""Versions of one page of the tape: with their recipes some hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class StatePoint:
    """A version whose state is at hand."""

    version: int
    parameters_sha256: str
    optimizer_sha256: str

    def is_of(self, info: VersionInfo) -> bool:
        """Whether it is the state that was committed as this version; one without an optimizer digest is not asked."""
        optimizer = info.optimizer_sha256 in (None, self.optimizer_sha256)
        return self.version == info.version and self.parameters_sha256 == info.parameters_sha256 and optimizer


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StateMade:
    """The answer to ReadCheckpoint and Remake: the digests of the state that is at hand now."""

    parameters_sha256: str
    optimizer_sha256: str


@dataclass(frozen=True, slots=True)
class TapeRead:
    """The answer to AskTape."""

    versions: Sequence[VersionInfo]


@dataclass(frozen=True, slots=True)
class Prevented:
    """The answer to any order that could not be carried out."""

    reason: str
    is_lost: bool = False
    """Whether what it takes is gone; otherwise the reason may pass."""


Event = StateMade | TapeRead | Prevented

# -------------------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Take the whole state of this version from the store."""

    info: VersionInfo


@dataclass(frozen=True, slots=True)
class AskTape:
    """Ask for the versions from `first` on, at most so many."""

    first: int
    num_max: int


@dataclass(frozen=True, slots=True)
class Remake:
    """Make this version from the state at hand, by its recipe and under these settings."""

    info: VersionInfo
    sync: SyncSettings


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state at hand is the head's."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Not now; the state at hand, if there is one, is good as far as it goes."""

    reason: str
    is_lost: bool = False
    """Whether another attempt on the same listing could not succeed either."""


Instruction = ReadCheckpoint | AskTape | Remake | Recovered | GiveUp


class Recovery:
    """One attempt, from `start` to Recovered or GiveUp; there is always one order under way."""

    def __init__(
        self,
        head: VersionInfo,
        checkpoint: VersionInfo,
        held: StatePoint | None,
        sync_of: Callable[[str], SyncSettings | None],
    ) -> None:
        """`head` and `checkpoint` are of one listing; `held` is a state that is at hand from earlier."""
        self.point = held
        """What the state at hand is of."""
        self.num_remade = 0
        self.payload_bytes: dict[int, int] = {}
        """Version -> payload bytes that it was made from, of all versions that were read from the tape."""
        self._head = head
        self._checkpoint = checkpoint
        self._sync_of = sync_of
        self._is_held_proven = False
        self._tape: list[VersionInfo] = []

    @property
    def is_from_held(self) -> bool:
        """Whether the way begins with the state that is held."""
        held = self.point
        return held is not None and self._checkpoint.version <= held.version <= self._head.version

    def start(self) -> list[Instruction]:
        """The first order."""
        if self._checkpoint.version > self._head.version:
            text = f"the checkpoint {self._checkpoint.version} is newer than the head {self._head.version}"
            return [GiveUp(f"fragment {self._head.fragment}: {text}")]
        if self.is_from_held:
            assert self.point is not None
            return self._ask(self.point.version)
        return self._begin_with_checkpoint()

    def handle(self, event: Event) -> list[Instruction]:
        """Takes the answer to the last order and returns the next one.

        Raises RefusedError if this run cannot be recomputed here, whatever else may happen.
        """
        match event:
            case Prevented():
                return [GiveUp(event.reason, event.is_lost)]
            case TapeRead():
                return self._take_tape(event.versions)
            case StateMade():
                return self._take_state(event)

    def _begin_with_checkpoint(self) -> list[Instruction]:
        self.point = None
        self._is_held_proven = True
        return [ReadCheckpoint(self._checkpoint)]

    def _take_state(self, made: StateMade) -> list[Instruction]:
        info = self._tape.pop(0) if self._tape else self._checkpoint
        point = StatePoint(info.version, made.parameters_sha256, made.optimizer_sha256)
        if not point.is_of(info):
            raise RefusedError(self._difference(info, point, is_checkpoint=self.point is None))
        self.num_remade += self.point is not None
        self.point = point
        return self._next()

    def _next(self) -> list[Instruction]:
        assert self.point is not None
        if self.point.version == self._head.version:
            if self.point.is_of(self._head):
                return [Recovered()]
            return [GiveUp(f"version {self._head.version} is another one on the tape than it is in the listing")]
        if not self._tape:
            return self._ask(self.point.version + 1)
        info = self._tape[0]
        assert info.recipe is not None
        sync = self._sync_of(info.recipe.settings_digest)
        where = f"fragment {info.fragment}, version {info.version}"
        if info.recipe_sha256 not in (None, info.recipe.digest()):
            raise RefusedError(
                f"{where} cannot be recomputed: its recipe is not the one that was committed, so its store is damaged"
            )
        if sync is None:
            raise RefusedError(
                f"{where} cannot be recomputed: it was made under settings (digest {info.recipe.settings_digest[:12]}) "
                "that are not in the run's record; the store was not written by this system alone"
            )
        if fault := recipe_fault(info.recipe, sync):
            raise RefusedError(f"{where} cannot be recomputed: {fault}")
        return [Remake(info, sync)]

    # ------------------------------------------------------------------------------------------------------------- tape

    def _ask(self, first: int) -> list[Instruction]:
        return [AskTape(first, min(TAPE_VERSIONS_MAX, self._head.version - first + 1))]

    def _take_tape(self, versions: Sequence[VersionInfo]) -> list[Instruction]:
        assert self.point is not None
        tape = list(versions)
        if not self._is_held_proven:
            if not tape or not self.point.is_of(tape[0]):
                return self._begin_with_checkpoint()
            self._is_held_proven = True
            tape = tape[1:]
            if not tape:
                return self._next()
        first = self.point.version + 1
        for number, info in enumerate(tape, first):
            if info.version != number or info.recipe is None:
                return [self._gap(number)]
            self.payload_bytes[number] = sum(ingredient.size_bytes for ingredient in info.recipe.ingredients)
        if not tape:
            return [self._gap(first)]
        self._tape = [info for info in tape if info.version <= self._head.version]
        return self._next()

    def _gap(self, version: int) -> GiveUp:
        fragment = self._head.fragment
        return GiveUp(
            f"the tape of fragment {fragment} has a gap: version {version} or its recipe is missing, between the "
            f"checkpoint {self._checkpoint.version} and the head {self._head.version}",
            is_lost=True,
        )

    def _difference(self, info: VersionInfo, point: StatePoint, *, is_checkpoint: bool) -> str:
        where = f"fragment {info.fragment}, version {info.version}"
        what = "parameters" if point.parameters_sha256 != info.parameters_sha256 else "momentum or remainder"
        if is_checkpoint:
            return f"{where}: the {what} of its checkpoint are not those that were committed, so its store is damaged"
        return (
            f"{where} was recomputed to other {what} than were committed: it takes the build that made it (isles, "
            "numpy, zstandard, processor) to go on from there; start the outer as it was before"
        )
