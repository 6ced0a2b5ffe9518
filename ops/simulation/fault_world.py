"""A run of eight learners in three regions, two outers and a broker, to which everything happens that may happen.

One seed is one run. Its events lie in a heap in the order of their time; there is no other clock, no thread and no
socket. Router, index, blob store, rounds, recovery, sessions and the client's protocol are the real ones; the tensors
are exact integers (`isles.ops.simulation.values`), so that every unit of work can be accounted for.

    faults      until enough has happened; the laws are checked at every step
    calm        all is healed: every learner must get something merged, soon
    drain       nothing may be left open, pending or unmerged, soon; then the books must balance
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Final, cast

from isles.brokers import vocabulary as broker
from isles.brokers.limits import RoutingSettings
from isles.brokers.store.blobs import FolderBlobs
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.ops.simulation import strikes
from isles.ops.simulation.broker_actor import BrokerActor, Crash
from isles.ops.simulation.credit import CreditBook
from isles.ops.simulation.disk import FOLDER, FREE_BYTES, PowerLostError, SimulatedFiles
from isles.ops.simulation.faults import GAP_SECONDS, POISON_CHANCE, Faults, Weather
from isles.ops.simulation.laws import Laws
from isles.ops.simulation.learner_actor import LearnerActor
from isles.ops.simulation.network import REGIONS, Direction, Network
from isles.ops.simulation.outer_actor import OuterActor
from isles.ops.simulation.processes import Clock, Place, Process
from isles.ops.simulation.values import LEARNERS_MAX, UP_QUANTUM, ZERO, Lane
from isles.proto.agreement import ApplyRule, Budget, RunRecord, SyncSettings
from isles.proto.client import Send
from isles.proto.errors import IslesError
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Channel, Chunk, Hint, Limits, Message

RULES: Final[tuple[ApplyRule, ...]] = ("rebase", "overwrite", "blend", "hybrid")
"""Each seed has one, in turn."""
QUORUMS: Final = (1, 1, 1, 1, 1, 1, 2, 2, 3, LEARNERS_MAX + 2)
"""Large ones are seldom: every version takes as many messages as there are contributions in it, ten times over."""
VERSIONS_MIN: Final = 100
DELIVERIES_MIN: Final = 5_000

SECONDS_MAX: Final = 900.0
"""Most simulated time until there are enough versions: a run that needs more is as good as stuck."""
CALM_SECONDS_MAX: Final = 120.0
"""Longest time from the end of all faults until every learner got something merged: some leases, some retries, and the
longest stall of a transfer."""
DRAIN_SECONDS_MAX: Final = 240.0
"""Longest time from there until nothing is left: a contribution may have to be made, and to expire, a few times."""

OUTER_TICK_SECONDS: Final = 0.25
LEASE_SECONDS: Final = 1.0
BROKER_TICK_SECONDS: Final = 0.4
REFRESH_SECONDS: Final = 8.0
"""Between two times that a learner asks for all versions, whatever it was told."""
HEARTBEAT_SECONDS: Final = 3.0
ROWS_KEPT: Final = 512
CHECKPOINTS_KEPT: Final = 5
CHECKPOINT_CHANCE: Final = 0.1
"""That a learner writes a checkpoint after a step, and an outer one of a fragment each second."""


class _Settings(RoutingSettings):
    """Payloads here are far smaller than the smallest chunk that a broker may be set to."""

    @property
    def limits(self) -> Limits:
        usual = RoutingSettings(**self.model_dump(exclude={"chunk_bytes"})).limits
        return usual.model_copy(update={"chunk_bytes": self.chunk_bytes})


@dataclass(frozen=True, slots=True)
class Report:
    """What one seed's run came to."""

    seed: int
    digest: str
    """Of its history: equal for every run of the seed by the same code."""
    fault: str
    """What must not have happened, "" if all is well."""
    num_versions: int
    num_faults: int
    num_deliveries: int
    num_events: int
    simulated_seconds: float


class _Index(SqliteIndex):
    """Reads the same row often, and checks it once."""

    def __init__(self) -> None:
        super().__init__(IN_MEMORY)
        self._row = lru_cache(ROWS_KEPT)(super()._row)  # type: ignore[method-assign]
        self._version = lru_cache(ROWS_KEPT)(super()._version)  # type: ignore[method-assign]


