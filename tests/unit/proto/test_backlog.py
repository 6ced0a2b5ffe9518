"""What waits in a broker's sockets: who is hung up on when it is too much, and who never is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from isles.proto.messages import Channel
from isles.proto.transport import backlog
from isles.proto.transport.backlog import (
    GREETED_BYTES_MAX,
    HANDSHAKE_BYTES_MAX,
    Backlog,
    Counts,
    Place,
    Reason,
    wire_bytes,
)

MIB = 1 << 20


class Watched:
    """A backlog with connections to its control socket; `see` is what the kernel says."""

    def __init__(self, *, bytes_max: int = 10 * MIB, per_key_max: int = 100, has_keys: bool = True) -> None:
        self.backlog = Backlog(bytes_max, per_key_max, has_keys)
        self.counts: dict[Place, Counts] = {}
        self.now = 0.0

    def open(self, descriptor: int, *, public: str | None = None, unread: int = 0, unsent: int = 0) -> Place:
        """One that has said something if it has a key."""
        place = Place(Channel.CONTROL, descriptor)
        self.backlog.open(place, self.now)
        name = str(descriptor).encode()
        if public is not None:
            self.backlog.read(place, name, public, 100)
            self.backlog.give(Channel.CONTROL, name, 200 + unsent)
        received = 100 + unread if public is not None else unread
        self.counts[place] = Counts(received, GREETED_BYTES_MAX + 100, 200)
        return place

    def knock(self, descriptor: int, num_bytes: int) -> Place:
        """One that is not through its handshake."""
        place = self.open(descriptor)
        self.counts[place] = Counts(num_bytes, GREETED_BYTES_MAX, 0)
        return place

    def excess(self) -> dict[Place, Reason]:
        self.backlog.see(self.counts)
        return self.backlog.excess(self.now)


def test_whoever_sends_more_than_a_handshake_takes_and_is_not_through_it_goes_whatever_else_there_is() -> None:
    watched = Watched()
    honest = watched.knock(1, 700)
    stranger = watched.knock(2, HANDSHAKE_BYTES_MAX + 1)
    watched.open(3, unread=MIB)  # through it, its first message under way
    assert watched.excess() == {stranger: Reason.STRANGER}
    assert honest not in watched.excess()


def test_without_keys_nobody_is_a_stranger() -> None:
    watched = Watched(has_keys=False)
    watched.knock(1, MIB)
    assert watched.excess() == {}


def test_of_too_many_handshakes_those_go_that_have_been_longest_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "HANDSHAKES_MAX", 3)
    watched = Watched()
    places = [watched.knock(number, 100) for number in range(5)]
    for number in range(10, 20):
        watched.open(number, public="k")
    assert watched.excess() == dict.fromkeys(places[:2], Reason.SURPLUS)


def test_of_too_many_that_are_silent_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "SILENT_MAX", 3)
    watched = Watched()
    places = [watched.open(number) for number in range(4)]
    assert watched.excess() == {places[0]: Reason.SURPLUS}


def test_of_a_key_with_too_many_the_newest_go_and_of_other_keys_none() -> None:
    watched = Watched(per_key_max=3)
    places = [watched.open(number, public="hostile") for number in range(5)]
    for number in range(10, 13):
        watched.open(number, public="honest")
    assert watched.backlog.is_crowded
    assert watched.excess() == dict.fromkeys(places[3:], Reason.SURPLUS)
    watched.backlog.close(places[0])
    watched.backlog.close(places[1])
    assert not watched.backlog.is_crowded


@pytest.mark.parametrize("way", ["unread", "unsent"])
def test_over_the_bound_those_go_that_hold_the_most_of_the_key_that_does(way: str) -> None:
    watched = Watched(bytes_max=10 * MIB)
    watched.open(1, public="honest", **{way: 4 * MIB})
    hostile = [watched.open(10 + number, public="hostile", **{way: (1 + number) * MIB}) for number in range(4)]
    assert watched.excess() == {hostile[3]: Reason.OVERFULL}, "ten are left, none of the honest one's four"


def test_within_the_bound_nobody_goes_however_uneven_it_is() -> None:
    watched = Watched(bytes_max=10 * MIB)
    watched.open(1, public="one", unread=9 * MIB, unsent=MIB // 2)
    assert watched.excess() == {}


def test_the_heartbeats_of_a_month_are_no_backlog() -> None:
    watched = Watched(bytes_max=MIB)
    watched.now = 30 * 86_400.0
    place = watched.open(1, public="old")
    watched.backlog.lines[place].opened_at = 0.0
    watched.counts[place] = Counts(100 + round(82 / 5 * watched.now), GREETED_BYTES_MAX + 100, 10**9)
    assert watched.excess() == {}


def test_a_descriptor_that_became_another_connection_owes_nothing_for_the_one_before() -> None:
    watched = Watched(bytes_max=MIB)
    place = watched.open(1, public="first", unread=MIB // 2)
    watched.backlog.read(place, b"second", "second", 3 * MIB)  # before its predecessor's end was told
    watched.backlog.open(place, 1.0)
    watched.backlog.read(place, b"second", "second", 100)
    watched.counts[place] = Counts(3 * MIB + 100, GREETED_BYTES_MAX + 100, 0)
    assert watched.backlog.lines[place].read == 3 * MIB + 100
    assert watched.excess() == {}


def test_what_the_kernel_does_not_know_is_forgotten() -> None:
    watched = Watched(per_key_max=1)
    places = [watched.open(number, public="k") for number in range(3)]
    del watched.counts[places[0]], watched.counts[places[1]]
    assert watched.excess() == {}
    assert list(watched.backlog.lines) == [places[2]]
    watched.backlog.give(Channel.CONTROL, b"0", 99 * MIB)
    assert watched.excess() == {}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_books_are_right(seed: int) -> None:
    chance = random.Random(seed)
    watched = Watched(per_key_max=5)
    for _ in range(400):
        place = Place(chance.choice(list(Channel)), chance.randrange(12))
        act: Callable[[], None] = chance.choice(
            [
                lambda place=place: watched.backlog.open(place, 0.0),  # type: ignore[misc]
                lambda place=place: watched.backlog.close(place),  # type: ignore[misc]
                lambda place=place: watched.backlog.forget(place.channel),  # type: ignore[misc]
                lambda place=place: watched.backlog.read(place, b"%d" % chance.randrange(9), "k", 10),  # type: ignore[misc]
                lambda place=place: watched.backlog.give(place.channel, b"%d" % chance.randrange(9), 10),  # type: ignore[misc]
            ]
        )
        act()
        speaking = [line for line in watched.backlog.lines.values() if line.public is not None]
        assert sum(watched.backlog._num_of.values()) == len(speaking)
        assert all(any(one is line for one in speaking) for line in watched.backlog._named.values())


@pytest.mark.parametrize("is_sealed", [True, False])
def test_frames_on_the_wire_are_as_long_as_libzmq_makes_them(is_sealed: bool) -> None:
    """Held against libzmq's own bytes in the tests of the sockets; here the borders of its two kinds of heads."""
    seal = 33 if is_sealed else 0
    assert wire_bytes([255 - seal], is_sealed=is_sealed) == 257
    assert wire_bytes([256 - seal], is_sealed=is_sealed) == 265
    assert wire_bytes([], is_sealed=is_sealed) == 0
