"""When a client gives up, tries another key of its broker, or opens a socket anew, out of what its monitors report."""

from __future__ import annotations

import pytest

from isles.proto.key_files import generate_pair
from isles.proto.keys import BROKER_KEYS_MAX, ClientKey
from isles.proto.messages import Channel
from isles.proto.transport.dialling import (
    CUT_SECONDS_MAX,
    GIVEN_UP_SECONDS,
    PROBES_MIN,
    REFUSALS_MIN,
    SWITCH_SECONDS,
    TURNS_MIN,
    Dialling,
    Outcome,
)


def make_key(num_broker_keys: int = 1) -> ClientKey:
    pair = generate_pair()
    broker = tuple(generate_pair().public for _ in range(num_broker_keys))
    return ClientKey(name="us-0", role="worker", public=pair.public, secret=pair.secret, broker=broker)


def cut_everywhere(dialling: Dialling, now: float = 0.0) -> None:
    for channel in Channel:
        dialling.handle(channel, Outcome.CUT, now)


def fail_every_key(dialling: Dialling, num_keys: int, now: float) -> float:
    """One turn: every key of the broker fails on every socket; the time after it."""
    for _ in range(num_keys):
        cut_everywhere(dialling, now)
        now += SWITCH_SECONDS
        dialling.due(now)
    return now


@pytest.mark.parametrize("channel", list(Channel))
def test_refusals_in_a_row_on_any_socket_are_a_denial_that_names_the_key(channel: Channel) -> None:
    dialling = Dialling(make_key())
    for _ in range(REFUSALS_MIN - 1):
        dialling.handle(channel, Outcome.REFUSED, 0.0)
    assert dialling.denial is None
    dialling.handle(channel, Outcome.REFUSED, 0.0)
    assert dialling.denial is not None
    assert dialling.denial.startswith("the key of worker us-0 does not stand in the allow-list of this broker")


def test_a_refusal_before_the_key_was_let_in_is_forgotten() -> None:
    dialling = Dialling(make_key())
    for _ in range(3):
        for _ in range(REFUSALS_MIN - 1):
            dialling.handle(Channel.BULK, Outcome.REFUSED, 0.0)
        dialling.handle(Channel.BULK, Outcome.OPENED, 0.0)
    assert dialling.denial is None


@pytest.mark.parametrize(
    ("key", "text"), [(None, "nobody is let in here without a key"), (make_key(), "this broker has no keys, but")]
)
def test_keys_on_one_side_only_are_a_denial_that_says_on_which(key: ClientKey | None, text: str) -> None:
    dialling = Dialling(key)
    for _ in range(REFUSALS_MIN):
        dialling.handle(Channel.CONTROL, Outcome.MISMATCHED, 0.0)
    assert dialling.denial is not None
    assert dialling.denial.startswith(text)


def test_only_a_broker_that_is_there_and_fails_every_key_again_has_another_key() -> None:
    dialling = Dialling(make_key(2))
    now = 0.0
    for _ in range(PROBES_MIN):
        assert dialling.denial is None
        for _ in range(TURNS_MIN):
            assert not dialling.wants_probe
            now = fail_every_key(dialling, 2, now)
        assert dialling.wants_probe
        dialling.probed(has_keys=True)
    assert dialling.denial is not None
    assert dialling.denial.startswith("this broker is not the one that the key of worker us-0 was made for")


@pytest.mark.parametrize("num_keys", [1, 2])
def test_a_broker_that_is_away_behind_a_forwarder_is_waited_for(num_keys: int) -> None:
    dialling = Dialling(make_key(num_keys))
    now = 0.0
    for _ in range(50):
        now = fail_every_key(dialling, num_keys, now)
        if dialling.wants_probe:
            dialling.probed(has_keys=False)
    assert dialling.denial is None


def test_a_broker_that_is_kept_waiting_by_its_disk_is_waited_for() -> None:
    dialling = Dialling(make_key(2))
    now = 0.0
    for _ in range(50):
        for channel in Channel:
            dialling.handle(channel, Outcome.CONNECTED, now)
        now += CUT_SECONDS_MAX + 1.0
        cut_everywhere(dialling, now)
    assert (dialling.wants_probe, dialling.due(now), dialling.denial) == (False, set(), None)


