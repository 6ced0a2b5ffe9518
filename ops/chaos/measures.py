"""What faults did to a run, from its logs: progress of the survivors, restarts, fail-overs, goodput. Pure.

Times are seconds since 1970, as the processes wrote them; on one machine they agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

Line = Mapping[str, Any]

WINDOW_SECONDS: Final = 10.0
"""Around a fault that is over at once: a restart and the survivors' next contributions fall into it."""
GAP_SECONDS: Final = 30.0
"""Two lines about a learner's progress that are further apart say nothing about the time between them."""
COVERED_SHARE: Final = 0.8
"""Of a window, that a learner must have reported on: it says how it is now and then, and not just when it is asked."""
STEPS_SECONDS_MIN: Final = 1.0
"""A rate over a shorter time is noise."""


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True)


class FaultRecord(_Value):
    """One fault as it happened."""

    number: int
    kind: str
    targets: tuple[str, ...]
    began_unix: float
    ended_unix: float
    seconds: float = 0.0
    """How long it was meant to last."""
    failure: str = ""
    """Why it did not happen."""
    detail: str = ""


class Survivor(_Value):
    """A learner that a fault did not hit, in its window."""

    learner: str
    steps_per_second_before: float
    """Its usual rate: the median over the run."""
    steps_per_second_during: float
    steps_lost: float
    """Usual rate minus that of the window, times its length; negative = it was faster than usual."""


class Effect(_Value):
    """What happened in the window of one fault."""

    fault: FaultRecord
    window_seconds: float
    survivors: tuple[Survivor, ...] = ()
    tokens_merged: float = 0.0
    """Mean over fragments."""
    rounds_committed: int = 0


class Restart(_Value):
    """One restart of a child; None where it did not come so far."""

    child: str
    started_unix: float
    loading_seconds: float | None = None
    """Until its libraries were loaded: interpreter and imports. Of a broker, until it listens."""
    joined_seconds: float | None = None
    """From then on until it had the run's state."""
    sent_seconds: float | None = None
    """From then on until its first contribution was handed over."""
    accepted_seconds: float | None = None
    """From then on until its first contribution was durable."""
    disturbed_by: int | None = None
    """Number of a fault that hit it, or the broker, between loading and that: then the times are that fault's, too."""


class FailOver(_Value):
    """An outer that had a lease was hit, and how long it took until somebody merged again."""

    fault: int
    kind: str
    outer: str
    heir: str = ""
    leased_seconds: float | None = None
    """Until the lease was granted anew; None = it never was."""
    committed_seconds: float | None = None
    """Until the next version was committed."""


class Goodput(_Value):
    """Merged tokens per second (mean over fragments) over parts of the run; None where there is no such part."""

    whole: float | None = None
    calm: float | None = None
    """From the first round to the first fault."""
    disturbed: float | None = None
    """From the first fault to the end of the last."""


class Measures(_Value):
    """Everything that is measured of one run with faults."""

    effects: tuple[Effect, ...] = ()
    restarts: tuple[Restart, ...] = ()
    fail_overs: tuple[FailOver, ...] = ()
    goodput: Goodput = Goodput()

    @property
    def steps_lost_most(self) -> float:
        """The most that any survivor lost in any window."""
        return max((one.steps_lost for effect in self.effects for one in effect.survivors), default=0.0)


def measure(logs: Mapping[str, Sequence[Line]], faults: Sequence[FaultRecord]) -> Measures:
    """`logs` is process -> its lines, each with its time as `unix`; `faults` in the order of their times."""
    happened = [fault for fault in faults if not fault.failure]
    hits = {name: [fault.began_unix for fault in happened if name in fault.targets] for name in logs}
    paces = {name: pace for name, lines in logs.items() if (pace := Pace.of(lines, hits[name])) is not None}
    rounds = Rounds.of(logs.get("broker", ()))
    return Measures(
        effects=tuple(_effect(fault, happened, paces, rounds) for fault in happened),
        restarts=tuple(_restarts(happened, logs)),
        fail_overs=tuple(_fail_overs(happened, logs.get("broker", ()))),
        goodput=_goodput(rounds, happened),
    )


# ---------------------------------------------------------------------------------------------------- progress of one


