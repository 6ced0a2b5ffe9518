"""Which way is taken: the relay as long as it answers, the home broker in its place, and back."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.clock import ManualClock
from isles.proto.connection import Connection
from isles.proto.messages import AskStatus, Channel, Error, Hello, Message, Status, Welcome, pack, unpack
from isles.proto.transport.interface import Arrival, Bytes
from isles.proto.transport.two_ways import ASK_SECONDS, TwoWays
from isles.proto.ways import LOOK_FOR_SECONDS, LOOK_SECONDS, Way, Ways

TIMEOUT = 15.0
STATUS = Status(run="r", broker_incarnation="ab" * 8, uptime_seconds=1.0, progress=0.0)


def listen(ways: Ways, until: float, *, since: float, is_heard: bool = False, is_denied: bool = False) -> None:
    """Listens in slices of half a second."""
    now = since
    while now < until:
        ways.attend(now)
        now += 0.5
        ways.listened(now, is_heard=is_heard, is_denied=is_denied)


def test_a_relay_that_answers_is_the_way() -> None:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, 1000.0, since=0.0, is_heard=True)
    assert (ways.present, ways.should_ask(1000.0)) == (Way.RELAY, False)


def test_while_the_relay_is_silent_the_home_broker_is_asked_until_it_answers() -> None:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, TIMEOUT, since=0.0)
    assert not ways.should_ask(TIMEOUT)
    listen(ways, 500.0, since=TIMEOUT)
    assert (ways.present, ways.should_ask(500.0)) == (Way.RELAY, True), "nobody answers there either"
    ways.answered(500.0)
    assert (ways.present, ways.should_ask(500.5)) == (Way.HOME, False)


def test_a_relay_that_is_heard_again_before_the_home_broker_answers_stays_the_way() -> None:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, 20.0, since=0.0)
    assert ways.should_ask(20.0)
    listen(ways, 20.5, since=20.0, is_heard=True)
    assert not ways.should_ask(20.5)


def test_a_relay_that_lets_nobody_in_is_not_waited_for() -> None:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, 0.5, since=0.0, is_denied=True)
    assert ways.should_ask(0.5)


def test_who_did_not_listen_heard_nobody_and_blames_nobody() -> None:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, 10.0, since=0.0)
    ways.attend(400.0)
    ways.listened(400.5, is_heard=False, is_denied=False)
    assert ways.silent_seconds(400.5) == 10.5
    assert not ways.should_ask(400.5)


def home(now: float = 100.0) -> Ways:
    ways = Ways(TIMEOUT, 0.0)
    listen(ways, now, since=0.0)
    ways.answered(now)
    return ways


def test_the_relay_is_looked_after_now_and_then() -> None:
    ways = home()
    asked = []
    for half in range(1, 400):
        now = 100.0 + half / 2
        listen(ways, now, since=now - 0.5, is_heard=True)
        if ways.should_ask(now):
            asked.append(now - 100.0)
    assert asked[0] == LOOK_SECONDS
    assert len([at for at in asked if at < 2 * LOOK_SECONDS]) == 2 * LOOK_FOR_SECONDS
    assert asked[int(2 * LOOK_FOR_SECONDS)] == 2 * LOOK_SECONDS + LOOK_FOR_SECONDS


def test_a_relay_that_answers_again_is_the_way_again() -> None:
    ways = home()
    listen(ways, 170.0, since=100.0, is_heard=True)
    assert ways.should_ask(165.0)
    ways.answered(165.0)
    assert (ways.present, ways.should_ask(165.5)) == (Way.RELAY, False)


def test_while_the_home_broker_is_silent_the_relay_is_asked_all_the_time() -> None:
    ways = home()
    listen(ways, 130.0, since=100.0)
    assert all(ways.should_ask(now) for now in (130.0, 131.0, 300.0))


# ----------------------------------------------------------------------------------------------------- the transport


class Line:
    """A way that a test answers on."""

    def __init__(self, way: Way, clock: ManualClock) -> None:
        self.way, self._clock = way, clock
        self.denial: str | None = None
        self.said: list[Any] = []
        self.answers: list[Message] = []
        self.num_wakes = 0
        self.is_open, self.is_up = True, True

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        if self.is_up:
            self.said.append(unpack(header))
        return self.is_up

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        assert self.is_open
        if not self.answers:
            self._clock.advance(timeout_seconds)
        answers, self.answers = self.answers, []
        return [Arrival(Channel.CONTROL, b"", pack(answer)) for answer in answers]

    def wake(self) -> None:
        self.num_wakes += 1

    def close(self) -> None:
        self.is_open = False


class World:
    """Two ways, and what was dialled."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.dialled: list[Line] = []
        self.two = TwoWays(self._dial, TIMEOUT, self.clock)

    def _dial(self, way: Way) -> Line:
        self.dialled.append(Line(way, self.clock))
        return self.dialled[-1]

    @property
    def last(self) -> Line:
        return self.dialled[-1]

    def poll(self, seconds: float) -> list[Arrival]:
        until = self.clock.now() + seconds
        arrivals = []
        while self.clock.now() < until:
            arrivals += self.two.poll(0.5)
        return arrivals


