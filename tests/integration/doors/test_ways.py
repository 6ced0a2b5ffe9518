"""A process with a relay and a home broker: it changes over when the relay is silent, and goes back.

The relay is a link here that only passes bytes, so it has the home broker's key.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from isles.ops.chaos.campaign import CLEAR, LinkShape
from isles.ops.chaos.proxy import Network
from isles.proto import ways
from isles.proto.client import Refused, Welcomed
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection, News
from isles.proto.errors import ConfigError
from isles.proto.key_files import read_client_key, write_client_key
from isles.proto.messages import AskHeads, Heads, Hello, Progress
from isles.proto.route import Route
from isles.proto.transport.address import Address

WAIT_SECONDS = 90.0
RELAY_TIMEOUT_SECONDS = 2.0
SHUT = LinkShape(is_refusing=True)
DARK = LinkShape(is_blackhole=True)

House = Any


@pytest.fixture
def link(house: House) -> Iterator[Network]:
    """What stands in place of a relay."""
    network = Network(Address.parse(house.address), ["relay"])
    network.start()
    yield network
    network.close()


@pytest.fixture
def key(house: House, tmp_path: Path) -> Path:
    """The key of us-1, which names the link as its relay."""
    key = read_client_key(house.key("us-1"))
    path = tmp_path / "us-1.key"
    write_client_key(path, key.model_copy(update={"relays": key.broker}))
    return path


class Worker:
    """One incarnation, which beats as a worker does."""

    def __init__(self, route: Route) -> None:
        self.ways: list[str] = []
        hello = Hello(role="worker", id="us-1", incarnation=secrets.token_hex(8))
        self.connection: Connection = route.connect(hello, tell=lambda address, _: self.ways.append(address))
        self.connection.start()

    def close(self) -> None:
        self.connection.close()

    def wait_for(self, is_wanted: Callable[[News], bool]) -> News:
        clock = SystemClock()
        deadline, beat_at = clock.now() + WAIT_SECONDS, 0.0
        while clock.now() < deadline:
            if clock.now() >= beat_at and self.connection.client.session:
                beat_at = clock.now() + 0.5
                self.connection.client.forget(lambda ask: isinstance(ask, Progress))
                self.connection.ask(Progress(steps=1, tokens=1))
            for news in self.connection.poll(0.1):
                assert not isinstance(news, Refused), news
                if is_wanted(news):
                    return news
        raise AssertionError(f"nothing came; ways taken: {self.ways}")

    def enter(self) -> str:
        """The session of the next WELCOME."""
        news = self.wait_for(lambda news: isinstance(news, Welcomed))
        assert isinstance(news, Welcomed)
        return news.welcome.new_session


def test_a_relay_that_is_gone_is_replaced_by_the_home_broker_and_comes_back(
    house: House, link: Network, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "LOOK_SECONDS", 2.0)
    relay = str(link.addresses["relay"])
    with closing(Worker(Route(house.address, key, relay, RELAY_TIMEOUT_SECONDS))) as worker:
        session = worker.enter()
        for shape in (SHUT, DARK):
            link.shape("relay", shape)
            assert worker.enter() == session, "the same incarnation has the same session, whatever the way"
            assert worker.ways[-1] == house.address
            link.shape("relay", CLEAR)
            assert worker.enter() == session
            assert worker.ways[-1] == relay
        assert len(worker.ways) == 4
        worker.connection.ask(question := AskHeads())
        news = worker.wait_for(lambda news: getattr(news, "ask", None) is question)
        assert isinstance(news.reply, Heads)  # type: ignore[union-attr]
    assert house.learners() == {"us-1"}


def test_a_relay_that_was_never_there_is_not_waited_for(house: House, link: Network, key: Path) -> None:
    link.shape("relay", SHUT)
    relay = str(link.addresses["relay"])
    with closing(Worker(Route(house.address, key, relay, RELAY_TIMEOUT_SECONDS))) as worker:
        assert worker.enter()
        assert worker.ways == [house.address]


def test_without_a_home_address_the_relay_is_waited_for(house: House, link: Network, key: Path) -> None:
    link.shape("relay", SHUT)
    with closing(Worker(Route(None, key, str(link.addresses["relay"]), RELAY_TIMEOUT_SECONDS))) as worker:
        for _ in range(20):
            assert worker.connection.poll(0.2) == []
        link.shape("relay", CLEAR)
        assert worker.enter()
        assert worker.ways == []


def test_what_is_said_through_a_relay_is_proved(house: House, link: Network, key: Path) -> None:
    with closing(Worker(Route(None, key, str(link.addresses["relay"])))) as worker:
        assert worker.enter()
        prove = worker.connection.client.prove
        assert prove is not None
        proved = prove(worker.connection.client.hello, "")
        assert isinstance(proved, Hello)
        assert proved.proof is not None
        assert proved.proof.public == read_client_key(key).public


def test_a_key_that_names_no_relay_dials_none(house: House, link: Network) -> None:
    with pytest.raises(ConfigError, match="names no relay"):
        Worker(Route(house.address, house.key("us-1"), str(link.addresses["relay"])))
