"""The conservation world: learners, two outers and a broker under every fault, and the law that must hold all the same.

One seed is one schedule of loss, duplicates, reordering, crashes of all three kinds of process, freezes, zombies,
checkpoints of any age and poisoned items. After the faults comes a calm phase, in which every learner must get
something merged, and a drain. Then the books must balance to the last unit.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from isles.brokers import vocabulary as broker
from isles.brokers.limits import RoutingSettings
from isles.ops.simulation.broker_actor import BrokerActor, Crash
from isles.ops.simulation.laws import Laws
from isles.ops.simulation.learner_actor import Checkpoint, LearnerActor
from isles.ops.simulation.outer_actor import OuterActor
from isles.ops.simulation.values import UP_QUANTUM, ZERO, Lane
from isles.proto.agreement import ApplyRule, Budget, RunRecord, SyncSettings
from isles.proto.client import Send
from isles.proto.errors import RefusedError
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import Message

TURNS_FAULTY: Final = 110
TURNS_CALM_MAX: Final = 1_500
"""Bound on the calm phase: a world that is not drained by then is stuck."""
TURN_SECONDS: Final = 0.25
CHECKPOINTS_KEPT: Final = 4


class LawBrokenError(AssertionError):
    """A seed for which the books do not balance."""


@dataclass(frozen=True)
class Faults:
    """How likely each fault is, per opportunity. Each seed draws its own, and leaves some out wholly."""

    loss: float = 0.0
    duplicate: float = 0.0
    hint_loss: float = 0.0
    broker_crash: float = 0.0
    outer_crash: float = 0.0
    learner_crash: float = 0.0
    zombie: float = 0.0
    poison: float = 0.0
    checkpoint: float = 0.0
    """No fault, but as unforeseen: an outer begins a checkpoint of a fragment."""

    @classmethod
    def draw(cls, chance: random.Random) -> Faults:
        def some(most: float) -> float:
            return 0.0 if chance.random() < 0.4 else most * chance.random()

        return cls(
            loss=some(0.25),
            duplicate=some(0.2),
            hint_loss=some(0.8),
            broker_crash=some(0.01),
            outer_crash=some(0.06),
            learner_crash=some(0.03),
            zombie=some(0.5),
            poison=some(0.03),
            checkpoint=chance.choice((0.0, 0.01, 0.03, 0.2)),
        )


@dataclass(frozen=True)
class _Letter:
    """A message under way."""

    connection: bytes
    is_to_broker: bool
    item: Any


@dataclass
class World:
    """All actors, the letters between them, and what has been seen so far."""

    seed: int
    rule: ApplyRule = "rebase"
    num_learners: int = 3
    num_fragments: int = 1
    letters: list[_Letter] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.faults = Faults.draw(self.chance)
        chance = self.chance
        self.sync = SyncSettings(
            interval_steps=chance.choice((1, 2, 4, 7)),
            num_fragments=self.num_fragments,
            apply_rule=self.rule,
            quorum=chance.choice((1, 1, 2, self.num_learners + 2)),
            horizon_versions=chance.choice((1, 2, 64)),
            has_cues=chance.random() < 0.7,
            grace_max_seconds=chance.choice((0.0, 0.5, 2.0)),
            has_fractional_steps=False,
        )
        settings = RoutingSettings(
            chunk_bytes=4096,
            credit_chunks=chance.choice((1, 8)),
            learner_lease_seconds=chance.choice((4.0, 10.0)),
            versions_kept=chance.choice((2, 3, 8)),
            num_shards=8,
            quarantine_rejections=0,  # poison strikes learners that go on
        )
        self._increments: dict[tuple[Lane, int], int] = {}
        self._poisoned: dict[tuple[Lane, str], bool] = {}
        self.broker = BrokerActor(settings, self.draw_token)
        self.laws = Laws(self.num_fragments, self.broker.index, self.broker.stored, self.increment)
        self.broker.on_durable = self.laws.see
        self.remade: list[int] = []
        """Versions that outers recomputed."""
        self._init_run()
        self.learners: dict[bytes, LearnerActor] = {}
        self.outers: dict[bytes, OuterActor] = {}
        self.zombies: list[bytes] = []
        self.checkpoints: dict[str, list[Checkpoint]] = defaultdict(list)
        self.num_restarts = 0
        self.num_resets = 0
        self._num_connections = 0
        for index in range(self.num_learners):
            self._start_learner(f"l{index}", index, None)
        for name in ("outer-a", "outer-b"):
            self._start_outer(name)

    # --------------------------------------------------------------------------------------------------------- chance

    def draw_token(self) -> str:
        return f"{self.chance.getrandbits(64):016x}"

    def increment(self, lane: Lane, fragment: int) -> int:
        """What an inner step on this item adds, the same whenever it is asked."""
        return self._increments.setdefault((lane, fragment), self.chance.randint(-9, 9))

    def is_poisoned(self, lane: Lane, outer: str) -> bool:
        """Whether a contribution with this item fails the screen of this outer."""
        if (lane, outer) not in self._poisoned:
            self._poisoned[lane, outer] = self.chance.random() < self.faults.poison
        return self._poisoned[lane, outer]

    # ---------------------------------------------------------------------------------------------------------- actors

    def _init_run(self) -> None:
        specs = [TensorSpec(f"t{number}", (1,), "float32", "parameter") for number in range(self.num_fragments)]
        manifest = Manifest.build(specs, {}, self.num_fragments)
        self.record = RunRecord(
            run="world",
            seed=self.seed,
            sync=self.sync,
            budget=Budget(tokens=1 << 40),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )
        self.broker.begin(self.record, ZERO.encode())

    def _connection(self) -> bytes:
        self._num_connections += 1
        return b"c%d" % self._num_connections

    def _start_learner(self, name: str, index: int, checkpoint: Checkpoint | None) -> None:
        learner = LearnerActor(
            name, index, self.draw_token(), self.sync, self.increment, checkpoint, taken=self.laws.taken
        )
        self.learners[self._connection()] = learner
        learner.start(self.now)

    def _start_outer(self, name: str) -> None:
        outer = OuterActor(name, self.draw_token(), self.record, self.is_poisoned, self.draw_token, self.remade)
        self.outers[self._connection()] = outer
        outer.start(self.now)

    def _crash_learner(self, connection: bytes, *, leaves_zombie: bool) -> None:
        """The process is gone, or only seems so: a zombie goes on until it learns that it has been replaced."""
        learner = self.learners[connection]
        if leaves_zombie:
            self.zombies.append(connection)
        else:
            del self.learners[connection]
        self.num_restarts += 1
        self.num_resets += learner.num_resets
        learner.num_resets = 0
        kept = self.checkpoints[learner.learner]
        checkpoint = self.chance.choice(kept) if kept and self.chance.random() < 0.8 else None
        self._start_learner(learner.learner, learner.index, checkpoint)

    # --------------------------------------------------------------------------------------------------------- letters

    def _collect(self) -> None:
        """Puts on its way what the actors have to say."""
        actors: dict[bytes, LearnerActor | OuterActor] = {**self.learners, **self.outers}
        for connection, actor in actors.items():
            self.letters += [_Letter(connection, True, send) for send in actor.outbox]
            actor.outbox.clear()
        self.letters += [_Letter(send.connection, False, send) for send in self.broker.outbox]
        self.broker.outbox.clear()
        for hint in self.broker.hints:
            self.letters += [_Letter(connection, False, hint) for connection in (*self.learners, *self.outers)]
        self.broker.hints.clear()

    def _deliver_one(self, *, is_calm: bool) -> None:
        position = 0 if is_calm else self.chance.randrange(len(self.letters))
        letter = self.letters[position]
        faults = Faults() if is_calm else self.faults
        is_hint = isinstance(letter.item, Message)
        if self.chance.random() >= faults.duplicate:
            self.letters.pop(position)
        if self.chance.random() < (faults.hint_loss if is_hint else faults.loss):
            return
        if letter.is_to_broker:
            send: Send = letter.item
            event = broker.MessageArrived(send.channel, letter.connection, send.message, send.payload)
            if not self.broker.hear(event, self.now, self._crash_of_broker(faults)):
                self.broker.crash()
            return
        actor = self.learners.get(letter.connection) or self.outers.get(letter.connection)
        if actor is not None:
            message, payload = (letter.item, None) if is_hint else (letter.item.message, letter.item.payload)
            actor.receive(message, payload, self.now)

    def _crash_of_broker(self, faults: Faults) -> Crash | None:
        if self.chance.random() >= faults.broker_crash:
            return None
        return self.chance.choice(("before commit", "before answers"))

    # ------------------------------------------------------------------------------------------------------------ turns

    def run(self) -> None:
        """The whole schedule. Raises LawBrokenError with the seed for any breach."""
        try:
            for _ in range(TURNS_FAULTY):
                self._turn(is_calm=False)
            self._heal()
            self.laws.merged_by.clear()
            names = {learner.learner for learner in self.learners.values()}
            self._calm_down(lambda: names <= self.laws.merged_by, "some learner gets nothing merged")
            for learner in self.learners.values():
                learner.drain(self.now)
            self._calm_down(self._is_drained, "the drain does not end")
            self.laws.check_end(self.learners.values(), self._num_losses())
        except (AssertionError, RefusedError) as error:
            raise LawBrokenError(f"seed {self.seed}, {self.rule}, {self.num_fragments} fragments: {error}") from error

    def _turn(self, *, is_calm: bool) -> None:
        chance = self.chance
        self.now += TURN_SECONDS
        self.broker.tick(self.now)
        for connection, learner in list(self.learners.items()):
            self._turn_learner(connection, learner, is_calm=is_calm)
        for connection, outer in list(self.outers.items()):
            outer.tick(self.now)
            if is_calm or chance.random() < 0.4:
                outer.renew(self.now)
            for fragment in outer.desks:
                if chance.random() < self.faults.checkpoint:
                    outer.checkpoint(fragment, self.now)
            if not is_calm and chance.random() < self.faults.outer_crash:
                del self.outers[connection]
                self._start_outer(outer.name)
        self._collect()
        for _ in range(len(self.letters) if is_calm else chance.randrange(2 * len(self.letters) + 1)):
            if self.letters:
                self._deliver_one(is_calm=is_calm)
            while self.broker.orders and (is_calm or chance.random() < 0.8):
                if not self.broker.work(self.now, None if is_calm else self._crash_of_broker(self.faults)):
                    self.broker.crash()
            self._collect()

    def _turn_learner(self, connection: bytes, learner: LearnerActor, *, is_calm: bool) -> None:
        chance = self.chance
        learner.tick(self.now)
        learner.look(self.now)
        if is_calm or chance.random() < 0.3:
            learner.ask_versions(self.now)
        if learner.session.is_draining:
            learner.boundary(self.now)
        elif chance.random() < 0.7:
            learner.step(self.now)
        if learner.session.is_ready and chance.random() < 0.15:
            kept = self.checkpoints[learner.learner]
            kept.append(learner.cut_checkpoint())
            del kept[:-CHECKPOINTS_KEPT]
        if learner.is_stopped:
            del self.learners[connection]
            if connection in self.zombies:
                self.zombies.remove(connection)
        elif not is_calm and connection not in self.zombies and chance.random() < self.faults.learner_crash:
            self._crash_learner(connection, leaves_zombie=chance.random() < self.faults.zombie)

    def _heal(self) -> None:
        """Every fault ends: zombies die, perhaps one learner does for good, and nothing is lost from here on."""
        for connection in self.zombies:
            self.learners.pop(connection, None)
        self.zombies.clear()
        self.faults = Faults(checkpoint=self.faults.checkpoint)
        if self.chance.random() < 0.3:
            connection = self.chance.choice(list(self.learners))
            self.num_resets += self.learners.pop(connection).num_resets
            self.num_restarts += 1

    def _calm_down(self, is_done: Callable[[], bool], complaint: str) -> None:
        for _ in range(TURNS_CALM_MAX):
            if is_done():
                return
            self._turn(is_calm=True)
        raise AssertionError(complaint)

    def _is_drained(self) -> bool:
        is_settled = all(books.open is None for one in self.learners.values() for books in one.session.books)
        return is_settled and not any(self.broker.index.num_pending().values()) and self._is_all_work_merged()

    def _is_all_work_merged(self) -> bool:
        return all(
            learner.account(fragment).quantised(UP_QUANTUM).is_zero
            for learner in self.learners.values()
            for fragment in range(self.num_fragments)
        )

    def _num_losses(self) -> int:
        return self.num_restarts + self.num_resets + sum(one.num_resets for one in self.learners.values())
