"""A watch asks again and again, keeps every figure once, and does not mind a broker that is away."""

from __future__ import annotations

import pytest

from isles.ops.watch import RETRY_SECONDS, StatusWatch
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.errors import RefusedError, UnreachableError
from isles.proto.messages import AskStatus, Channel, Limits, ReportInfo, Status, Welcome, pack, unpack
from isles.proto.transport.memory import MemoryBroker


class Stage:
    """A watch, and the broker's side of its connection, played by the test."""

    def __init__(self, *, wants_newest: bool = False) -> None:
        self.clock = ManualClock(50.0)
        self.broker = MemoryBroker()
        self.transport = self.broker.connect()
        self.watch = StatusWatch(self.transport, every_seconds=1.0, wants_newest=wants_newest, clock=self.clock)

    def asked(self) -> list[tuple[bytes, AskStatus]]:
        found = []
        for arrival in self.broker.poll(0.0):
            message = unpack(arrival.header)
            assert isinstance(message, AskStatus)
            found.append((arrival.connection, message))
        return found

    def answer(self, *reports: ReportInfo) -> AskStatus:
        """Answers the newest question and lets the watch hear it."""
        connection, ask = self.asked()[-1]
        status = Status(
            request=ask.request,
            run="demo",
            broker_incarnation="ab" * 8,
            uptime_seconds=1,
            progress=0.5,
            reports=reports,
        )
        self.broker.send(Channel.CONTROL, connection, pack(status))
        assert self.watch.poll(0.0)
        return ask


def report(seq: int) -> ReportInfo:
    return ReportInfo(seq=seq, name="validation_loss", value=1.0, versions={0: seq}, reporter="e", unix=1.0)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_first_look_asks_at_once(stage: Stage) -> None:
    assert not stage.watch.poll(0.0)
    assert len(stage.asked()) == 1


def test_a_question_that_got_lost_is_asked_again_soon_at_the_beginning(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.clock.advance(0.11)
    stage.watch.poll(0.0)
    assert len(stage.asked()) == 2


def test_an_answered_watch_asks_once_a_second_only(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.answer()
    stage.clock.advance(0.9)
    stage.watch.poll(0.0)
    assert stage.asked() == []
    stage.clock.advance(0.2)
    stage.watch.poll(0.0)
    assert len(stage.asked()) == 1


def test_a_broker_that_went_away_is_asked_again_with_patience(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.answer()
    for _ in range(4):
        stage.clock.advance(RETRY_SECONDS)
        stage.watch.poll(0.0)
    assert 1 <= len(stage.asked()) <= 4
    stage.clock.advance(RETRY_SECONDS)
    stage.watch.poll(0.0)
    stage.answer()


def test_each_figure_is_kept_once_and_only_newer_ones_are_asked_for(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.answer(report(2), report(1))
    stage.clock.advance(1.0)
    stage.watch.poll(0.0)
    ask = stage.answer(report(2), report(3))
    assert ask.reports_after == 2
    assert [one.seq for one in stage.watch.reports] == [1, 2, 3]
    assert not ask.wants_newest


def test_who_looks_once_asks_for_the_newest_figures() -> None:
    stage = Stage(wants_newest=True)
    stage.watch.poll(0.0)
    assert stage.answer(report(7), report(8)).wants_newest
    assert [one.seq for one in stage.watch.reports] == [7, 8]


def test_a_status_remembers_when_it_was_asked_for(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.clock.advance(0.05)
    stage.answer()
    assert (stage.watch.status_asked_at, stage.watch.status_at) == (50.0, 50.05)


def test_the_record_of_the_run_comes_only_to_those_who_ask_for_it(stage: Stage) -> None:
    stage.watch.poll(0.0)
    stage.answer()
    assert (stage.broker.poll(0.0), stage.watch.record) == ([], None)
    stage.watch.ask_record()
    (arrival,) = stage.broker.poll(0.0)
    record = RunRecord(
        run="demo", seed=1, sync=SyncSettings(), budget=Budget(tokens=9), manifest_digest="0" * 64, manifest="{}"
    )
    welcome = Welcome(
        request=unpack(arrival.header).request,
        new_session="cd" * 8,
        protocol=(1, 0),
        broker_incarnation="ee" * 8,
        seq=0,
        limits=Limits(),
        run_record=record,
    )
    stage.broker.send(Channel.CONTROL, arrival.connection, pack(welcome))
    stage.watch.poll(0.0)
    assert stage.watch.record == record


def test_waiting_for_a_status_gives_up_in_one_sentence(stage: Stage) -> None:
    stage.clock.advance(5.0)
    with pytest.raises(UnreachableError, match="no broker answered at nowhere within 0 s"):
        stage.watch.wait(0.0, address="nowhere")


def test_a_watch_that_is_denied_ends_at_once_and_asks_no_more(stage: Stage) -> None:
    stage.transport.denial = "the key of operator me was revoked"
    with pytest.raises(
        RefusedError, match=r"at memory refused this process \(denied\): the key of operator me was revoked"
    ):
        stage.watch.wait(1000.0, address="memory")
    stage.asked()
    stage.clock.advance(100.0)
    stage.watch.poll(0.0)
    assert stage.asked() == []
