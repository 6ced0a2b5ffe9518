"""From a model, sites and links to bandwidth, memory, disk and money. Pure arithmetic.

A learner sends every fragment once in H inner steps and receives every version of it, so that each way

    bits per second = parameters * bits per value / (H * step time)

and the broker's machine has that for every learner. Data parallel training sums up all gradients in each step: around a
ring of n sites each link carries 2 (n - 1) / n times the gradients, in the share of the step in which they can travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isles.ops.plan.codec_bits import bits_of
from isles.ops.plan.settings import PUBLISHED_BITS, Direction, PlanSettings

GIGA = 1e9
DAY_SECONDS = 86_400.0
STATE_BYTES_PER_VALUE = 12
"""Parameters, momentum and remainder, 4 bytes each (docs/guides/scale.md)."""
VALUE_BYTES = 4
FETCH_BYTES_MAX = 256 << 20
"""What a learner holds of what it fetches, and an outer of what it screens."""
MERGE_BYTES_PER_VALUE = 30
"""Of the largest fragment, while the outer merges it (docs/guides/scale.md)."""
BROKER_BYTES = 100 << 20
"""Of a broker, whatever the model."""
CHECKPOINTS = 2
"""Of a fragment that may lie in the store at a time: the last one, and the one being written."""
CPU_SECONDS_PER_VALUE_MERGED = 0.14 / 41.7e6
CPU_SECONDS_PER_VALUE_STEPPED = 4.4 / 41.7e6
"""Of the outer, for each value of a contribution and of a version, on two slow cores (docs/guides/scale.md)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one link carries one way."""

    link: str
    direction: Direction
    gbit: float
    """On average, in Gbit/s."""
    capacity_gbit: float
    num_links: int
    """How many such links there are."""
    is_paid: bool
    """Whether it leaves a site, and so costs egress."""

    @property
    def utilisation(self) -> float:
        """Share of the link, above 1 if it cannot carry it."""
        return self.gbit / self.capacity_gbit

    def gigabytes(self, days: float) -> float:
        """Over all such links in this time, in units of 10^9 bytes."""
        return self.gbit / 8 * DAY_SECONDS * days * self.num_links


@dataclass(frozen=True, slots=True)
class Process:
    """What one process needs beside the model and its inner optimizer."""

    name: str
    count: int
    memory_bytes: float
    disk_bytes: float
    reason: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What it would take."""

    interval_steps: int
    """The smallest H at which no link is fuller than wanted."""
    num_fragments: int | None
    """The smallest P at which a fragment is up and down again within tau steps; None = the round trip takes longer."""
    fragment_seconds: float
    """How long one fragment takes up and down, with the round trip, in seconds."""
    budget_seconds: float
    """tau steps, in seconds."""
    outer_cores: float
    """CPU seconds that the outer needs in a second, on the slow machine on which it was measured."""


def decoupled_gbit(parameters: float, bits: float, interval_steps: int, step_seconds: float) -> float:
    """What one learner sends, or receives, on average, in Gbit/s."""
    return parameters * bits / (interval_steps * step_seconds) / GIGA


def data_parallel_gbit(settings: PlanSettings) -> float:
    """What each link of a ring of all sites carries while gradients are summed up, in Gbit/s; 0 for one site."""
    rounds = 2 * (settings.sites - 1) / settings.sites
    return (
        settings.parameters * settings.gradient_bits * rounds / (settings.reduce_share * settings.step_seconds) / GIGA
    )


def published_gbit(settings: PlanSettings) -> float:
    """What the published method has with this model, H and step: about 4 bits each way, in Gbit/s."""
    return decoupled_gbit(settings.parameters, PUBLISHED_BITS, settings.interval_steps, settings.step_seconds)


def value_bits(settings: PlanSettings) -> tuple[float, float]:
    """Bits per value up and down: as stated, else as measured."""
    up = settings.bits_up or bits_of(settings.codec_up)
    down = settings.bits_down or bits_of(settings.codec_down)
    return up, down


