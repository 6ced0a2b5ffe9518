"""The courier, turn by turn on a manual clock, against a scripted connection."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.client import Refused
from isles.proto.client import Welcomed as ClientWelcomed
from isles.proto.clock import ManualClock
from isles.proto.codec.torch_codec import decode, encode
from isles.proto.connection import Connection
from isles.proto.errors import FencedError, IslesError, RefusedError
from isles.proto.ids import ContributionId
from isles.proto.messages import (
    Accepted,
    Alive,
    AskHeads,
    AskVersion,
    Done,
    Error,
    Expired,
    Head,
    Heads,
    Hello,
    Leave,
    Limits,
    Offer,
    Progress,
    Rejected,
    Row,
    Shards,
    ShardsLeased,
    VersionInfo,
    VersionReply,
    Welcome,
)
from isles.proto.transport.memory import MemoryBroker
from isles.workers.account import Account
from isles.workers.courier import Forget, RequestShards, SayGoodbye, Want
from isles.workers.orders import Cued, PaceTold, PayloadEncoded, PayloadFailed, VersionArrived
from isles.workers.parameters import parameters_digest

ID = ContributionId("us-0", 0, "aaaaaaaa", 1)
SYNC = SyncSettings(num_fragments=2, codec_up="int8", codec_down="int8")


# ------------------------------------------------------------------------------------------------------ contributing


def test_an_account_is_encoded_and_offered_with_its_books_and_the_norms_before_quantisation(desk: Any) -> None:
    theta = torch.randn(desk.flat.num_values[0])
    desk.encode(theta.clone())
    assert desk.courier.mailbox.take()[0] == [PayloadEncoded(ID)]
    (offer,) = desk.connection.take(Offer)
    contribution, payload = offer.contribution, desk.connection.payloads[-1]
    assert payload is not None
    assert (contribution.blob.digest, contribution.blob.size_bytes) == (
        hashlib.sha256(payload).hexdigest(),
        len(payload),
    )
    assert (contribution.base_version, contribution.tokens, contribution.steps, contribution.seconds) == (3, 30, 3, 1.5)
    assert (contribution.cursor, contribution.codec) == ({4: 9}, "int8")
    norms = [float(torch.linalg.vector_norm(theta[start:stop].double())) for start, stop in desk.flat.bounds(0)]
    assert contribution.norms == pytest.approx(norms, rel=1e-6)
    torch.testing.assert_close(decode(payload, num_values=theta.numel()), -theta, atol=0.02, rtol=0)


def test_zeros_are_not_offered(desk: Any) -> None:
    desk.encode(torch.zeros(desk.flat.num_values[0]))
    assert desk.courier.mailbox.take()[0] == [PayloadEncoded(ID, is_zero=True)]
    assert desk.connection.take(Offer) == []
    assert desk.courier.payloads == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_offered(desk: Any, value: float) -> None:
    theta = torch.zeros(desk.flat.num_values[0])
    theta[1] = value
    desk.encode(theta)
    ((failed,), _) = desk.courier.mailbox.take()
    assert isinstance(failed, PayloadFailed)
    assert failed.is_not_finite
    assert failed.reason.startswith("not finite")
    assert desk.connection.take(Offer) == []


def test_answers_go_to_the_session_and_all_but_accepted_ask_for_the_version(desk: Any) -> None:
    desk.encode(torch.ones(desk.flat.num_values[0]))
    desk.courier.mailbox.take()
    (offer,) = desk.connection.take(Offer)
    for reply in (Accepted(id=ID), Expired(id=ID, head=9), Rejected(id=ID, reason="norm")):
        desk.answer(offer, reply)
        assert desk.courier.mailbox.take()[0] == [reply]
        assert desk.wanted() == ([] if isinstance(reply, Accepted) else [0])
        desk.courier.mailbox.take()


def test_an_offer_that_the_broker_spoiled_is_made_again_with_the_same_bytes(desk: Any) -> None:
    desk.encode(torch.ones(desk.flat.num_values[0]))
    (offer,) = desk.connection.take(Offer)
    payload = desk.connection.payloads[-1]
    desk.answer(offer, Error(code="internal", text="a mistake"))
    desk.pass_time(1.0)
    assert desk.connection.take(Offer) == []
    desk.pass_time(10.0)
    assert desk.connection.take(Offer) == [offer]
    assert payload in desk.connection.payloads
    assert desk.log.events().count("message.refused") == 1


def test_an_offer_that_was_forgotten_is_not_made_again(desk: Any) -> None:
    desk.encode(torch.ones(desk.flat.num_values[0]))
    (offer,) = desk.connection.take(Offer)
    desk.answer(offer, Error(code="internal", text="a mistake"))
    desk.submit(Forget(ID))
    desk.pass_time(20.0)
    assert desk.connection.take(Offer) == []
    assert desk.courier.payloads == {}


def test_what_is_not_urgent_does_not_wake_the_courier(desk: Any) -> None:
    desk.courier.submit(Forget(ID), is_urgent=False)
    assert desk.connection.num_wakes == 0
    desk.courier.submit(Want(0))
    assert desk.connection.num_wakes == 1


def test_an_offer_that_the_broker_spoils_again_and_again_ends_the_learner_with_its_words(desk: Any) -> None:
    desk.encode(torch.ones(desk.flat.num_values[0]))
    with pytest.raises(RefusedError, match=r"internal, \d+ times in a row\): a mistake"):  # noqa: PT012
        for _ in range(1000):
            (offer,) = desk.connection.take(Offer)
            desk.answer(offer, Error(code="internal", text="a mistake"))
            desk.pass_time(10.0)
    assert desk.clock.now() < 600.0


def test_an_offer_that_breaks_the_rules_ends_the_learner_with_the_brokers_words(desk: Any) -> None:
    desk.encode(torch.ones(desk.flat.num_values[0]))
    (offer,) = desk.connection.take(Offer)
    with pytest.raises(RefusedError, match="names other bytes"):
        desk.answer(offer, Error(code="conflict", text="this id names other bytes already"))


# ------------------------------------------------------------------------------------------------------ hints and heads


def test_the_hint_about_an_open_round_cues_everybody_but_its_own_learner(desk: Any) -> None:
    desk.hint("contribution", 1, fragment=1, version=3, learner="us-0")
    assert desk.courier.mailbox.take()[0] == []
    desk.hint("contribution", 2, fragment=1, version=3, learner="eu-0")
    assert desk.courier.mailbox.take()[0] == [Cued(1, 3)]


def test_hints_about_newer_versions_and_verdicts_ask_for_them(desk: Any) -> None:
    desk.hint("version", 1, fragment=1, version=3)
    assert desk.wanted() == []
    desk.hint("version", 2, fragment=1, version=4)
    assert desk.wanted() == [1]
    desk.hint("settled", 3, fragment=0)
    assert desk.wanted() == [0]
    desk.hint("version", 4, fragment=99, version=4)
    assert desk.wanted() == []


def test_a_gap_in_the_hints_is_followed_by_a_look_at_all_heads(desk: Any) -> None:
    desk.pass_time(0.0)
    desk.connection.take(AskHeads)
    desk.hint("beat", 1)
    desk.hint("beat", 2)
    desk.pass_time(0.1)
    assert desk.connection.take(AskHeads) == []
    desk.hint("beat", 4)
    desk.pass_time(0.1)
    assert len(desk.connection.take(AskHeads)) == 1


def test_without_any_hint_all_heads_are_looked_at_every_few_seconds(desk: Any) -> None:
    for _ in range(3):
        desk.pass_time(6.0)
        (ask,) = desk.connection.take(AskHeads)
        heads = (Head(fragment=0, version=4), Head(fragment=1, version=3))
        desk.answer(ask, Heads(broker_incarnation="bbbbbbbb", seq=1, heads=heads))
        assert desk.wanted() == [0]


def test_a_verdict_in_the_rows_is_asked_for_until_it_was_delivered(desk: Any) -> None:
    row = Row(id=ID, state="rejected", reason="norm")
    heads = Heads(broker_incarnation="bbbbbbbb", seq=1, heads=(), rows=(row,))
    desk.answer(AskHeads(), heads)
    (ask,) = desk.connection.take(AskVersion)
    values = torch.zeros(desk.flat.num_values[0])
    head = VersionInfo(fragment=0, version=3, parameters_sha256=parameters_digest(values))
    desk.answer(ask, VersionReply(head=head, row=row))
    (_, (arrival,)) = desk.courier.mailbox.take()
    assert arrival.event == VersionArrived(0, 3, row)
    desk.answer(AskHeads(), heads)
    assert desk.connection.take(AskVersion) == []


def test_a_version_comes_with_the_decoded_payload_of_the_own_contribution_in_it(make_desk: Any) -> None:
    model = make_desk()
    payload = encode("int8", torch.ones(model.flat.num_values[0]))
    desk = make_desk(payloads={ID: payload})
    desk.submit(Want(0))
    (ask,) = desk.connection.take(AskVersion)
    values = torch.zeros(desk.flat.num_values[0])
    head = VersionInfo(fragment=0, version=3, parameters_sha256=parameters_digest(values))
    desk.answer(ask, VersionReply(head=head, row=Row(id=ID, state="merged", settled_in=3)))
    (_, (arrival,)) = desk.courier.mailbox.take()
    assert arrival.decoded is not None
    torch.testing.assert_close(arrival.decoded, torch.ones(desk.flat.num_values[0]), atol=0.01, rtol=0)


def bring_own_version(desk: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
    """What the courier hands over when version 3, of zeros, is said to contain the own contribution."""
    desk.submit(Want(0))
    (ask,) = desk.connection.take(AskVersion)
    meanwhile()
    values = torch.zeros(desk.flat.num_values[0])
    head = VersionInfo(fragment=0, version=3, parameters_sha256=parameters_digest(values))
    desk.answer(ask, VersionReply(head=head, row=Row(id=ID, state="merged", settled_in=3)))
    (_, (arrival,)) = desk.courier.mailbox.take()
    return arrival


def test_what_a_version_adds_is_prepared_from_the_account_with_the_own_contribution_in_it(make_desk: Any) -> None:
    count = make_desk().flat.num_values[0]
    payload, anchor = encode("int8", torch.linspace(0.5, 1.0, count)), torch.full((count,), 0.25)
    desk = make_desk(payloads={ID: payload})
    desk.accounts[0] = Account(anchor)
    arrival = bring_own_version(desk)
    assert arrival.decoded is None
    assert arrival.increment.is_of(desk.accounts[0], is_own=True)
    assert torch.equal(arrival.increment.added.values, decode(payload, num_values=count) - 0.25)


def test_a_contribution_that_was_closed_while_a_version_was_built_is_no_part_of_it(make_desk: Any) -> None:
    count = make_desk().flat.num_values[0]
    desk = make_desk(payloads={ID: encode("int8", torch.ones(count))})
    desk.accounts[0] = Account(torch.ones(count))
    arrival = bring_own_version(desk, lambda: desk.courier.submit(Forget(ID), is_urgent=False))
    assert arrival.increment.is_of(desk.accounts[0], is_own=False)
    assert torch.equal(arrival.increment.added.values, torch.full((count,), -1.0))


# ------------------------------------------------------------------------------------------------------ time and broker


def test_progress_is_sent_each_heartbeat_and_only_the_newest_is_repeated(desk: Any) -> None:
    for _ in range(3):
        desk.pass_time(Limits().heartbeat_seconds)
        assert desk.connection.take(Progress) == [Progress(steps=7)]


@pytest.mark.parametrize(("has_dynamic_interval", "wanted"), [(False, []), (True, [PaceTold(0.25, 0.5)])])
def test_the_fleets_pace_goes_to_the_session_if_the_run_has_dynamic_intervals(
    make_desk: Any, has_dynamic_interval: bool, wanted: list[PaceTold]
) -> None:
    desk = make_desk(sync=SYNC.model_copy(update={"has_dynamic_interval": has_dynamic_interval}))
    for typical in (0.2, 0.25):
        desk.answer(Progress(step_seconds=0.5), Alive(typical_step_seconds=typical))
    assert not desk.courier.mailbox.wait(0.0)
    assert desk.courier.mailbox.take()[0] == wanted
    assert desk.courier.mailbox.take()[0] == []


def test_a_silent_broker_is_reported_once_and_its_return_once(desk: Any) -> None:
    desk.connection.client.heard_at = 0.0
    for _ in range(10):
        desk.pass_time(1.0)
        desk.courier._watch_broker(desk.clock.now())
    assert desk.log.events() == ["broker.lost"]
    desk.connection.client.heard_at = desk.clock.now()
    for _ in range(3):
        desk.pass_time(1.0)
        desk.courier._watch_broker(desk.clock.now())
    assert desk.log.events() == ["broker.lost", "broker.joined"]


def test_dropped_messages_are_told_now_and_then_but_not_while_the_broker_is_away(desk: Any) -> None:
    desk.connection.dropped = {"unsent": 1, "unread": 0, "hints": 3}
    for _ in range(3):
        desk.pass_time(6.0)
    assert desk.log.records == [("info", "messages.dropped", {"unsent": 1, "unread": 0, "hints": 3})]
    desk.courier._lost_at, desk.connection.dropped = 1.0, {"unsent": 9, "unread": 0, "hints": 0}
    desk.pass_time(6.0)
    assert desk.log.events().count("messages.dropped") == 1


def make_welcome(**fields: Any) -> Welcome:
    return Welcome(
        new_session="cccccccc", protocol=(1, 0), broker_incarnation="bbbbbbbb", seq=5, limits=Limits(), **fields
    )


def test_a_broker_that_comes_back_without_the_run_ends_the_learner_with_what_to_do(desk: Any) -> None:
    with pytest.raises(RefusedError, match="store was emptied"):
        desk.courier._handle(ClientWelcomed(make_welcome()))


def test_a_broker_that_comes_back_with_other_settings_ends_the_learner_with_what_to_do(desk: Any) -> None:
    record = make_record(SYNC.model_copy(update={"interval_steps": 1 + SYNC.interval_steps}))
    with pytest.raises(RefusedError, match=r"settings of the run were changed.*start this worker again"):
        desk.courier._handle(ClientWelcomed(make_welcome(run_record=record)))


def make_record(sync: SyncSettings) -> RunRecord:
    return RunRecord(run="toy", seed=1, sync=sync, budget=Budget(rounds=9), manifest_digest="0" * 64, manifest="{}")


@pytest.mark.parametrize(("code", "error"), [("fenced", FencedError), ("manifest", RefusedError)])
def test_a_refusal_ends_the_learner(desk: Any, code: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        desk.courier._handle(Refused(code, "for a reason"))


def test_shards_are_asked_for_again_while_there_are_fewer_than_wanted(desk: Any) -> None:
    desk.submit(RequestShards(2, {9: 4}))
    (ask,) = desk.connection.take(Shards)
    assert (ask.num_wanted, ask.returned) == (2, {9: 4})
    desk.answer(ask, ShardsLeased(shards={1: 0}))
    assert desk.courier.shards == {1: 0}
    desk.pass_time(6.0)
    assert desk.connection.take(Shards) == [Shards(num_wanted=2)]
    desk.answer(ask, ShardsLeased(shards={1: 0, 2: 5}))
    desk.pass_time(6.0)
    assert desk.connection.take(Shards) == []


def test_shards_that_were_lent_to_others_are_asked_for_anew(desk: Any) -> None:
    desk.submit(RequestShards(2, {}))
    desk.answer(desk.connection.take(Shards)[0], ShardsLeased(shards={1: 0, 2: 5}))
    desk.answer(Progress(), Alive(has_lost_shards=True))
    (ask,) = desk.connection.take(Shards)
    desk.answer(ask, ShardsLeased(shards={7: 0, 8: 0}))
    assert desk.courier.shards == {7: 0, 8: 0}


def test_what_is_returned_is_said_until_it_was_heard(desk: Any) -> None:
    desk.submit(RequestShards(2, {9: 4}))
    desk.submit(RequestShards(2, {8: 1}))
    first, second = desk.connection.take(Shards)
    assert (first.returned, second.returned) == ({9: 4}, {9: 4, 8: 1})
    desk.answer(second, ShardsLeased(shards={1: 0}))
    desk.submit(RequestShards(2, {}))
    assert desk.connection.take(Shards) == [Shards(num_wanted=2)]


def test_questions_do_not_pile_up_while_the_broker_is_away(make_desk: Any) -> None:
    broker = MemoryBroker()
    connection = Connection(Hello(role="worker", id="us-0", incarnation="aaaaaaaa"), broker.connect(), ManualClock())
    desk = make_desk(connection=connection)
    for _ in range(100):
        desk.submit(RequestShards(2, {}))
        desk.submit(Want(0))
        desk.pass_time(10.0)
    assert len(connection.client._asked) == 4  # shards, version, heads, progress


def test_the_goodbye_brings_the_last_counters_and_ends_the_thread(desk: Any) -> None:
    desk.submit(SayGoodbye())
    assert [type(message) for message in desk.connection.asked] == [Progress, Leave]
    desk.answer(desk.connection.asked[-1], Done())
    assert desk.courier._is_stopping


def test_a_courier_that_dies_ends_the_learner_instead_of_leaving_it_alone(desk: Any) -> None:
    def poll(timeout: float) -> list[Any]:
        raise RefusedError("not you")

    desk.connection.poll = poll
    desk.courier.start()
    desk.courier._thread.join()
    assert isinstance(desk.courier.mailbox.failure, IslesError)
    assert desk.connection.is_closed
