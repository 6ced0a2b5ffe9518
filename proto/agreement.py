"""What everybody in a run agrees on: written once, by the first INIT, and received by all who come later.

A process may state any of these settings; those that it states must equal the run's, those that it leaves out it
adopts. So a worker started by hand needs only the address of the broker.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from isles.proto.codec_names import CodecName
from isles.proto.ids import Digest, Name
from isles.proto.presets import PRESETS, QUORUM_MAX, Preset

ApplyRule = Literal["rebase", "overwrite", "blend", "hybrid"]
Books = Literal["exact", "published"]
MergeRule = Literal["mean", "rda"]
OuterSchedule = Literal["constant", "linear", "cosine"]

Scalar = bool | int | float | Annotated[str, StringConstraints(max_length=4096)] | None
"""What a setting may be on the wire; settings with structure are dotted keys."""

MANIFEST_CHARACTERS_MAX: Final = 6 << 20
"""Longest manifest text: a model of 50,000 tensors has about 5 MB."""

SETTINGS_EPOCHS_MAX: Final = 1000
"""Changes of settings that one run may see; each is made by hand while the run stands still."""

SETTINGS_ALWAYS_IN_DIGEST: Final = frozenset(
    {
        "preset",
        "interval_steps",
        "has_dynamic_interval",
        "num_fragments",
        "codec_up",
        "codec_down",
        "apply_rule",
        "blend_alpha",
        "books",
        "quorum",
        "overlap_steps",
        "grace_share",
        "grace_min_seconds",
        "grace_max_seconds",
        "has_cues",
        "merge_rule",
        "staleness_exponent",
        "outer_learning_rate",
        "outer_schedule",
        "outer_warmup_share",
        "outer_final_share",
        "outer_momentum",
        "has_fractional_steps",
        "horizon_versions",
        "is_deterministic",
    }
)
"""What the digest of a run's settings covers whatever its value. Closed: the recipes in every store depend on it.

