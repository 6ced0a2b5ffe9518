"""What everybody in a run agrees on: written once, by the first INIT, and received by all who come later.

A process may state any of these settings; those that it states must equal the run's, those that it leaves out it
adopts. So a worker started by hand needs only the address of the broker.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from isles.proto.ids import Digest, Name

ApplyRule = Literal["rebase", "overwrite", "blend", "hybrid"]
Books = Literal["exact", "published"]
MergeRule = Literal["mean"]
CodecName = Literal["fp32", "bf16", "int8", "int4"]

Scalar = bool | int | float | Annotated[str, StringConstraints(max_length=4096)] | None
"""What a setting may be on the wire; settings with structure are dotted keys."""

MANIFEST_CHARACTERS_MAX: Final = 6 << 20
"""Longest manifest text: a model of 50,000 tensors has about 5 MB."""

SETTINGS_EPOCHS_MAX: Final = 1000
"""Changes of settings that one run may see; each is made by hand while the run stands still."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SyncSettings(BaseModel):
    """How the learners of one run are synchronised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval_steps: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=48, description="H: inner steps between two contributions of one learner to one fragment"
    )
    num_fragments: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=4, description="P: disjoint sets of tensors that are synchronised in turn"
    )
    codec_up: CodecName = Field(default="int4", description="codec of the deltas that learners send")
    codec_down: CodecName = Field(default="int4", description="codec of the updates that the outer publishes")
    apply_rule: ApplyRule = Field(default="rebase", description="how a learner applies a new version")
    blend_alpha: Share = Field(default=0.5, description="share of the live parameters kept by blend and hybrid")
    books: Books = Field(
        default="exact", description="exact counts every piece of work once; published follows the papers' rules"
    )
    quorum: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1, description="K: distinct learners that a round waits for"
    )
    overlap_steps: NotNegative = Field(
        default=4.0, description="tau: inner steps that a synchronisation may take without anybody noticing"
    )
    grace_share: Share = Field(default=0.9, description="gamma: share of the slack that the grace window may use")
    grace_min_seconds: NotNegative = Field(default=0.0, description="shortest grace window, in seconds")
    grace_max_seconds: NotNegative = Field(default=10.0, description="longest grace window, in seconds")
    has_cues: bool = Field(default=True, description="whether an open round cues the learners that are not in it yet")
    merge_rule: MergeRule = Field(default="mean", description="how the deltas of a round become one outer gradient")
    outer_learning_rate: Positive = Field(default=0.7, description="step of the outer optimizer")
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
        return self

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of all settings: what a recipe names them by."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


class Budget(BaseModel):
    """When a run is finished, and thereby the length of its learning-rate schedule. Exactly one of the two is set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="merged tokens (mean over fragments) that finish the run"
    )
    rounds: Annotated[int, Field(ge=1)] | None = Field(
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

    model_config = ConfigDict(frozen=True, extra="ignore")

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
    past_sync: Annotated[tuple[SyncSettings, ...], Field(max_length=SETTINGS_EPOCHS_MAX)] = ()
    """The settings before each change of them, oldest first: `sync` is those of settings epoch `len(past_sync)`."""

    def sync_of(self, digest: str) -> SyncSettings | None:
        """The settings that a recipe names; None if the run never had them."""
        return next((sync for sync in (self.sync, *reversed(self.past_sync)) if sync.digest == digest), None)

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