def loads(settings: PlanSettings) -> list[Load]:
    """Every link and direction of a run of ours: sites first, then the broker's machine."""
    up, down = (
        decoupled_gbit(settings.parameters, bits, settings.interval_steps, settings.step_seconds)
        for bits in value_bits(settings)
    )
    count = settings.sites
    return [
        Load("each site", "up", up, settings.up_gbit, count, is_paid=True),
        Load("each site", "down", down, settings.down_gbit, count, is_paid=False),
        Load("the broker", "in", count * up, settings.broker_gbit, 1, is_paid=False),
        Load("the broker", "out", count * down, settings.broker_gbit, 1, is_paid=True),
    ]


def others(settings: PlanSettings) -> list[Load]:
    """The same model trained otherwise, on each site's link."""
    capacity = min(settings.up_gbit, settings.down_gbit)
    reduced = settings.reduce_share * data_parallel_gbit(settings)  # on average over the step
    return [
        Load("data parallel", "ring", data_parallel_gbit(settings), capacity, settings.sites, is_paid=True),
        Load("data parallel, mean", "ring", reduced, capacity, settings.sites, is_paid=True),
        Load("decoupled, as published", "up", published_gbit(settings), settings.up_gbit, settings.sites, is_paid=True),
    ]


def egress_dollars(found: list[Load], settings: PlanSettings) -> float:
    """Price of everything that leaves a site over the whole run."""
    paid = sum(load.gigabytes(settings.days) for load in found if load.is_paid)
    return paid * settings.egress_dollars_per_gb


def needs(settings: PlanSettings) -> Needs:
    """H and P that reach the target, and whether links and outer keep up."""
    fullest = max(load.utilisation for load in loads(settings))
    interval = math.ceil(settings.interval_steps * fullest / settings.utilisation_max - 1e-9)
    budget = settings.overlap_steps * settings.step_seconds
    whole = fragment_seconds(settings, 1) - settings.round_trip_seconds
    free = budget - settings.round_trip_seconds
    values = settings.parameters / settings.num_fragments
    merging = values * (settings.sites * CPU_SECONDS_PER_VALUE_MERGED + CPU_SECONDS_PER_VALUE_STEPPED)
    return Needs(
        interval_steps=max(1, interval),
        num_fragments=max(1, math.ceil(whole / free - 1e-9)) if free > 0 else None,
        fragment_seconds=fragment_seconds(settings, settings.num_fragments),
        budget_seconds=budget,
        outer_cores=merging * settings.num_fragments / (settings.interval_steps * settings.step_seconds),
    )


def fragment_seconds(settings: PlanSettings, num_fragments: int) -> float:
    """From the moment a fragment is handed in by everybody until its version is there: transfer and round trip.

    All sites send and receive at once, so that the broker's link may be the slower one. Merging comes on top.
    """
    up, down = value_bits(settings)
    values = settings.parameters / num_fragments / GIGA
    sent = values * up * max(1 / settings.up_gbit, settings.sites / settings.broker_gbit)
    received = values * down * max(1 / settings.down_gbit, settings.sites / settings.broker_gbit)
    return sent + received + settings.round_trip_seconds


def processes(settings: PlanSettings) -> list[Process]:
    """Memory and disk of each kind of process, at most."""
    parameters, fragment = settings.parameters, settings.parameters / settings.num_fragments
    up, down = value_bits(settings)
    state = STATE_BYTES_PER_VALUE * parameters
    cached = min(state, settings.state_cache_bytes)
    merging = MERGE_BYTES_PER_VALUE * fragment
    per_version = fragment * (settings.sites * up + down) / 8
    kept = per_version * settings.checkpoint_versions
    since = min(kept, max(settings.checkpoint_bytes, STATE_BYTES_PER_VALUE * fragment) + per_version)
    store = VALUE_BYTES * parameters + CHECKPOINTS * state + settings.num_fragments * since
    books = VALUE_BYTES * parameters * (1 if settings.apply_rule == "rebase" else 2)
    payload = up / 8 * parameters
    return [
        Process("broker", 1, BROKER_BYTES, store, "version 0, checkpoints and the payloads since"),
        Process(
            "outer", 1, cached + settings.payload_cache_bytes + FETCH_BYTES_MAX + merging, state - cached,
            "states, payloads that wait, and 30 bytes for each value of a fragment; on disk the other states",
        ),
        Process(
            "learner", settings.sites, books + payload + FETCH_BYTES_MAX, state,
            "beside model and optimizer: anchors, encoded payloads, what is fetched; on disk its checkpoint",
        ),
    ]  # fmt: skip
