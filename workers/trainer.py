"""The built-in trainer: what `isles worker` runs. It is only a client of `Learner`, and an example for one's own loop.

    learning rate from the run's progress -> batch -> loss -> backward -> clip -> inner step -> learner.step -> pace

Nothing here waits for anybody but at the two ends: for data when it begins, and for the last work to be merged when
that fills the run's budget or somebody asks it to stop.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event
from typing import Final, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from isles.proto.agreement import RunRecord, SyncSettings
from isles.proto.clock import Clock, SystemClock
from isles.proto.config import Config, RunSettings
from isles.proto.errors import FencedError, ManifestMismatchError, NonFiniteError, RefusedError, UnreachableError
from isles.proto.logs import Logger
from isles.workers.claim import Claim, Identity, claim_given, claim_learner
from isles.workers.device import choose_device
from isles.workers.learner import Learner
from isles.workers.record import asking_for_id, make_task, read_run_record, shared_task_settings, statements
from isles.workers.settings import WorkerSettings
from isles.workers.task import Batches, Task

SKIPPED_MAX: Final = 100
"""Inner steps in a row with a loss that is not finite before the worker gives up: a burst of bad data is shorter."""

SLICE_SECONDS: Final = 0.05
"""Longest single sleep: a request to stop is seen within it."""

POLL_SECONDS: Final = 0.005
"""Time between two looks for an answer about data."""

ASK_SHARDS_SECONDS: Final = 1.0
"""Time between two requests for data shards: the answer to one should be here before the next."""


class Trainer:
    """The loop of one worker, around a learner that has been started."""

    def __init__(
        self,
        learner: Learner,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        settings: WorkerSettings,
        *,
        name: str,
        logger: Logger,
        should_stop: Callable[[], bool],
        clock: Clock,
        sleep: Callable[[float], None] = time.sleep,
        is_deterministic: bool = False,
    ) -> None:
        """`batches` may still be without shards; `is_deterministic` makes the steps at which they change repeatable."""
        self.num_skipped = 0
        """Inner steps that were not taken because the loss or the gradient was not finite."""
        self._learner = learner
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._settings = settings
        self._name = name
        self._logger = logger
        self._should_stop = should_stop
        self._clock = clock
        self._sleep = sleep
        self._is_deterministic = is_deterministic
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._skipped_in_a_row = 0
        self._asked_at = -math.inf
        self._logged_at = clock.now()
        self._losses: list[float] = []

    def train(self) -> bool:
        """Trains until nothing is missing but merges (True) or a stop was requested (False).

        Raises UnreachableError if no data shard comes in time, NonFiniteError if the loss stays NaN or infinite, and
        what the learner's `step` raises.
        """
        self._model.train()
        self._await_shards()
        while not self._learner.has_enough and not self._should_stop():
            started = self._clock.now()
            rate = self._set_learning_rate()
            tokens = self._take_inner_step()
            self._learner.step(tokens=tokens, cursor=self._batches.cursors)
            self._exchange_shards()
            self._log_progress(rate)
            self._pace(started)
        return self._learner.has_enough

    # ------------------------------------------------------------------------------------------------- the inner step

    def _set_learning_rate(self) -> float:
        rate = self._task.schedule.at(self._learner.progress)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _take_inner_step(self) -> int:
        """Learns from one batch; returns the tokens it learned from: 0 if their gradient would have done harm."""
        loss = self._task.loss(self._model, self._batches.next_batch())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self._clip_gradient()
        loss_value, norm_value = torch.stack((loss.detach().float(), norm.to(loss.device).float())).tolist()
        is_finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if is_finite:
            self._optimizer.step()
            self._skipped_in_a_row = 0
            self._losses.append(loss_value)
        self._optimizer.zero_grad(set_to_none=True)
        if not is_finite:
            self._count_skipped(loss_value, norm_value)
        return self._task.tokens_per_batch if is_finite else 0

    def _clip_gradient(self) -> torch.Tensor:
        """Scales the gradient down to the task's largest norm; returns the norm it had, a scalar."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._task.gradient_norm_max > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._task.gradient_norm_max, norm)
        return norm

    def _count_skipped(self, loss: float, norm: float) -> None:
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        self._logger.warning("step.skipped", learner=self._name, steps=self._learner.num_steps, loss=loss, norm=norm)
        if self._skipped_in_a_row >= SKIPPED_MAX:
            raise NonFiniteError(
                f"learner {self._name} computed a loss or gradient that is not finite {SKIPPED_MAX} times in a row, "
                f"last loss {loss} with gradient norm {norm}; nothing of it was sent: lower the learning rate, or look "
                "at the data and the model"
            )

    # -------------------------------------------------------------------------------------------------------- the data

    def _await_shards(self) -> None:
        """The one wait for data: a learner that has some goes on with it whatever happens to its broker."""
        self._ask_shards({})
        self._wait_for_data(lambda: len(self._learner.shards) >= self._num_shards_min)
        self._batches.replace(self._learner.shards)

    def _exchange_shards(self) -> None:
        """Takes over what the broker has leased since, and gives finished shards back for others."""
        leased = self._learner.shards
        if leased and leased.keys() != self._batches.cursors.keys():
            self._batches.replace(leased)
        finished = self._batches.finished_shards()
        if finished and self._is_deterministic:
            self._learner.request_shards(num_wanted=self._settings.num_shards, returned=finished)
            self._wait_for_data(lambda: self._has_exchanged(finished))
            self._batches.replace(self._learner.shards)
        elif finished or len(leased) < self._settings.num_shards:
            self._ask_shards(finished)

    def _has_exchanged(self, returned: Mapping[int, int]) -> bool:
        leased = self._learner.shards
        return len(leased) >= self._num_shards_min and not returned.keys() & leased.keys()

    @property
    def _num_shards_min(self) -> int:
        """With fewer shards the next inner step is not taken."""
        return self._settings.num_shards if self._is_deterministic else 1

    def _wait_for_data(self, is_there: Callable[[], bool]) -> None:
        deadline = self._clock.now() + self._settings.join_timeout_seconds
        while not is_there() and not self._should_stop() and not self._learner.has_enough:
            if self._clock.now() >= deadline:
                raise UnreachableError(
                    f"learner {self._name} got no data shard within {self._settings.join_timeout_seconds:g} s: the "
                    "broker is away, or other learners hold all of them; start fewer, or lower worker.num_shards"
                )
            self._sleep(POLL_SECONDS)
            self._ask_shards({})

    def _ask_shards(self, returned: Mapping[int, int]) -> None:
        now = self._clock.now()
        if now - self._asked_at >= ASK_SHARDS_SECONDS:
            self._asked_at = now
            self._learner.request_shards(num_wanted=self._settings.num_shards, returned=dict(returned))

    # ----------------------------------------------------------------------------------------------- progress and pace

    def _log_progress(self, rate: float) -> None:
        now = self._clock.now()
        if now - self._logged_at < self._settings.log_every_seconds:
            return
        self._logged_at = now
        loss = sum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses.clear()
        self._logger.info(
            "learner.progressed",
            learner=self._name,
            steps=self._learner.num_steps,
            tokens=self._learner.tokens,
            loss=round(loss, 4) if math.isfinite(loss) else None,
            learning_rate=float(f"{rate:.4g}"),
            progress=round(self._learner.progress, 4),
            versions=list(self._learner.versions.values()),
            skipped=self.num_skipped,
        )

    def _pace(self, started: float) -> None:
        """Makes the step last as long as it should: a crowded machine stands in for many."""
        end = started + self._settings.step_seconds
        while (left := end - self._clock.now()) > 0 and not self._should_stop():
            self._sleep(min(left, SLICE_SECONDS))


