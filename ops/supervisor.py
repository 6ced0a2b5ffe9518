"""The shell around `Supervision`: starts and stops real processes, looks at the broker, shows what happens."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final, Self

from isles.ops.children import ChildProcess
from isles.ops.conclusion import Conclusion
from isles.ops.display import Display, View, warning_line
from isles.ops.fault_view import FaultSource, NoFaults
from isles.ops.log_watch import LogWatch
from isles.ops.reach import Reach, key_in
from isles.ops.run_folder import RunFolder, State
from isles.ops.supervision import (
    ChildExited,
    Conclude,
    End,
    Event,
    Instruction,
    Interrupted,
    Kill,
    Observed,
    Start,
    Supervision,
    Terminate,
    Tick,
    describe_exit,
)
from isles.ops.watch import StatusWatch
from isles.proto.clock import Clock
from isles.proto.errors import UsageError
from isles.proto.logs import Logger
from isles.proto.manifest import Manifest
from isles.proto.messages import LearnerInfo, Status
from isles.proto.policy import policy

POLL_SECONDS: Final = 0.1
"""A death is noticed within it: it is part of the time until a learner contributes again."""
STATE_SECONDS: Final = 5.0
"""Between two writings of the time that the run has taken: what a killed supervisor may forget."""
REAP_SECONDS: Final = 10.0
"""For a killed process to be gone; longer only if the machine is in trouble."""

LOG_SECONDS: Final = 1.0
"""Between two looks into the children's logs."""

PHASES: Final = {"finished": "finishing", "interrupted": "draining", "failed": "stopping"}


class Signals:
    """Counts SIGINT and SIGTERM while it is entered; those that nobody takes any more do no harm."""

    def __init__(self) -> None:
        self._count = 0
        self._has_come = False
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take_signal)
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            # Whoever has asked for the end may ask once more while this process is leaving: that must not look like
            # a crash.
            signal.signal(number, signal.SIG_IGN if self._has_come else handler)

    def _take_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1
        self._has_come = True

    def take(self) -> int:
        """How many have come since the last call."""
        count, self._count = self._count, 0
        return count


