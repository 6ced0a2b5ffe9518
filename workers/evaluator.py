"""The evaluator: validates the global parameters while they change. What `isles evaluate` runs.

It is a subscriber like any other and no learner: it fetches the newest versions once every fragment has advanced,
computes the task's validation loss on them, and reports the figure to the broker, where everybody can read it. The
first figure is that of version 0, the last one that of the versions that are newest when it is told to stop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from threading import Event
from typing import Final

import torch
from torch import nn

from isles.proto.agreement import RunRecord
from isles.proto.client import Hinted
from isles.proto.clock import Clock, SystemClock
from isles.proto.config import Config, RunSettings
from isles.proto.connection import Connection, raise_if_refused
from isles.proto.errors import PayloadError, UnreachableError
from isles.proto.ids import FRAGMENTS_MAX, FragmentId, Version
from isles.proto.logs import Logger
from isles.proto.messages import AskHeads, AskStatus, Done, Heads, Leave, Report, ReportInfo, Status
from isles.proto.timeouts import check_times, times_of, times_told
from isles.workers.device import choose_device
from isles.workers.parameters import ASK_SECONDS, GlobalParameters, ParameterFetcher, ask
from isles.workers.record import connect, make_task, say_hello, statements
from isles.workers.settings import EvaluatorSettings
from isles.workers.task import Task

FIGURE: Final = "validation_loss"
"""Name of the figure in reports: the task's validation loss, nats per byte for a model of text."""

LOOK_SECONDS: Final = 1.0
"""Time between two looks at the heads: small against a cycle, and one short message."""

RECORD_SECONDS: Final = 5.0
"""Time between two questions whether some worker has started the run, should the hint about it be lost."""

LEAVE_SECONDS: Final = 2.0
"""Longest wait for the answer to LEAVE, on which nothing depends."""


class Agenda:
    """When another evaluation is due. Pure: a function of versions and of the time, in seconds."""

    def __init__(
        self, *, every_cycles: int, every_seconds_min: float, quiet_seconds: float, num_fragments: int = FRAGMENTS_MAX
    ) -> None:
        """`num_fragments` are those of parameters: one of buffers comes after them and may never change."""
        self._num_fragments = num_fragments
        self._every_cycles = every_cycles
        self._every_seconds_min = every_seconds_min
        self._quiet_seconds = quiet_seconds
        self._evaluated: dict[FragmentId, Version] = {}
        self._begun_at = -math.inf
        self._heads: dict[FragmentId, Version] = {}
        self._changed_at = -math.inf

    def see(self, heads: Mapping[FragmentId, Version], now: float) -> None:
        """Takes note of the newest versions."""
        if heads != self._heads:
            self._heads = dict(heads)
            self._changed_at = now

    def note_evaluated(self, versions: Mapping[FragmentId, Version], begun_at: float) -> None:
        """These versions have their figure; getting it began at `begun_at`."""
        self._evaluated = dict(versions)
        self._begun_at = begun_at

    @property
    def is_behind(self) -> bool:
        """Whether there is a version that no figure contains."""
        return any(version > self._evaluated.get(fragment, -1) for fragment, version in self._heads.items())

    def is_due(self, now: float, *, is_finished: bool) -> bool:
        """Whether to evaluate now: a cycle is complete, or the run is finished and nothing follows any more."""
        if not self.is_behind or now - self._begun_at < self._every_seconds_min:
            return False
        if is_finished and now - self._changed_at >= self._quiet_seconds:
            return True
        return all(
            version - self._evaluated.get(fragment, -1) >= self._every_cycles
            for fragment, version in self._heads.items()
            if fragment < self._num_fragments
        )


