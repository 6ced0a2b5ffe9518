"""The built-in trainer's loop, around a learner that only notes what it is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.config import RunSettings, Stated, resolve
from isles.proto.errors import (
    ConfigError,
    FencedError,
    ManifestMismatchError,
    NonFiniteError,
    RefusedError,
    UnreachableError,
)
from isles.proto.logs import ListLogger
from isles.workers.claim import Claim
from isles.workers.record import make_task, shared_task_settings, statements
from isles.workers.schedule import LearningRateSchedule
from isles.workers.settings import WorkerSettings
from isles.workers.task import TaskSettings
from isles.workers.trainer import SKIPPED_MAX, Trainer, _Worker, learner_seed


class FakeLearner:
    """Leases whatever shards it is asked for, unless `has_shards` is false, and finishes after `num_steps_max`.

    Once no more than `num_unmerged` steps are missing it has enough.
    """

    def __init__(self, num_steps_max: int = 10, num_unmerged: int = 0) -> None:
        self.has_shards = True
        self.num_unmerged = num_unmerged
        self.num_steps_max = num_steps_max
        self.num_steps = 0
        self.versions: dict[int, int] = {0: 0}
        self.tokens = 0
        self.taken: list[tuple[int, dict[int, int]]] = []
        self.requests: list[tuple[int, dict[int, int]]] = []
        self.clock: ManualClock | None = None
        self.delay_until: Callable[[], float] | None = None
        self._next_shard = 0
        self._shards: dict[int, int] = {}
        self._answer: tuple[float, dict[int, int]] = (0.0, {})

    @property
    def shards(self) -> dict[int, int]:
        due, answer = self._answer
        if self.clock is None or self.clock.now() >= due:
            self._shards = answer
        return self._shards

    @property
    def progress(self) -> float:
        return self.num_steps / self.num_steps_max

    @property
    def is_finished(self) -> bool:
        return self.num_steps >= self.num_steps_max

    @property
    def has_enough(self) -> bool:
        return self.num_steps + self.num_unmerged >= self.num_steps_max

    def step(self, tokens: int, cursor: Mapping[int, int]) -> None:
        self.num_steps += 1
        self.tokens += tokens
        self.taken.append((tokens, dict(cursor)))

    def request_shards(self, num_wanted: int, returned: Mapping[int, int]) -> None:
        self.requests.append((num_wanted, dict(returned)))
        if self.has_shards:
            held = {shard: cursor for shard, cursor in self._answer[1].items() if shard not in returned}
            while len(held) < num_wanted:
                held[self._next_shard] = 0
                self._next_shard += 1
            self._answer = (0.0 if self.delay_until is None else self.delay_until(), held)


class FakeBatches:
    """One item of each shard held per batch; a shard has three items."""

    def __init__(self) -> None:
        self.cursors: dict[int, int] = {}

    def next_batch(self) -> Tensor:
        self.cursors = {shard: cursor + 1 for shard, cursor in self.cursors.items()}
        return torch.ones(2, 3)

    def replace(self, leased: Mapping[int, int]) -> None:
        self.cursors = {shard: max(cursor, self.cursors.get(shard, 0)) for shard, cursor in leased.items()}

    def finished_shards(self) -> dict[int, int]:
        return {shard: cursor for shard, cursor in self.cursors.items() if cursor >= 3}


class FakeTask:
    """A linear map whose mean output is the loss; `factor` makes single losses wrong."""

    tokens_per_batch = 6
    schedule = LearningRateSchedule(peak=0.1, warmup_fraction=0.5)

    def __init__(self, factor: Callable[[int], float] = lambda _: 1.0, gradient_norm_max: float = 1.0) -> None:
        self.gradient_norm_max = gradient_norm_max
        self.num_losses = 0
        self._factor = factor

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.num_losses += 1
        loss: Tensor = model(batch).mean() * self._factor(self.num_losses)
        return loss


class Bench:
    """A trainer and everything around it; time passes only when it sleeps, `step_takes` seconds each step apart."""

    def __init__(self, learner: FakeLearner | None = None, task: FakeTask | None = None, **settings: Any) -> None:
        self.learner = learner or FakeLearner()
        self.task = task or FakeTask()
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=99.0)
        self.clock = ManualClock()
        self.logger = ListLogger()
        self.is_stopped = False
        self.trainer = Trainer(
            self.learner,  # type: ignore[arg-type]
            self.task,  # type: ignore[arg-type]
            self.model,
            self.optimizer,
            FakeBatches(),
            WorkerSettings.model_validate({"num_shards": 2, **settings}),
            name="us-0",
            logger=self.logger,
            should_stop=lambda: self.is_stopped,
            clock=self.clock,
            sleep=self.clock.advance,
        )


def test_it_trains_until_the_run_is_finished() -> None:
    bench = Bench()
    assert bench.trainer.train()
    assert bench.learner.num_steps == 10
    assert bench.learner.tokens == 60


def test_it_takes_no_step_more_once_its_unmerged_work_fills_the_budget() -> None:
    bench = Bench(FakeLearner(num_steps_max=10, num_unmerged=3))
    assert bench.trainer.train()
    assert bench.learner.num_steps == 7
    assert not bench.learner.is_finished


def test_asked_to_stop_it_ends_after_the_step_under_way() -> None:
    bench = Bench()

    def stop(_: int) -> float:
        bench.is_stopped = bench.task.num_losses == 3
        return 1.0

    bench.task = FakeTask(stop)
    bench.trainer._task = bench.task  # type: ignore[assignment]
    assert not bench.trainer.train()
    assert bench.learner.num_steps == 3


def test_the_learning_rate_follows_the_progress_of_the_run_alone() -> None:
    bench = Bench(FakeLearner(num_steps_max=4))
    rates: list[float] = []
    step = bench.learner.step
    bench.learner.step = lambda **given: (rates.append(bench.optimizer.param_groups[0]["lr"]), step(**given))  # type: ignore[assignment]
    bench.trainer.train()
    assert rates == [FakeTask.schedule.at(progress) for progress in (0.0, 0.25, 0.5, 0.75)]


def test_gradients_are_clipped_to_the_norm_of_the_task() -> None:
    bench = Bench(FakeLearner(num_steps_max=1), FakeTask(lambda _: 1e6, gradient_norm_max=0.5))
    before = [parameter.detach().clone() for parameter in bench.model.parameters()]
    bench.trainer.train()
    moved = [parameter.detach() - was for parameter, was in zip(bench.model.parameters(), before, strict=True)]
    length = float(torch.nn.utils.get_total_norm(moved))
    assert math.isclose(length, 0.5 * FakeTask.schedule.at(0.0), rel_tol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_whose_loss_is_not_finite_is_skipped_and_counts_no_token(bad: float) -> None:
    bench = Bench(task=FakeTask(lambda number: bad if number == 4 else 1.0))
    bench.trainer.train()
    assert bench.trainer.num_skipped == 1
    assert [tokens for tokens, _ in bench.learner.taken] == [6, 6, 6, 0, 6, 6, 6, 6, 6, 6]
    assert all(torch.isfinite(parameter).all() for parameter in bench.model.parameters())
    assert bench.logger.events().count("step.skipped") == 1


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_as_well() -> None:
    class RootTask(FakeTask):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return (super().loss(model, batch) * 0.0).sqrt()

    bench = Bench(task=RootTask(gradient_norm_max=0.0))
    bench.trainer.train()
    assert bench.trainer.num_skipped == 10
    assert all(torch.isfinite(parameter).all() for parameter in bench.model.parameters())


def test_a_loss_that_stays_nan_ends_the_worker_with_a_sentence() -> None:
    bench = Bench(FakeLearner(num_steps_max=10 * SKIPPED_MAX), FakeTask(lambda _: math.nan))
    with pytest.raises(NonFiniteError, match="lower the learning rate"):
        bench.trainer.train()
    assert bench.trainer.num_skipped == SKIPPED_MAX


def test_a_paced_step_takes_its_time() -> None:
    bench = Bench(step_seconds=0.25)
    bench.trainer.train()
    assert 2.5 <= bench.clock.now() < 2.6


def test_a_stop_ends_the_wait_of_a_paced_step() -> None:
    bench = Bench(step_seconds=1000.0)

    def sleep(seconds: float) -> None:
        bench.clock.advance(seconds)
        bench.is_stopped = bench.clock.now() > 1.0

    bench.trainer._sleep = sleep
    bench.trainer.train()
    assert bench.clock.now() < 2.0


def test_cursors_go_with_every_step() -> None:
    bench = Bench(FakeLearner(num_steps_max=2))
    bench.trainer.train()
    assert [cursor for _, cursor in bench.learner.taken] == [{0: 1, 1: 1}, {0: 2, 1: 2}]


def test_finished_shards_are_exchanged_for_others() -> None:
    bench = Bench(FakeLearner(num_steps_max=9), step_seconds=2.0)
    bench.trainer.train()
    assert bench.learner.requests == [(2, {}), (2, {0: 3, 1: 3}), (2, {2: 3, 3: 3})]
    assert bench.learner.taken[-1][1] == {4: 1, 5: 1}


def test_a_deterministic_run_exchanges_shards_at_the_same_steps_however_long_the_answer_takes() -> None:
    runs = []
    for delay in (0.0, 0.7):
        bench = Bench(FakeLearner(num_steps_max=8))
        bench.trainer._is_deterministic = True
        bench.learner.delay_until = lambda bench=bench, delay=delay: bench.clock.now() + delay
        bench.learner.clock = bench.clock
        bench.trainer.train()
        runs.append([cursor for _, cursor in bench.learner.taken])
    assert runs[0] == runs[1]
    assert runs[0][3] == {2: 1, 3: 1}


def test_without_an_answer_it_reads_on_and_does_not_ask_at_every_step() -> None:
    bench = Bench(FakeLearner(num_steps_max=100), step_seconds=0.1)
    bench.learner.request_shards(2, {})
    bench.learner.has_shards = False
    bench.trainer.train()
    assert bench.learner.num_steps == 100
    assert 5 <= len(bench.learner.requests) <= 12


def test_a_learner_that_gets_no_data_gives_up_after_the_timeout() -> None:
    bench = Bench(join_timeout_seconds=30.0)
    bench.learner.has_shards = False
    with pytest.raises(UnreachableError, match="no data shard within 30 s"):
        bench.trainer.train()
    assert bench.clock.now() < 31.0


def test_a_worker_that_comes_to_a_finished_run_needs_no_data() -> None:
    bench = Bench(FakeLearner(num_steps_max=1))
    bench.learner.has_shards = False
    bench.learner.num_steps = 1
    assert bench.trainer.train()
    assert bench.learner.taken == []


def test_a_worker_that_has_enough_in_its_checkpoint_needs_no_data() -> None:
    bench = Bench(FakeLearner(num_steps_max=5, num_unmerged=5))
    bench.learner.has_shards = False
    assert bench.trainer.train()
    assert bench.learner.taken == []


class ScriptedWorker(_Worker):
    """Finds these records at its broker, one after the other, and each time that it trains, this comes of it."""

    records: list[RunRecord | None]
    outcomes: list[str | Exception]
    trained: list[RunRecord | None]

    def _read_record(self) -> RunRecord | None:
        return self.records.pop(0)

    def _train(self, record: RunRecord | None) -> Any:
        self.trained.append(record)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def worker_that(*outcomes: str | Exception, finds: list[RunRecord | None]) -> ScriptedWorker:
    worker = ScriptedWorker(resolve({}), WorkerSettings(), ListLogger(), Event(), Claim("us-0"), torch.device("cpu"))
    for name, value in {"records": finds, "outcomes": list(outcomes), "trained": []}.items():
        object.__setattr__(worker, name, value)
    return worker


def test_work_that_was_counted_on_and_rejected_is_made_up_for() -> None:
    worker = worker_that("unfinished", "unfinished", "done", finds=[record(), record(), record()])
    worker.work()
    assert worker.outcomes == []


def test_a_worker_that_started_the_run_and_is_not_finished_goes_on_with_its_record() -> None:
    worker = worker_that("unfinished", "done", finds=[None, record()])
    worker.work()
    assert worker.trained == [None, record()]


@pytest.mark.parametrize(
    "outcome", ["another run", RefusedError("another run"), ManifestMismatchError("another model")]
)
def test_a_worker_whose_run_was_started_by_another_takes_that_one(outcome: str | Exception) -> None:
    worker = worker_that(outcome, "done", finds=[None, record()])
    worker.work()
    assert worker.trained == [None, record()]


def test_a_worker_that_is_fenced_does_not_try_again() -> None:
    worker = worker_that(FencedError("a newer one"), finds=[None])
    with pytest.raises(FencedError):
        worker.work()


def test_progress_is_logged_now_and_then_with_the_mean_loss() -> None:
    bench = Bench(FakeLearner(num_steps_max=30), step_seconds=1.0, log_every_seconds=10.0)
    bench.trainer.train()
    lines = [fields for _, event, fields in bench.logger.records if event == "learner.progressed"]
    assert [line["steps"] for line in lines] == [11, 21]
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_learners_of_one_run_draw_different_random_numbers_and_the_same_after_a_restart() -> None:
    assert learner_seed(1, "us-0") == learner_seed(1, "us-0")
    assert learner_seed(1, "us-0") != learner_seed(1, "us-1")
    assert 0 <= learner_seed(2**63 - 1, "us-0") < 2**63


# ------------------------------------------------------------------------------------------- taking over the run record


def record(**fields: Any) -> RunRecord:
    settings = {
        "run": "night",
        "seed": 7,
        "sync": SyncSettings(),
        "budget": Budget(tokens=1000),
        "manifest_digest": "0" * 64,
        "manifest": "",
        "task": "gpt",
        "task_settings": {"layers": 3, "corpus": "/somewhere/else"},
        **fields,
    }
    return RunRecord.model_validate(settings)


def test_a_worker_takes_the_task_settings_of_the_run_over_but_for_the_path_of_its_corpus() -> None:
    task = make_task(record(), "gpt", TaskSettings(layers=5, corpus="/here").model_dump())
    assert task.settings["layers"] == 3
    assert task.settings["corpus"] == "/here"
    assert "corpus" not in shared_task_settings(task)


def test_without_a_run_a_worker_uses_its_own_task_settings() -> None:
    assert make_task(None, "gpt", {"layers": 5}).settings["layers"] == 5


def test_a_task_is_never_taken_from_the_network() -> None:
    with pytest.raises(ConfigError, match="never taken from the network"):
        make_task(record(task="evil:task"), "gpt", {})


def test_another_corpus_is_refused(tmp_path: Any) -> None:
    (tmp_path / "text.txt").write_text("some text of one's own " * 100)
    with pytest.raises(ConfigError, match=r"task\.corpus"):
        make_task(record(corpus_sha256="1" * 64), "gpt", {"corpus": str(tmp_path)})


def test_only_what_was_stated_on_purpose_must_agree_with_the_run() -> None:
    models = {"run": RunSettings, "sync": SyncSettings, "task": TaskSettings}
    flags = {"run.id": "night", "run.seed": "8", "run.tokens": "1000", "sync.quorum": "2", "task.layers": "3"}
    stated = [Stated(key, value, "a flag") for key, value in {**flags, "task.corpus": "/here"}.items()]
    found = statements(resolve(models, flags=stated))
    assert found == {
        "run": "night",
        "seed": 8,
        "budget.tokens": 1000,
        "sync.quorum": 2,
        "task_settings.layers": 3,
    }
    difference = record().first_difference(found)
    assert difference is not None
    assert difference.startswith("seed is 7")
    assert record(seed=8, sync=SyncSettings(quorum=2)).first_difference(found) is None
