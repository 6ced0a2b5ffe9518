"""How all waiting times must fit each other: one table, and its check. Pure.

A process knows some of them: those of its own settings, the constants of this package, and what its broker tells in
WELCOME; `isles up` knows all. Whatever two times of one relation are known are compared. Times are in seconds; a
setting of 0 means that there is no such limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pydantic import BaseModel

from isles.proto import client
from isles.proto.agreement import SyncSettings
from isles.proto.errors import ConfigError
from isles.proto.messages import Limits
from isles.proto.presets import QUORUM_MAX

SUFFIXES: Final = ("_seconds", "_seconds_min", "_seconds_max")
"""How the names of settings end that are times."""

HEARTBEAT_SECONDS: Final = 5.0
"""Between two heartbeats of a connection."""
HEARTBEAT_TIMEOUT_SECONDS: Final = 30.0
"""Silence after which a connection is given up. A heartbeat's answer is counted only after a whole frame, and 1 MiB
takes 17 s at 0.5 Mbit/s."""

CONSTANTS: Final[Mapping[str, float]] = {
    "client.retry_seconds": client.RETRY_SECONDS,
    "client.join_retry_seconds_max": client.JOIN_RETRY_SECONDS_MAX,
    "client.stall_seconds": client.STALL_SECONDS,
    "transport.heartbeat_seconds": HEARTBEAT_SECONDS,
    "transport.heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT_SECONDS,
}
"""Times that are no settings; every process has them."""


class Teller(Protocol):
    """What is used here of a logger, whose own module knows of files."""

    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Relation:
    """`longer` must be at least `factor` times `shorter`."""

    longer: str
    shorter: str
    why: str
    """What would happen otherwise, in words that go on after `so`."""
    factor: float = 1.0
    is_must: bool = True
    """Whether nothing good can come of the opposite. Else it is only said: somebody may prefer it."""

    def is_kept(self, seconds: Mapping[str, float]) -> bool:
        """Whether it holds, as far as both times are known and set."""
        longer, shorter = seconds.get(self.longer), seconds.get(self.shorter)
        return not longer or shorter is None or longer >= self.factor * shorter

    def sentence(self, seconds: Mapping[str, float]) -> str:
        """What is wrong and what to do."""
        times = "" if self.factor == 1 else f"{self.factor:g} times "
        remedies = [
            text
            for text, name in (("raise the first", self.longer), ("lower the second", self.shorter))
            if not is_constant(name)
        ]
        return (
            f"{self.longer} = {seconds[self.longer]:g} s is under {times}{self.shorter} = {seconds[self.shorter]:g} s, "
            f"so {self.why}: {' or '.join(remedies)}"
        )


CONSTANT_PREFIXES: Final = ("client.", "learner.", "transport.")
"""How the names of times begin that nobody can set."""


def is_constant(name: str) -> bool:
    """Whether this time is no setting."""
    return name.startswith(CONSTANT_PREFIXES)


_KILLED: Final = "a process would be killed while it hands in what it has"
_STALLED: Final = "a run that only waits as long as it may would be ended as stalled"
_HASTY: Final = "a broker that starts a little later would hardly be asked twice"

RELATIONS: Final[tuple[Relation, ...]] = (
    # what the broker waits for
    Relation(
        "broker.learner_lease_seconds",
        "broker.heartbeat_seconds",
        "one lost heartbeat could expire a healthy learner",
        factor=3,
    ),
    Relation(
        "broker.session_idle_seconds", "broker.learner_lease_seconds", "a session could end before its learner's lease"
    ),
    Relation(
        "broker.session_idle_seconds", "broker.outer_lease_seconds", "a session could end before its outer's lease"
    ),
    Relation("broker.learner_lease_seconds", "broker.tick_seconds", "leases would end long after their time", factor=2),
    Relation("broker.outer_lease_seconds", "broker.tick_seconds", "leases would end long after their time", factor=2),
    Relation(
        "broker.outer_lease_seconds",
        "client.retry_seconds",
        "one lost message could cost an outer its lease",
        factor=2,
    ),
    Relation(
        "broker.upload_idle_seconds",
        "client.stall_seconds",
        "an upload could be dropped before its sender asks how far it came",
        factor=2,
    ),
    Relation(
        "broker.unused_blob_seconds",
        "broker.upload_idle_seconds",
        "a blob may be deleted while the one that goes with it is still on its way",
        is_must=False,
    ),
    # what clients wait for
    Relation(
        "transport.heartbeat_timeout_seconds",
        "transport.heartbeat_seconds",
        "one lost heartbeat could end a healthy connection",
        factor=3,
    ),
    Relation(
        "learner.lost_seconds",
        "broker.heartbeat_seconds",
        "a broker that answers every heartbeat would count as lost in between",
    ),
    Relation(
        "outer.lost_seconds",
        "outer.list_seconds",
        "a broker that answers every question could count as lost",
        factor=1.5,
    ),
    Relation(
        "evaluator.record_timeout_seconds",
        "evaluator.join_timeout_seconds",
        "a run, which is waited for once its broker has answered, would get less time than the broker",
    ),
    Relation("worker.join_timeout_seconds", "client.join_retry_seconds_max", _HASTY, is_must=False),
    Relation("outer.join_timeout_seconds", "client.join_retry_seconds_max", _HASTY, is_must=False),
    Relation("evaluator.join_timeout_seconds", "client.join_retry_seconds_max", _HASTY, is_must=False),
    Relation(
        "worker.join_timeout_seconds",
        "broker.retry_seconds",
        "a worker that is put off once would give up",
        is_must=False,
    ),
    Relation(
        "worker.drain_timeout_seconds",
        "sync.grace_max_seconds",
        "a worker may leave before the round that its last work waits for has ended",
        is_must=False,
    ),
    Relation(
        "worker.drain_timeout_seconds",
        "broker.outer_lease_seconds",
        "a worker may leave before an outer that died meanwhile is replaced",
        is_must=False,
    ),
    # what `isles up` waits for
    Relation("up.drain_seconds", "worker.drain_timeout_seconds", _KILLED),
    Relation("up.drain_seconds", "outer.stop_seconds", _KILLED),
    Relation("up.drain_seconds", "evaluator.final_timeout_seconds", _KILLED),
    Relation("up.stall_seconds", "sync.grace_max_seconds", _STALLED),
    Relation("up.stall_seconds", "broker.learner_lease_seconds", _STALLED),
    Relation("up.stall_seconds", "broker.outer_lease_seconds", _STALLED),
)


def times_of(section: str, settings: BaseModel) -> dict[str, float]:
    """All times among the settings of a section, in seconds, by their dotted names."""
    return {
        f"{section}.{name}": float(getattr(settings, name))
        for name in type(settings).model_fields
        if name.endswith(SUFFIXES)
    }


def cue_doubt(sync: SyncSettings) -> str:
    """A sentence about a grace window that no cued learner can meet, "" if one may.

    Whoever is cued hands in at its next step boundary, up to one inner step later. The window is at most
    overlap_steps * grace_share steps: if that is less, contributions come late, and each one that does opens the next
    round, which cues everybody else again.
    """
    if not sync.has_cues or sync.is_deterministic or sync.quorum >= QUORUM_MAX or sync.grace_min_seconds > 0:
        return ""
    if sync.grace_max_seconds > 0 and sync.overlap_steps * sync.grace_share >= 1:
        return ""
    names = ("grace_max_seconds",) if sync.grace_max_seconds == 0 else ("overlap_steps", "grace_share")
    stated = " and ".join(f"sync.{name} = {getattr(sync, name):g}" for name in names)
    remedy = "raise it" if len(names) == 1 else "raise the first to 2 or more"
    return (
        f"{stated} make a grace window shorter than one inner step, so learners that are cued hand in too late for the "
        f"round and cue the others again, many times in an interval: {remedy}, or switch sync.has_cues off"
    )


def times_told(limits: Limits) -> dict[str, float]:
    """Those that a broker tells of its own, in seconds."""
    return times_of("broker", limits)


def faults(seconds: Mapping[str, float], relations: Iterable[Relation] = RELATIONS) -> list[str]:
    """Sentences about all relations that must hold and do not."""
    return [one.sentence(seconds) for one in relations if one.is_must and not one.is_kept(seconds)]


def check_times(seconds: Mapping[str, float], logger: Teller | None = None) -> None:
    """Compares the times that a process knows besides the constants; with a logger says once what they are.

    Raises ConfigError with one sentence that names both settings of the first relation that does not hold.
    """
    known = {**CONSTANTS, **seconds}
    if wrong := faults(known):
        raise ConfigError(wrong[0])
    if logger is None:
        return
    for one in RELATIONS:
        if not one.is_kept(known):
            logger.warning("timeouts.doubtful", text=one.sentence(known))
    logger.info("timeouts.checked", seconds=dict(sorted(known.items())))
