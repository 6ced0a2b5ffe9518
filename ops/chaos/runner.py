"""The shell around `Campaign`: signals, links and files in, a log and a record out."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from isles.ops.chaos.campaign import (
    Begun,
    Campaign,
    Corrupt,
    Event,
    Failed,
    FillDisk,
    Finish,
    FreeDisk,
    Freeze,
    Injection,
    Instruction,
    Kill,
    Process,
    Reset,
    Seen,
    Shape,
    Stopped,
    Thaw,
    Tick,
)
from isles.ops.chaos.damage import Ballast, corrupt_blob
from isles.ops.chaos.measures import FaultRecord
from isles.ops.chaos.plan import Plan
from isles.ops.chaos.proxy import Network
from isles.ops.chaos.showing import begun, happened, over, shown
from isles.ops.chaos.targets import Targets, ThawGuard, send_signal
from isles.ops.fault_view import FaultsShown
from isles.proto.clock import Clock
from isles.proto.errors import IslesError, UsageError
from isles.proto.logs import Logger

POLL_SECONDS: Final = 0.05
"""Between two looks at the clock: a fault is never later than this."""
FIND_SECONDS: Final = 0.5
"""Between two looks for processes."""


class Room(Protocol):
    """What can take the broker's room on its disk, and give it back."""

    def fill(self) -> int:
        """Takes it; the bytes taken, 0 if that is not how it works. Raises UsageError where that must not be."""

    def free(self) -> None:
        """Gives it back; idempotent."""