class Pace:
    """Inner steps of one learner over time, in stretches: none goes on over a restart or a fault that hit it."""

    def __init__(self, stretches: Sequence[Sequence[tuple[float, int]]]) -> None:
        self._stretches = [stretch for stretch in stretches if len(stretch) > 1]
        rates = [
            (after[1] - before[1]) / (after[0] - before[0])
            for stretch in self._stretches
            for before, after in pairwise(stretch)
            if after[0] > before[0]
        ]
        self.usual = median(rates) if rates else 0.0

    @classmethod
    def of(cls, lines: Iterable[Line], hits: Sequence[float] = ()) -> Pace | None:
        """Of a worker's log, and the times at which faults hit it; None if it is no worker's, or says too little."""
        stretches: list[list[tuple[float, int]]] = [[]]
        for line in lines:
            unix = float(line["unix"])
            was_hit = stretches[-1] and any(stretches[-1][-1][0] < hit <= unix for hit in hits)
            if line["event"] == "process.started":
                stretches.append([])
            elif line["event"] == "learner.progressed":
                if was_hit:
                    stretches.append([])
                stretches[-1].append((unix, int(line["steps"])))
        pace = cls(stretches)
        return pace if pace.usual > 0 else None

    def steps(self, start: float, end: float) -> tuple[float, float] | None:
        """Steps between two times and the seconds they were counted over; None if no stretch covers enough of it."""
        for stretch in self._stretches:
            first, last = max(start, stretch[0][0]), min(end, stretch[-1][0])
            if last - first >= max(STEPS_SECONDS_MIN, COVERED_SHARE * (end - start)):
                done = _at(stretch, last), _at(stretch, first)
                return None if None in done else ((done[0] or 0.0) - (done[1] or 0.0), last - first)
        return None


def _at(stretch: Sequence[tuple[float, int]], unix: float) -> float | None:
    """Steps at a time between two lines."""
    index = bisect_left(stretch, (unix, 0))
    if index == 0:
        return float(stretch[0][1])
    if index == len(stretch):
        return float(stretch[-1][1])
    (before, low), (after, high) = stretch[index - 1], stretch[index]
    if after - before > GAP_SECONDS:
        return None
    return low + (high - low) * (unix - before) / (after - before)


class Rounds:
    """Committed rounds over time."""

    def __init__(self, rounds: Sequence[tuple[float, int, float]]) -> None:
        """Each as time, fragment, and the tokens in that fragment since version 0."""
        self._rounds = sorted(rounds)
        self._num_fragments = len({fragment for _, fragment, _ in rounds}) or 1

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Rounds:
        """From the broker's log."""
        found = (line for line in lines if line["event"] == "round.committed")
        return cls([(float(line["unix"]), int(line["fragment"]), float(line["tokens"])) for line in found])

    def between(self, start: float, end: float) -> tuple[int, float]:
        """Rounds committed in (start, end], and the tokens in them, mean over fragments."""
        before, after = dict[int, float](), dict[int, float]()
        num_rounds = 0
        for unix, fragment, tokens in self._rounds:
            if unix <= start:
                before[fragment] = tokens
            elif unix <= end:
                after[fragment] = tokens
                num_rounds += 1
        merged = sum(tokens - before.get(fragment, 0.0) for fragment, tokens in after.items())
        return num_rounds, merged / self._num_fragments

    @property
    def span(self) -> tuple[float, float] | None:
        """Times of the first and the last round; None if there are none."""
        return (self._rounds[0][0], self._rounds[-1][0]) if self._rounds else None


def _effect(fault: FaultRecord, faults: Sequence[FaultRecord], paces: Mapping[str, Pace], rounds: Rounds) -> Effect:
    start, end = fault.began_unix, max(fault.ended_unix, fault.began_unix + WINDOW_SECONDS)
    survivors = []
    for learner, pace in sorted(paces.items()):
        own = [other for other in faults if learner in other.targets]
        is_hit = any(other.began_unix <= start <= other.ended_unix for other in own)
        until = min((other.began_unix for other in own if other.began_unix > start), default=end)
        counted = None if is_hit else pace.steps(start, min(end, until))
        if counted is None:
            continue
        steps, seconds = counted
        lost = pace.usual * seconds - steps
        survivors.append(
            Survivor(
                learner=learner,
                steps_per_second_before=round(pace.usual, 3),
                steps_per_second_during=round(steps / seconds, 3),
                steps_lost=round(lost, 2),
            )
        )
    num_rounds, tokens = rounds.between(start, end)
    return Effect(
        fault=fault,
        window_seconds=round(end - start, 3),
        survivors=tuple(survivors),
        tokens_merged=tokens,
        rounds_committed=num_rounds,
    )