class Supervisor:
    """Runs children until the run has ended one way or another; leaves none behind, whatever happens."""

    def __init__(
        self,
        supervision: Supervision,
        commands: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        *,
        folder: RunFolder,
        state: State,
        watch: StatusWatch,
        view: View,
        display: Display,
        logger: Logger,
        clock: Clock,
        signals: Signals,
        faults: FaultSource | None = None,
    ) -> None:
        """`commands` are the children's command lines after `isles`; `state` is kept up to date in the folder.

        `faults` is whoever makes faults happen to the run, to be shown.
        """
        self._supervision = supervision
        self._commands = commands
        self._environment = environment
        self._folder = folder
        self._state = state
        self._watch = watch
        self._view = view
        self._display = display
        self._logger = logger
        self._clock = clock
        self._signals = signals
        self._faults = faults or NoFaults()
        self._running: dict[str, ChildProcess] = {}
        self._conclusion: Conclusion | None = None
        self._has_asked_record = self._is_described = False
        self._end: End | None = None
        self._live: frozenset[str] = frozenset()
        self._num_reports: int | None = None
        """Figures that have been noted; None = those of earlier starts are not known yet."""
        self._logs = LogWatch({name: folder.log(name) for name in commands})
        self._began_at = self._written_at = self._logs_read_at = clock.now()
        self._is_state_refused = False
        self._wall_before, self._restarts_before = state.wall_seconds, dict(state.restarts)

    def run(self) -> End:
        """Until the end."""
        try:
            self._perform(self._supervision.start(self._clock.now()))
            while self._end is None:
                self._step()
            return self._end
        finally:
            self._stop_rest()
            self._display.close()
            self._write_state()

    def _step(self) -> None:
        is_new = self._watch.poll(POLL_SECONDS)
        events = [
            *self._observations(is_new),
            *self._exits(),
            *(Interrupted() for _ in range(self._signals.take())),
            Tick(),
        ]
        if self._conclusion is not None and (concluded := self._conclusion.poll(self._clock.now())) is not None:
            self._conclusion = None
            events.append(concluded)
        for event in events:
            status = self._supervision.status
            self._perform(self._supervision.handle(event, self._clock.now()))
            if self._supervision.status != status:
                self._logger.info("run.stopping", status=self._supervision.status, text=self._supervision.text)
            if isinstance(event, ChildExited):
                self._note_exit(event)
        self._show()
        if self._clock.now() - self._written_at >= STATE_SECONDS:
            self._write_state()

    # --------------------------------------------------------------------------------------------------------- facts in

    def _observations(self, is_new: bool) -> list[Event]:
        status = self._watch.status
        if not is_new or status is None or not status.run:
            return []
        self._note_changes(status)
        self._describe_model()
        return [Observed(status.progress, status.totals.rounds_committed, self._watch.status_asked_at)]

    def _describe_model(self) -> None:
        """Says once what is done with the model's tensors, as the run's record has it."""
        record = self._watch.record
        if record is not None and not self._is_described:
            self._is_described = True
            self._logger.info("model.described", **policy(Manifest.from_text(record.manifest)))
        elif not self._has_asked_record:
            self._has_asked_record = True
            self._watch.ask_record()

    def _exits(self) -> list[Event]:
        codes = {name: process.poll() for name, process in self._running.items()}
        events: list[Event] = []
        for name, code in codes.items():
            if code is not None:
                self._running.pop(name).close()
                events.append(ChildExited(name, code))
        return events

    # ------------------------------------------------------------------------------------------------------ orders out

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Start(child):
                    self._start(child)
                case Terminate(child) if child in self._running:
                    self._running[child].terminate()
                case Kill(child) if child in self._running:
                    self._logger.warning("child.killed", child=child)
                    self._running[child].kill()
                case Conclude():
                    self._conclusion = Conclusion(
                        self._folder,
                        self._watch,
                        Reach(self._state.address, key_in(self._folder.path)),
                        self._environment,
                        self._clock.now(),
                        is_hurried=self._supervision.status == "failed",
                    )
                case End():
                    self._end = instruction

    def _start(self, child: str) -> None:
        output = self._folder.errors(child)
        process = ChildProcess(self._commands[child], output=output, environment=self._environment)
        self._running[child] = process
        self._logger.info("child.started", child=child, pid=process.pid)

    def _stop_rest(self) -> None:
        """Nobody is left; matters only after a second interrupt or a mistake of ours."""
        if self._conclusion is not None:
            self._conclusion.close()
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait(REAP_SECONDS)
            process.close()

    # ------------------------------------------------------------------------------------------------ words and figures

    def _note_exit(self, event: ChildExited) -> None:
        child = self._supervision.children[event.child]
        if event.code == 0 or child.is_done:
            return
        delay = None if child.restart_at is None else round(child.restart_at - child.ended_at, 3)
        if child.is_running:
            delay = 0.0
        self._logger.warning("child.died", child=child.name, code=event.code, restart_seconds=delay)
        words = self._folder.last_words(child.name) if event.code > 0 else ""
        text = f"{child.name} died ({describe_exit(event.code)})" + (f": {words}" if words else "")
        self._view.note(self._clock.now(), text + (", started again" if child.is_running else ""))

    def _note_changes(self, status: Status) -> None:
        now = self._clock.now()
        live = frozenset(learner.learner for learner in status.learners if self._is_live(learner))
        for learner in sorted(live - self._live):
            self._view.note(now, f"{learner} joined")
        for learner in sorted(self._live - live):
            self._view.note(now, f"{learner} {self._parting(learner)}")
        self._live = live
        for report in self._watch.reports[self._num_reports :] if self._num_reports is not None else ():
            self._view.note(now, f"{report.name.replace('_', ' ')} {report.value:.4f}")
        self._num_reports = len(self._watch.reports)

    def _parting(self, learner: str) -> str:
        """What became of a learner that is not live any more: it may just have nothing left to do."""
        child = self._supervision.children.get(learner)
        return "has finished" if child is not None and child.is_done else "is gone"

    def _is_live(self, learner: LearnerInfo) -> bool:
        """A lease may be of an earlier start of the run: who has not been heard since this one has not joined yet."""
        if learner.learner in self._live or not learner.is_live:
            return learner.is_live
        child = self._supervision.children.get(learner.learner)
        started_at = self._began_at if child is None else child.started_at
        return learner.last_seen_unix >= self._clock.unix() - (self._clock.now() - started_at)

    def _note_warnings(self) -> None:
        now = self._clock.now()
        if now - self._logs_read_at >= LOG_SECONDS:
            self._logs_read_at = now
            for warned in self._logs.poll():
                self._view.warn(now, warned)
                self._supervision.last_warning = f"last {warning_line(warned, 0)}"

    def _show(self) -> None:
        self._note_warnings()
        view, status = self._view, self._watch.status
        for text in self._faults.news():
            view.note(self._clock.now(), text)
        view.faults = self._faults.shown()
        view.status, view.status_at, view.reports = status, self._watch.status_at, self._watch.reports
        view.unix = self._clock.unix()
        if view.progress_at_start is None and self._live and status is not None:
            view.progress_at_start = (status.progress, self._clock.now())
        if self._supervision.status is not None:
            view.phase = PHASES[self._supervision.status]
        else:
            view.phase = "training" if status is not None and status.run else "starting"
        self._display.update(view, self._clock.now())

    def _write_state(self) -> None:
        self._written_at = self._clock.now()
        self._state.wall_seconds = self._wall_before + self._written_at - self._began_at
        for child in self._supervision.children.values():
            self._state.restarts[child.name] = self._restarts_before.get(child.name, 0) + child.num_restarts
        try:
            self._folder.write_state(self._state)
        except UsageError as error:
            # A full disk ends nothing here: what is lost is the time of this start, should it be killed now.
            if not self._is_state_refused:
                self._view.note(self._written_at, str(error))
            self._is_state_refused = True
        else:
            self._is_state_refused = False
