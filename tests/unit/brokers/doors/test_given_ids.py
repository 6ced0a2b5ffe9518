"""Ids that the broker gives to workers that share a key: each its own, and taken again only with its token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.doors import hash_token
from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage
from isles.proto.client import Client
from isles.proto.keys import AllowList
from isles.proto.messages import (
    Accepted,
    AskHeads,
    Contribution,
    Error,
    Fenced,
    Heads,
    Hello,
    Leave,
    Message,
    Offer,
    Progress,
    Welcome,
)

Given = Callable[..., tuple[Member, Welcome]]
Public = Callable[[str], str]

A, B = "a1" * 8, "b2" * 8


def denied(answer: Message) -> str:
    assert isinstance(answer, Error), answer
    assert answer.code == "denied"
    return answer.text


def test_two_workers_at_once_get_an_id_each(given: Given) -> None:
    (_, first), (_, second) = given(A), given(B)
    assert (first.learner, second.learner) == ("service-1", "service-2")
    assert len({first.rejoin, second.rejoin, first.new_session, second.new_session}) == 4


def test_who_did_not_hear_the_answer_gets_the_same_one_again(stage: Stage, given: Given) -> None:
    _, first = given(A)
    _, again = given(A)
    assert (again.learner, again.rejoin, again.new_session) == (first.learner, first.rejoin, first.new_session)
    assert [one.learner for one in stage.router.state.membership.infos()] == ["service-1"]


def test_an_answer_that_was_lost_with_the_broker_costs_no_id(stage: Stage, given: Given) -> None:
    _, first = given(A)
    stage.restart()
    member, again = given(A)
    assert again.learner == first.learner
    assert again.rejoin != first.rejoin, "nobody kept the first one, the store not even in a readable form"
    assert isinstance(member.join(rejoin=again.rejoin), Welcome)
    assert denied(member.join(rejoin=first.rejoin))


def test_a_restarted_worker_takes_its_id_again_with_its_token(stage: Stage, given: Given, public: Public) -> None:
    member, welcome = given(A)
    member.ask(Progress(tokens=10, steps=1))
    for restart in (lambda: None, stage.restart):
        restart()
        later = stage.member("worker", "service-1", B, key=public("s"))
        answer = later.join(rejoin=welcome.rejoin)
        assert isinstance(answer, Welcome)
        assert (answer.learner, answer.rejoin) == ("service-1", ""), "it knows its token"
        assert isinstance(later.ask(AskHeads()), Heads)


@pytest.mark.parametrize("token", ["", "00" * 16, "x"])
def test_without_its_token_a_given_id_is_not_taken_again(
    stage: Stage, given: Given, public: Public, token: str
) -> None:
    member, _ = given(A)
    member.ask(Progress())
    later = stage.member("worker", "service-1", B, key=public("s"))
    assert "rejoin token" in denied(later.join(rejoin=token))
    assert isinstance(member.ask(AskHeads()), Heads), "its holder goes on"


def test_another_key_does_not_get_it_even_with_the_token(stage: Stage, given: Given, public: Public) -> None:
    _, welcome = given(A)
    answer = stage.member("worker", "service-1", B, key=public("u")).join(rejoin=welcome.rejoin)
    assert "belongs to another key" in denied(answer)


def test_once_the_answer_was_heard_its_incarnation_opens_nothing(stage: Stage, given: Given, public: Public) -> None:
    """Incarnations are no secret: the status shows them."""
    member, _ = given(A)
    member.ask(Progress(tokens=10, steps=1))
    thief = stage.member("worker", "", A, key=public("s"))
    assert "has an id already" in denied(thief.join())
    stage.restart()
    assert "has an id already" in denied(thief.join())
    assert isinstance(stage.member("worker", "", A, key=public("u")).join(), Error), "with another key neither"


def test_an_id_that_nothing_was_done_under_is_kept_by_what_its_holder_did(stage: Stage, given: Given) -> None:
    member, _ = given(A)
    member.ask(AskHeads())
    _, other = given(B)
    assert other.learner == "service-2"


def test_no_id_is_given_twice_nor_one_that_somebody_chose(
    stage: Stage, given: Given, public: Public, come: Callable[..., Member]
) -> None:
    come("s", "worker", "service-2")
    first, _ = given(A)
    first.ask(Leave())
    stage.restart()
    assert given(B)[1].learner == "service-3"
    assert given("c3" * 8)[1].learner == "service-4"


def test_ids_that_people_chose_need_no_token(stage: Stage, come: Callable[..., Member], public: Public) -> None:
    come("s", "worker", "mine")
    answer = stage.member("worker", "mine", B, key=public("s")).join()
    assert isinstance(answer, Welcome)
    assert (answer.learner, answer.rejoin) == ("mine", "")


def test_a_store_that_was_emptied_takes_the_ids_that_workers_bring(
    settings: RoutingSettings, allow: Callable[..., AllowList], public: Public
) -> None:
    stage = Stage(settings, allowed=allow("s"))
    returned = stage.member("worker", "service-7", A, key=public("s"))
    assert isinstance(returned.join(rejoin="f0" * 16), Welcome)
    thief = stage.member("worker", "service-7", B, key=public("s"))
    assert "rejoin token" in denied(thief.join())
    assert isinstance(thief.join(rejoin="f0" * 16), Welcome)


def test_the_store_keeps_no_token_that_could_be_used(stage: Stage, given: Given) -> None:
    _, welcome = given(A)
    [stored] = [one for one in stage.index.learners() if one.learner == welcome.learner]
    assert (stored.key_name, stored.rejoin_sha256) == ("service", hash_token(welcome.rejoin))
    assert welcome.rejoin not in repr(stage.index.learners())


def test_the_key_of_a_long_name_gives_legal_ids(
    settings: RoutingSettings, allow: Callable[..., AllowList], public: Public
) -> None:
    stage = Stage(settings, allowed=allow("", z=("x" * 58 + "..-y-z", "worker")))
    answer = stage.member("worker", "", A, key=public("z")).join()
    assert isinstance(answer, Welcome)
    assert answer.learner == "x" * 58 + "-1"


@pytest.mark.parametrize("role", ["outer", "operator", "evaluator"])
def test_only_workers_may_come_without_an_id(stage: Stage, public: Public, role: str) -> None:
    letter = "o" if role == "outer" else "a"
    answer = stage.member(role, "", A, key=public(letter)).join()  # type: ignore[arg-type]
    assert isinstance(answer, Error)
    assert "without an id" in answer.text


def test_a_broker_without_keys_gives_no_ids(settings: RoutingSettings) -> None:
    assert "name this learner" in denied(Stage(settings).member("worker", "", A).join())


def test_a_given_id_trains_like_any_other(
    stage: Stage, given: Given, contribute: Callable[..., Contribution], payload: Callable[[Member, int], bytes]
) -> None:
    member, _ = given(A)
    answer = member.send(Offer(contribution=contribute(member, 1)), payload(member, 1))
    assert isinstance(answer, Accepted)
    assert answer.id.learner == "service-1"


def test_a_newer_incarnation_fences_the_older_one_of_a_given_id(stage: Stage, given: Given, public: Public) -> None:
    member, welcome = given(A)
    stage.member("worker", "service-1", B, key=public("s")).join(rejoin=welcome.rejoin)
    assert isinstance(member.ask(AskHeads()), Fenced)


def test_a_client_that_was_given_an_id_says_it_ever_after(stage: Stage, given: Given) -> None:
    client = Client(Hello(role="worker", id="", incarnation=A))
    [hello] = client.start(0.0)
    _, welcome = given(A)
    client.handle(welcome.model_copy(update={"request": hello.message.request}), 0.0)  # type: ignore[union-attr]
    [again] = client.start(1.0)
    assert (again.message.id, again.message.rejoin) == (welcome.learner, welcome.rejoin)  # type: ignore[union-attr]


def test_learners_of_one_key_and_of_all_are_bounded(
    settings: RoutingSettings, allow: Callable[..., AllowList], public: Public
) -> None:
    stage = Stage(settings.model_copy(update={"learners_per_key_max": 3}), allowed=allow("su"))
    for number in range(3):
        assert isinstance(stage.member("worker", "", f"{number:016x}", key=public("s")).join(), Welcome)
    assert "learners_per_key_max" in denied(stage.member("worker", "", A, key=public("s")).join())
    assert "learners_per_key_max" in denied(stage.member("worker", "chosen", A, key=public("s")).join())
    assert isinstance(stage.member("worker", "us-1", A, key=public("u")).join(), Welcome), "another key has its own"
