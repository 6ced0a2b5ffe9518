"""The door to a run: put a `Learner` around a model and its optimizer, call it each step, and train for ever alone.

    learner = Learner(model, optimizer, broker="tcp://host:7700", learner="us-0", budget=Budget(tokens=10**9))
    with learner:
        for batch in data:
            loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
            learner.step(tokens=batch.numel())
            if learner.is_finished: break

`step` costs a copy of one fragment to the host now and then, and the addition of a version that has arrived. A broker
that is away costs nothing: training goes on, and what was learned meanwhile is handed in later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from torch import nn
from torch.optim import Optimizer

from isles.proto.agreement import Budget, RunRecord, Scalar, SyncSettings
from isles.proto.clock import Clock, SystemClock
from isles.proto.config import DEFAULT_RUN
from isles.proto.connection import Connection
from isles.proto.errors import ConfigError, UnreachableError, UsageError
from isles.proto.ids import NAME_LENGTH_MAX, is_name
from isles.proto.logs import Logger, SilentLogger
from isles.proto.messages import Hello, Progress
from isles.proto.policy import policy
from isles.proto.route import Route
from isles.proto.transport.address import DEFAULT_BROKER
from isles.proto.transport.interface import ClientTransport
from isles.workers.checkpoint import CheckpointWriter, origin_of, read_checkpoint
from isles.workers.claim import new_incarnation
from isles.workers.counters import Counters, check_step
from isles.workers.courier import Courier, RequestShards
from isles.workers.description import ModelTensors, check_optimizer, describe
from isles.workers.flat import FlatModel
from isles.workers.joining import Joined, Joiner, NewRun, check_learner_times, with_origin
from isles.workers.orders import Boundary, DrainRequested, StepTaken, Welcomed
from isles.workers.performer import Performer
from isles.workers.record import SLICE_SECONDS
from isles.workers.session import Session

GOODBYE_SECONDS: Final = 2.0
"""Longest wait for the broker to hear that we leave; it finds out anyway when the lease expires."""
NAME_RULE: Final = (
    f"up to {NAME_LENGTH_MAX} lower-case letters, digits, dots, dashes and underscores, no mark at the ends"
)
CUT_SHARE_MAX: Final = 0.01
"""Share of the time that may go into copying checkpoints: for a large model they become rarer than was asked for."""


@dataclass(frozen=True)
class _Started:
    """What a learner has from `start` on."""

    record: RunRecord
    store: str
    session: Session
    performer: Performer
    courier: Courier


class Learner:
    """One learner of a run. The constructor starts nothing; `with` joins the run and leaves it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        broker: str | Route = DEFAULT_BROKER,
        key: Path | None = None,
        learner: str,
        rejoin: str = "",
        region: str = "local",
        run: str = "",
        sync: SyncSettings | None = None,
        budget: Budget | None = None,
        seed: int = 1,
        task: str = "",
        task_settings: Mapping[str, Scalar] | None = None,
        corpus_sha256: str = "",
        stated: Mapping[str, Scalar] | None = None,
        num_shards: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_seconds: float = 10.0,
        join_timeout_seconds: float = 120.0,
        drain_timeout_seconds: float = 60.0,
        should_stop: Callable[[], bool] = lambda: False,
        log: Logger | None = None,
        connect: Callable[[], ClientTransport] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`model` is on its device, `optimizer` has its parameters; docs/guides/own-model.md says what it may be.

        With a `budget` this learner may start the run if there is none: with `run` as its name, these `sync` settings,
        seed, task and corpus, and its own weights as version 0. An existing run replaces all of that; what is in
        `stated` (dotted keys of the run record) must agree with it. `num_shards` data shards are leased for it.
        With a `checkpoint_dir` of its own it can be restarted. `should_stop` is looked at wherever it waits.
        `rejoin` belongs to a name that a broker gave. `broker` may be a Route, which has its own `key`, and perhaps a
        relay. `connect` makes another transport than ZeroMQ. Raises ConfigError for a name that is none.
        """
        for what, name in {"learner": learner, "region": region, "run": run or DEFAULT_RUN}.items():
            if not is_name(name):
                raise ConfigError(f"{what} = {name!r} is no name: {NAME_RULE}")
        self._model = model
        self._optimizer = optimizer
        self._route = broker if isinstance(broker, Route) else Route(broker, key)
        self._address = self._route.address
        self._name = learner
        self._clock = clock or SystemClock()
        self._log = log or SilentLogger()
        self._connect = connect
        self._new_run = (
            None
            if budget is None
            else NewRun(
                run or DEFAULT_RUN, sync or SyncSettings(), budget, seed, task, dict(task_settings or {}), corpus_sha256
            )
        )
        said = dict(stated or {})
        self._hello = Hello(
            role="worker", id=learner, rejoin=rejoin, region=region, run=run, incarnation=new_incarnation(), stated=said
        )
        self._region = region
        self._num_shards = num_shards
        self._checkpoint_dir = checkpoint_dir
        self._checkpoint_seconds = checkpoint_seconds
        self._join_timeout_seconds = join_timeout_seconds
        self._drain_timeout_seconds = drain_timeout_seconds
        self._should_stop = should_stop
        self._writer: CheckpointWriter | None = None
        if checkpoint_dir is not None:
            self._writer = CheckpointWriter(checkpoint_dir, learner=learner, clock=self._clock, log=self._log)
        self._started: _Started | None = None
        self._is_left = False
        self.tokens = 0
        """Tokens this learner learned from, checkpoints included."""
        self.seconds_blocked = 0.0
        """Time spent in `step`."""
        self._counters = Counters()
        self._stepped_at = self._next_cut = 0.0

    # ------------------------------------------------------------------------------------------------- what users call

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._is_left:
                self.drain()
        finally:
            self.close()

    def start(self) -> None:
        """Joins the run, or starts it; returns when the model has the newest version of every fragment.

        Raises UnreachableError if that takes too long or is stopped, RefusedError or FencedError if the broker will not
        have this learner, ManifestError for a model or optimizer that cannot be synchronised, ManifestMismatchError for
        a model that is not the run's, ConfigError for a checkpoint of another learner, run or model.
        """
        deadline = self._clock.now() + self._join_timeout_seconds
        tensors = describe(self._model)
        check_optimizer(self._model, self._optimizer)
        connection = self._open()
        try:
            joined = Joiner(
                connection,
                tensors,
                new_run=self._new_run,
                address=self._address,
                timeout_seconds=self._join_timeout_seconds,
                should_stop=self._should_stop,
                clock=self._clock,
                log=self._log,
                resumes="" if self._checkpoint_dir is None else origin_of(self._checkpoint_dir)[0],
            ).join()
            own = {"join_timeout": self._join_timeout_seconds, "drain_timeout": self._drain_timeout_seconds}
            check_learner_times(joined, {**own, "checkpoint": self._checkpoint_seconds}, self._log)
            self._started = started = self._begin(connection, joined, tensors)
        except BaseException:
            connection.close()
            raise
        started.courier.start()
        try:
            self._take_heads(started, joined, deadline)
        except BaseException:
            self.close()
            raise
        self._stepped_at = self._clock.now()
        self._next_cut = self._stepped_at + self._checkpoint_seconds
        fields = {"versions": self.versions, "progress": round(self.progress, 4)}
        self._log.info("learner.joined", learner=self._name, region=self._region, **fields)
        self._log.info("model.described", learner=self._name, **policy(joined.manifest))
        if self._num_shards:
            self.request_shards(self._num_shards)

    def step(self, tokens: int, cursor: Mapping[int, int] | None = None) -> None:
        """Call it after each inner step: `tokens` it learned from, `cursor` data shard -> items taken since the start.

        Never waits (but in a deterministic run, for the version that is due). Raises FencedError if a newer
        incarnation of this learner exists, RefusedError if the broker refuses it for good, UsageError for numbers that
        cannot be right.
        """
        self._refuse_if_left()
        check_step(tokens, cursor or {})
        performer = self._running.performer
        begun = self._clock.now()
        seconds = begun - self._stepped_at
        self.tokens += tokens
        self._counters.count(tokens, seconds)
        performer.take_mail()
        performer.tell(StepTaken(tokens, seconds, dict(cursor or {})))
        performer.wait_if_told()
        self._checkpoint_if_due()
        self._stepped_at = self._clock.now()
        self.seconds_blocked += self._stepped_at - begun

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Hands in all work and waits until it is merged, then leaves the run; no step may follow.

        Returns whether everything was merged within `timeout_seconds`; what was not stays in the checkpoint. Raises
        what `step` raises.
        """
        started = self._running
        session, performer = started.session, started.performer
        if self._is_left:
            return session.is_drained
        limit = self._drain_timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._clock.now() + limit
        performer.take_mail()
        performer.tell(DrainRequested())
        performer.tell(Boundary())
        while not session.is_drained and started.courier.mailbox.wait(deadline - self._clock.now()):
            performer.take_mail()
            performer.tell(Boundary())
        if self._writer is not None:
            self._writer.wait()
            self._cut(is_last=True)
        fields = {"steps": self.num_steps, "tokens": self.tokens, "is_complete": session.is_drained}
        self._log.info("learner.drained", learner=self._name, **fields)
        self._is_left = True
        started.courier.stop(goodbye_seconds=GOODBYE_SECONDS)
        return session.is_drained

    def close(self) -> None:
        """Ends the courier without handing anything in; idempotent. `drain` first if the work matters."""
        if self._started is not None:
            self._started.courier.stop()
        if self._writer is not None:
            self._writer.wait()

    def request_shards(self, num_wanted: int, returned: Mapping[int, int] | None = None) -> None:
        """Asks for so many data shards in all, and gives some back with their cursors; `shards` changes later."""
        self._refuse_if_left()
        running = self._running
        for shard in returned or ():
            running.session.cursor.pop(shard, None)
        running.courier.submit(RequestShards(num_wanted, dict(returned or {})))

    @property
    def progress(self) -> float:
        """The global step as a share of the budget, in [0, 1]: a function of the versions held."""
        session = self._running.session
        return self.record.budget.progress(
            tokens_merged=session.tokens_merged, rounds_committed=session.rounds_committed
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run's budget is spent."""
        return self.progress >= 1.0

    @property
    def has_enough(self) -> bool:
        """Whether a budget of tokens is spent once all work of this learner is merged: more steps only overshoot it.

        True before `is_finished`, and for good only then: work that is rejected has to be made up for.
        """
        session = self._running.session
        tokens = session.tokens_merged + session.tokens_unmerged
        return self.record.budget.progress(tokens_merged=tokens, rounds_committed=session.rounds_committed) >= 1.0

    @property
    def versions(self) -> dict[int, int]:
        """Fragment -> version held."""
        return self._running.session.versions

    @property
    def shards(self) -> dict[int, int]:
        """Data shard leased to this learner -> items taken from it so far, by whoever took them."""
        cursor = self._running.session.cursor
        return {shard: max(taken, cursor.get(shard, 0)) for shard, taken in self._running.courier.shards.items()}

    @property
    def num_steps(self) -> int:
        """Inner steps of this learner, checkpoints included."""
        return self._running.session.num_steps

    @property
    def record(self) -> RunRecord:
        """What everybody in the run agrees on."""
        return self._running.record

    @property
    def _running(self) -> _Started:
        if self._started is None:
            raise UsageError(f"learner {self._name} has not been started: use it inside a `with learner:` block")
        return self._started

    def _refuse_if_left(self) -> None:
        if self._is_left:
            raise UsageError(f"learner {self._name} was drained and has left the run: no step may follow")

    # -------------------------------------------------------------------------------------------------------- starting

    def _open(self) -> Connection:
        hello = with_origin(self._hello, self._checkpoint_dir)
        if self._connect is not None:
            return Connection(hello, self._connect(), self._clock)
        return self._route.connect(
            hello,
            self._clock,
            lambda way, seconds: self._log.warning("way.changed", address=way, silent_seconds=round(seconds, 1)),
        )

    def _begin(self, connection: Connection, joined: Joined, tensors: ModelTensors) -> _Started:
        """Compares the checkpoint, if there is one, with the store's books, and restores what they leave of it."""
        record = joined.record
        checkpoint = None
        if self._checkpoint_dir is not None:
            checkpoint = read_checkpoint(
                self._checkpoint_dir,
                learner=self._name,
                run=record.run,
                manifest_digest=record.manifest_digest,
                log=self._log,
            )
        session = Session(
            record.sync,
            self._name,
            self._hello.incarnation,
            has_buffers=joined.manifest.fragments[-1].is_buffers,
            restored=None if checkpoint is None else checkpoint.books,
            cursor=None if checkpoint is None else checkpoint.cursor,
            num_steps=0 if checkpoint is None else checkpoint.num_steps,
        )
        orders = session.handle(Welcomed(joined.welcome.heads, joined.welcome.rows), self._clock.now())
        flat = FlatModel(tensors, joined.manifest)
        performer = Performer(
            session,
            flat,
            self._optimizer,
            tensors.buffers,
            should_stop=self._should_stop,
            clock=self._clock,
            log=self._log,
        )
        if checkpoint is not None:
            performer.restore(checkpoint)
            self.tokens = checkpoint.tokens
        performer.courier = Courier(
            connection,
            record.sync,
            flat,
            learner=self._name,
            address=self._address,
            held=performer.held,
            payloads={} if checkpoint is None else checkpoint.payloads,
            shards=joined.welcome.shards,
            progress=self._report,
            clock=self._clock,
            log=self._log,
            accounts=performer.accounts,
        )
        performer.perform(orders)
        return _Started(record, joined.welcome.store, session, performer, performer.courier)

    def _take_heads(self, started: _Started, joined: Joined, deadline: float) -> None:
        """Waits for the newest version of every fragment, as far as it was known when this learner joined."""
        heads = {head.fragment: head.version for head in joined.welcome.heads}
        while not _is_current(started.session, heads):
            if self._should_stop():
                started.courier.stop(goodbye_seconds=GOODBYE_SECONDS)
                raise UnreachableError(f"stopped before the parameters had arrived from the broker at {self._address}")
            left = deadline - self._clock.now()
            if not started.courier.mailbox.wait(min(left, SLICE_SECONDS)) and left <= 0:
                missing = [
                    fragment for fragment, head in heads.items() if started.session.versions.get(fragment) != head
                ]
                raise UnreachableError(
                    f"the broker at {self._address} let this worker in, but its parameters did not arrive within "
                    f"{self._join_timeout_seconds:g} s (fragments {missing}): is the link fast enough for the model?"
                )
            started.performer.take_mail()
            started.performer.tell(Boundary())

    # ------------------------------------------------------------------------------------------------------- counting

    def _report(self) -> Progress:
        """Counters since this incarnation began; called by the courier thread."""
        return self._counters.progress(is_draining=self._started is not None and self._started.session.is_draining)

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def _checkpoint_if_due(self) -> None:
        if self._writer is None or self._clock.now() < self._next_cut or self._writer.is_busy:
            return
        self._cut()

    def _cut(self, *, is_last: bool = False) -> None:
        begun, record = self._clock.now(), self._running.record
        checkpoint = self._running.performer.cut(
            self._name, self._hello.incarnation, record.run, record.manifest_digest, self.tokens, is_last=is_last
        )
        if checkpoint is not None and self._writer is not None:
            ended = self._clock.now()
            self._next_cut = ended + max(self._checkpoint_seconds, (ended - begun) / CUT_SHARE_MAX)
            checkpoint.store = self._running.store
            self._writer.start(checkpoint)


def _is_current(session: Session, heads: Mapping[int, int]) -> bool:
    """Whether training may begin. A deterministic run that goes on applies later versions at their own steps."""
    if not session.is_ready or session.sync.is_deterministic:
        return session.is_ready
    return all(session.versions[fragment] >= version for fragment, version in heads.items())
