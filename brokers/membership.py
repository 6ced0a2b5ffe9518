"""Which learners are live, how fast they work, and which data shards they hold. Pure.

Live means: heard within the lease. It says nothing about participation, which is what a round counts. A learner's
counters and its liveness are in the index, so a broker that starts again finds them; a lease that was held then
continues for one lease time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from isles.brokers.store.index import Index, StoredLearner
from isles.proto.messages import COUNT_MAX, LearnerInfo, Progress

RATE_SECONDS: Final = 10.0
"""Time constant of the moving average of a learner's rate: a few heartbeats, a few rounds."""
RATE_INTERVAL_SECONDS_MIN: Final = 0.2
"""Two PROGRESS messages closer than this say little about a rate; the second one waits for the next."""


@dataclass
class _Learner:
    region: str
    incarnation: str
    is_live: bool
    heard_at: float
    last_seen_unix: float
    tokens_before: int = 0
    """Of all earlier incarnations, like steps_before."""
    steps_before: int = 0
    tokens: int = 0
    steps: int = 0
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    measured_at: float | None = None
    measured_tokens: int = 0
    key_name: str = ""
    rejoin_sha256: str = ""
    has_rejoin: bool = False
    is_draining: bool = False
    has_lost_shards: bool = False
    is_changed: bool = True
    info: LearnerInfo | None = None
    """What rounds were last told, made of these facts."""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expiry:
    """A learner whose lease has run out."""

    learner: str
    silent_seconds: float


class Holder(NamedTuple):
    """Whose a learner's id is."""

    key_name: str
    """Empty = nobody with a key has used it."""
    rejoin_sha256: str
    """Of the token that takes it again; empty = it was not given."""


