"""Carries out a plan: who is hit when, what must be undone when, and what has been done. Pure.

    facts in                                    orders out
    Seen, Begun, Failed, Stopped, Tick          Kill, Freeze, Thaw, Shape, Reset, Corrupt, FillDisk, FreeDisk, Finish

A fault whose process is not there at the time is skipped, and the record says so: a campaign never waits for anybody.
Faults may overlap: a process that was frozen twice thaws when both are over, and a link obeys the newest fault on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from isles.ops.chaos.plan import MOMENTARY_KINDS, NETWORK_KINDS, Chance, Fault, Plan, Role

GONE: Final = "no such process was running"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the run, as it was found."""

    name: str
    role: Role
    region: str
    pid: int
    birth: int = 0
    """Tells two processes apart that had the same pid one after the other."""
    is_merging: bool = False
    """Of an outer: it has the lease, and the others stand by."""


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a link does to the bytes between a worker and its broker."""

    delay_seconds: float = 0.0
    bytes_per_second: int = 0
    """0 = no limit."""
    is_blackhole: bool = False
    is_refusing: bool = False


CLEAR: Final = LinkShape()


# ------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True)
class Seen:
    """Fact: these processes run."""

    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """Fact: the plan's time begins now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Fact: an order of this fault could not be carried out."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Fact: the run ends, or somebody wants it to: undo everything."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Fact: time has passed."""


Event = Seen | Begun | Failed | Stopped | Tick


# ------------------------------------------------------------------------------------------------------------ orders


@dataclass(frozen=True, slots=True)
class Kill:
    """Order: SIGKILL for these."""

    number: int
    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Freeze:
    """Order: SIGSTOP."""

    number: int
    process: Process


@dataclass(frozen=True, slots=True)
class Thaw:
    """Order: SIGCONT, if it is still the same process."""

    number: int
    process: Process


@dataclass(frozen=True, slots=True)
class Shape:
    """Order: this worker's link does this from now on."""

    number: int
    worker: str
    shape: LinkShape


@dataclass(frozen=True, slots=True)
class Reset:
    """Order: reset all connections of this worker's link."""

    number: int
    worker: str


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Order: flip one bit of a stored payload."""

    number: int


@dataclass(frozen=True, slots=True)
class FillDisk:
    """Order: leave the broker too little room."""

    number: int


@dataclass(frozen=True, slots=True)
class FreeDisk:
    """Order: give the room back."""

    number: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Order: all faults are over."""


Instruction = Kill | Freeze | Thaw | Shape | Reset | Corrupt | FillDisk | FreeDisk | Finish


@dataclass(frozen=True, slots=True)
class Injection:
    """What became of one fault of the plan; times are those of `now`."""

    number: int
    fault: Fault
    targets: tuple[str, ...] = ()
    began_at: float | None = None
    ended_at: float | None = None
    failure: str = ""
    """Why it did not happen; empty = it did."""

    @property
    def ends_at(self) -> float:
        """When it is to end, once it has begun."""
        assert self.began_at is not None, "a fault that has not begun has no end"
        return self.began_at + self.fault.seconds


