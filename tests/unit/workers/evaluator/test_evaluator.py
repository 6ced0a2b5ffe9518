"""The evaluator, against a broker that answers at once, in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from isles.proto.logs import ListLogger, Logger, SilentLogger
from isles.proto.messages import (
    Leave,
)
from isles.workers.evaluator import Evaluator
from isles.workers.settings import EvaluatorSettings


class SumTask:
    """The validation loss of a model is the sum of its parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def validation_loss(self, model: nn.Module) -> float:
        assert not model.training
        self.losses.append(sum(float(parameter.detach().sum()) for parameter in model.parameters()))
        return self.losses[-1]


def start(broker: Any, task: SumTask | None = None, logger: Logger | None = None, **settings: float) -> Evaluator:
    assert broker.record is not None
    return Evaluator(
        broker.connection(),
        broker.record,
        task or SumTask(),  # type: ignore[arg-type]
        broker.new_model(),
        EvaluatorSettings.model_validate({"every_seconds_min": 0.0, **settings}),
        logger=logger or SilentLogger(),
        clock=broker.clock,
        should_stop=lambda: False,
    )


def publish_cycle(broker: Any) -> None:
    broker.publish(0, torch.zeros(15), tokens=10)
    broker.publish(1, torch.zeros(12), tokens=30)


def test_the_first_figure_is_that_of_version_0_even_if_the_run_has_gone_on(broker: Any) -> None:
    broker.publish(0, torch.zeros(15), tokens=10)
    task = SumTask()
    start(broker, task).look()
    assert broker.reports[0].versions == {0: 0, 1: 0}
    assert broker.reports[0].value == task.losses[0]
    assert broker.reports[0].tokens == 0.0


def test_each_cycle_is_evaluated_with_its_versions_and_tokens(broker: Any) -> None:
    logger = ListLogger()
    evaluator = start(broker, logger=logger)
    for _ in range(3):
        evaluator.look()
        evaluator.look()
        publish_cycle(broker)
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 2}]
    assert [report.tokens for report in broker.reports] == [0.0, 20.0, 20.0]
    assert all(report.name == "validation_loss" for report in broker.reports)
    assert logger.events().count("loss.evaluated") == 3


def test_told_to_stop_it_evaluates_the_newest_versions_once_more_and_leaves(broker: Any) -> None:
    evaluator = start(broker)
    evaluator.look()
    broker.publish(0, torch.zeros(15), tokens=10)
    evaluator.look()
    assert len(broker.reports) == 1
    evaluator.finish()
    assert broker.reports[-1].versions == {0: 1, 1: 0}
    assert broker.count(Leave) == 1


def test_told_to_stop_with_nothing_new_it_only_leaves(broker: Any) -> None:
    evaluator = start(broker)
    evaluator.look()
    evaluator.finish()
    assert len(broker.reports) == 1
    assert broker.count(Leave) == 1


def test_a_restarted_evaluator_goes_on_from_the_figures_that_are_there(broker: Any) -> None:
    start(broker).look()
    again = start(broker)
    again.look()
    again.finish()
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}]


def test_a_broker_that_is_away_is_waited_for_and_said_once(broker: Any) -> None:
    logger = ListLogger()
    evaluator = start(broker, logger=logger)
    evaluator.look()
    broker.is_silent = True
    evaluator.look()
    evaluator.look()
    assert logger.events().count("broker.lost") == 1
    broker.is_silent = False
    publish_cycle(broker)
    evaluator.look()
    assert broker.reports[-1].versions == {0: 1, 1: 1}


def test_it_ends_in_time_when_the_broker_is_gone_for_good(broker: Any) -> None:
    evaluator = start(broker, final_timeout_seconds=30.0)
    evaluator.look()
    broker.is_silent = True
    before = broker.clock.now()
    evaluator.finish()
    assert broker.clock.now() - before < 40.0


def test_a_figure_that_the_broker_did_not_hear_is_reported_again(broker: Any) -> None:
    class SilencingTask(SumTask):
        def validation_loss(self, model: nn.Module) -> float:
            broker.is_silent = True
            return super().validation_loss(model)

    task = SilencingTask()
    evaluator = start(broker, task)
    evaluator.look()
    assert broker.reports == []
    broker.is_silent = False
    evaluator.look()
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}]
    assert len(task.losses) == 1


def test_a_loss_that_is_not_finite_is_logged_and_not_reported(broker: Any) -> None:
    class NanTask(SumTask):
        def validation_loss(self, model: nn.Module) -> float:
            return math.nan

    logger = ListLogger()
    start(broker, NanTask(), logger).look()
    assert broker.reports == []
    assert ("error", "loss.evaluated") in [(level, event) for level, event, _ in logger.records]
