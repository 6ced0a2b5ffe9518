"""8, 64, 256 learners on one broker and one outer, each contributing at the same fixed pace.

Member m of N hands in its k-th contribution, to fragment k mod P, at `pace * (k + m / N)`; with a quorum of N and no
grace window a round takes everybody, and there is one commit each `pace` seconds. What grows with N is the traffic.

Commit latency: from ACCEPTED of a round's last contribution to the hint that its version is the head, both as the first
member receives them. Accept latency: from OFFER to ACCEPTED, as each member sees them. CPU seconds are those of the
measured rounds alone; the first round of each fragment is not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.scale.crowd import Crowd, Member, hinted_version
from benchmarks.scale.processes import Cost, Watch, broker_and_outer, read_cost
from benchmarks.scale.synthetic import contribution, delta, make_manifest, start_run
from isles.proto.agreement import SyncSettings
from isles.proto.client import Answered
from isles.proto.connection import News
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest
from isles.proto.messages import Accepted, Error, Offer

FRAGMENTS: Final = 4
VALUES_PER_FRAGMENT: Final = 65_536
JOIN_SECONDS: Final = 120.0
LATE_SECONDS_MAX: Final = 60.0
"""A schedule that is missed by more than this is too fast for this machine."""
MEGABYTE: Final = 1e6


@dataclass
class Figures:
    """What one crowd cost."""

    num_learners: int
    num_contributions: int = 0
    seconds: float = 0.0
    late_seconds: float = 0.0
    """By how much the worst contribution missed its moment."""
    accept_seconds: list[float] = field(default_factory=list)
    commit_seconds: list[float] = field(default_factory=list)
    broker: Cost = field(default_factory=Cost)
    outer: Cost = field(default_factory=Cost)
    """CPU of the measured rounds; peak memory of the whole life."""


class Schedule:
    """One crowd on one run: contributes at the pace and notes the times."""

    def __init__(self, crowd: Crowd, manifest: Manifest, arguments: argparse.Namespace, figures: Figures) -> None:
        self._crowd = crowd
        self._arguments = arguments
        self._figures = figures
        self._manifest = manifest
        self._codec = SyncSettings().codec_up
        self._values = np.empty(max(fragment.num_values for fragment in self._manifest.fragments), np.float32)
        self._heads = dict.fromkeys(range(FRAGMENTS), 0)
        self._offered_at: dict[ContributionId, float] = {}
        self._num_accepted: dict[tuple[int, int], int] = {}
        """(fragment, version it is for) -> contributions accepted."""
        self._complete_at: dict[tuple[int, int], float] = {}
        self._is_measuring = False

    def run(self, first: int, last: int, *, is_measuring: bool) -> None:
        """Contributions `first` to `last` - 1 of every member, and until their rounds are committed."""
        self._is_measuring = is_measuring
        pace, members, clock = self._arguments.pace_seconds, self._crowd.members, self._crowd.clock
        begun = clock.now()
        for turn in range(first, last):
            for number, member in enumerate(members):
                due = begun + pace * (turn - first + number / len(members))
                self._take(self._wait_until(due))
                self._take(self._wait_for_base(turn, due))
                late = clock.now() - due
                if late > LATE_SECONDS_MAX:
                    raise SystemExit(f"{len(members)} learners missed their pace by {late:.0f} s: raise --pace-seconds")
                if is_measuring:
                    self._figures.late_seconds = max(self._figures.late_seconds, late)
                self._offer(member, number, turn)
        rounds = -(-last // FRAGMENTS)
        waited = "for the last versions"
        self._take(self._crowd.turns(JOIN_SECONDS, lambda: min(self._heads.values()) >= rounds, waited))
        if is_measuring:
            self._figures.seconds = clock.now() - begun
            self._figures.num_contributions = (last - first) * len(members)

    def _wait_until(self, due: float) -> Iterator[tuple[Member, News]]:
        while (left := due - self._crowd.clock.now()) > 0:
            yield from self._crowd.turn(left)

    def _wait_for_base(self, turn: int, due: float) -> Iterator[tuple[Member, News]]:
        """The version that this contribution is measured from; long there, unless somebody is overloaded."""
        fragment, base = turn % FRAGMENTS, turn // FRAGMENTS
        seconds = max(1.0, LATE_SECONDS_MAX + due - self._crowd.clock.now())
        yield from self._crowd.turns(seconds, lambda: self._heads[fragment] >= base, f"for version {base}")

    def _offer(self, member: Member, number: int, turn: int) -> None:
        fragment, base = turn % FRAGMENTS, turn // FRAGMENTS
        values = self._values[: self._manifest.fragments[fragment].num_values]
        delta(self._arguments.seed, number, fragment, base, values)
        name = ContributionId(member.name, fragment, member.incarnation, turn)
        books, payload = contribution(name, base, values, self._manifest.slices(fragment), self._codec)
        member.steps += books.steps
        member.tokens += books.tokens
        self._offered_at[name] = self._crowd.clock.now()
        member.connection.ask(Offer(contribution=books), payload)

    def _take(self, arrivals: Iterator[tuple[Member, News]]) -> None:
        for _, news in arrivals:
            now = self._crowd.clock.now()
            if isinstance(news, Answered) and isinstance(news.ask, Offer):
                self._take_answer(news, now)
            elif (hinted := hinted_version(news)) is not None:
                fragment, version = hinted
                self._heads[fragment] = max(self._heads[fragment], version)
                if self._is_measuring and hinted in self._complete_at:
                    self._figures.commit_seconds.append(now - self._complete_at.pop(hinted))

    def _take_answer(self, news: Answered, now: float) -> None:
        assert isinstance(news.ask, Offer)
        books, reply = news.ask.contribution, news.reply
        if not isinstance(reply, Accepted):
            text = reply.text if isinstance(reply, Error) else type(reply).__name__
            raise SystemExit(f"the broker did not accept contribution {books.id}: {text}")
        offered_at = self._offered_at.pop(books.id)
        if self._is_measuring:
            self._figures.accept_seconds.append(now - offered_at)
        key = (books.id.fragment, books.base_version + 1)
        self._num_accepted[key] = self._num_accepted.get(key, 0) + 1
        if self._num_accepted[key] == len(self._crowd.members):
            self._complete_at[key] = now


def measure(arguments: argparse.Namespace, num_learners: int, folder: Path) -> Figures:
    """One broker, one outer, and a crowd of so many learners."""
    figures = Figures(num_learners)
    with Watch() as watch, broker_and_outer(folder, watch) as address:
        crowd = Crowd(address, num_learners)
        crowd.join(JOIN_SECONDS)
        manifest = make_manifest(FRAGMENTS * VALUES_PER_FRAGMENT, FRAGMENTS)
        start_run(crowd, manifest, arguments.seed, num_learners)
        schedule = Schedule(crowd, manifest, arguments, figures)
        schedule.run(0, FRAGMENTS, is_measuring=False)
        before = {role: read_cost(watch.pid(role)) for role in ("broker", "outer")}
        schedule.run(FRAGMENTS, FRAGMENTS * (1 + arguments.rounds), is_measuring=True)
        for role, cost in (("broker", figures.broker), ("outer", figures.outer)):
            after, earlier = read_cost(watch.pid(role)), before[role]
            if after is None or earlier is None:
                raise SystemExit(f"the {role} has ended in the middle: see its log in {folder}")
            cost.cpu_seconds, cost.peak_bytes = after.cpu_seconds - earlier.cpu_seconds, after.peak_bytes
        crowd.close()
    return figures


def compare_crowds(arguments: argparse.Namespace, scratch: Path) -> None:
    """All sizes one after the other, and the table."""
    rows = [measure(arguments, count, scratch / f"crowd-{count}") for count in arguments.learners_each]
    print(
        f"\nlearners: {FRAGMENTS} fragments of {VALUES_PER_FRAGMENT} values, each learner hands in one every "
        f"{arguments.pace_seconds:g} s, {arguments.rounds} rounds of each fragment"
    )

    def row(name: str, values: list[str]) -> None:
        print(f"{name:<40}" + "".join(f"{value:>11}" for value in values) + growth(values))

    def growth(values: list[str]) -> str:
        first, last = float(values[0]), float(values[-1])
        return f"{last / first:>9.1f}x" if len(values) > 1 and first > 0 else ""

    print(f"{'':<40}" + "".join(f"{one.num_learners:>11}" for one in rows) + f"{'growth':>10}")
    row("contributions per second", [f"{one.num_contributions / one.seconds:.2f}" for one in rows])
    for role in ("broker", "outer"):
        costs = [getattr(one, role) for one in rows]
        pairs = list(zip(rows, costs, strict=True))
        row(f"{role}: CPU, share of a core", [f"{cost.cpu_seconds / one.seconds:.3f}" for one, cost in pairs])
        row(f"{role}: CPU ms per round", [_per(cost, FRAGMENTS * arguments.rounds) for cost in costs])
        row(f"{role}: CPU ms per contribution", [_per(cost, one.num_contributions) for one, cost in pairs])
        row(f"{role}: peak MB", [f"{cost.peak_bytes / MEGABYTE:.0f}" for cost in costs])
    for name, percent in (("p50", 50), ("p99", 99)):
        row(f"commit latency {name}, ms", [f"{1e3 * np.percentile(one.commit_seconds, percent):.0f}" for one in rows])
    for name, percent in (("p50", 50), ("p99", 99)):
        row(f"accept latency {name}, ms", [f"{1e3 * np.percentile(one.accept_seconds, percent):.0f}" for one in rows])
    row("worst delay of a contribution, ms", [f"{1e3 * one.late_seconds:.0f}" for one in rows])


def _per(cost: Cost, count: int) -> str:
    return f"{1e3 * cost.cpu_seconds / count:.2f}"