Any other setting was added when there were stores without it, and a run that was begun without it is read as one that
has its default. So that default must do what was done before there was such a setting, must never change, and must not
be replaced by a preset.
"""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SyncSettings(BaseModel):
    """How the learners of one run are synchronised. What is not stated comes from the preset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: Preset = Field(
        default="decoupled",
        description="published method whose settings replace the defaults of this section; what is stated wins over it",
    )
    interval_steps: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=48, description="H: inner steps between two contributions of one learner to one fragment"
    )
    has_dynamic_interval: bool = Field(
        default=False,
        description="whether a learner's H is scaled by its speed, so that slow and fast ones contribute at one pace",
    )
    num_fragments: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=4, description="P: disjoint sets of tensors that are synchronised in turn"
    )
    codec_up: CodecName = Field(default="step1.5", description="codec of the deltas that learners send")
    codec_down: CodecName = Field(default="step1.5", description="codec of the updates that the outer publishes")
    apply_rule: ApplyRule = Field(default="rebase", description="how a learner applies a new version")
    blend_alpha: Share = Field(default=0.5, description="share of the live parameters kept by blend and hybrid")
    books: Books = Field(
        default="exact", description="exact counts every piece of work once; published follows the papers' rules"
    )
    quorum: Annotated[int, Field(ge=1, le=QUORUM_MAX)] = Field(
        default=1, description="K: distinct learners that a round waits for; never more than are live"
    )
    overlap_steps: NotNegative = Field(
        default=4.0, description="tau: inner steps that a synchronisation may take without anybody noticing"
    )
    grace_share: Share = Field(default=0.9, description="gamma: share of the slack that the grace window may use")
    grace_min_seconds: NotNegative = Field(default=0.0, description="shortest grace window, in seconds")
    grace_max_seconds: NotNegative = Field(default=10.0, description="longest grace window, in seconds")
    has_cues: bool = Field(default=True, description="whether an open round cues the learners that are not in it yet")
    merge_rule: MergeRule = Field(
        default="rda",
        description="how the deltas of a round become one outer gradient: mean, or rda = mean norm and direction",
    )
    staleness_exponent: Annotated[float, Field(ge=0, le=4, allow_inf_nan=False)] = Field(
        default=0.0,
        description="exponent a of the weight (1 + versions behind)^-a that old work keeps; 0 = all of it",
    )
    outer_learning_rate: Positive = Field(default=0.7, description="step of the outer optimizer, at its highest")
    outer_schedule: OuterSchedule = Field(
        default="constant", description="how the outer optimizer's step falls over the run"
    )
    outer_warmup_share: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        default=0.0, description="share of the run over which the outer optimizer's step rises from a tenth"
    )
    outer_final_share: Share = Field(
        default=0.1, description="where the linear and the cosine schedule end, as a share of the highest step"
    )
    outer_momentum: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        default=0.5, description="Nesterov momentum of the outer optimizer; 0 makes it plain SGD"
    )
    has_fractional_steps: bool = Field(
        default=True, description="whether a partial round takes a partial outer step (fraction f)"
    )
    horizon_versions: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=64, description="a contribution whose base is more versions behind the head than this has expired"
    )
    is_deterministic: bool = Field(
        default=False,
        description="apply each version exactly tau steps after its contribution, waiting if need be (one learner)",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Puts the values of the preset below those that are given; a wrong preset is left for its field to refuse."""
        preset = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS[preset], **given} if isinstance(preset, str) and preset in PRESETS else given

    @model_serializer(mode="wrap")
    def _write_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All values, even where defaults are left out: those of a preset, or of another build, are not these."""
        return {**{name: getattr(self, name) for name in type(self).model_fields}, **handler(self)}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.grace_min_seconds > self.grace_max_seconds:
            raise ValueError(
                f"sync.grace_min_seconds = {self.grace_min_seconds} is above sync.grace_max_seconds = "
                f"{self.grace_max_seconds}: raise the second or lower the first"
            )
        if self.is_deterministic and self.overlap_steps > self.interval_steps:
            raise ValueError(
                f"sync.overlap_steps = {self.overlap_steps} is above sync.interval_steps = {self.interval_steps}: "
                "a deterministic run applies a version before the next contribution of its fragment"
            )
        if self.is_deterministic and self.has_dynamic_interval:
            raise ValueError(
                "sync.has_dynamic_interval makes contributions depend on measured times, which sync.is_deterministic "
                "excludes: switch one of them off"
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the settings: what a recipe names them by.

        A setting that is not in SETTINGS_ALWAYS_IN_DIGEST enters only if it differs from its default, so that the
        digest of a run that does without it stays what its recipes say.
        """
        return _digest(self)


@lru_cache(maxsize=SETTINGS_EPOCHS_MAX)
def _digest(sync: SyncSettings) -> str:
    """Kept by value: a history asks for it with every version, and a changed copy must not inherit it."""
    fields = type(sync).model_fields
    covered = {
        name: value
        for name, value in sync.model_dump(mode="json").items()
        if name in SETTINGS_ALWAYS_IN_DIGEST or getattr(sync, name) != fields[name].get_default()
    }
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


BUDGET_MAX: Final = 2**53 - 1
"""What any count on the wire may be."""


class Budget(BaseModel):
    """When a run is finished, and thereby the length of its learning-rate schedule. Exactly one of the two is set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[int, Field(ge=1, le=BUDGET_MAX)] | None = Field(
        default=None, description="merged tokens (mean over fragments) that finish the run"
    )
    rounds: Annotated[int, Field(ge=1, le=BUDGET_MAX)] | None = Field(
        default=None, description="committed rounds (sum over fragments) that finish the run"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tokens is None) == (self.rounds is None):
            raise ValueError("a budget is either tokens or rounds: give exactly one of them")
        return self

    def progress(self, *, tokens_merged: float, rounds_committed: int) -> float:
        """The global step as a share of the budget, in [0, 1]: a function of versions alone."""
        done = tokens_merged / self.tokens if self.tokens else rounds_committed / (self.rounds or 1)
        return min(1.0, done)


class RunRecord(BaseModel):
    """The one record of a run; its digest-bearing parts decide who may take part."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    run: Name
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    sync: SyncSettings
    budget: Budget
    manifest_digest: Digest
    manifest: Annotated[str, StringConstraints(max_length=MANIFEST_CHARACTERS_MAX)]
    """The canonical text whose SHA-256 is the digest; read and checked by whoever uses it (`isles.proto.manifest`)."""
    task: Annotated[str, Field(max_length=256)] = ""
    task_settings: dict[Annotated[str, Field(max_length=128)], Scalar] = {}
    """What every worker must share to build the same model and see the same corpus."""
    corpus_sha256: Annotated[str, Field(max_length=64)] = ""
    past_sync: Annotated[tuple[SyncSettings, ...], Field(max_length=SETTINGS_EPOCHS_MAX, fail_fast=True)] = ()
    """The settings before each change of them, oldest first: `sync` is those of settings epoch `len(past_sync)`."""

    @property
    def every_sync(self) -> tuple[SyncSettings, ...]:
        """The settings of all settings epochs, the first ones first."""
        return (*self.past_sync, self.sync)

    def sync_of(self, digest: str) -> SyncSettings | None:
        """The settings that a recipe names; None if the run never had them."""
        return next((sync for sync in reversed(self.every_sync) if sync.digest == digest), None)

    def settings_epoch_of(self, digest: str) -> int | None:
        """The newest settings epoch with these settings, counted from 0; None if the run never had them."""
        digests = [sync.digest for sync in self.every_sync]
        return len(digests) - 1 - digests[::-1].index(digest) if digest in digests else None

    def first_difference(self, stated: dict[str, Any]) -> str | None:
        """Names the first stated setting that is not the run's, as one sentence; None if all agree.

        `stated` has dotted keys, such as `sync.interval_steps`; a key the record does not know is a difference.
        """
        mine = self.model_dump(mode="json")
        for key in sorted(stated):
            node: Any = mine
            for part in key.split("."):
                if not isinstance(node, dict) or part not in node:
                    return f"this run knows no setting {key}"
                node = node[part]
            if node != stated[key]:
                return f"{key} is {node!r} in this run and {stated[key]!r} here: leave it out or make them equal"
        return None
