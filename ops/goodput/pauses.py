"""When a group of chips stands still because some of them fail: the fast path, a few operations for each pause.

The rules are those of `isles.ops.goodput.group`, which goes through them event by event. What depends on nothing but
times is computed for all events at once; only the chain of pauses is followed one by one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isles.ops.goodput.scenario import Scenario
from isles.ops.goodput.trace import Floats


@dataclass(frozen=True)
class Pauses:
    """Stretches of time in which a group stands still: ascending, none overlaps another, none ends after `seconds`."""

    seconds: float
    starts: Floats
    ends: Floats

    @classmethod
    def of(cls, seconds: float, starts: Floats, ends: Floats) -> Pauses:
        """Of stretches in any order that may overlap."""
        is_inside = starts < seconds
        starts, ends = starts[is_inside], np.minimum(ends[is_inside], seconds)
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        if not starts.size:
            return cls(seconds, starts, ends)
        reach = np.maximum.accumulate(ends)
        is_first = np.concatenate(([True], starts[1:] > reach[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        return cls(seconds, starts[is_first], reach[is_last])

    def with_more(self, starts: Floats, ends: Floats) -> Pauses:
        """And those as well."""
        return self.of(self.seconds, np.concatenate((self.starts, starts)), np.concatenate((self.ends, ends)))

    @property
    def total(self) -> float:
        """Seconds of standing still."""
        return float(np.sum(self.ends - self.starts))


class Clock:
    """Time spent training, as a function of time, and the other way round."""

    def __init__(self, pauses: Pauses) -> None:
        lengths = pauses.ends - pauses.starts
        self._pauses = pauses
        self._before = np.concatenate(([0.0], np.cumsum(lengths)))
        """[n + 1] seconds of standing still before each pause, and in all."""
        self._trained_at_start = pauses.starts - self._before[:-1]

    def trained(self, times: Floats) -> Floats:
        """Seconds of training until each of these times; beyond the end, as if there were no pause any more."""
        index = np.searchsorted(self._pauses.starts, times, side="right")
        last = np.maximum(index - 1, 0)
        ends = self._pauses.ends[last] if self._pauses.ends.size else np.zeros(np.shape(times))
        return times - self._before[index] + np.where(index > 0, np.maximum(ends - times, 0.0), 0.0)

    def time_at(self, trained: Floats) -> Floats:
        """When so many seconds of training are reached; beyond the end, as if it then trained without a pause."""
        index = np.searchsorted(self._trained_at_start, trained, side="left")
        return trained + self._before[index]

    def still_since(self, times: Floats) -> Floats:
        """The beginning of the pause that each of these times lies in; infinity for times outside."""
        index = np.searchsorted(self._pauses.starts, times, side="right") - 1
        last = np.maximum(index, 0)
        if not self._pauses.starts.size:
            return np.full(np.shape(times), np.inf)
        return np.where((index >= 0) & (times < self._pauses.ends[last]), self._pauses.starts[last], np.inf)

    def end_of(self, times: Floats) -> Floats:
        """The end of the pause that each of these times lies in; the times themselves outside."""
        if not self._pauses.starts.size:
            return times
        index = np.maximum(np.searchsorted(self._pauses.starts, times, side="right") - 1, 0)
        is_still = (self._pauses.starts[index] <= times) & (times < self._pauses.ends[index])
        return np.where(is_still, self._pauses.ends[index], times)

    def next_pause(self, times: Floats) -> Floats:
        """The beginning of the first pause at or after each of these times; infinity if there is none."""
        starts = np.concatenate((self._pauses.starts, [np.inf]))
        return starts[np.searchsorted(self._pauses.starts, times, side="left")]


def lock_step_pauses(times: Floats, seconds: float, restart_seconds: float) -> Pauses:
    """A group that is not elastic: a failure stops it for so long, and one that happens meanwhile is mended with it.

    `times` are those of the failures, ascending.
    """
    following = np.searchsorted(times, times + restart_seconds, side="left").tolist()
    firsts, index = [], 0
    while index < len(following):
        firsts.append(index)
        index = following[index]
    starts = times[firsts]
    return Pauses.of(seconds, starts, starts + restart_seconds)


def elastic_pauses(times: Floats, returns: Floats, scenario: Scenario) -> Pauses:
    """A group that goes on without the chips that failed, and takes them back later.

    `times` are those of the failures, ascending; `returns` when each chip is back.
    """
    back = np.sort(returns)
    starts, ends = _chain(
        times.tolist(),
        back.tolist(),
        (back + scenario.return_wait_seconds).tolist(),
        scenario.scale_down_seconds,
        scenario.scale_up_seconds,
    )
    return Pauses.of(scenario.seconds, np.array(starts), np.array(ends))


def _chain(
    failures: Sequence[float], back: Sequence[float], patience: Sequence[float], down: float, up: float
) -> tuple[list[float], list[float]]:
    """Pause after pause: the next failure begins one, or a chip whose patience ends first."""
    starts: list[float] = []
    ends: list[float] = []
    num_failures, num_back = len(failures), len(back)
    failure, waiting, now = 0, 0, 0.0
    while True:
        failure = bisect_left(failures, now, failure)
        waiting = bisect_left(back, now, waiting)
        at = failures[failure] if failure < num_failures else float("inf")
        until = patience[waiting] if waiting < num_back else float("inf")
        start, length = (at, down) if at <= until else (until, up)
        if start == float("inf"):
            return starts, ends
        now = start + length
        starts.append(start)
        ends.append(now)


def missing_seconds(pauses: Pauses, times: Floats, returns: Floats) -> float:
    """Seconds of training that an elastic group did without one slice or another, summed over the failures.

    A chip that is back is taken along in the pause that is just going on, or in the next one.
    """
    clock = Clock(pauses)
    is_still = np.isfinite(clock.still_since(returns))
    admitted = np.where(is_still, returns, clock.next_pause(returns))
    admitted = np.minimum(admitted, pauses.seconds)
    return float(np.sum(clock.trained(admitted) - clock.trained(np.minimum(times, pauses.seconds))))


def all_still_seconds(groups: Sequence[Pauses]) -> float:
    """Seconds in which every one of these groups stands still."""
    if len(groups) == 1:
        return groups[0].total
    times = np.concatenate([part for group in groups for part in (group.starts, group.ends)])
    changes = np.concatenate(
        [np.full(part.size, sign) for group in groups for part, sign in ((group.starts, 1), (group.ends, -1))]
    )
    order = np.argsort(times, kind="stable")
    times, num_still = times[order], np.cumsum(changes[order])
    is_all = num_still[:-1] == len(groups)
    return float(np.sum((times[1:] - times[:-1])[is_all]))