@dataclass
class Campaign:
    """The state of a plan that is being carried out."""

    plan: Plan
    chance: Chance
    injections: dict[int, Injection] = field(default_factory=dict)
    """By number, from 1 on in the order of the plan's times."""
    is_finished: bool = False
    _began_at: float | None = None
    _waiting: list[tuple[int, Fault]] = field(default_factory=list)
    _active: dict[int, tuple[Process, ...]] = field(default_factory=dict)
    _processes: tuple[Process, ...] = ()
    _shapes: dict[str, dict[int, LinkShape]] = field(default_factory=dict)
    """Worker -> fault -> what it does to the link, the newest last."""

    def __post_init__(self) -> None:
        ordered = sorted(self.plan.fault, key=lambda fault: fault.at)
        self._waiting = list(enumerate(ordered, 1))

    @property
    def lasting(self) -> list[Injection]:
        """Faults of this moment, the oldest first."""
        return [self.injections[number] for number in self._active]

    @property
    def next_at(self) -> float | None:
        """When the next fault happens; None if the plan's time has not begun, or no fault is left."""
        if self._began_at is None or not self._waiting:
            return None
        return self._began_at + self._waiting[0][1].at

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes one fact; returns orders to carry out in turn."""
        if self.is_finished:
            # The last order of all may be the one that could not be carried out.
            return self._take_failure(event.number, event.text, now) if isinstance(event, Failed) else []
        match event:
            case Seen(processes):
                self._processes = processes
            case Begun():
                self._began_at = now if self._began_at is None else self._began_at
            case Failed(number, text):
                return [*self._take_failure(number, text, now), *self._advance(now)]
            case Stopped():
                self._waiting.clear()
                return [*self._end(list(self._active), now), *self._finish()]
        return self._advance(now)

    def _advance(self, now: float) -> list[Instruction]:
        if self._began_at is None:
            return []
        out = self._end([number for number in self._active if self.injections[number].ends_at <= now], now)
        while self._waiting and self._began_at + self._waiting[0][1].at <= now:
            number, fault = self._waiting.pop(0)
            out += self._inject(number, fault, now)
        if not self._waiting and not self._active:
            out += self._finish()
        return out

    def _finish(self) -> list[Instruction]:
        self.is_finished = True
        return [Finish()]

    def _take_failure(self, number: int, text: str, now: float) -> list[Instruction]:
        """Undoes what has been done of it: a region may have been cut off in part."""
        out = self._end_one(number, now) if number in self._active else []
        self.injections[number] = replace(self.injections[number], failure=text, ended_at=now)
        return out

    # -------------------------------------------------------------------------------------------------------- beginning

    def _inject(self, number: int, fault: Fault, now: float) -> list[Instruction]:
        victims = self._choose(fault)
        is_momentary = fault.kind in MOMENTARY_KINDS
        targets = tuple(victim.name for victim in victims) or ("the store",)
        self.injections[number] = Injection(number, fault, targets, now, now if is_momentary else None)
        if not victims and fault.kind not in ("corrupt", "disk-full"):
            self.injections[number] = Injection(number, fault, (), now, now, GONE)
            return []
        if not is_momentary:
            self._active[number] = victims
        match fault.kind:
            case "kill" | "kill-all":
                return [Kill(number, victims)]
            case "freeze":
                return [Freeze(number, victims[0])]
            case "corrupt":
                return [Corrupt(number)]
            case "disk-full":
                return [FillDisk(number)]
            case "reset":
                return [Reset(number, victim.name) for victim in victims]
            case _:
                return [self._shape(number, victim.name, shape_of(fault)) for victim in victims]

    def _choose(self, fault: Fault) -> tuple[Process, ...]:
        """To whom it happens: all of a region, all of the run, or one process."""
        if fault.kind in ("corrupt", "disk-full"):
            return ()
        if fault.kind == "kill-all":
            return self._processes
        found = list(self._candidates(fault))
        if fault.role == "outer":
            found = [process for process in found if process.is_merging] or found
        if fault.region or not found:
            return tuple(found)
        return (self.chance.choice(found),)

    def _candidates(self, fault: Fault) -> Iterable[Process]:
        for process in self._processes:
            is_meant = (
                process.name == fault.process
                if fault.process
                else process.role in ((fault.role,) if fault.role else (process.role,))
            )
            if fault.region:
                is_meant = process.region == fault.region and process.role == "worker"
            if fault.kind in NETWORK_KINDS:
                is_meant = is_meant and process.role == "worker"
            if is_meant:
                yield process

    def _shape(self, number: int, worker: str, shape: LinkShape) -> Instruction:
        self._shapes.setdefault(worker, {})[number] = shape
        return Shape(number, worker, shape)

    # ----------------------------------------------------------------------------------------------------------- ending

    def _end(self, numbers: Sequence[int], now: float) -> list[Instruction]:
        return [instruction for number in numbers for instruction in self._end_one(number, now)]

    def _end_one(self, number: int, now: float) -> list[Instruction]:
        victims = self._active.pop(number)
        injection = self.injections[number]
        self.injections[number] = replace(injection, ended_at=now)
        kind = injection.fault.kind
        if kind == "disk-full":
            is_held = any(self.injections[other].fault.kind == kind for other in self._active)
            return [] if is_held else [FreeDisk(number)]
        if kind == "freeze":
            return [Thaw(number, victim) for victim in victims if not self._is_frozen(victim)]
        out: list[Instruction] = []
        for victim in victims:
            shapes = self._shapes[victim.name]
            shapes.pop(number, None)
            out.append(Shape(number, victim.name, list(shapes.values())[-1] if shapes else CLEAR))
        return out

    def _is_frozen(self, process: Process) -> bool:
        """By a fault that still lasts."""
        frozen = [
            victim.pid
            for number, victims in self._active.items()
            if self.injections[number].fault.kind == "freeze"
            for victim in victims
        ]
        return process.pid in frozen


def shape_of(fault: Fault) -> LinkShape:
    """What a network fault makes of a link."""
    match fault.kind:
        case "delay":
            return LinkShape(delay_seconds=fault.delay_seconds)
        case "rate":
            return LinkShape(bytes_per_second=fault.bytes_per_second)
        case "refuse":
            return LinkShape(is_refusing=True)
        case _:
            return LinkShape(is_blackhole=True)