class Membership:
    """All learners that were ever seen."""

    def __init__(self, index: Index, *, lease_seconds: float, num_shards: int, now: float) -> None:
        self._index = index
        self._lease_seconds = lease_seconds
        self._num_shards = num_shards
        index.create_shards(num_shards)
        self._learners = {stored.learner: _restore(index, stored, now) for stored in index.learners()}

    # -------------------------------------------------------------------------------------------------------- learners

    def join(
        self,
        learner: str,
        incarnation: str,
        region: str,
        now: float,
        unix: float,
        *,
        key_name: str = "",
        rejoin_sha256: str = "",
        has_rejoin: bool = False,
    ) -> None:
        """A worker said HELLO. A newer incarnation starts its counters anew and keeps the learner's shards.

        With a key, the learner is that name's from now on, and needs the token of this digest to come again;
        `has_rejoin` says whether it has shown that it has it.
        """
        known = self._learners.get(learner)
        holder = self.holder(learner) or Holder("", "")
        if known is None or known.incarnation != incarnation:
            if known is not None:
                self._put(learner, known)
            known = _Learner(region, incarnation, True, now, unix)
            known.tokens_before, known.steps_before = self._index.work_before(learner, incarnation)
            known.tokens, known.steps = self._index.work(learner, incarnation)
            self._learners[learner] = known
        known.key_name, known.rejoin_sha256 = (key_name, rejoin_sha256) if key_name else holder
        known.has_rejoin = has_rejoin
        known.region, known.is_live, known.heard_at, known.last_seen_unix = region, True, now, unix
        known.has_lost_shards = False  # the answer to HELLO says which it has
        self._put(learner, known)

    def hear(self, learner: str, now: float, unix: float) -> bool:
        """A worker said anything: its lease is renewed. True if it had expired."""
        known = self._learners[learner]
        was_live, known.is_live = known.is_live, True
        known.heard_at, known.last_seen_unix, known.is_changed = now, unix, True
        return not was_live

    def progress(self, learner: str, message: Progress, now: float) -> None:
        """Takes a learner's counters, which only grow, and measures its rate on this broker's clock."""
        known = self._learners[learner]
        known.tokens, known.steps = max(known.tokens, message.tokens), max(known.steps, message.steps)
        known.step_seconds, known.is_draining = message.step_seconds, message.is_draining
        if known.measured_at is None:
            known.measured_at, known.measured_tokens = now, known.tokens
            return
        elapsed = now - known.measured_at
        if elapsed < RATE_INTERVAL_SECONDS_MIN:
            return
        rate = (known.tokens - known.measured_tokens) / elapsed
        share = 1.0 if known.tokens_per_second == 0 else 1 - math.exp(-elapsed / RATE_SECONDS)
        known.tokens_per_second += share * (rate - known.tokens_per_second)
        known.measured_at, known.measured_tokens = now, known.tokens

    def keep(self, learner: str) -> None:
        """Writes a learner's counters, in the transaction that accepts its work: none may be merged unaccounted for."""
        known = self._learners.get(learner)
        if known is not None:
            self._put(learner, known)

    @property
    def typical_step_seconds(self) -> float:
        """The median step of the live learners that have told theirs, in seconds; 0 if none has."""
        known = sorted(one.step_seconds for one in self._learners.values() if one.is_live and one.step_seconds > 0)
        middle = len(known) // 2
        return (known[middle] + known[~middle]) / 2 if known else 0.0

    def has_lost_shards(self, learner: str) -> bool:
        """Whether its shards were set free since it last heard which ones it has."""
        return self._learners[learner].has_lost_shards

    @property
    def live(self) -> frozenset[str]:
        """The learners that were heard within their lease."""
        return frozenset(name for name, one in self._learners.items() if one.is_live)

    @property
    def training(self) -> frozenset[str]:
        """The live learners that have taken a step since they started and go on."""
        return frozenset(
            name for name, one in self._learners.items() if one.is_live and one.steps and not one.is_draining
        )

    def holder(self, learner: str) -> Holder | None:
        """Whose a learner's id is; None = nobody's yet."""
        known = self._learners.get(learner)
        return None if known is None else Holder(known.key_name, known.rejoin_sha256)

    def confirm(self, learner: str) -> None:
        """A learner has heard which id it was given, durably: from now on it needs its token."""
        known = self._learners[learner]
        known.has_rejoin = True
        self._put(learner, known)

    def is_current(self, learner: str, incarnation: str) -> bool:
        """Whether this is the newest incarnation of the learner."""
        known = self._learners.get(learner)
        return known is not None and known.incarnation == incarnation

    def unheard_of(self, key_name: str, incarnation: str) -> str:
        """The id that was given to this incarnation, if perhaps it has not heard so; empty if there is none."""
        return next(
            (
                name
                for name, known in self._learners.items()
                if (known.key_name, known.incarnation) == (key_name, incarnation)
                and known.rejoin_sha256
                and not known.has_rejoin
            ),
            "",
        )

    def knows_incarnation(self, incarnation: str) -> bool:
        """Whether this is the newest incarnation of some learner."""
        return any(known.incarnation == incarnation for known in self._learners.values())

    @property
    def num_learners(self) -> int:
        return len(self._learners)

    def num_learners_of(self, key_name: str) -> int:
        """Those whose ids belong to this key name."""
        return sum(known.key_name == key_name for known in self._learners.values())

    def leave(self, learner: str) -> None:
        """A learner goes on purpose: its shards are free at once."""
        self._end(learner)

    def expire(self, now: float) -> list[Expiry]:
        """Ends the leases that have run out."""
        expired = [
            Expiry(name, now - known.heard_at)
            for name, known in self._learners.items()
            if known.is_live and now - known.heard_at > self._lease_seconds
        ]
        for expiry in expired:
            self._end(expiry.learner)
        return expired

    def _end(self, learner: str) -> None:
        known = self._learners[learner]
        known.is_live = False
        known.measured_at = None
        known.has_lost_shards = True
        self._put(learner, known)
        self._index.free_shards_of(learner)

    def infos(self) -> tuple[LearnerInfo, ...]:
        """All learners in order of their names, for rounds and for people."""
        num_shards = self._index.num_shards_of()
        return tuple(_info(name, known, num_shards.get(name, 0)) for name, known in sorted(self._learners.items()))

    @property
    def tokens_produced(self) -> int:
        """Of all learners and all their incarnations.

        Each learner's counters up to their last PROGRESS, or the tokens of its accepted contributions if these are
        more: an incarnation that dies has often handed in work that no PROGRESS told of.
        """
        accepted = self._index.tokens_accepted()
        counted = {name: known.tokens_before + known.tokens for name, known in self._learners.items()}
        return min(COUNT_MAX, sum(max(tokens, accepted.get(name, 0)) for name, tokens in counted.items()))

    def flush(self) -> None:
        """Writes what has changed since the last time; a broker that dies loses at most that."""
        for name, known in self._learners.items():
            if known.is_changed:
                self._put(name, known)

    def _put(self, learner: str, known: _Learner) -> None:
        known.is_changed = False
        self._index.put_work(learner, known.incarnation, known.tokens, known.steps)
        self._index.put_learner(
            StoredLearner(
                learner=learner,
                region=known.region,
                incarnation=known.incarnation,
                is_live=known.is_live,
                last_seen_unix=known.last_seen_unix,
                tokens_per_second=known.tokens_per_second,
                step_seconds=known.step_seconds,
                key_name=known.key_name,
                rejoin_sha256=known.rejoin_sha256,
                has_rejoin=known.has_rejoin,
            )
        )

    # ---------------------------------------------------------------------------------------------------------- shards

    def shards_of(self, learner: str) -> dict[int, int]:
        """The data shards that a learner holds, with their cursors."""
        return self._index.shards_of(learner)

    def lease_shards(self, learner: str, num_wanted: int, returned: dict[int, int]) -> dict[int, int]:
        """Takes back some shards, then lends free ones, those with the least data taken first, up to `num_wanted`."""
        self._learners[learner].has_lost_shards = False
        held = self._index.shards_of(learner)
        given_back = {shard: cursor for shard, cursor in returned.items() if shard in held}
        self._index.advance_shards(learner, given_back)
        self._index.put_shard_holder(given_back, "")
        num_missing = num_wanted - (len(held) - len(given_back))
        if num_missing > 0:
            self._index.put_shard_holder(self._index.free_shards(num_missing, self._num_shards), learner)
        return self._index.shards_of(learner)

    def advance_shards(self, learner: str, cursor: dict[int, int]) -> None:
        """An accepted contribution carries its work's place in the data, in the transaction that accepts it."""
        self._index.advance_shards(learner, cursor)