# --------------------------------------------------------------------------------------------------------- the process


def serve(config: Config, *, logger: Logger, should_stop: Event) -> int:
    """Runs one worker until the run is finished or `should_stop` is set; drains and leaves before; returns 0.

    `config` has the sections worker, run, sync and task. A run that exists already replaces the last three by its
    record, all but what was stated on purpose, which must agree with it. A run that does not exist yet is started
    with them.

    Raises ConfigError or UsageError for what a person can mend, RefusedError or FencedError if the broker will not
    have this worker, UnreachableError if nobody answers in time, NonFiniteError if training diverged.
    """
    settings = config.section("worker", WorkerSettings)
    device = choose_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        with _claim(settings, should_stop) as claim:
            _Worker(config, settings, logger, should_stop, claim, device).work()
    except UnreachableError:
        if not should_stop.is_set():
            raise
    return 0


def _claim(settings: WorkerSettings, should_stop: Event) -> Claim:
    """The name of this learner: its own, or with a key one from the broker, or one made from the machine's."""
    if settings.id or settings.key is None:
        return claim_learner(settings.id, settings.checkpoint_dir, host=socket.gethostname())

    def ask(incarnation: str) -> AbstractContextManager[Identity]:
        return asking_for_id(
            settings.route,
            settings.region,
            settings.join_timeout_seconds,
            incarnation=incarnation,
            should_stop=should_stop.is_set,
        )

    return claim_given(settings.checkpoint_dir, ask)