class Runner:
    """Carries out one plan. Belongs to one thread; `stop` may be called from another."""

    def __init__(
        self,
        plan: Plan,
        targets: Targets,
        *,
        logger: Logger,
        clock: Clock,
        network: Network | None = None,
        store: Path | None = None,
        room: Room | None = None,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Without a network, a store or room, faults that need them are skipped, each with a sentence.

        `tell` hears a sentence about each fault when it happens, on the thread of `run`.
        """
        self._chance = random.Random(plan.seed)
        self.campaign = Campaign(plan, self._chance)
        self._targets = targets
        self._logger = logger
        self._clock = clock
        self._network = network
        self._store = store
        self._room = room or (Ballast(store) if store is not None else None)
        self._details: dict[int, str] = {}
        self._said: dict[int, str] = {}
        self._guards: dict[tuple[int, int], ThawGuard] = {}
        self._has_to_stop = False
        self._tell = tell
        self.shown: FaultsShown = shown(self.campaign)
        """How things stand, replaced as a whole: another thread may read it."""
        self._offset = clock.unix() - clock.now()
        self.damaged: list[str] = []
        """Digests of the blobs that were damaged."""

    def stop(self) -> None:
        """Makes `run` undo everything and return soon."""
        self._has_to_stop = True

    def run(self, has_begun: Callable[[], bool], is_ending: Callable[[], bool] = lambda: False) -> None:
        """Until all faults are over, the run ends, or `stop`. The plan's time begins when `has_begun` first says so.

        Whatever lasts is undone then: a run whose processes are frozen could not end.
        """
        is_begun = False
        found_at = self._clock.now() - FIND_SECONDS
        try:
            while not self.campaign.is_finished:
                events: list[Event] = []
                if self._clock.now() - found_at >= FIND_SECONDS:
                    found_at = self._clock.now()
                    events += self._find()
                if not is_begun and has_begun():
                    is_begun = True
                    events.append(Begun())
                    self._tell(begun(self.campaign.plan))
                self._handle([*events, Stopped() if self._has_to_stop or is_ending() else Tick()])
                time.sleep(POLL_SECONDS)
        finally:
            self._handle([Stopped()])
        if is_begun and self.campaign.plan.fault:
            self._tell(over(self.campaign.plan))

    def records(self) -> list[FaultRecord]:
        """All faults so far, in the order of their times, in unix seconds."""
        return [self._record(injection) for injection in self.campaign.injections.values()]

    def _find(self) -> list[Event]:
        try:
            return [Seen(self._targets.find())]
        except UsageError as error:
            self._logger.debug("message.refused", code="not-found", text=str(error))
            return [Seen(())]

    def _handle(self, events: Sequence[Event]) -> None:
        waiting = list(events)
        while waiting:
            event = waiting.pop(0)
            for instruction in self.campaign.handle(event, self._clock.now()):
                try:
                    self._perform(instruction)
                except IslesError as error:
                    number = getattr(instruction, "number", 0)
                    if not isinstance(instruction, Thaw | FreeDisk):  # whoever is gone needs no thawing
                        waiting.append(Failed(number, str(error)))
        self._say()
        self.shown = shown(self.campaign)

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Kill(number, processes):
                gone = [text for process in processes if (text := _kill(process))]
                self._details[number] = "; ".join(gone)
                if len(gone) == len(processes):
                    raise UsageError(self._details[number])
            case Freeze(_, process):
                self._freeze(process)
            case Thaw(_, process):
                self._dismiss(process)
                send_signal(process, signal.SIGCONT)
            case Shape(_, worker, shape):
                self._links.shape(worker, shape)
            case Reset(number, worker):
                self._details[number] = f"{self._links.reset(worker)} connections of {worker} were reset"
            case Corrupt(number):
                digest, position = corrupt_blob(self._found_store, self._chance, self.damaged)
                self.damaged.append(digest)
                self._details[number] = f"bit 0 of byte {position} of blob {digest[:12]}"
            case FillDisk(number):
                num_bytes = self._found_room.fill()
                self._details[number] = f"{num_bytes} bytes were taken" if num_bytes else "by its watermark"
            case FreeDisk():
                self._found_room.free()
            case Finish():
                pass

    def _freeze(self, process: Process) -> None:
        """Never without somebody who thaws it, should this process be killed meanwhile."""
        key = process.pid, process.birth
        if key not in self._guards:
            self._guards[key] = ThawGuard(process)
        try:
            send_signal(process, signal.SIGSTOP)
        except UsageError:
            self._dismiss(process)
            raise

    def _dismiss(self, process: Process) -> None:
        guard = self._guards.pop((process.pid, process.birth), None)
        if guard is not None:
            guard.close()

    @property
    def _links(self) -> Network:
        if self._network is None:
            raise UsageError("the workers reach their broker directly: network faults take `isles up --chaos PLAN`")
        return self._network

    @property
    def _found_store(self) -> Path:
        if self._store is None:
            raise UsageError("the store is not on this machine's disk, as far as this command knows: name --run-dir")
        return self._store

    @property
    def _found_room(self) -> Room:
        if self._room is None:
            raise UsageError("the store is not on this machine's disk, as far as this command knows: name --run-dir")
        return self._room

    # ------------------------------------------------------------------------------------------------------ the record

    def _say(self) -> None:
        """Logs what is new."""
        for number, injection in self.campaign.injections.items():
            kind, targets = injection.fault.kind, list(injection.targets)
            is_over = injection.ended_at is not None
            state = "skipped" if injection.failure else "ended" if is_over else "injected"
            before = self._said.get(number)
            if before == state:
                continue
            self._said[number] = state
            detail = self._details.get(number, "")
            if before is None or injection.failure:
                self._tell(happened(injection, len(self.campaign.plan.fault), detail))
            if injection.failure:
                self._logger.warning("fault.skipped", fault=number, kind=kind, text=injection.failure)
                continue
            if before is None:
                self._logger.warning("fault.injected", fault=number, kind=kind, targets=targets, detail=detail)
            if is_over and injection.began_at != injection.ended_at:
                self._logger.info("fault.ended", fault=number, kind=kind, targets=targets)

    def _record(self, injection: Injection) -> FaultRecord:
        began = injection.began_at or 0.0
        ended = injection.ended_at if injection.ended_at is not None else self._clock.now()
        return FaultRecord(
            number=injection.number,
            kind=injection.fault.kind,
            targets=injection.targets,
            began_unix=round(began + self._offset, 3),
            ended_unix=round(ended + self._offset, 3),
            seconds=injection.fault.ends_at - injection.fault.at,
            failure=injection.failure,
            detail=self._details.get(injection.number, ""),
        )


def _kill(process: Process) -> str:
    try:
        send_signal(process, signal.SIGKILL)
    except UsageError as error:
        return str(error)
    return ""
