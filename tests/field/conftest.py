"""A broker over ZeroMQ in a thread, and the lives of the other processes, from their settings to their exit codes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles.brokers import broker
from isles.brokers.settings import BrokerSettings
from isles.ops.settings import section_models
from isles.outer import outer
from isles.outer.settings import OuterSettings
from isles.proto.config import Config, Stated, resolve
from isles.proto.logs import ListLogger
from isles.workers import evaluator, trainer


class StopAfter(threading.Event):
    """Set from the n-th look on."""

    def __init__(self, num_looks: int) -> None:
        super().__init__()
        self._num_left = num_looks

    def is_set(self) -> bool:
        self._num_left -= 1
        return self._num_left < 0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a broker that has no run yet."""
    stop, settings = threading.Event(), BrokerSettings(store=tmp_path / "store", port=0)
    keywords = {"logger": ListLogger(), "should_stop": stop}
    thread = threading.Thread(target=broker.serve, args=(settings,), kwargs=keywords)
    thread.start()
    path = settings.store / "address"
    while not path.exists():
        assert thread.is_alive()
        thread.join(0.01)
    yield path.read_text(encoding="utf-8").strip()
    stop.set()
    thread.join()


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Config]:
    """Settings of all processes of a tiny run, whose broker is at an address."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60, encoding="utf-8")

    def make(address: str, **settings: str) -> Config:
        values = {
            "worker.broker": address, "worker.id": "us-0", "worker.num_shards": "2", "outer.broker": address,
            "worker.drain_timeout_seconds": "0.2", "worker.checkpoint_dir": str(tmp_path / "checkpoints"),
            "outer.id": "outer", "evaluator.broker": address, "evaluator.niceness": "0", "sync.num_fragments": "1",
            "run.tokens": "1000000", "task.corpus": str(corpus), "task.layers": "1", "task.width": "16",
            "task.heads": "1", "task.context": "16", "task.batch_size": "2",
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in settings.items()}
        return resolve(section_models(), flags=[Stated(key, value, "the test") for key, value in values.items()])

    return make


@pytest.fixture
def serve() -> Callable[..., int]:
    """The life of a process that is told to stop, perhaps at the n-th look; its exit code."""

    def run(role: str, config: Config, when: int | threading.Event, log: ListLogger) -> int:
        stop = StopAfter(when) if isinstance(when, int) else when
        match role:
            case "worker":
                return trainer.serve(config, logger=log, should_stop=stop)
            case "evaluator":
                return evaluator.serve(config, logger=log, should_stop=stop)
        return outer.serve(config.section("outer", OuterSettings), logger=log, should_stop=stop)

    return run