class Evaluator:
    """The loop of one evaluator, over a connection that has been welcomed."""

    def __init__(
        self,
        connection: Connection,
        record: RunRecord,
        task: Task,
        model: nn.Module,
        settings: EvaluatorSettings,
        *,
        logger: Logger,
        clock: Clock,
        should_stop: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._record = record
        self._task = task
        self._model = model
        self._settings = settings
        self._logger = logger
        self._clock = clock
        self._should_stop = should_stop
        self._agenda = Agenda(
            every_cycles=settings.every_cycles,
            every_seconds_min=settings.every_seconds_min,
            quiet_seconds=settings.quiet_seconds,
            num_fragments=record.sync.num_fragments,
        )
        self._parameters: GlobalParameters | None = None
        self._has_first = False
        self._unreported: Report | None = None
        self._lost_at: float | None = None
        model.eval()

    def run(self) -> None:
        """Evaluates whenever it is due until a stop is requested, then the newest versions once more, and leaves.

        A broker that is away is waited for. Raises RefusedError or FencedError if it refuses this process.
        """
        while not self._should_stop():
            self.look()
            self._connection.poll(LOOK_SECONDS)
        self.finish()

    def look(self) -> None:
        """Looks at the heads, and evaluates if that is due. Raises as `run`."""
        self._attempt(self._look)

    def finish(self) -> None:
        """Gets and reports the last figure, as long as there is time for it, and leaves. Raises as `run`."""
        self._attempt(self._finish)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Does something that needs the broker; whatever fails because of it is tried again later."""
        now = self._clock.now()
        try:
            action()
        except UnreachableError:
            if self._lost_at is None and not self._should_stop():
                self._lost_at = now
                address, silent_seconds = self._settings.address, round(ASK_SECONDS, 1)
                self._logger.warning("broker.lost", address=address, silent_seconds=silent_seconds)
            return
        except PayloadError as error:
            self._logger.warning("blob.unavailable", digest="", text=str(error))
        self._lost_at = None
        if dropped := self._connection.take_dropped():
            self._logger.info("messages.dropped", **dropped)

    def _look(self) -> None:
        if self._unreported is not None:
            self._report(self._unreported)
        if not self._has_first:
            self._begin()
        progress = self._see_heads(ASK_SECONDS)
        if self._agenda.is_due(self._clock.now(), is_finished=progress >= 1.0):
            self._evaluate_newest(self._settings.fetch_timeout_seconds, self._should_stop)

    def _begin(self) -> None:
        """Goes on from the figures that are there; without one of version 0 that is the first to get."""
        status = ask(self._connection, AskStatus(), Status, ASK_SECONDS, address=self._settings.address)
        earlier = [report for report in status.reports if report.name == FIGURE and report.versions]
        if not any(_is_first(report) for report in earlier):
            fetcher = self._fetcher(self._settings.fetch_timeout_seconds, self._should_stop)
            self._evaluate(fetcher.first(), self._clock.now())
        elif earlier:
            self._agenda.note_evaluated(earlier[-1].versions, -math.inf)
        self._has_first = True

    def _see_heads(self, timeout_seconds: float) -> float:
        """Takes note of the newest versions; returns the run's progress by them."""
        reply = ask(self._connection, AskHeads(), Heads, timeout_seconds, address=self._settings.address)
        self._agenda.see({head.fragment: head.version for head in reply.heads}, self._clock.now())
        trained = [head for head in reply.heads if head.fragment < self._record.sync.num_fragments]
        return self._record.budget.progress(
            tokens_merged=sum(head.tokens_total for head in trained) / max(1, len(trained)),
            rounds_committed=sum(head.version for head in trained),
        )

    def _finish(self) -> None:
        deadline = self._clock.now() + self._settings.final_timeout_seconds
        if self._unreported is not None:
            self._report(self._unreported)
        self._see_heads(self._settings.final_timeout_seconds)
        if self._agenda.is_behind:
            self._evaluate_newest(max(1.0, deadline - self._clock.now()), lambda: False)
        ask(self._connection, Leave(), Done, LEAVE_SECONDS, address=self._settings.address)

    # ------------------------------------------------------------------------------------------------- one evaluation

    def _evaluate_newest(self, timeout_seconds: float, should_stop: Callable[[], bool]) -> None:
        begun_at = self._clock.now()
        self._parameters = self._fetcher(timeout_seconds, should_stop).newest(self._parameters)
        self._evaluate(self._parameters, begun_at)

    def _evaluate(self, parameters: GlobalParameters, begun_at: float) -> None:
        parameters.load_into(self._model)
        loss = self._task.validation_loss(self._model)
        self._agenda.note_evaluated(parameters.versions, begun_at)
        say = self._logger.info if math.isfinite(loss) else self._logger.error
        say(
            "loss.evaluated",
            value=round(loss, 5),
            versions=parameters.versions,
            tokens=round(parameters.tokens),
            seconds=round(self._clock.now() - begun_at, 3),
        )
        if math.isfinite(loss):
            self._report(Report(name=FIGURE, value=loss, versions=parameters.versions, tokens=parameters.tokens))

    def _report(self, report: Report) -> None:
        self._unreported = report
        ask(self._connection, report, Done, ASK_SECONDS, address=self._settings.address)
        self._unreported = None

    def _fetcher(self, timeout_seconds: float, should_stop: Callable[[], bool]) -> ParameterFetcher:
        return ParameterFetcher(
            self._connection,
            self._record,
            address=self._settings.address,
            timeout_seconds=timeout_seconds,
            clock=self._clock,
            should_stop=should_stop,
        )


def _is_first(report: ReportInfo) -> bool:
    return not any(report.versions.values())


# --------------------------------------------------------------------------------------------------------- the process


def serve(config: Config, *, logger: Logger, should_stop: Event) -> int:
    """Runs one evaluator until `should_stop` is set, then evaluates the newest versions, and returns 0.

    `config` has the sections evaluator, run and task; the last two give way to the run record but for what was stated
    on purpose. Raises ConfigError or UsageError for what a person can mend, RefusedError or FencedError if the broker
    will not have it, UnreachableError if nobody answers, or nobody starts the run, in time.
    """
    settings = config.section("evaluator", EvaluatorSettings)
    device = choose_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    connection = connect(settings.route, "evaluator", settings.id, stated=statements(config))
    try:
        record = _await_record(connection, settings, should_stop.is_set)
        check_times(times_of("evaluator", settings) | times_told(connection.client.limits), logger)
        logger.info("broker.joined", address=settings.address, run=record.run)
        run = config.section("run", RunSettings)
        task = make_task(record, run.task, config.sections["task"].model_dump())
        model = task.build_model(record.seed).to(device)
        os.nice(settings.niceness)
        evaluator = Evaluator(
            connection,
            record,
            task,
            model,
            settings,
            logger=logger,
            clock=SystemClock(),
            should_stop=should_stop.is_set,
        )
        evaluator.run()
    except UnreachableError:
        if not should_stop.is_set():
            raise
    finally:
        connection.close()
    return 0


def _await_record(connection: Connection, settings: EvaluatorSettings, should_stop: Callable[[], bool]) -> RunRecord:
    """The run record, waiting for the worker that starts the run. Raises UnreachableError after the timeout."""
    clock = SystemClock()
    deadline = clock.now() + settings.record_timeout_seconds
    while clock.now() < deadline and not should_stop():
        seconds, address = settings.join_timeout_seconds, settings.address
        welcome = say_hello(connection, seconds, address=address, should_stop=should_stop)
        if welcome.run_record is not None:
            return welcome.run_record
        _await_start(connection, settings.address, clock, should_stop)
    raise UnreachableError(
        f"no worker has started a run at {settings.address} within {settings.record_timeout_seconds:g} s: start one, "
        "then the evaluator again"
    )


def _await_start(connection: Connection, address: str, clock: Clock, should_stop: Callable[[], bool]) -> None:
    """Returns when some worker has started the run, or it is time to ask whether the hint about that was lost."""
    until = clock.now() + RECORD_SECONDS
    while (left := until - clock.now()) > 0 and not should_stop():
        for news in connection.poll(left):
            raise_if_refused(news, address)
            if isinstance(news, Hinted) and news.hint.kind == "initialised":
                return
