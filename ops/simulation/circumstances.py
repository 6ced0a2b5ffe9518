"""What one seed's run of the world of faults is like: its settings, and what may happen to it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from isles.brokers.limits import RoutingSettings
from isles.ops.simulation.faults import Faults
from isles.ops.simulation.values import LEARNERS_MAX
from isles.proto.agreement import ApplyRule, Budget, RunRecord, SyncSettings
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import CHUNK_BYTES, Limits

RULES: Final[tuple[ApplyRule, ...]] = ("rebase", "overwrite", "blend", "hybrid")
"""Each seed has one, in turn."""
QUORUMS: Final = (*(30 * (1,)), *(8 * (2,)), 3, LEARNERS_MAX + 2)
"""Large ones are seldom, fifty in a thousand seeds: every version takes as many messages as there are contributions in
it, ten times over."""
LOOK_STEPS: Final = (1, 3, 3, 4)
"""Per fragment. Mostly a learner's own work is merged and a few versions of others are there when it looks again, so it
skips some, as one does whose steps are short beside its transfers."""
QUORUM_LARGE: Final = 3
"""From here on rounds take long, so there have to be more of them at a time."""


class _Routing(RoutingSettings):
    """Payloads here are far smaller than the smallest chunk that a broker may be set to."""

    @property
    def limits(self) -> Limits:
        usual = RoutingSettings.model_construct(**{**dict(self), "chunk_bytes": CHUNK_BYTES})
        return usual.limits.model_copy(update={"chunk_bytes": self.chunk_bytes})


@dataclass(frozen=True)
class Circumstances:
    """All that a seed draws before anything happens."""

    seed: int
    faults: Faults
    routing: RoutingSettings
    record: RunRecord
    num_blobs_kept: int
    """That an outer need not fetch again."""
    disk_seconds: float
    """What one operation of the broker's disk takes."""
    look_steps: int
    """Steps of a learner from one look at what it was hinted at to the next: with more of them it skips versions."""

    @classmethod
    def draw(cls, seed: int, chance: random.Random) -> Circumstances:
        """Those of a seed; `chance` is its generator, still unused."""
        faults = Faults.draw(chance)
        sync = _draw_sync(seed, chance)
        specs = [TensorSpec(f"t{number}", (1,), "float32", "parameter") for number in range(sync.num_fragments)]
        manifest = Manifest.build(specs, {}, sync.num_fragments)
        record = RunRecord(
            run="world",
            seed=seed,
            sync=sync,
            budget=Budget(tokens=1 << 40),
            manifest_digest=manifest.digest,
            manifest=manifest.to_text(),
        )
        routing = _draw_routing(chance)
        return cls(
            seed,
            faults,
            routing,
            record,
            num_blobs_kept=chance.choice((0, 16, 64, 64)),
            disk_seconds=chance.choice((0.001, 0.005, 0.02)),
            look_steps=1 if sync.quorum >= QUORUM_LARGE else sync.num_fragments * chance.choice(LOOK_STEPS),
        )

    def __str__(self) -> str:
        sync, routing = self.record.sync, self.routing
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


def _draw_sync(seed: int, chance: random.Random) -> SyncSettings:
    quorum = chance.choice(QUORUMS)
    is_large = quorum >= QUORUM_LARGE
    return SyncSettings(
        interval_steps=1 if is_large else chance.choice((1, 2, 2, 3)),
        num_fragments=3 if is_large else chance.choice((1, 2, 3)),
        apply_rule=RULES[seed % len(RULES)],
        quorum=quorum,
        horizon_versions=chance.choice((8, 16, 64)),
        has_cues=chance.random() < 0.4,
        grace_max_seconds=chance.choice((0.0, 0.0, 0.3, 1.0)),
        has_fractional_steps=False,
    )


def _draw_routing(chance: random.Random) -> RoutingSettings:
    usual = _Routing(
        credit_chunks=chance.choice((1, 2, 8)),
        learner_lease_seconds=chance.choice((6.0, 9.0)),
        session_idle_seconds=chance.choice((10.0, 120.0)),
        versions_kept=chance.choice((2, 3, 8)),
        unused_blob_seconds=chance.choice((4.0, 30.0, 600.0)),
        upload_idle_seconds=chance.choice((5.0, 60.0)),
        num_shards=LEARNERS_MAX,
        quarantine_rejections=0,  # poison strikes learners that go on
    )
    return usual.model_copy(update={"chunk_bytes": chance.choice((256, 4096, 4096, 4096))})
