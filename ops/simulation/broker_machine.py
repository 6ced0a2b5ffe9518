"""The machine that a simulated broker runs on: it has a disk and a clock, may stand still, and may lose its power."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from isles.brokers import vocabulary as broker
from isles.brokers.store.blobs import FolderBlobs
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.ops.simulation.broker_actor import BrokerActor, Crash
from isles.ops.simulation.circumstances import Circumstances
from isles.ops.simulation.disk import FOLDER, FREE_BYTES, PowerLostError, SimulatedFiles
from isles.ops.simulation.laws import Laws
from isles.ops.simulation.processes import Clock
from isles.ops.simulation.timeline import Timeline
from isles.ops.simulation.values import ZERO, Lane
from isles.proto.messages import BlobRef

TICK_SECONDS: Final = 0.5
DOWN_SECONDS: Final = (0.1, 4.0)
"""From the end of a broker to the start of the next one, at least and at most."""
ROWS_KEPT: Final = 512
AIMED_CHANCE: Final = 0.7
"""That what rots is a blob that somebody will soon read, if there is one; most others nobody reads again."""


class _Index(SqliteIndex):
    """Reads the same row often, and checks it once."""

    def __init__(self) -> None:
        super().__init__(IN_MEMORY)
        self._row = lru_cache(ROWS_KEPT)(super()._row)  # type: ignore[method-assign]
        self._version = lru_cache(ROWS_KEPT)(super()._version)  # type: ignore[method-assign]


class BrokerMachine:
    """One machine, one store, and one broker after the other."""

    def __init__(
        self,
        drawn: Circumstances,
        timeline: Timeline,
        chance: random.Random,
        draw_clock: Callable[[], Clock],
        draw_token: Callable[[], str],
        increment: Callable[[Lane, int], int],
        flush: Callable[[], None],
    ) -> None:
        """`flush` puts on its way what the broker has to say; `increment` is what an inner step on an item adds."""
        self._timeline = timeline
        self._chance = chance
        self._draw_clock = draw_clock
        self._flush = flush
        self._files = SimulatedFiles(chance)
        self._clock = draw_clock()
        self.broker = BrokerActor(
            drawn.routing, draw_token, self._clock.at(0.0), index=_Index(), open_blobs=self._open_blobs
        )
        self.laws = Laws(drawn.record.sync.num_fragments, self.broker.index, self._stored, increment)
        self.laws.is_rotten = self._files.is_rotten
        self.broker.on_durable = self.laws.see
        self.broker.begin(drawn.record, ZERO.encode())
        self._crash: Crash | None = None
        """What the broker dies of in what it does next."""
        self._frozen_until = 0.0
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._disk_seconds = self._disk_seconds_usual = drawn.disk_seconds
        self._disk_free_at = 0.0
        self._num_planned = 0
        """Orders of the disk that have their moment."""
        timeline.plan(TICK_SECONDS, self._tick)

    def _open_blobs(self) -> FolderBlobs:
        self._seen_blobs = FolderBlobs(FOLDER, self._files)
        return FolderBlobs(FOLDER, self._files)

    def _stored(self, blob: BlobRef) -> bytes:
        """The bytes of a blob, read by somebody else than the broker, which knows no more of it thereby."""
        return self._seen_blobs.read(blob, 0, blob.size_bytes)

    @property
    def now(self) -> float:
        """What the clock of this machine shows."""
        return self._clock.at(self._timeline.now)

    # ------------------------------------------------------------------------------------------------------ its work

    def hear(self, event: broker.MessageArrived) -> None:
        """A message arrives that this machine has noticed."""
        if not self.broker.hear(event, self.now, self._take_crash()):
            self._end()
        if self.broker.orders:
            self.plan_disk()

    def is_deaf(self, later: Callable[..., None], *arguments: Any) -> bool:
        """Whether nobody hears what arrives: never, or only `later`."""
        if not self.broker.is_up:
            return True
        if self._frozen_until > self._timeline.now:
            self._backlog.append((later, arguments))
            return True
        return False

    def _take_crash(self) -> Crash | None:
        crash, self._crash = self._crash, None
        return crash

    def plan_disk(self) -> None:
        """What the disk was told to do gets its moment, one thing after the other."""
        while len(self.broker.orders) > self._num_planned:
            self._num_planned += 1
            self._disk_free_at = max(self._disk_free_at, self._timeline.now) + self._disk_seconds
            self._timeline.plan(self._disk_free_at, self._work, self.broker.num_crashes)

    def _work(self, num_crashes: int) -> None:
        if num_crashes != self.broker.num_crashes or self.is_deaf(self._work, num_crashes):
            return
        self._num_planned -= 1
        try:
            if not self.broker.work(self.now, self._take_crash()):
                self._end()
        except PowerLostError:
            self._lose_power()
        self._flush()

    def _tick(self) -> None:
        self._timeline.plan(self._timeline.now + TICK_SECONDS, self._tick)
        if self.broker.is_up and self._frozen_until <= self._timeline.now:
            self.broker.tick(self.now)
            self._flush()

    # ------------------------------------------------------------------------------------------------- what befalls it

    def kill(self, crash: Crash | None) -> None:
        """The broker ends, now or in what it does next."""
        if crash is None:
            self._end()
        self._crash = crash

    def _end(self) -> None:
        self._timeline.say("broker ends")
        self.broker.die()
        self._crash = None
        self._backlog.clear()
        self._frozen_until = 0.0
        self._num_planned = 0
        self._disk_free_at = self._timeline.now
        self._timeline.plan(self._timeline.now + self._chance.uniform(*DOWN_SECONDS), self._start)

    def _start(self) -> None:
        self._timeline.say("broker starts")
        self.broker.now = self.now
        try:
            self.broker.start()
        except PowerLostError:
            self._lose_power()
            return
        self.laws.check_store()

    def fail_power(self, after: int | None) -> None:
        """The machine stops, now or after so many operations of its disk."""
        self._files.operations_left = after
        if after is None:
            self._lose_power()

    def _lose_power(self) -> None:
        if self.broker.is_up:
            self._end()
        self._files.fail_power()
        self._timeline.say(f"the broker's machine loses power; {self._files.num_lost} files so far were torn")
        self._clock = self._draw_clock()

    def freeze(self, until: float) -> None:
        """The broker stands still, its disk too."""
        if self.broker.is_up and self._frozen_until <= self._timeline.now:
            self._frozen_until = until
            self._timeline.plan(until, self._thaw)

    def _thaw(self) -> None:
        backlog, self._backlog = self._backlog, []
        for call, arguments in backlog:
            call(*arguments)

    def slow_disk(self, seconds: float, until: float) -> None:
        """Each operation of the disk takes so long."""
        self._disk_seconds = seconds
        self._timeline.plan(until, self._speed_disk)

    def _speed_disk(self) -> None:
        self._disk_seconds = self._disk_seconds_usual

    def fill_disk(self, until: float) -> None:
        """The disk has no room."""
        self._files.free = 0
        self._timeline.plan(until, self._empty_disk)

    def _empty_disk(self) -> None:
        self._files.free = FREE_BYTES

    def rot(self) -> str:
        """A blob of the store is damaged where it lies; which one and how, "" if there is none that is whole."""
        whole = [one for one in sorted(self.broker.index.digests()) if not self._files.is_rotten(one)]
        if not whole:
            return ""
        wanted = [one for one in self.laws.recent_digests() if one in whole]
        is_aimed = wanted and self._chance.random() < AIMED_CHANCE
        digest = self._chance.choice(wanted if is_aimed else whole)
        self.laws.note_rot(digest)
        return f"{self._files.rot(digest)} of blob {digest[:12]}"

    def rotten(self) -> list[str]:
        """Digests of the blobs of the store that are damaged."""
        return [digest for digest in sorted(self.broker.index.digests()) if self._files.is_rotten(digest)]

    def put_copies_back(self) -> None:
        """Somebody stops the broker and puts copies of all rotten blobs back."""
        rotten = self.rotten()
        if self.broker.is_up:
            self._end()
        for digest in rotten:
            self._files.mend(digest)

    def heal(self) -> None:
        """Everything that is wrong with this machine ends."""
        self._crash = self._files.operations_left = None
        self._frozen_until = min(self._frozen_until, self._timeline.now)
        self._speed_disk()
        self._empty_disk()
        self._timeline.plan(self._timeline.now, self._thaw)