# --------------------------------------------------------------------------------------------------- dying and coming


def _restarts(faults: Sequence[FaultRecord], logs: Mapping[str, Sequence[Line]]) -> Iterable[Restart]:
    starts: dict[str, list[float]] = {}
    num_ups = 0
    for line in logs.get("up", ()):
        num_ups += line["event"] == "process.started"
        if line["event"] == "child.started":
            starts.setdefault(str(line["child"]), []).append(float(line["unix"]))
    accepted: dict[str, list[float]] = {}
    for line in logs.get("broker", ()):
        if line["event"] == "contribution.accepted":
            accepted.setdefault(str(line["learner"]), []).append(float(line["unix"]))
    found = []
    for child, times in starts.items():
        for start, end in pairwise([*times, float("inf")]):
            if start != times[0]:
                found.append(_restart(child, start, end, logs.get(child, ()), accepted.get(child, ()), faults))
    return sorted(found, key=lambda restart: restart.started_unix)


def _restart(
    child: str,
    start: float,
    end: float,
    lines: Sequence[Line],
    accepted: Sequence[float],
    faults: Sequence[FaultRecord],
) -> Restart:
    def first(event: str, after: float) -> float | None:
        return next((line["unix"] for line in lines if line["event"] == event and after <= line["unix"] < end), None)

    loaded = first("broker.started" if child == "broker" else "process.loaded", start)
    if loaded is None:
        return Restart(child=child, started_unix=start)
    joined, sent = first("learner.joined", loaded), first("contribution.sent", loaded)
    taken = next((unix for unix in accepted if (joined or loaded) <= unix < end), None)
    hit = [
        fault.number
        for fault in faults
        if {child, "broker"} & {*fault.targets}
        and fault.ended_unix >= loaded
        and fault.began_unix < min(end, taken or end)
    ]
    return Restart(
        child=child,
        started_unix=start,
        loading_seconds=round(loaded - start, 3),
        joined_seconds=None if joined is None else round(joined - loaded, 3),
        sent_seconds=None if sent is None else round(sent - loaded, 3),
        accepted_seconds=None if taken is None else round(taken - loaded, 3),
        disturbed_by=hit[0] if hit else None,
    )


def _fail_overs(faults: Sequence[FaultRecord], broker: Sequence[Line]) -> Iterable[FailOver]:
    leases = [(float(line["unix"]), str(line["outer"])) for line in broker if line["event"] == "outer.leased"]
    commits = [float(line["unix"]) for line in broker if line["event"] == "round.committed"]
    for fault in faults:
        holder = next((outer for unix, outer in reversed(leases) if unix <= fault.began_unix), "")
        if fault.kind not in ("kill", "kill-all", "freeze") or holder not in fault.targets:
            continue
        leased = next(((unix, outer) for unix, outer in leases if unix > fault.began_unix), None)
        after = None if leased is None else next((unix for unix in commits if unix >= leased[0]), None)
        yield FailOver(
            fault=fault.number,
            kind=fault.kind,
            outer=holder,
            heir="" if leased is None else leased[1],
            leased_seconds=None if leased is None else round(leased[0] - fault.began_unix, 3),
            committed_seconds=None if after is None else round(after - fault.began_unix, 3),
        )


def _goodput(rounds: Rounds, faults: Sequence[FaultRecord]) -> Goodput:
    span = rounds.span
    if span is None:
        return Goodput()
    first, last = span

    def over(start: float, end: float) -> float | None:
        return round(rounds.between(start, end)[1] / (end - start), 2) if end - start >= STEPS_SECONDS_MIN else None

    if not faults:
        return Goodput(whole=over(first, last), calm=over(first, last))
    began, ended = faults[0].began_unix, max(fault.ended_unix for fault in faults)
    disturbed = over(max(first, began), min(ended, last))
    return Goodput(whole=over(first, last), calm=over(first, began), disturbed=disturbed)
