"""HELLO, INIT, LEAVE: who takes part, and who made the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.agreement import RunRecord
from isles.proto.client import Client, Refused
from isles.proto.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Alive,
    AskHeads,
    AskStatus,
    AskVersion,
    Channel,
    Done,
    Error,
    Fenced,
    Grant,
    Heads,
    Hello,
    Init,
    Initialised,
    Leave,
    Message,
    Progress,
    RetryAfter,
    Status,
    Stored,
    Upload,
    VersionReply,
    Welcome,
)

Initialise = Callable[[Member], Initialised]


def test_the_first_worker_is_welcomed_without_a_record(empty_stage: Stage) -> None:
    answer = empty_stage.member("worker", "us-1").join()
    assert isinstance(answer, Welcome)
    assert answer.run_record is None
    assert (answer.heads, answer.rows) == ((), ())
    assert answer.limits == empty_stage.settings.limits


def test_later_ones_receive_the_record_and_the_heads(stage: Stage, record: RunRecord) -> None:
    answer = stage.member("worker", "us-1").join()
    assert isinstance(answer, Welcome)
    assert answer.run_record == record
    assert [(head.fragment, head.version) for head in answer.heads] == [(0, 0), (1, 0)]


def test_an_operator_may_start_the_run_and_is_no_learner_for_that(empty_stage: Stage, initialise: Initialise) -> None:
    operator = empty_stage.member("operator", "init-1")
    operator.join()
    assert initialise(operator).is_mine
    status = operator.ask(AskStatus())
    assert isinstance(status, Status)
    assert (status.run, status.learners) == ("trial", ())
    late = empty_stage.member("worker", "us-1")
    late.join()
    assert not initialise(late).is_mine


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"protocol_min": (2, 0), "protocol_max": (2, 3)}, "protocol", "2.0 to 2.3"),
        ({"protocol_min": (0, 1), "protocol_max": (0, 9)}, "protocol", "0.1 to 0.9"),
        ({"run": "other"}, "run", "serves run trial"),
        ({"manifest_digest": "d" * 64}, "manifest", "dddddddddddd"),
        ({"stated": {"sync.interval_steps": 7}}, "settings", "sync.interval_steps is 48"),
        ({"stated": {"sync.colour": "red"}}, "settings", "no setting sync.colour"),
    ],
)
def test_who_differs_is_told_what_differs_and_changes_nothing(
    stage: Stage, worker: Member, fields: dict[str, object], code: str, word: str
) -> None:
    answer = stage.member("worker", "us-1", "a9" * 8).join(**fields)
    assert isinstance(answer, Error)
    assert answer.code == code
    assert word in answer.text
    assert stage.events()[-1] == "client.refused"
    assert isinstance(worker.ask(AskHeads()), Heads), "the incarnation before it is still current"


def test_a_wider_range_of_protocols_settles_on_a_common_one(stage: Stage) -> None:
    answer = stage.member("worker", "us-1").join(protocol_min=(1, 0), protocol_max=(2, 5))
    assert isinstance(answer, Welcome)
    assert answer.protocol == (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    older = stage.member("worker", "us-2").join(protocol_min=(1, 0), protocol_max=(1, 0))
    assert isinstance(older, Welcome)
    assert older.protocol == (1, 0)


def test_a_repeated_hello_keeps_the_session(worker: Member) -> None:
    session = worker.session
    answer = worker.join()
    assert isinstance(answer, Welcome)
    assert answer.new_session == session


def test_who_says_hello_again_and_again_is_logged_once_until_it_has_left(empty_stage: Stage) -> None:
    outer = empty_stage.member("outer", "outer-1")
    for _ in range(3):
        outer.join()
        empty_stage.advance(5.0)
    assert empty_stage.events().count("client.joined") == 1
    outer.ask(Leave())
    outer.join()
    assert empty_stage.events().count("client.joined") == 2
    empty_stage.member("outer", "outer-1", "b2" * 8).join()
    assert empty_stage.events().count("client.joined") == 3, "another incarnation is somebody else"


def test_a_session_that_a_restarted_broker_forgot_is_asked_to_say_hello(stage: Stage, worker: Member) -> None:
    stage.restart()
    answer = worker.ask(AskHeads())
    assert isinstance(answer, Error)
    assert answer.code == "unknown-session"
    assert isinstance(worker.join(), Welcome)
    assert isinstance(worker.ask(AskHeads()), Heads)


def test_an_idle_session_is_forgotten(stage: Stage, worker: Member) -> None:
    stage.advance(stage.settings.session_idle_seconds + 1)
    assert isinstance(worker.ask(AskHeads()), Error)


def test_too_many_sessions_are_put_off(empty_stage: Stage) -> None:
    empty_stage.router.state.sessions.num_max = 1
    assert isinstance(empty_stage.member("worker", "us-1").join(), Welcome)
    assert isinstance(empty_stage.member("worker", "us-2").join(), RetryAfter)


def test_a_client_that_is_fenced_at_hello_ends(stage: Stage, worker: Member) -> None:
    stage.member("worker", worker.id, "a2" * 8).join()
    client = Client(Hello(role="worker", id=worker.id, incarnation=worker.incarnation))
    [said] = client.start(0.0)
    answer = worker.ask(said.message)  # type: ignore[union-attr]
    assert isinstance(answer, Fenced)
    [news] = client.handle(answer, 0.1)
    assert isinstance(news, Refused)
    assert news.code == "fenced"


def test_operators_may_share_a_name(stage: Stage) -> None:
    first, second = stage.member("operator", "me", "01" * 8), stage.member("operator", "me", "02" * 8)
    first.join()
    second.join()
    assert isinstance(first.ask(AskHeads()), Heads)
    assert isinstance(first.ask(AskVersion(fragment=0)), VersionReply)


def test_a_worker_and_an_outer_of_one_name_do_not_fence_each_other(stage: Stage) -> None:
    worker, outer = stage.member("worker", "one", "01" * 8), stage.member("outer", "one", "02" * 8)
    worker.join()
    outer.join()
    assert isinstance(worker.ask(Progress()), Alive)


# ---------------------------------------------------------------------------------------------------------------- INIT


def test_the_first_init_makes_the_run_and_later_ones_learn_that_it_exists(
    empty_stage: Stage, initialise: Initialise, first_init: Init, record: RunRecord
) -> None:
    first, second = empty_stage.member("worker", "us-1"), empty_stage.member("worker", "us-2")
    first.join()
    second.join()
    assert initialise(first).is_mine
    other = first_init.model_copy(update={"run_record": record.model_copy(update={"run": "second"})})
    answer = second.ask(other)
    assert isinstance(answer, Initialised)
    assert not answer.is_mine
    welcome = second.join()
    assert isinstance(welcome, Welcome)
    assert welcome.run_record == record
    assert [hint.kind for hint in empty_stage.hints] == ["initialised"]


def test_a_repeated_init_is_still_its_writers(empty_stage: Stage, initialise: Initialise, first_init: Init) -> None:
    first = empty_stage.member("worker", "us-1")
    first.join()
    initialise(first)
    empty_stage.restart()
    first.join()
    answer = first.ask(first_init)
    assert isinstance(answer, Initialised)
    assert answer.is_mine


def broken_inits(init: Init) -> dict[str, Init]:
    record = init.run_record
    missing = init.versions[1].model_copy(update={"parameters": blob_of(b"never sent")})
    return {
        "a fragment is missing": init.model_copy(update={"versions": init.versions[:1]}),
        "the order is wrong": init.model_copy(update={"versions": init.versions[::-1]}),
        "a blob is missing": init.model_copy(update={"versions": (init.versions[0], missing)}),
        "no parameters": init.model_copy(
            update={"versions": (init.versions[0], init.versions[1].model_copy(update={"parameters": None}))}
        ),
        "no manifest": init.model_copy(update={"run_record": record.model_copy(update={"manifest": "{}"})}),
        "other digest": init.model_copy(update={"run_record": record.model_copy(update={"manifest_digest": "e" * 64})}),
        "other number of fragments": init.model_copy(
            update={
                "run_record": record.model_copy(update={"sync": record.sync.model_copy(update={"num_fragments": 1})}),
                "versions": init.versions[:1],
            }
        ),
    }


def test_an_init_that_is_not_whole_makes_no_run(empty_stage: Stage, initialise: Initialise, first_init: Init) -> None:
    worker = empty_stage.member("worker", "us-1")
    worker.join()
    for name in ("parameters of fragment 0" * 40, "parameters of fragment 1" * 40):
        assert isinstance(worker.send(Upload(blob=blob_of(name.encode())), name.encode()), Stored)
    for what, init in broken_inits(first_init).items():
        answer = worker.ask(init)
        assert isinstance(answer, Error), what
        assert empty_stage.index.heads() == [], what
    assert initialise(worker).is_mine


def test_before_init_there_is_nothing_to_offer_or_to_read(empty_stage: Stage) -> None:
    worker = empty_stage.member("worker", "us-1")
    worker.join()
    answer = worker.ask(AskVersion(fragment=0))
    assert isinstance(answer, Error)
    assert answer.code == "not-initialised"
    assert isinstance(worker.ask(AskHeads()), Heads)


# ------------------------------------------------------------------------------------------------- who may say what


@pytest.mark.parametrize(
    ("role", "message", "channel"),
    [
        ("worker", Welcome, Channel.CONTROL),
        ("outer", Init, Channel.CONTROL),
        ("evaluator", Upload, Channel.CONTROL),
        ("worker", AskHeads, Channel.BULK),
        ("worker", Hello, Channel.BULK),
    ],
)
def test_what_a_role_may_not_say_is_refused_by_name(
    stage: Stage, first_init: Init, role: str, message: type[Message], channel: Channel
) -> None:
    member = stage.member(role, "some-1")  # type: ignore[arg-type]
    welcome = member.join()
    assert isinstance(welcome, Welcome)
    messages: dict[type[Message], Message] = {
        Welcome: welcome,
        Init: first_init,
        Upload: Upload(blob=blob_of(b"x")),
        AskHeads: AskHeads(),
        Hello: Hello(role="worker", id="x", incarnation="ab" * 8, session=member.session),
    }
    [answer] = member.say(messages[message], channel=channel)
    assert isinstance(answer.message, Error)
    assert answer.message.code == "bad-message"
    assert message.__name__ in answer.message.text
    assert stage.events()[-1] == "message.refused"


def test_a_learner_that_left_is_not_revived_by_a_late_message(stage: Stage, worker: Member) -> None:
    assert isinstance(worker.ask(Leave()), Done)
    assert isinstance(worker.ask(Progress(tokens=5)), Alive)
    assert isinstance(worker.ask(Leave()), Done)
    [info] = [info for info in stage.router.state.membership.infos() if info.learner == worker.id]
    assert not info.is_live
    assert stage.events().count("client.left") == 1


def test_a_client_may_have_so_many_uploads_and_not_more(empty_stage: Stage) -> None:
    worker = empty_stage.member("worker", "us-1")
    worker.join()
    most = empty_stage.settings.uploads_per_client_max
    answers = [worker.ask(Upload(blob=blob_of(str(number).encode()))) for number in range(most + 1)]
    assert [type(answer) for answer in answers] == [Grant] * most + [RetryAfter]


def test_a_refusal_of_a_very_long_setting_still_fits_its_message(stage: Stage) -> None:
    answer = stage.member("worker", "us-1").join(stated={"sync.merge_rule": "x" * 4000})
    assert isinstance(answer, Error)
    assert answer.code == "settings"
