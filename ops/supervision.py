"""Keeps the processes of one run alive, and ends the run in order. Pure.

    facts in                                              orders out
    start, ChildExited, Observed, Interrupted, Concluded, Tick     Start, Terminate, Kill, Conclude, End

A child that dies is started again at once, then after 1, 2, 4 .. 30 s; ten seconds of health make it "at once" again.
One that is refused, or that dies at once again and again, ends the run with a sentence: nothing here waits for ever.

The end of a run, whatever its cause, goes through the same stages: workers hand in what they have, the evaluator
reports, the results are written (`Conclude`), the outer stops, relays stop, the broker stops. Children of later stages
are kept alive until theirs comes: a draining worker needs its broker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from isles.proto.errors import QuarantinedError, StoreFullError

HEALTHY_SECONDS: Final = 10.0
"""A child that lived this long starts again without delay."""
BACKOFF_SECONDS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Delay before the n-th restart in a row."""
CRASHES_MAX: Final = 8
"""Deaths in a row, none after ten healthy seconds: about a minute of trying."""
REFUSALS_MAX: Final = 3
"""More than one: a store may still be locked by a broker that is about to die."""
REFUSAL_CODES: Final = frozenset({2, 3, 4, 6})
"""Exit codes of children that a person must mend: starting them unchanged cannot succeed."""
BEGIN_SHARE: Final = 1 / 3
"""Of the stall time: a run that nobody begins is waited for less long than the next round of one that is under way."""
WAIT_CODES: Final = frozenset({StoreFullError.exit_code, QuarantinedError.exit_code})
"""Exit codes of children that say what will pass without anybody starting anew: neither a full disk nor a quarantine of
one learner is a reason to give up."""
REFUSAL_MEMORY_SECONDS: Final = 60.0
"""A refusal after a longer life than this is not one more of a row."""
FAILED_DRAIN_SECONDS: Final = 10.0
"""What each stage gets in a run that cannot succeed any more."""

Role = Literal["broker", "relay", "outer", "evaluator", "worker"]
Status = Literal["finished", "interrupted", "failed"]

EXIT_CODES: Final[dict[Status, int]] = {"finished": 0, "interrupted": 130, "failed": 1}


@dataclass(frozen=True, slots=True)
class ChildExited:
    """Fact: a process has ended; a negative code is the signal that killed it."""

    child: str
    code: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Fact: what the broker says of the run."""

    progress: float
    rounds: int
    asked_at: float
    """A child that ended later than this is not judged by it."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Fact: somebody wants the run to stop; said twice, at once."""


@dataclass(frozen=True, slots=True)
class Concluded:
    """Fact: Conclude was carried out, or could not be."""

    fault: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Fact: time has passed."""


Event = ChildExited | Observed | Interrupted | Concluded | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Order: start this child."""

    child: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Order: ask this child to end (SIGTERM)."""

    child: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Order: end this child (SIGKILL)."""

    child: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """Order: fetch and write the results while broker and outer still run; then say Concluded."""


@dataclass(frozen=True, slots=True)
class End:
    """Order: all is over."""

    status: Status
    text: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]


Instruction = Start | Terminate | Kill | Conclude | End


@dataclass(slots=True)
class Child:
    """One process and its history."""

    name: str
    role: Role
    is_running: bool = False
    is_done: bool = False
    """Ended with code 0 and is not wanted again."""
    started_at: float = 0.0
    ended_at: float = 0.0
    restart_at: float | None = None
    num_restarts: int = 0
    num_crashes: int = 0
    """Deaths in a row without health in between."""
    num_refusals: int = 0
    last_code: int | None = None
    killed_at: float | None = None
    """When it is killed if it has not ended by then."""