class FaultWorld:
    """The world of one seed."""

    def __init__(self, seed: int, *, note: Callable[[str], None] | None = None) -> None:
        """`note` is told the history, one line per event."""
        self.seed = seed
        self.time = 0.0
        self.chance = chance = random.Random(seed)
        self.faults = Faults.draw(chance)
        self.network = Network(chance)
        self.num_events = self.num_deliveries = self.num_faults = self.num_losses = 0
        self._note = note
        self._digest = hashlib.sha256()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_pushed = self._num_connections = 0
        self._is_calm = False
        self._is_draining = False
        self._increments: dict[tuple[Lane, int], int] = {}
        self._poisoned: dict[tuple[Lane, str], bool] = {}
        self._draw_settings()
        self._files = SimulatedFiles(chance)
        self._disk_seconds = self._disk_seconds_usual = chance.choice((0.001, 0.005, 0.02))
        self._num_blobs_kept = chance.choice((0, 8, 64))
        self._disk_free_at = 0.0
        self._num_orders = 0
        """Orders of the disk that have their moment."""
        self._crash: Crash | None = None
        self.broker_clock = self._draw_clock()
        self._broker_frozen_until = 0.0
        self._broker_backlog: list[Callable[[], None]] = []
        self.broker = BrokerActor(
            self._routing, self._draw_token, self.broker_clock.at(0.0), index=_Index(), open_blobs=self._open_blobs
        )
        self.laws = Laws(self.sync.num_fragments, self.broker.index, self.broker.stored, self._increment)
        self.broker.on_durable = self.laws.see
        self.broker.begin(self.record, ZERO.encode())
        self.credit = CreditBook(self._routing.chunk_bytes, self._routing.credit_chunks)
        self.processes: dict[bytes, Process[Any]] = {}
        self.places = [
            Place(f"l{index}", index, REGIONS[index % 3], chance.uniform(0.5, 1.0)) for index in range(LEARNERS_MAX)
        ]
        for place in self.places:
            self._push(chance.random(), self._start_learner, place, False)
        for name, region in (("outer-a", REGIONS[0]), ("outer-b", REGIONS[1])):
            self._push(chance.random(), self._start_outer, name, region)
        self._push(BROKER_TICK_SECONDS, self._tick_broker)
        self._plan_strike()

    def _draw_settings(self) -> None:
        chance = self.chance
        quorum = chance.choice(QUORUMS)
        # Rounds of everybody take long, so there have to be more at a time.
        num_fragments = chance.choice((1, 2, 3)) if quorum < 3 else 3
        self.sync = SyncSettings(
            interval_steps=chance.choice((2, 3, 4)) if quorum < 3 else 1,
            num_fragments=num_fragments,
            apply_rule=RULES[self.seed % len(RULES)],
            quorum=quorum,
            horizon_versions=chance.choice((5, 10, 64)),
            has_cues=chance.random() < 0.5,
            grace_max_seconds=chance.choice((0.0, 0.0, 0.3, 1.0)),
            has_fractional_steps=False,
        )
        usual = _Settings(
            credit_chunks=chance.choice((1, 2, 8)),
            learner_lease_seconds=chance.choice((5.0, 8.0)),
            session_idle_seconds=chance.choice((10.0, 120.0)),
            versions_kept=chance.choice((2, 3, 8)),
            unused_blob_seconds=chance.choice((4.0, 30.0, 600.0)),
            upload_idle_seconds=chance.choice((5.0, 60.0)),
            num_shards=LEARNERS_MAX,
            chunk_bytes=4096,
        )
        self._routing = usual.model_copy(update={"chunk_bytes": chance.choice((128, 4096, 4096))})
        specs = [TensorSpec(f"t{number}", (1,), "float32", "parameter") for number in range(num_fragments)]
        manifest = Manifest.build(specs, {}, num_fragments)
        self.record = RunRecord(
            run="world",
            seed=self.seed,
            sync=self.sync,
            budget=Budget(tokens=1 << 40),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )

    # ---------------------------------------------------------------------------------------------------------- chance

    def _draw_token(self) -> str:
        return f"{self.chance.getrandbits(64):016x}"

    def _draw_clock(self) -> Clock:
        return Clock.draw(self.chance, is_skewed="clocks" in self.faults.kinds)

    def _plan_strike(self) -> None:
        """The next fault comes in a while, or after a few versions, so that all runs have as many faults."""
        self._strike_at = self.time + self.chance.expovariate(1 / GAP_SECONDS)
        gap_versions = VERSIONS_MIN / self.faults.num_faults
        self._strike_version = self.laws.num_versions_all + self.chance.expovariate(1 / gap_versions)

    def _increment(self, lane: Lane, fragment: int) -> int:
        key = lane, fragment
        if key not in self._increments:
            self._increments[key] = self.chance.randint(-9, 9)
        return self._increments[key]

    def _is_poisoned(self, lane: Lane, outer: str) -> bool:
        if "poison" not in self.faults.kinds:
            return False
        key = lane, outer
        if key not in self._poisoned:
            self._poisoned[key] = self.chance.random() < POISON_CHANCE
        return self._poisoned[key] and not self._is_calm

    # ------------------------------------------------------------------------------------------------------------ time

    def describe(self) -> str:
        """What this seed has drawn: the settings of its run, and what may happen to it."""
        sync, routing = self.sync, self._routing
        drawn = (
            f"{sync.num_fragments} fragments",
            sync.apply_rule,
            f"H {sync.interval_steps}",
            f"K {sync.quorum}",
            f"cues {'on' if sync.has_cues else 'off'}",
            f"grace up to {sync.grace_max_seconds:g} s",
            f"horizon {sync.horizon_versions}",
            f"{routing.versions_kept} versions kept",
            f"chunks of {routing.chunk_bytes} bytes",
            f"credit {routing.credit_chunks}",
        )
        kinds = ", ".join(sorted(self.faults.kinds))
        return f"seed {self.seed}: {', '.join(drawn)}\n{self.faults.num_faults} faults: {kinds}"

    def run(self) -> Report:
        """The whole run; a fault is in its report, not raised."""
        fault = ""
        try:
            self._run_until(self._has_enough, SECONDS_MAX, f"fewer than {VERSIONS_MIN} versions")
            self._heal()
            self.laws.merged_by.clear()
            self._run_until(self._has_everyone, CALM_SECONDS_MAX, "not every learner gets something merged")
            self._drain()
            self._run_until(self._is_drained, DRAIN_SECONDS_MAX, "the drain does not end")
            self.laws.check_store()
            self.laws.check_end([one.actor for one in self.learners()], self._num_losses())
        except (AssertionError, KeyError, IslesError) as error:
            fault = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            self.say(f"LAW BROKEN: {fault}")
        return Report(
            self.seed,
            self.digest,
            fault,
            self.laws.num_versions_all,
            self.num_faults,
            self.num_deliveries,
            self.num_events,
            self.time,
        )

    def _run_until(self, is_done: Callable[[], bool], seconds_max: float, complaint: str) -> None:
        ends_at = self.time + seconds_max
        while not is_done():
            self.advance()
            assert self.time <= ends_at, f"after {seconds_max:g} s {complaint}"

    def advance(self) -> None:
        """The next event happens. Raises AssertionError if a law is broken by it."""
        self.time, _, call, arguments = heappop(self._heap)
        self.num_events += 1
        call(*arguments)

    @property
    def digest(self) -> str:
        """Of the history up to now."""
        return self._digest.hexdigest()

    def _push(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        self._num_pushed += 1
        heappush(self._heap, (time, self._num_pushed, call, arguments))

    def say(self, text: str) -> None:
        """Writes a line of the history."""
        line = f"{self.time:9.4f} {text}"
        self._digest.update(line.encode())
        if self._note is not None:
            self._note(line)

    def _has_enough(self) -> bool:
        return (
            self.num_deliveries >= DELIVERIES_MIN
            and self.num_faults >= self.faults.num_faults
            and self.laws.num_versions_all >= VERSIONS_MIN
        )

    def _has_everyone(self) -> bool:
        return len(self.laws.merged_by) == len(self.places)

    # ----------------------------------------------------------------------------------------------------------- links

    def _connection(self) -> bytes:
        self._num_connections += 1
        return b"c%d" % self._num_connections

    def _flush(self, process: Process[Any]) -> None:
        """Puts on its way what a process has to say."""
        outbox = process.actor.outbox
        if outbox:
            for send in outbox:
                if isinstance(send.message, Chunk):
                    self.credit.leave(process.connection, send.message, len(send.payload or b""), is_from_broker=False)
                for time in self._arrivals(process, "up", send.channel):
                    self._push(time, self._arrive_at_broker, process, send)
            outbox.clear()

    def _flush_broker(self) -> None:
        for send in self.broker.outbox:
            process = self.processes.get(send.connection)
            if isinstance(send.message, Chunk):
                self.credit.leave(send.connection, send.message, len(send.payload or b""), is_from_broker=True)
            if process is not None:
                for time in self._arrivals(process, "down", send.channel):
                    self._push(time, self._arrive, process, send.message, send.payload)
        self.broker.outbox.clear()
        for hint in self.broker.hints:
            for process in self.processes.values():
                for time in self._arrivals(process, "down", Channel.EVENTS):
                    self._push(time, self._arrive, process, hint, None)
        self.broker.hints.clear()
        while len(self.broker.orders) > self._num_orders:
            self._num_orders += 1
            self._disk_free_at = max(self._disk_free_at, self.time) + self._disk_seconds
            self._push(self._disk_free_at, self._work, self.broker.num_crashes)

    def _arrivals(self, process: Process[Any], direction: Direction, channel: Channel) -> list[float]:
        return self.network.send(process.connection, process.name, process.region, direction, channel, self.time)

    def _arrive(self, process: Process[Any], message: Message, payload: Any) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.time:
            process.backlog.append(lambda: self._arrive(process, message, payload))
            return
        self.num_deliveries += 1
        self.say(f"{process.name} hears {_words(message)}")
        self.credit.reach(process.connection, message, is_at_broker=False)
        process.actor.receive(message, payload, process.clock.at(self.time))
        self._flush(process)

    def _arrive_at_broker(self, process: Process[Any], send: Send) -> None:
        if not self.broker.is_up:
            return
        if self._broker_frozen_until > self.time:
            self._broker_backlog.append(lambda: self._arrive_at_broker(process, send))
            return
        self.num_deliveries += 1
        self.say(f"broker hears {process.name}: {_words(send.message)}")
        self.credit.reach(process.connection, send.message, is_at_broker=True)
        event = broker.MessageArrived(send.channel, process.connection, send.message, send.payload)
        crash, self._crash = self._crash, None
        if not self.broker.hear(event, self.broker_clock.at(self.time), crash):
            self._end_broker()
        self._flush_broker()

    # ---------------------------------------------------------------------------------------------------- the broker

    def _open_blobs(self) -> FolderBlobs:
        return FolderBlobs(FOLDER, self._files)

    def _tick_broker(self) -> None:
        self._push(self.time + BROKER_TICK_SECONDS, self._tick_broker)
        is_time = self.time >= self._strike_at or self.laws.num_versions_all >= self._strike_version
        if is_time and not self._is_calm and self.num_faults < self.faults.num_faults:
            self._strike()
        if self.broker.is_up and self._broker_frozen_until <= self.time:
            self.broker.tick(self.broker_clock.at(self.time))
            self._flush_broker()

    def _work(self, num_crashes: int) -> None:
        if num_crashes != self.broker.num_crashes:
            return
        if self._broker_frozen_until > self.time:
            self._broker_backlog.append(lambda: self._work(num_crashes))
            return
        self._num_orders -= 1
        crash, self._crash = self._crash, None
        try:
            if not self.broker.work(self.broker_clock.at(self.time), crash):
                self._end_broker()
        except PowerLostError:
            self._lose_power()
        self._flush_broker()

    def kill_broker(self, crash: Crash | None) -> None:
        """The broker ends, now or in what it does next."""
        if crash is None:
            self._end_broker()
        self._crash = crash

    def _end_broker(self) -> None:
        self.say("broker ends")
        self.broker.die()
        self._num_orders = 0
        self._disk_free_at = self.time
        self._crash = None
        self._broker_backlog.clear()
        self._broker_frozen_until = 0.0
        self._push(self.time + self.chance.uniform(0.1, 4.0), self._start_broker)

    def fail_power(self, after: int | None) -> None:
        """The machine of the broker stops, now or after so many operations of its disk."""
        self._files.operations_left = after
        if after is None:
            self._lose_power()

    def _lose_power(self) -> None:
        if self.broker.is_up:
            self._end_broker()
        self._files.fail_power()
        self.say(f"broker's machine loses power; {self._files.num_lost} files so far were torn")
        self.broker_clock = self._draw_clock()

    def _start_broker(self) -> None:
        self.say("broker starts")
        self.broker.now = self.broker_clock.at(self.time)
        self.broker.start()
        self.laws.check_store()

    def _thaw_broker(self) -> None:
        backlog, self._broker_backlog = self._broker_backlog, []
        for call in backlog:
            call()

    # ------------------------------------------------------------------------------------------------------- learners

    def learners(self) -> list[Process[LearnerActor]]:
        """Those that nobody has replaced."""
        return [one for one in self.processes.values() if isinstance(one.actor, LearnerActor) and not one.is_zombie]

    def _start_learner(self, place: Place, is_restart: bool) -> None:
        self.num_losses += is_restart
        checkpoint = self.chance.choice(place.checkpoints) if is_restart and place.checkpoints else None
        if self.chance.random() < 0.2:
            checkpoint = None
        actor = LearnerActor(
            place.name,
            place.index,
            self._draw_token(),
            self.sync,
            self._increment,
            checkpoint,
            taken=self.laws.taken,
        )
        process = self._admit(place.name, place.region, actor)
        self.say(f"{place.name} starts {'with' if checkpoint else 'without'} a checkpoint")
        self._push(self.time + place.step_seconds, self._step, process, place, 0.0, 0.0)

    def _admit(self, name: str, region: str, actor: LearnerActor | OuterActor) -> Process[Any]:
        process: Process[Any] = Process(name, region, self._connection(), self._draw_clock(), actor)
        self.processes[process.connection] = process
        actor.start(process.clock.at(self.time))
        self._flush(process)
        return process

    def _step(self, process: Process[LearnerActor], place: Place, refresh_at: float, beat_at: float) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.time:
            self._push(process.frozen_until, self._step, process, place, refresh_at, beat_at)
            return
        actor, now = process.actor, process.clock.at(self.time)
        actor.tick(now)
        if self.time >= refresh_at:
            refresh_at = self.time + REFRESH_SECONDS
            actor.ask_versions(now)
        if self.time >= beat_at:
            beat_at = self.time + HEARTBEAT_SECONDS
            actor.beat(now)
        bases = [books.base for books in actor.session.books]
        if actor.session.is_draining:
            actor.boundary(now)
        else:
            actor.step(now)
        for books, base in zip(actor.session.books, bases, strict=True):
            assert base is None or (books.base is not None and books.base >= base), "a learner goes to an older version"
        if actor.session.is_ready and self.chance.random() < CHECKPOINT_CHANCE and not process.is_zombie:
            place.checkpoints.append(actor.cut_checkpoint())
            del place.checkpoints[:-CHECKPOINTS_KEPT]
        self._flush(process)
        if actor.is_stopped:
            self._end(process)
            return
        self._push(self.time + place.step_seconds, self._step, process, place, refresh_at, beat_at)

    def _end(self, process: Process[Any]) -> None:
        self.say(f"{process.name} ends")
        process.is_alive = False
        process.backlog.clear()
        del self.processes[process.connection]
        if isinstance(process.actor, LearnerActor):
            self.num_losses += process.actor.num_resets

    def _num_losses(self) -> int:
        return self.num_losses + sum(one.actor.num_resets for one in self.learners())

    # --------------------------------------------------------------------------------------------------------- outers

    def outers(self) -> list[Process[OuterActor]]:
        """Those that nobody has replaced."""
        return [one for one in self.processes.values() if isinstance(one.actor, OuterActor) and not one.is_zombie]

    def _start_outer(self, name: str, region: str) -> None:
        self.say(f"{name} starts")
        actor = OuterActor(name, self._draw_token(), self.record, self._is_poisoned, self._draw_token)
        actor.num_kept = self._num_blobs_kept
        process = self._admit(name, region, actor)
        self._push(self.time + OUTER_TICK_SECONDS, self._tick_outer, process, 0.0)

    def _tick_outer(self, process: Process[OuterActor], lease_at: float) -> None:
        if not process.is_alive:
            return
        if process.frozen_until > self.time:
            self._push(process.frozen_until, self._tick_outer, process, lease_at)
            return
        actor, now = process.actor, process.clock.at(self.time)
        actor.tick(now)
        if self.time >= lease_at:
            lease_at = self.time + LEASE_SECONDS
            actor.lease(now)
            for fragment in actor.desks:
                if self.chance.random() < CHECKPOINT_CHANCE:
                    actor.checkpoint(fragment, now)
        self._flush(process)
        if actor.client.is_refused:
            self._end(process)
            return
        self._push(self.time + OUTER_TICK_SECONDS, self._tick_outer, process, lease_at)

    # --------------------------------------------------------------------------------------------------------- faults

    def _strike(self) -> None:
        """Something happens."""
        self._plan_strike()
        kind = self.faults.next_kind(self.chance)
        self.num_faults += 1
        if kind in strikes.BLOWS:
            strikes.BLOWS[kind](self)
        else:
            strikes.worsen(self, cast(Weather, kind))

    def kill(self, process: Process[Any], restart_at: float) -> None:
        """A process ends; another one starts in its place."""
        self.replace(process, restart_at)
        self._end(process)

    def replace(self, process: Process[Any], time: float) -> None:
        """Another process of this name starts."""
        if isinstance(process.actor, OuterActor):
            self._push(time, self._start_outer, process.name, process.region)
        else:
            self._push(time, self._start_learner, self.places[process.actor.index], True)

    def freeze(self, process: Process[Any], until: float) -> None:
        """A process stands still."""
        if process.frozen_until <= self.time:
            process.frozen_until = until
            self._push(until, self._thaw, process)

    def _thaw(self, process: Process[Any]) -> None:
        backlog, process.backlog = process.backlog, []
        for call in backlog:
            call()

    def freeze_broker(self, until: float) -> None:
        """The broker stands still, its disk too."""
        if self.broker.is_up and self._broker_frozen_until <= self.time:
            self._broker_frozen_until = until
            self._push(until, self._thaw_broker)

    def slow_disk(self, seconds: float, until: float) -> None:
        """Each operation of the broker's disk takes so long."""
        self._disk_seconds = seconds
        self._push(until, self._speed_disk)

    def _speed_disk(self) -> None:
        self._disk_seconds = self._disk_seconds_usual

    def fill_disk(self, until: float) -> None:
        """The broker's disk has no room."""
        self._files.free = 0
        self._push(until, self._empty_disk)

    def _empty_disk(self) -> None:
        self._files.free = FREE_BYTES

    # ------------------------------------------------------------------------------------------------------ the end

    def _heal(self) -> None:
        """Every fault ends: zombies die, and nothing is lost from here on."""
        self.say("CALM")
        self._is_calm = True
        self.network.heal()
        self._speed_disk()
        self._empty_disk()
        self._crash = self._files.operations_left = None
        for process in [one for one in self.processes.values() if one.is_zombie]:
            self._end(process)
        for process in self.processes.values():
            process.frozen_until = min(process.frozen_until, self.time)
            self._push(self.time, self._thaw, process)
        self._broker_frozen_until = min(self._broker_frozen_until, self.time)
        self._push(self.time, self._thaw_broker)

    def _drain(self) -> None:
        self.say("DRAIN")
        for process in self.learners():
            process.actor.drain(process.clock.at(self.time))
            self._flush(process)

    def _is_drained(self) -> bool:
        learners = self.learners()
        if any(not learner.actor.session.is_drained for learner in learners):
            return False
        return not any(self.broker.index.num_pending().values()) and all(
            learner.actor.account(fragment).quantised(UP_QUANTUM).is_zero
            for learner in learners
            for fragment in range(self.sync.num_fragments)
        )


def _words(message: Message) -> str:
    """A message in short."""
    match message:
        case Hint():
            return f"Hint {message.kind} {message.fragment} {message.version} {message.learner}"
        case Chunk():
            return f"Chunk {message.transfer} {message.offset}"
    return f"{type(message).__name__} {message.request}"
