"""What happens to a fleet, drawn once and met by every system alike: failures, returns, deaths, outages, speeds.

All times are seconds since the beginning. Each kind of event has a random stream of its own, so that another broker
does not make other chips fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from isles.ops.goodput.scenario import YEAR_SECONDS, Returns, Scenario

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]

BLOCK_CHIPS: Final = 1 << 20
"""Chips that are drawn at a time: 8 MB an array, however large the fleet."""
FAILURES_MAX: Final = 50_000_000
"""Failures in one trace: 1.2 GB of arrays, and minutes of computing."""
_FAILURES, _DEATHS, _BROKER, _OUTER, _SPEEDS, _JITTER, _PHASES = range(7)
"""Random streams of one seed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One learner stands still for some seconds, whatever its chips do."""

    learner: int
    start: float
    seconds: float
    loses_memory: bool = True
    """A death: what it did since its last accepted contribution and its last checkpoint is lost. Else it was frozen."""


@dataclass(frozen=True)
class Trace:
    """Everything that happens, in order of time."""

    seconds: float
    times: Floats
    """[F] when a chip fails."""
    chips: Whole
    """[F] which one, from 0 on."""
    returns: Floats
    """[F] when it is back."""
    stops: tuple[Stop, ...] = ()
    broker_outages: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """[B, 2] from when to when there is no broker."""
    outer_outages: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """[O, 2] from when to when no outer merges."""

    def of_group(self, group: int, num_groups: int, num_chips: int) -> tuple[Floats, Floats]:
        """Failures and returns of the chips of one group of several that share `num_chips` evenly."""
        if num_groups == 1:
            return self.times, self.returns
        mine = self.chips * num_groups // num_chips == group
        return self.times[mine], self.returns[mine]


def draw(scenario: Scenario) -> Trace:
    """The trace of a scenario: the same for the same seed. Raises ValueError for more than FAILURES_MAX failures."""
    expected = scenario.chips * scenario.seconds / (scenario.chip_failure_years * YEAR_SECONDS)
    if expected > FAILURES_MAX:
        raise ValueError(
            f"some {expected:.2g} failures are to be expected, and {FAILURES_MAX:.2g} are simulated at most: take "
            "fewer days or chips, or more years between the failures of a chip"
        )
    times, chips, returns = _failures(scenario, _stream(scenario, _FAILURES))
    return Trace(
        seconds=scenario.seconds,
        times=times,
        chips=chips,
        returns=returns,
        stops=_deaths(scenario, _stream(scenario, _DEATHS)),
        broker_outages=_outages(
            scenario, _stream(scenario, _BROKER), scenario.broker_failure_days, scenario.broker_outage_seconds
        ),
        outer_outages=_outages(
            scenario, _stream(scenario, _OUTER), scenario.outer_failure_days, scenario.outer_outage_seconds
        ),
    )


def step_seconds(scenario: Scenario, count: int) -> Floats:
    """[count] the mean time of one inner step of each of so many learners or places; log-normal around the setting."""
    normal = _stream(scenario, _SPEEDS).standard_normal(count)
    sigma = math.sqrt(math.log1p(scenario.speed_spread**2))
    steps: Floats = scenario.step_seconds * np.exp(sigma * normal)
    return steps


def lock_step_share(scenario: Scenario, num_drawn: int = 4096) -> float:
    """Share of its speed that a fleet keeps when all places wait for the slowest in each step, in (0, 1].

    All of its speed is what the places do together when none waits for another.
    """
    if scenario.places == 1:
        return 1.0
    means = step_seconds(scenario, scenario.places)
    sigma = math.sqrt(math.log1p(scenario.step_jitter**2))
    normal = _stream(scenario, _JITTER).standard_normal((num_drawn, scenario.places))
    steps = means * np.exp(sigma * normal - sigma**2 / 2)
    return float(1 / (np.mean(np.max(steps, axis=1)) * np.mean(1 / means)))


def phases(scenario: Scenario, shape: tuple[int, int]) -> Floats:
    """Shares of an interval in [0, 1) that clocks which nothing brings together are apart."""
    return _stream(scenario, _PHASES).random(shape)


def _stream(scenario: Scenario, kind: int) -> np.random.Generator:
    return np.random.default_rng([scenario.seed, kind])


def _failures(scenario: Scenario, chance: np.random.Generator) -> tuple[Floats, Whole, Floats]:
    """Of all chips: when, which, and when it is back; a chip that is back may fail again."""
    found: list[tuple[Floats, Whole, Floats]] = []
    for first in range(0, scenario.chips, BLOCK_CHIPS):
        chips = np.arange(first, min(first + BLOCK_CHIPS, scenario.chips))
        times = _first_failures(scenario, chance, chips.size)
        while (is_inside := times < scenario.seconds).any():
            times, chips = times[is_inside], chips[is_inside]
            returns = times + _repairs(scenario.return_distribution, 60 * scenario.return_minutes, chance, times.size)
            found.append((times, chips, returns))
            times = returns + _scale(scenario) * chance.weibull(scenario.failure_shape, times.size)
    times, chips, returns = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else _nothing()
    order = np.argsort(times, kind="stable")
    return times[order], chips[order], returns[order]


def _nothing() -> tuple[Floats, Whole, Floats]:
    return np.empty(0), np.empty(0, dtype=np.int64), np.empty(0)


def _scale(scenario: Scenario) -> float:
    """Of the Weibull distribution that has the wanted mean."""
    return scenario.chip_failure_years * YEAR_SECONDS / math.gamma(1 + 1 / scenario.failure_shape)


def _first_failures(scenario: Scenario, chance: np.random.Generator, count: int) -> Floats:
    """[count] as if every chip had been running for long: a uniform share of a gap drawn in proportion to its length.

    For the Weibull distribution the k-th power of such a gap is Gamma(1 + 1/k).
    """
    shape = scenario.failure_shape
    gaps = chance.gamma(1 + 1 / shape, size=count) ** (1 / shape)
    first: Floats = _scale(scenario) * gaps * chance.random(count)
    return first


def _repairs(distribution: Returns, mean: float, chance: np.random.Generator, count: int) -> Floats:
    """[count] times until a chip is back, with this mean, in seconds."""
    match distribution:
        case "constant":
            return np.full(count, mean)
        case "exponential":
            return chance.exponential(mean, count)
        case "lognormal":
            sigma = math.sqrt(math.log(2))
            return chance.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


def _arrivals(chance: np.random.Generator, mean: float, seconds: float) -> Floats:
    """Ascending times of a Poisson process with this mean gap; none if the mean is 0."""
    if mean <= 0:
        return np.empty(0)
    return np.sort(chance.random(chance.poisson(seconds / mean)) * seconds)


def _deaths(scenario: Scenario, chance: np.random.Generator) -> tuple[Stop, ...]:
    """Of whole learners; of two that overlap in one learner the second is left out."""
    stops: list[Stop] = []
    for learner in range(scenario.learners if scenario.learner_failure_days else 0):
        free_at = 0.0
        for start in _arrivals(chance, 86_400 * scenario.learner_failure_days, scenario.seconds):
            seconds = float(chance.exponential(scenario.learner_outage_seconds))
            if start >= free_at:
                stops.append(Stop(learner, float(start), seconds))
                free_at = start + seconds
    return tuple(sorted(stops, key=lambda stop: stop.start))


def _outages(scenario: Scenario, chance: np.random.Generator, days: float, seconds: float) -> Floats:
    """[n, 2] beginnings and ends; one that begins in another is left out."""
    found: list[tuple[float, float]] = []
    for start in _arrivals(chance, 86_400 * days, scenario.seconds):
        if not found or start >= found[-1][1]:
            found.append((float(start), float(start) + seconds))
    return np.array(found, dtype=np.float64).reshape(-1, 2)
