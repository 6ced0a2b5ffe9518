"""A relay between its region and its home broker: joining, what passes, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from isles.brokers.relay.passing import PASSED_REQUESTS_FROM
from isles.proto.client import Hinted, Refused, Send, Welcomed
from isles.proto.messages import (
    Accepted,
    Alive,
    AskHeads,
    AskStatus,
    AskVersion,
    Channel,
    Done,
    Error,
    Heads,
    Hello,
    Leave,
    Progress,
    RelayBeat,
    Status,
    VersionReply,
)

LONG_SECONDS = 30.0
PARAMETERS = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)
"""As the stage's founder brought them."""


def test_a_worker_joins_through_the_relay_and_is_told_the_chunks_that_the_relay_takes(world: Any) -> None:
    worker = world.speaker().join()
    [welcomed] = worker.told(Welcomed)
    assert welcomed.welcome.run_record is not None
    assert welcomed.welcome.limits.chunk_bytes == world.settings.chunk_bytes
    assert world.home.router.state.sessions.find("worker", "us-1", "a1" * 8) is not None
    assert "client.joined" in world.events()


def test_every_question_gets_its_own_answer_whatever_its_number(world: Any) -> None:
    workers = [world.speaker(f"us-{number}", incarnation=f"{number:016x}").join() for number in range(4)]
    for worker in workers:
        worker.ask(Progress(steps=1))
        worker.ask(AskHeads())
        worker.ask(AskVersion(fragment=1))
    for worker in workers:
        assert [type(answer) for answer in worker.answers()] == [Alive, Heads, VersionReply]
    assert len(world.relay.state.passing) == 0


def test_no_number_of_a_passed_question_meets_one_of_the_relay_itself(world: Any) -> None:
    worker = world.speaker().join()
    worker.ask(AskHeads())
    world.advance(3.0)
    passed = [message.request for message in world.passed_up if isinstance(message, AskHeads)]
    own = [message.request for message in world.passed_up if isinstance(message, RelayBeat)]
    assert passed
    assert own
    assert min(passed) >= PASSED_REQUESTS_FROM > max(own)


def test_the_status_passes_without_a_session(world: Any) -> None:
    onlooker = world.speaker("me", "operator")
    onlooker.ask(AskStatus())
    [status] = onlooker.answers(Status)
    assert status.run == "trial"
    world.advance(1.0)
    onlooker.ask(AskStatus())
    status = onlooker.answers(Status)[-1]
    assert [(one.relay, one.is_live, one.facts.region) for one in status.relays] == [("relay-us", True, "us")]


def test_hints_of_the_home_broker_reach_the_region_as_they_are(world: Any) -> None:
    worker = world.speaker().join()
    world.advance(3.0)
    hints = [news.hint for news in worker.told(Hinted)]
    assert hints
    assert all(hint in world.home.hints for hint in hints)


@pytest.mark.parametrize("role", ["outer", "relay"])
def test_who_belongs_to_the_home_broker_is_sent_there(world: Any, role: Any) -> None:
    speaker = world.speaker("someone", role).join()
    [refused] = speaker.told(Refused)
    assert refused.code == "denied"
    assert "home broker itself" in refused.text


def test_a_session_that_the_relay_does_not_know_is_opened_again(world: Any) -> None:
    worker = world.speaker().join()
    world.restart()
    worker.ask(AskHeads())
    assert [type(answer) for answer in worker.answers()] == [Heads]
    assert len(worker.told(Welcomed)) == 2


def test_a_home_broker_that_was_restarted_is_joined_again_by_all(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.home.restart()
    worker.ask(Progress(steps=1))
    worker.ask(*offer_of())
    world.advance(3.0)
    assert [type(answer) for answer in worker.answers()] == [Alive, Accepted]


def test_what_is_asked_while_the_link_is_down_is_answered_after_it(world: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(AskHeads())
    world.advance(LONG_SECONDS)
    assert worker.answers() == []
    assert [fields["num_waiting"] for fields in world.said("link.lost")] == [0]
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert [type(answer) for answer in worker.answers()] == [Heads]
    [restored] = world.said("link.restored")
    assert LONG_SECONDS <= restored["seconds"] < 2 * LONG_SECONDS


def test_a_question_that_was_never_answered_is_forgotten(world: Any) -> None:
    worker = world.speaker().join()
    world.is_link_up = False
    worker.ask(AskHeads())
    worker.die()
    assert len(world.relay.state.passing) == 1
    world.advance(120.0)
    assert len(world.relay.state.passing) == 0


def test_who_leaves_has_left_at_home_and_is_counted_no_longer(world: Any) -> None:
    worker = world.speaker().join()
    worker.ask(Leave())
    world.advance(2.0)
    assert [type(answer) for answer in worker.answers()] == [Done]
    assert world.passed_up[-1].facts.num_clients == 0


def test_a_relay_that_was_replaced_ends(make_world: Any) -> None:
    world = make_world()
    successor = make_world()
    successor.restart()  # with an incarnation that the first one has not had
    world.advance(3.0)
    assert [end.code for end in world.ends] == ["fenced"]


def test_an_offer_of_a_learner_in_quarantine_ends_its_learner_and_not_the_relay(world: Any, offer_of: Any) -> None:
    worker = world.speaker().join()
    world.home.router.state.quarantined["us-1"] = world.home.unix + 1000.0
    worker.ask(*offer_of())
    assert [refused.code for refused in worker.told(Refused)] == ["quarantined"]
    assert world.ends == []
    assert world.disk.offers == {}


def join_all(world: Any, num: int) -> list[Any]:
    """So many workers, each of which has one contribution to make."""
    return [world.speaker(f"us-{number}").join() for number in range(num)]


def test_several_links_share_what_there_is_to_carry(make_world: Any, offer_of: Any) -> None:
    world = make_world(upstream_connections=3)
    workers = join_all(world, 6)
    world.is_link_up = False
    for worker in workers:
        worker.ask(*offer_of(worker.client.hello.id))
    links = {parcel.link for parcel in world.relay.state.outbox._under_way.values()}
    assert links == {0, 1, 2}
    world.is_link_up = True
    world.advance(LONG_SECONDS)
    assert [len(worker.answers(Accepted)) for worker in workers] == [1] * 6
    assert world.payload_bytes["up"] == 60_000


def test_what_nobody_may_say_on_a_channel_is_refused(world: Any) -> None:
    worker = world.speaker().join()
    for number, message in enumerate([AskHeads(), Hello(role="worker", id="us-2", incarnation="c3" * 8)]):
        said = message.addressed(request=100 + number, session=worker.client.session)
        world.hear_client(worker, Send(Channel.BULK, said))
    world.settle()
    errors = [send.message for send in world.sent if isinstance(send.message, Error)]
    assert [error.code for error in errors] == ["bad-message", "bad-message"]
    assert world.ends == []
