"""What is wrong with a run although every process works: rounds of one, work that comes late, a store that fills up.

Each of these is a state. It is said when it begins and when it ends, never in between, and `isles status` shows it for
as long as it lasts. Pure; a broker that starts anew finds out anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from isles.brokers.limits import RoutingSettings
from isles.brokers.replies import log
from isles.brokers.vocabulary import Log
from isles.proto.agreement import SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.messages import WarningInfo

ALONE_CYCLES: Final = 10
"""Cycles that one learner makes up by itself before it counts as alone: a second one that joins or comes back after a
crash takes fewer."""
EXPIRED_IN_A_ROW: Final = 3
"""Contributions of one learner that expire one after the other: after an absence the first ones do, and then no more,
since they are measured from the newest version again."""
FULL_SHARE: Final = 0.9
"""Of stored_bytes_max: from here on the store is said to be filling up."""
RELIEVED_SHARE: Final = 0.85
"""Below this share it no longer is; lower than the other, so that one payload more or less says nothing."""
DISK_FACTOR: Final = 4
"""Times disk_free_bytes_min that a healthy disk has free: with its default, the last GiB."""
DISK_RELIEVED_FACTOR: Final = 5
"""From so many times on it is healthy again; more than the other, so that one payload more or less says nothing."""
SHOWN_SECONDS: Final = 600.0
"""How long a warning is shown that has no end, such as a process of another run that knocked."""
STRANGERS_MAX: Final = 16
"""Processes of other runs that are warned of at once: more would hide the other warnings, and any name may knock."""
WARNINGS_MAX: Final = 256
"""Shown at once, as the message permits: more tell nobody more."""


@dataclass
class Warnings:
    """All states that somebody should know of."""

    settings: RoutingSettings
    _active: dict[tuple[str, str], WarningInfo] = field(default_factory=dict)
    """By the event that began it and whom it is about."""
    _until: dict[tuple[str, str], float] = field(default_factory=dict)
    """When those end that nothing ends."""
    _num_lonely: int = 0
    """Rounds of one learner since the warning about them began."""
    _num_shared: int = 0
    """Rounds in a row since the last one of a single learner."""
    _only: str = ""
    """Who made up all rounds lately."""
    _num_only: int = 0
    """How many rounds those are."""
    _expired: dict[str, tuple[ContributionId, int]] = field(default_factory=dict)
    """Learner -> its last contribution that expired, and how many have in a row."""

    def infos(self) -> tuple[WarningInfo, ...]:
        """What lasts now, the oldest first."""
        return tuple(sorted(self._active.values(), key=lambda one: one.since_unix))[:WARNINGS_MAX]

    # ---------------------------------------------------------------------------------------------------------- rounds

    def take_commit(
        self,
        learners: Collection[str],
        training: Collection[str],
        where: Mapping[str, int],
        sync: SyncSettings,
        unix: float,
    ) -> list[Log]:
        """A version was made from the work of `learners`, while `training` take steps.

        `where` has the fields `fragment` and `version` of what is logged.
        """
        logs = []
        if sync.quorum > 1 or sync.grace_max_seconds > 0:  # else rounds of one are what was asked for
            logs += self._see_lonely(learners, training, where, sync.num_fragments, unix)
        if not sync.is_deterministic:  # which is for a single learner
            logs += self._see_only(learners, training, sync.num_fragments, unix)
        return logs

    def _see_lonely(
        self, learners: Collection[str], training: Collection[str], where: Mapping[str, int], cycle: int, unix: float
    ) -> list[Log]:
        name = "round.alone"
        others = set(training) - set(learners)
        if len(learners) == 1 and others:
            self._num_shared = 0
            self._num_lonely += 1
            [learner] = learners
            text = (
                f"a round held only {learner} although {_few(others)} also trained: they miss the grace window, see "
                "sync.overlap_steps and sync.grace_max_seconds"
            )
            return self._begin(name, "", text, unix, **where, learner=learner, num_others=len(others))
        self._num_shared += 1
        if self._num_shared < cycle:
            return []
        num_rounds, self._num_lonely = self._num_lonely, 0
        return self._end(name, "", "round.shared", **where, num_rounds=num_rounds)

    def _see_only(self, learners: Collection[str], training: Collection[str], cycle: int, unix: float) -> list[Log]:
        name = "learner.alone"
        if set(learners) != {self._only}:
            ended = self._end(name, self._only, "learner.accompanied", learner=self._only)
            self._only, self._num_only = next(iter(learners)) if len(learners) == 1 else "", 1
            return ended
        self._num_only += 1
        if self._num_only < ALONE_CYCLES * cycle:
            return []
        others = set(training) - {self._only}
        who = f"{_few(others)} also trained but handed in nothing" if others else "no other learner trains"
        text = (
            f"learner {self._only} alone has made up the rounds of the last {ALONE_CYCLES} cycles: {who}; if others "
            "are meant to be here, compare the address that they dial with this one"
        )
        return self._begin(name, self._only, text, unix, learner=self._only, num_cycles=ALONE_CYCLES)

    # --------------------------------------------------------------------------------------------------- contributions

    def take_expiry(self, name: ContributionId, versions_behind: int, unix: float) -> list[Log]:
        """A contribution was refused because its base is too old; the same one asked about again counts once."""
        last, num = self._expired.get(name.learner, (None, 0))
        num += last != name
        self._expired[name.learner] = name, num
        if num < EXPIRED_IN_A_ROW:
            return []
        text = (
            f"the last {EXPIRED_IN_A_ROW} contributions of learner {name.learner} all came too late: its steps or its "
            "link are too slow for sync.horizon_versions; raise that, or let it contribute more often with a smaller "
            "sync.interval_steps or sync.has_dynamic_interval"
        )
        fields = {"learner": name.learner, "num_expired": num, "versions_behind": versions_behind}
        return self._begin("learner.outdated", name.learner, text, unix, **fields)

    def take_acceptance(self, learner: str) -> list[Log]:
        """A contribution came in time."""
        self._expired.pop(learner, None)
        return self._end("learner.outdated", learner, "learner.caught_up", learner=learner)

    # ------------------------------------------------------------------------------------------------ the store, others

    def look(self, *, disk_free_bytes: int, stored_bytes: int, live: Collection[str], unix: float) -> list[Log]:
        """The state of the store, now and then; forgets what is over by itself."""
        for key in [key for key, until in self._until.items() if unix >= until]:
            del self._until[key], self._active[key]
        for learner in self._expired.keys() - set(live):
            # Who is gone is nobody's worry: that it went was said.
            del self._expired[learner]
            self._active.pop(("learner.outdated", learner), None)
        return [*self._see_disk(disk_free_bytes, unix), *self._see_stored(stored_bytes, unix)]

    def _see_disk(self, free: int, unix: float) -> list[Log]:
        limit = self.settings.disk_free_bytes_min
        fields = {"limit": "disk_free_bytes_min", "bytes": free, "limit_bytes": limit}
        if free >= DISK_RELIEVED_FACTOR * limit:
            return self._end("store.filling", "disk", "store.relieved", **fields)
        if free >= DISK_FACTOR * limit:
            return []
        text = (
            f"the disk of the store has {free} bytes left, and with less than {limit} (broker.disk_free_bytes_min) "
            "uploads wait: make room, or lower broker.versions_kept"
        )
        return self._begin("store.filling", "disk", text, unix, **fields)

    def _see_stored(self, stored: int, unix: float) -> list[Log]:
        limit = self.settings.stored_bytes_max
        if limit is None:
            return []
        fields = {"limit": "stored_bytes_max", "bytes": stored, "limit_bytes": limit}
        if stored < RELIEVED_SHARE * limit:
            return self._end("store.filling", "stored", "store.relieved", **fields)
        if stored < FULL_SHARE * limit:
            return []
        text = (
            f"the store holds {stored} of at most {limit} bytes (broker.stored_bytes_max), and at the limit uploads "
            "wait: raise it, or lower broker.versions_kept or outer.checkpoint_versions"
        )
        return self._begin("store.filling", "stored", text, unix, **fields)

    def take_stranger(self, role: str, name: str, run: str, store: str, text: str, unix: float) -> list[Log]:
        """A process knocked that belongs to another store with a run of this name."""
        key = "run.duplicated", name
        if len(self._until) >= STRANGERS_MAX and key not in self._until:
            return []
        begun = self._begin(*key, text, unix, role=role, id=name, run=run, store=store)
        self._until[key] = unix + SHOWN_SECONDS
        return begun

    # -------------------------------------------------------------------------------------------------------- the state

    def _begin(self, event: str, subject: str, text: str, unix: float, /, **fields: Any) -> list[Log]:
        if (event, subject) in self._active:
            return []
        self._active[event, subject] = WarningInfo(name=event, subject=subject, text=text, since_unix=max(0.0, unix))
        return [log("warning", event, **fields, text=text)]

    def _end(self, event: str, subject: str, ending: str, /, **fields: Any) -> list[Log]:
        return [] if self._active.pop((event, subject), None) is None else [log("info", ending, **fields)]


def _few(names: Collection[str]) -> str:
    """Names for a sentence: some of many."""
    shown = sorted(names)[:3]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