@dataclass
class Supervision:
    """The state of all children; `children` in the order in which they start."""

    children: dict[str, Child]
    drain_seconds: float = 60.0
    stall_seconds: float = 0.0
    """No new round for this long ends the run; 0 = never."""
    last_warning: str = ""
    """What a child complained about last: perhaps the reason for a stall."""
    status: Status | None = None
    """What the run ends as; None while it goes on."""
    text: str = ""
    culprit: str = ""
    """The child because of which the run failed, if it was one."""
    progress: float = 0.0
    rounds: int = -1
    _progressed_at: float = 0.0
    _completed_at: float | None = None
    _stages: list[Role | Literal["conclude"]] = field(default_factory=list)
    _is_stage_begun: bool = False
    _has_ended: bool = False

    @classmethod
    def of(cls, children: Sequence[tuple[str, Role]], *, drain_seconds: float, stall_seconds: float) -> Supervision:
        """A supervision of these (name, role) pairs."""
        return cls({name: Child(name, role) for name, role in children}, drain_seconds, stall_seconds)

    @property
    def num_restarts(self) -> int:
        """Of all children together."""
        return sum(child.num_restarts for child in self.children.values())

    def start(self, now: float) -> list[Instruction]:
        """Starts everything."""
        self._progressed_at = now
        instructions: list[Instruction] = []
        for child in self.children.values():
            instructions += self._start(child, now)
        return instructions

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Takes one fact; returns orders to carry out in turn."""
        if self._has_ended:
            return []
        match event:
            case ChildExited():
                self._take_exit(self.children[event.child], event.code, now)
            case Observed():
                self._observe(event, now)
            case Interrupted():
                if self.status == "interrupted":
                    return self._stop_at_once(
                        "stopped at once; what was not handed in is in the last checkpoints, or lost"
                    )
                self._close("interrupted", "stopped as asked", now)
            case Concluded():
                self._take_conclusion(event)
        return [*self._advance(now), *self._tick(now)]

    # --------------------------------------------------------------------------------------------------------- children

    def _start(self, child: Child, now: float) -> list[Instruction]:
        child.is_running, child.started_at, child.restart_at, child.killed_at = True, now, None, None
        return [Start(child.name)]

    def _take_exit(self, child: Child, code: int, now: float) -> None:
        child.is_running, child.ended_at, child.last_code = False, now, code
        child.killed_at = None
        if self._is_stopping(child):
            child.is_done = True
            return
        if code == 0 and child.role in ("worker", "evaluator"):
            # A worker that is asked to leave also ends with 0: whether it is wanted again shows in the progress.
            child.is_done = True
            return
        self._plan_restart(child, code, now)

    def _plan_restart(self, child: Child, code: int, now: float) -> None:
        self._count_death(child, code, child.ended_at - child.started_at)
        if child.num_refusals >= REFUSALS_MAX:
            self.culprit = self.culprit or child.name
            self._close("failed", f"{child.name} cannot run (exit code {code}, {REFUSALS_MAX} times)", now)
        elif child.num_crashes >= CRASHES_MAX:
            self.culprit = self.culprit or child.name
            text = f"{child.name} died {CRASHES_MAX} times in a row, each within {HEALTHY_SECONDS:g} s"
            self._close("failed", f"{text} ({describe_exit(code)})", now)
        else:
            child.restart_at = now + BACKOFF_SECONDS[min(child.num_crashes, len(BACKOFF_SECONDS)) - 1]

    def _count_death(self, child: Child, code: int, lifetime: float) -> None:
        child.num_crashes = 1 if lifetime >= HEALTHY_SECONDS else child.num_crashes + 1
        if code in WAIT_CODES:
            child.num_crashes = min(child.num_crashes, CRASHES_MAX - 1)
        if code not in REFUSAL_CODES:
            child.num_refusals = 0
        else:
            child.num_refusals = 1 if lifetime >= REFUSAL_MEMORY_SECONDS else child.num_refusals + 1

    def _restart(self, child: Child, now: float) -> list[Instruction]:
        child.num_restarts += 1
        return self._start(child, now)

    # ------------------------------------------------------------------------------------------------------ the course

    def _observe(self, observed: Observed, now: float) -> None:
        if observed.rounds != self.rounds:
            self.rounds, self._progressed_at = observed.rounds, now
        self.progress = observed.progress
        if self.status is not None:
            return
        if observed.progress < 1:
            self._completed_at = None
            for child in self.children.values():
                if child.is_done and child.ended_at < observed.asked_at:
                    child.is_done = False
                    self._plan_restart(child, 0, now)
        elif self._completed_at is None:
            self._completed_at = now

    def _tick(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        for child in self.children.values():
            if child.restart_at is not None and now >= child.restart_at and not self._is_stopping(child):
                instructions += self._restart(child, now)
            elif child.is_running and child.killed_at is not None and now >= child.killed_at:
                child.killed_at = None
                instructions.append(Kill(child.name))
        if self.status is None and (text := self._stall(now)):
            self._close("failed", text, now)
            instructions += self._advance(now)
        return instructions

    def _stall(self, now: float) -> str:
        """Why this run is given up, if it goes on too long without progress."""
        has_begun = self.rounds >= 0
        seconds = self.stall_seconds * (1.0 if has_begun else BEGIN_SHARE)
        if not seconds or now - self._progressed_at < seconds:
            return ""
        text = f"no round was committed for {seconds:g} s" if has_begun else f"nobody began the run in {seconds:g} s"
        return f"{text}; {self.last_warning}" if self.last_warning else text

    def _close(self, status: Status, text: str, now: float) -> None:
        if self.status is not None and not (self.status == "finished" and status == "failed"):
            return
        if self.status is None:
            self._stages = ["worker", "evaluator", "conclude", "outer", "relay", "broker"]
        self.status, self.text = status, text
        for child in self.children.values():
            if status == "failed" and child.killed_at is not None:
                child.killed_at = min(child.killed_at, now + FAILED_DRAIN_SECONDS)

    def _advance(self, now: float) -> list[Instruction]:
        """Goes through the stages of the end as far as it can."""
        if self.status is None and self._is_complete(now):
            self._close("finished", "the budget is reached", now)
        instructions: list[Instruction] = []
        while self._stages:
            stage = self._stages[0]
            members = [child for child in self.children.values() if child.role == stage and child.is_running]
            if not self._is_stage_begun:
                self._is_stage_begun = True
                instructions += [Conclude()] if stage == "conclude" else self._terminate(members, now)
            if members or stage == "conclude":
                return instructions
            self._next_stage()
        if self.status is not None:
            self._has_ended = True
            instructions.append(End(self.status, self.text))
        return instructions

    def _is_complete(self, now: float) -> bool:
        if self._completed_at is None:
            return False
        workers = [child for child in self.children.values() if child.role == "worker"]
        is_over = all(child.is_done or _is_put_off(child) for child in workers)
        return is_over or now - self._completed_at >= self.drain_seconds

    def _terminate(self, members: Sequence[Child], now: float) -> list[Instruction]:
        seconds = FAILED_DRAIN_SECONDS if self.status == "failed" else self.drain_seconds
        for child in members:
            child.killed_at = now + seconds
        return [Terminate(child.name) for child in members]

    def _take_conclusion(self, concluded: Concluded) -> None:
        if self._stages and self._stages[0] == "conclude":
            if concluded.fault and self.status == "finished":
                self.status, self.text = "failed", concluded.fault
            elif concluded.fault and self.status == "interrupted":
                self.text = f"{self.text}; {concluded.fault}"
            self._next_stage()

    def _next_stage(self) -> None:
        self._stages.pop(0)
        self._is_stage_begun = False

    def _is_stopping(self, child: Child) -> bool:
        """Whether its stage of the end has come, or is over."""
        return self.status is not None and (
            child.role not in self._stages or (self._stages[0] == child.role and self._is_stage_begun)
        )

    def _stop_at_once(self, text: str) -> list[Instruction]:
        self.text, self._has_ended = text, True
        kills: list[Instruction] = [Kill(child.name) for child in self.children.values() if child.is_running]
        return [*kills, End("interrupted", text)]


def _is_put_off(child: Child) -> bool:
    """Whether a child has ended because nobody wants its work for now."""
    return not child.is_running and child.last_code == QuarantinedError.exit_code


def describe_exit(code: int) -> str:
    """An exit code in words: `exit code 3`, `signal 9`."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
