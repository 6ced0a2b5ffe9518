"""A broker with keys on a stage, relays, and who comes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage
from isles.proto.key_files import generate_pair
from isles.proto.keys import AllowedKey, AllowList, ClientKey, KeyRole
from isles.proto.messages import Contribution, Error, Hello, Initialised, Message, Offer, Role, Welcome
from isles.proto.proofs import Prover, Verifier

HOME = generate_pair()
ROLES: dict[str, KeyRole] = {
    "us-1": "worker",
    "eu-1": "worker",
    "service": "worker",
    "outer-1": "outer",
    "admin": "operator",
    "relay-us": "relay",
    "relay-eu": "relay",
}


def _make(name: str) -> ClientKey:
    pair = generate_pair()
    return ClientKey(name=name, role=ROLES[name], public=pair.public, secret=pair.secret, broker=(HOME.public,))


KEYS = {name: _make(name) for name in ROLES}
A, B = "a1" * 8, "b2" * 8


def allow(*names: str) -> AllowList:
    return AllowList(keys=tuple(AllowedKey(name=one, role=ROLES[one], public=KEYS[one].public) for one in names))


def all_but(*names: str) -> AllowList:
    return allow(*(name for name in ROLES if name not in names))


@dataclass
class Behind(Member):
    """A client behind a relay, which passes on what it says."""

    relay: Member = field(kw_only=True)
    signs_with: str = ""
    """The name of its key; empty = it proves nothing."""

    @property
    def connection(self) -> bytes:
        return self.relay.connection

    def hello(self, **fields: Any) -> Hello:
        hello = Hello(role=self.role, id=self.id, incarnation=self.incarnation, **fields)
        proved = Prover(KEYS[self.signs_with]).prove(hello, "") if self.signs_with else hello
        assert isinstance(proved, Hello)
        return proved

    def join(self, **fields: Any) -> Message:
        answer = self.ask(self.hello(**fields))
        if isinstance(answer, Welcome):
            self.session, self.id = answer.new_session, answer.learner or self.id
        return answer

    def offer(self, contribution: Contribution) -> Offer:
        offer = Offer(contribution=contribution)
        proved = Prover(KEYS[self.signs_with]).prove(offer, self.stage.router.state.store) if self.signs_with else offer
        assert isinstance(proved, Offer)
        return proved


@pytest.fixture
def settings() -> RoutingSettings:
    return RoutingSettings(chunk_bytes=4096, credit_chunks=2, num_shards=8, versions_kept=3)


@pytest.fixture
def empty_stage(settings: RoutingSettings) -> Stage:
    return Stage(settings, allowed=allow(*ROLES), verify=Verifier(HOME).verify)


Come = Callable[..., Member]


@pytest.fixture
def come(empty_stage: Stage) -> Come:
    """Has the owner of a key say HELLO to the broker itself."""
    numbers: Iterator[int] = count(1)

    def run(key: str, role: Role, name: str = "", incarnation: str = "") -> Member:
        incarnation = incarnation or f"{next(numbers):016x}"
        member = empty_stage.member(role, name or key, incarnation, key=KEYS[key].public)
        assert isinstance(member.join(), Welcome)
        return member

    return run


@pytest.fixture
def stage(empty_stage: Stage, come: Come, initialise: Callable[[Member], Initialised]) -> Stage:
    initialise(come("admin", "operator", "founder"))
    return empty_stage


@pytest.fixture
def relay(stage: Stage, come: Come) -> Member:
    return come("relay-us", "relay")


Behinds = Callable[..., Behind]


@pytest.fixture
def behind() -> Behinds:
    """Makes a client behind a relay."""

    def run(relay: Member, signs_with: str = "us-1", role: Role = "worker", name: str = "us-1", inc: str = A) -> Behind:
        return Behind(relay.stage, role, name, inc, key=relay.key, relay=relay, signs_with=signs_with)

    return run


@pytest.fixture
def worker(relay: Member, behind: Behinds) -> Behind:
    """The worker us-1, which came through the relay."""
    member = behind(relay)
    assert isinstance(member.join(region="us"), Welcome)
    return member


@pytest.fixture
def keys() -> dict[str, ClientKey]:
    """Name -> key; all of them are let in."""
    return KEYS


@pytest.fixture
def without() -> Callable[..., AllowList]:
    """The allow-list less some names."""
    return all_but


@pytest.fixture
def refusal() -> Callable[[Message, str], str]:
    """The text of an error of this code."""

    def run(answer: Message, code: str) -> str:
        assert isinstance(answer, Error), answer
        assert answer.code == code
        return answer.text

    return run


@pytest.fixture
def session_of(empty_stage: Stage) -> Callable[[Member], Any]:
    """What the broker knows of a member's session."""
    return lambda member: empty_stage.router.state.sessions.get(member.session)