@pytest.fixture
def world() -> World:
    return World()


def test_a_silent_relay_is_left_for_a_home_broker_that_answers(world: World) -> None:
    relay = world.last
    world.poll(TIMEOUT - 1)
    assert world.dialled == [relay]
    world.poll(2 + 3 * ASK_SECONDS)
    home = world.last
    assert (home.way, relay.is_open) == (Way.HOME, True)
    assert {type(message) for message in home.said} == {AskStatus}
    assert len(home.said) in (3, 4)
    assert world.two.take_change() is None
    home.answers = [STATUS]
    world.poll(0.5)
    assert (relay.is_open, home.is_open) == (False, True)
    silent = world.two.take_change()
    assert silent is not None
    assert silent > TIMEOUT
    assert world.two.take_change() is None
    world.two.send(Channel.CONTROL, pack(AskStatus()))
    assert home.said[-1] == AskStatus()


def test_only_the_status_is_an_answer(world: World) -> None:
    world.poll(TIMEOUT + 1)
    world.last.answers = [Error(code="internal", text="no")]
    world.poll(1.0)
    assert world.two.ways.present is Way.RELAY


def test_a_home_broker_that_is_not_asked_any_more_is_hung_up_on(world: World) -> None:
    relay = world.last
    world.poll(TIMEOUT + 1)
    home = world.last
    relay.answers = [STATUS]
    assert len(world.poll(0.5)) == 1
    assert (home.is_open, relay.is_open) == (False, True)


def test_a_question_that_could_not_be_sent_is_sent_as_soon_as_it_can(world: World) -> None:
    world.poll(TIMEOUT + 0.5)
    world.last.said.clear()
    world.last.is_up = False
    world.poll(10.0)
    assert world.last.said == []
    world.last.is_up = True
    world.poll(0.5)
    assert [type(message) for message in world.last.said] == [AskStatus]


def test_only_the_home_brokers_no_is_final(world: World) -> None:
    relay = world.last
    relay.denial = "no"
    assert world.two.denial is None
    world.poll(1.0)
    home = world.last
    assert home.way is Way.HOME
    assert world.two.denial is None
    home.denial = "never"
    assert world.two.denial == "never"


def test_at_home_a_no_is_final_only_while_the_relay_does_not_answer(world: World) -> None:
    world.poll(TIMEOUT + 1)
    home = world.last
    home.answers = [STATUS]
    world.poll(0.5)
    home.denial = "revoked"
    world.poll(0.5)
    assert (world.last.way, world.two.denial) == (Way.RELAY, "revoked")


def test_a_wake_and_an_end_reach_the_way_that_is_listened_on(world: World) -> None:
    world.two.wake()
    assert world.last.num_wakes == 1
    world.poll(TIMEOUT + 1)
    world.two.close()
    assert not any(line.is_open for line in world.dialled)


def test_a_connection_says_hello_again_by_the_other_way(world: World) -> None:
    from isles.proto.route import _TwoWayConnection

    told: list[tuple[Way, float]] = []
    hello = Hello(role="worker", id="us-1", incarnation="a1" * 8)
    connection: Connection = _TwoWayConnection(
        hello, world.two, world.clock, None, lambda way, seconds: told.append((way, seconds))
    )
    connection.start()
    relay = world.last
    [said] = relay.said
    limits = connection.client.limits
    relay.answers = [
        Welcome(
            request=said.request, new_session="5e" * 8, protocol=(1, 2), broker_incarnation="ab" * 8, seq=0,
            limits=limits,
        )
    ]  # fmt: skip
    connection.poll(0.5)
    assert connection.client.session == "5e" * 8
    for _ in range(200):
        connection.poll(0.5)
    home = world.last
    home.answers = [STATUS]
    connection.poll(0.5)
    assert [way for way, _ in told] == [Way.HOME]
    assert (home.said[-1].id, home.said[-1].incarnation) == ("us-1", "a1" * 8)
    assert connection.client.session == ""
