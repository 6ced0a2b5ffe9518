"""Values that rounds are about, made with few words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Contribution, LearnerInfo, Listing, VersionInfo

INCARNATION = "ab" * 8


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def make_contribution() -> Callable[..., Contribution]:
    def make(learner: str, number: int = 1, *, fragment: int = 0, **fields: Any) -> Contribution:
        values: dict[str, Any] = {
            "id": ContributionId(learner, fragment, INCARNATION, number),
            "base_version": 0,
            "blob": BlobRef(digest=_digest(f"{learner}/{number}"), size_bytes=100),
            "codec": "int4",
            "tokens": 1000,
            "steps": 10,
            "seconds": 1.0,
            "norms": (1.0,),
        }
        return Contribution(**(values | fields))

    return make


@pytest.fixture
def make_learner() -> Callable[..., LearnerInfo]:
    def make(learner: str, **fields: Any) -> LearnerInfo:
        values: dict[str, Any] = {
            "learner": learner,
            "region": "eu",
            "incarnation": INCARNATION,
            "is_live": True,
            "last_seen_unix": 1.0,
            "tokens_per_second": 1000.0,
            "step_seconds": 0.1,
        }
        return LearnerInfo(**(values | fields))

    return make


@pytest.fixture
def make_head() -> Callable[..., VersionInfo]:
    def make(version: int = 0, *, fragment: int = 0, **fields: Any) -> VersionInfo:
        values: dict[str, Any] = {
            "fragment": fragment,
            "version": version,
            "parameters_sha256": _digest(f"theta {version}"),
            "parameters": BlobRef(digest=_digest(f"parameters {version}"), size_bytes=100),
        }
        return VersionInfo(**(values | fields))

    return make


@pytest.fixture
def make_listing(make_head: Callable[..., VersionInfo]) -> Callable[..., Listing]:
    def make(pending: list[Contribution], learners: list[LearnerInfo], version: int = 0, **head_fields: Any) -> Listing:
        ordered = tuple(sorted(pending, key=lambda contribution: contribution.id))
        return Listing(head=make_head(version, **head_fields), pending=ordered, learners=tuple(learners))

    return make
