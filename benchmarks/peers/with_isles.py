"""isles as a peer among its peers: a learner around the MLP, and the broker and the outer that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.peers.orders import Orders
from benchmarks.peers.plan import BATCH_SIZE, Plan
from benchmarks.peers.processes import STOP_SECONDS
from isles.ops.children import ChildProcess, child_environment
from isles.ops.run_folder import choose_address

TOKENS_MAX: Final = 10**12
"""Budget that no comparison reaches."""


class CountingLogger:
    """Counts events by name, and the tokens that are discarded."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tokens_discarded = 0.0
        """Over all fragments."""

    def _count(self, event: str, **fields: Any) -> None:
        self.counts[event] += 1
        if event == "learner.reset":
            self.tokens_discarded += fields["tokens"]

    debug = info = warning = error = _count


def learn(plan: Plan, orders: Orders) -> None:
    """One learner; its last line says whether everything that it learned was merged."""
    from benchmarks.peers.training import Loop
    from isles.proto.agreement import Budget, SyncSettings
    from isles.workers.learner import Learner

    loop, log = Loop(plan), CountingLogger()
    learner = Learner(
        loop.model,
        loop.optimizer,
        broker=plan.address,
        learner=plan.name,
        sync=SyncSettings(interval_steps=plan.interval, **_codecs(plan.options)),
        budget=Budget(tokens=TOKENS_MAX),
        seed=plan.seed,
        log=log,
        should_stop=orders.stop.is_set,
    )
    learner.start()

    def counts() -> dict[str, float]:
        discarded = log.tokens_discarded / BATCH_SIZE / learner.record.sync.num_fragments
        return {"contributions": log.counts["contribution.sent"], "commits": log.counts["contribution.merged"],
                "discarded": discarded}  # fmt: skip

    loop.wait_for_start(orders)
    while not loop.is_over and not orders.stop.is_set():
        loop.inner_step(lambda: learner.step(tokens=BATCH_SIZE))
        loop.write(**counts())
    is_drained = learner.drain()
    loop.write(is_drained=is_drained, is_last=True, **counts())
    learner.close()


def _codecs(options: dict[str, str]) -> dict[str, Any]:
    """`codec` = UP/DOWN; nothing leaves what the project has."""
    up, _, down = options.get("codec", "").partition("/")
    return {"codec_up": up, "codec_down": down or up} if up else {}


def codec_text(options: dict[str, str]) -> str:
    """What a learner with these options has, as UP/DOWN."""
    from isles.proto.agreement import SyncSettings

    sync = SyncSettings(**_codecs(options))
    return f"{sync.codec_up}/{sync.codec_down}"


class BrokerAndOuter:
    """A broker with an empty store and an outer that starts after it, as an operator starts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = choose_address("")
        self._children: list[ChildProcess] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.terminate()
            child.wait(STOP_SECONDS)
            child.close()

    @property
    def is_running(self) -> bool:
        return bool(self._children)

    def start(self) -> None:
        broker = ["--store", str(self._folder / "store"), "--port", str(self.address.control_port)]
        self._children = [self._start("broker", broker), self._start("outer", ["--broker", str(self.address)])]

    def kill(self) -> None:
        """Both, with -9."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait(STOP_SECONDS)
            child.close()
        self._children = []

    def _start(self, role: str, own: Sequence[str]) -> ChildProcess:
        log = ["--log-file", str(self._folder / f"{role}.jsonl"), "--exit-with-parent"]
        return ChildProcess([role, *own, *log], output=self._folder / f"{role}.err", environment=child_environment(2))
