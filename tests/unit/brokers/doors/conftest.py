"""A broker with keys, on a stage, and those who have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage
from isles.proto.keys import AllowedKey, AllowList, KeyRole
from isles.proto.messages import Initialised, Lease, Role, Welcome


def _public(letter: str) -> str:
    return letter * 40


KEYS: dict[str, tuple[str, KeyRole]] = {
    "s": ("service", "worker"),
    "u": ("us-1", "worker"),
    "e": ("eu-1", "worker"),
    "o": ("outer-1", "outer"),
    "a": ("admin", "operator"),
    "r": ("relay-1", "relay"),
}
"""First letter of the public key -> its name and role."""


def _allow(letters: str, **others: tuple[str, KeyRole]) -> AllowList:
    known = {letter: KEYS[letter] for letter in letters} | others
    return AllowList(
        keys=tuple(AllowedKey(name=name, role=role, public=_public(letter)) for letter, (name, role) in known.items())
    )


EVERYBODY = "".join(KEYS)


@pytest.fixture
def public() -> Callable[[str], str]:
    """The public key of a letter."""
    return _public


@pytest.fixture
def allow() -> Callable[..., AllowList]:
    """Makes an allow-list of the keys of some letters, and of others: letter -> name and role."""
    return _allow


@pytest.fixture
def settings() -> RoutingSettings:
    return RoutingSettings(chunk_bytes=4096, credit_chunks=2, num_shards=8, versions_kept=3)


@pytest.fixture
def empty_stage(settings: RoutingSettings) -> Stage:
    """A broker with keys whose run has no parameters yet."""
    return Stage(settings, allowed=_allow(EVERYBODY), verify=lambda _proof, _words: False)


Come = Callable[..., Member]


@pytest.fixture
def come(empty_stage: Stage) -> Come:
    """Has a process with the key of that letter say HELLO; a new incarnation each time."""
    numbers: Iterator[int] = count(1)

    def run(letter: str, role: Role = "worker", name: str = "us-1", **fields: str) -> Member:
        member = empty_stage.member(role, name, f"{next(numbers):016x}", key=_public(letter) if letter else "")
        member.join(**fields)
        return member

    return run


@pytest.fixture
def stage(empty_stage: Stage, come: Come, initialise: Callable[[Member], Initialised]) -> Stage:
    """A broker with keys and a run at version 0."""
    initialise(come("a", "operator", "founder"))
    return empty_stage


@pytest.fixture
def worker(stage: Stage, come: Come) -> Member:
    return come("u")


@pytest.fixture
def outer(stage: Stage, come: Come) -> Member:
    """An outer that holds both fragments with epoch 1."""
    member = come("o", "outer", "outer-1")
    member.ask(Lease(fragments=(0, 1)))
    return member


@pytest.fixture
def given(stage: Stage) -> Callable[..., tuple[Member, Welcome]]:
    """Has a worker of the service come without an id; the member, which has one then, and its WELCOME."""

    def run(incarnation: str, letter: str = "s", rejoin: str = "") -> tuple[Member, Welcome]:
        member = stage.member("worker", "", incarnation, key=_public(letter))
        answer = member.join(rejoin=rejoin)
        assert isinstance(answer, Welcome), answer
        member.id = answer.learner
        return member, answer

    return run