def _info(learner: str, known: _Learner, num_shards: int) -> LearnerInfo:
    """What the broker knows of a learner; mostly nothing has changed since the last round but when it was heard."""
    facts: dict[str, Any] = {
        "region": known.region,
        "incarnation": known.incarnation,
        "is_live": known.is_live,
        "tokens": min(COUNT_MAX, known.tokens_before + known.tokens),
        "steps": min(COUNT_MAX, known.steps_before + known.steps),
        "tokens_per_second": max(0.0, known.tokens_per_second),
        "step_seconds": known.step_seconds,
        "num_shards": num_shards,
        "is_draining": known.is_draining,
    }
    if known.info is None or known.facts != facts:
        known.facts = facts
        known.info = LearnerInfo(learner=learner, last_seen_unix=known.last_seen_unix, **facts)
    elif known.info.last_seen_unix != known.last_seen_unix:
        known.info = known.info.changed(last_seen_unix=known.last_seen_unix)
    return known.info


def _restore(index: Index, stored: StoredLearner, now: float) -> _Learner:
    tokens, steps = index.work(stored.learner, stored.incarnation)
    return _Learner(
        region=stored.region,
        incarnation=stored.incarnation,
        is_live=stored.is_live,
        heard_at=now,
        last_seen_unix=stored.last_seen_unix,
        tokens_before=stored.tokens - tokens,
        steps_before=stored.steps - steps,
        tokens=tokens,
        steps=steps,
        tokens_per_second=stored.tokens_per_second,
        step_seconds=stored.step_seconds,
        key_name=stored.key_name,
        rejoin_sha256=stored.rejoin_sha256,
        has_rejoin=stored.has_rejoin,
        is_changed=False,
    )
