"""Values that rounds are about, made with few words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from isles.outer.payload_cache import Payload, PayloadCache
from isles.outer.services import Stock, Unavailable
from isles.outer.state_cache import StateCache
from isles.proto.clock import ManualClock
from isles.proto.ids import ContributionId
from isles.proto.messages import BlobRef, Contribution, LearnerInfo, Listing, Message, VersionInfo

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


class FakeServices:
    """Remembers what is asked and fetched until a test answers; works at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.asked: list[tuple[Message, Callable[[Message], None], bytes | None]] = []
        self.fetched: list[tuple[BlobRef, Callable[[Payload | Unavailable], None]]] = []

    def now(self) -> float:
        return self.clock.now()

    def draw_token(self) -> str:
        return "ab" * 8

    def ask(self, message: Message, then: Callable[[Message], None], payload: bytes | None = None) -> None:
        self.asked.append((message, then, payload))

    def fetch(self, blob: BlobRef, then: Callable[[Payload | Unavailable], None], *, bytes_max: int) -> None:
        self.fetched.append((blob, then))

    def work(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(call())

    work_aside = work

    def answer(self, kind: type[Message], reply: Message) -> Any:
        """Answers the oldest ask of a kind, which is returned."""
        index = next(index for index, (message, _, _) in enumerate(self.asked) if isinstance(message, kind))
        message, then, _ = self.asked.pop(index)
        then(reply)
        return message

    def asks(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message, _, _ in self.asked)

    def deliver(self, found: Payload | Unavailable, digest: str | None = None) -> None:
        """Delivers the fetch of a blob, by default the oldest one."""
        index = next(index for index, (blob, _) in enumerate(self.fetched) if digest in (None, blob.digest))
        _, then = self.fetched.pop(index)
        then(found)

    def is_fetching(self, digest: str) -> bool:
        return any(blob.digest == digest for blob, _ in self.fetched)


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
def stock() -> Stock:
    return Stock(StateCache(1 << 20), PayloadCache(1 << 20))
