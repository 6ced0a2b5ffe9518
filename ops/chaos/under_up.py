"""Faults inside `isles up`: links before its workers start, a thread that carries out the plan while they run."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from isles.ops.chaos.checker import is_kept
from isles.ops.chaos.conclusion import conclude
from isles.ops.chaos.damage import Ballast
from isles.ops.chaos.logbook import LogReader
from isles.ops.chaos.plan import Plan
from isles.ops.chaos.proxy import Network
from isles.ops.chaos.runner import Runner
from isles.ops.chaos.targets import FolderTargets, Targets, send_signal
from isles.ops.fault_view import FaultsShown
from isles.ops.run_folder import RunFolder
from isles.proto.clock import SystemClock
from isles.proto.logs import make_logger
from isles.proto.transport.address import Address

JOIN_SECONDS: Final = 10.0
"""For the thread to undo everything."""
WATERMARK_BYTES: Final = 1 << 60
"""More than any disk has free: with it, a broker finds every disk too full."""


class Disturbance:
    """`with` puts links in front of the workers, carries the plan out, and undoes all of it at the end."""

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        *,
        regions: dict[str, str],
        broker: Address,
        commands: dict[str, list[str]],
        is_ending: Callable[[], bool],
    ) -> None:
        """Starts nothing. `commands` are those of the children, to be changed; `regions` is worker -> region."""
        self.plan = plan
        self._folder = folder
        self._commands = commands
        self._is_ending = is_ending
        self._broker_log = LogReader(folder.log("broker"))
        self._network = Network(broker, list(regions)) if plan.has_network_faults else None
        targets = FolderTargets(folder, regions)
        self.logger = make_logger("chaos", folder.path.name, file=folder.log("chaos"))
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._runner = Runner(
            plan,
            targets,
            logger=self.logger,
            clock=SystemClock(),
            network=self._network,
            store=folder.store,
            room=BrokerRoom(folder.store, commands, targets),
            tell=self._news.put,
        )
        self._thread = threading.Thread(target=self._work, name="chaos", daemon=True)

    def __enter__(self) -> Self:
        self._broker_log.read()  # rounds of earlier starts do not begin this plan
        if self._network is not None:
            self._network.start()
            for worker, address in self._network.addresses.items():
                self._commands[worker] = [*self._commands[worker], "--broker", str(address)]
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._runner.stop()
        self._thread.join(JOIN_SECONDS)
        if self._network is not None:
            self._network.close()

    def news(self) -> list[str]:
        """Sentences about the faults since the last call."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def shown(self) -> FaultsShown:
        """What a display shows of them."""
        return self._runner.shown

    def conclude(self, *, is_silent: bool) -> bool:
        """After the end of the run: checks and measures it, writes `chaos.json`, and tells. Whether all was kept.

        Raises what reading the store raises.
        """
        from isles.ops.chaos.report import render
        from isles.ops.wording import make_console

        faults = self._runner.records()
        _, measures, findings = conclude(
            self._folder, self.plan, faults, self._runner.damaged, self.logger, is_ended=True
        )
        if not is_silent:
            console = make_console()
            for part in render(faults, measures, findings):
                console.print(part)
        return is_kept(findings)

    def _work(self) -> None:
        self._runner.run(self._has_begun, self._is_ending)

    def _has_begun(self) -> bool:
        return any(line["event"] == "round.committed" for line in self._broker_log.read())


class BrokerRoom:
    """Takes the room of a broker: its file system's if that is a small one of its own, else through its watermark.

    The watermark is a setting of the process, so the broker is killed and comes back with it: twice, since it is taken
    away the same way.
    """

    def __init__(self, store: Path, commands: dict[str, list[str]], targets: Targets) -> None:
        self._ballast = Ballast(store)
        self._commands = commands
        self._usual = list(commands["broker"])
        self._targets = targets
        self._has_watermark = False

    def fill(self) -> int:
        if not self._ballast.refusal():
            return self._ballast.fill()
        self._has_watermark = True
        self._commands["broker"] = [*self._usual, "--disk-free-bytes-min", str(WATERMARK_BYTES)]
        self._restart()
        return 0

    def free(self) -> None:
        self._ballast.free()
        if self._has_watermark:
            self._has_watermark = False
            self._commands["broker"] = self._usual
            self._restart()

    def _restart(self) -> None:
        for process in self._targets.find():
            if process.role == "broker":
                send_signal(process, signal.SIGKILL)