def test_one_handshake_that_succeeds_is_proof_of_the_key() -> None:
    dialling = Dialling(make_key())
    for _ in range(20):
        cut_everywhere(dialling)
        cut_everywhere(dialling)
        if dialling.wants_probe:
            dialling.probed(has_keys=True)
        dialling.handle(Channel.EVENTS, Outcome.OPENED, 0.0)
    assert dialling.denial is None


def test_failures_on_two_of_three_sockets_prove_nothing() -> None:
    dialling = Dialling(make_key(2))
    for _ in range(50):
        dialling.handle(Channel.CONTROL, Outcome.CUT, 0.0)
        dialling.handle(Channel.EVENTS, Outcome.CUT, 0.0)
    assert (dialling.wants_probe, dialling.due(100.0)) == (False, set())


@pytest.mark.parametrize("num_keys", range(2, BROKER_KEYS_MAX + 1))
def test_the_keys_of_the_broker_are_tried_in_turn_and_not_in_a_rush(num_keys: int) -> None:
    key = make_key(num_keys)
    dialling = Dialling(key)
    for number in range(2 * num_keys):
        assert dialling.broker_key == key.broker[number % num_keys]
        cut_everywhere(dialling, 10.0)
        cut_everywhere(dialling, 10.0)  # libzmq dials again with the old one meanwhile
        assert dialling.due(10.0) == set()
        assert dialling.wait(10.0) == pytest.approx(SWITCH_SECONDS)
        assert dialling.due(10.0 + SWITCH_SECONDS) == set(Channel)
        assert dialling.due(100.0) == set()


def test_a_socket_that_libzmq_gave_up_is_opened_anew_once() -> None:
    dialling = Dialling(None)
    dialling.handle(Channel.BULK, Outcome.LOST, 5.0)
    assert dialling.due(5.0) == set()
    assert dialling.wait(5.0) == pytest.approx(GIVEN_UP_SECONDS)
    assert dialling.due(5.0 + GIVEN_UP_SECONDS) == {Channel.BULK}
    assert (dialling.due(100.0), dialling.wait(100.0)) == (set(), None)


@pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.CONNECTED, Outcome.OPENED])
def test_a_socket_that_libzmq_dials_again_is_left_alone(outcome: Outcome) -> None:
    dialling = Dialling(None)
    dialling.handle(Channel.BULK, Outcome.LOST, 5.0)
    dialling.handle(Channel.BULK, outcome, 5.1)
    assert (dialling.due(100.0), dialling.wait(100.0)) == (set(), None)


def test_another_pair_in_the_file_opens_all_sockets_anew_and_forgets_refusals() -> None:
    dialling = Dialling(make_key())
    for _ in range(REFUSALS_MIN - 1):
        dialling.handle(Channel.BULK, Outcome.REFUSED, 0.0)
    other = make_key()
    dialling.adopt(other, 1.0)
    assert dialling.due(1.0) == set(Channel)
    dialling.handle(Channel.BULK, Outcome.REFUSED, 2.0)
    assert (dialling.denial, dialling.broker_key) == (None, other.broker[0])


def test_one_more_key_of_the_broker_in_the_file_disturbs_no_connection() -> None:
    key = make_key(2)
    dialling = Dialling(key)
    cut_everywhere(dialling)
    dialling.due(SWITCH_SECONDS)
    assert dialling.broker_key == key.broker[1]
    dialling.adopt(key.model_copy(update={"broker": (*key.broker, generate_pair().public)}), 1.0)
    assert (dialling.due(1.0), dialling.broker_key) == (set(), key.broker[1])


def test_nothing_changes_after_a_denial() -> None:
    dialling = Dialling(None)
    dialling.handle(Channel.BULK, Outcome.LOST, 0.0)
    for _ in range(REFUSALS_MIN):
        dialling.handle(Channel.CONTROL, Outcome.MISMATCHED, 0.0)
    denial = dialling.denial
    dialling.handle(Channel.CONTROL, Outcome.OPENED, 0.0)
    dialling.handle(Channel.CONTROL, Outcome.LOST, 0.0)
    assert (dialling.denial, dialling.wait(0.0)) == (denial, None)