_Outcome = Literal["done", "unfinished", "another run"]


@dataclass(frozen=True)
class _Worker:
    """One process: builds what the run trains, joins, trains, drains."""

    config: Config
    settings: WorkerSettings
    logger: Logger
    should_stop: Event
    claim: Claim
    device: torch.device

    def work(self) -> None:
        """Joins the run, or starts it, and trains to the end; anew if work that it had counted on was rejected."""
        while self._join_and_train() == "unfinished":
            pass

    def _join_and_train(self) -> _Outcome:
        record = self._read_record()
        if record is not None:
            return self._train(record)
        try:
            outcome = self._train(None)
        except FencedError:
            raise
        except (RefusedError, ManifestMismatchError):
            outcome = "another run"
        # Between our look at the record and our joining another worker started the run: its settings count.
        return self._train(self._read_record()) if outcome == "another run" else outcome

    def _read_record(self) -> RunRecord | None:
        return read_run_record(
            self.settings.route,
            self.settings.join_timeout_seconds,
            stated=statements(self.config),
            should_stop=self.should_stop.is_set,
        )

    def _train(self, record: RunRecord | None) -> _Outcome:
        """What came of it; another run is one that has another record than the one that we would write."""
        run = self.config.section("run", RunSettings)
        sync = self.config.section("sync", SyncSettings) if record is None else record.sync
        seed = run.seed if record is None else record.seed
        if sync.is_deterministic:
            make_deterministic()
        task = make_task(record, run.task, self.config.sections["task"].model_dump())
        model = task.build_model(seed).to(self.device)
        torch.manual_seed(learner_seed(seed, self.claim.name))
        optimizer = task.make_optimizer(model)
        with self._make_learner(record, task, model, optimizer) as learner:
            found = learner.record
            if record is None and (found.seed, found.sync, found.task_settings) != (
                seed,
                sync,
                shared_task_settings(task),
            ):
                return "another run"
            trainer = Trainer(
                learner,
                task,
                model,
                optimizer,
                task.batches({}, seed),
                self.settings,
                name=self.claim.name,
                logger=self.logger,
                should_stop=self.should_stop.is_set,
                clock=SystemClock(),
                is_deterministic=sync.is_deterministic,
            )
            has_enough = trainer.train()
            if not learner.drain(timeout_seconds=self.settings.drain_timeout_seconds) and has_enough:
                # A supervisor starts us again, and the checkpoint's work is handed in then.
                raise UnreachableError(
                    f"there is work enough to finish the run, but the last of learner {self.claim.name} was not merged "
                    f"within {self.settings.drain_timeout_seconds:g} s: start this worker again once broker and outer "
                    "run"
                )
            return "unfinished" if has_enough and not learner.is_finished else "done"

    def _make_learner(self, record: RunRecord | None, task: Task, model: nn.Module, optimizer: Optimizer) -> Learner:
        run = self.config.section("run", RunSettings)
        return Learner(
            model,
            optimizer,
            broker=self.settings.route,
            learner=self.claim.name,
            rejoin=self.claim.rejoin,
            region=self.settings.region,
            run=run.id if record is None else record.run,
            sync=self.config.section("sync", SyncSettings),
            budget=run.budget,
            seed=run.seed,
            task=run.task,
            task_settings=shared_task_settings(task),
            corpus_sha256=task.corpus_sha256,
            stated=statements(self.config),
            checkpoint_dir=self.claim.folder,
            checkpoint_seconds=self.settings.checkpoint_seconds,
            join_timeout_seconds=self.settings.join_timeout_seconds,
            drain_timeout_seconds=self.settings.drain_timeout_seconds,
            should_stop=self.should_stop.is_set,
            log=self.logger,
        )


def make_deterministic() -> None:
    """Makes equal inputs give equal bits: deterministic kernels, and one thread, so that sums have one order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


def learner_seed(seed: int, name: str) -> int:
    """The seed of a learner's own randomness, such as dropout: learners of one run must not drop the same values."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) >> 1
