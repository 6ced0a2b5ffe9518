"""What is wrong with a run although every process works: said when it begins and when it ends, shown while it lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage
from isles.brokers.vocabulary import Log
from isles.brokers.warnings import (
    ALONE_CYCLES,
    DISK_FACTOR,
    EXPIRED_IN_A_ROW,
    SHOWN_SECONDS,
    STRANGERS_MAX,
    WARNINGS_MAX,
    Warnings,
)
from isles.proto.agreement import SyncSettings
from isles.proto.events import EVENTS
from isles.proto.ids import ContributionId
from isles.proto.messages import AskStatus, Contribution, Error, Lease, Offer, Progress, Status, Welcome

SYNC = SyncSettings(num_fragments=2)
EVERYBODY = ("a", "b", "c")
DISK = 1 << 40
"""Bytes that a disk without worries has free."""


class Case:
    """Warnings, and what they said, in order."""

    def __init__(self, **settings: Any) -> None:
        self.warnings = Warnings(RoutingSettings(**settings))
        self.said: list[str] = []
        self.logs: list[Log] = []
        self.version = 0

    def hear(self, logs: list[Log]) -> None:
        self.logs += logs
        self.said += [log.event for log in logs]
        for log in logs:
            assert set(EVENTS[log.event]) <= set(log.fields)

    def commit(self, *learners: str, training: tuple[str, ...] = EVERYBODY, sync: SyncSettings = SYNC) -> None:
        self.version += 1
        where = {"fragment": 0, "version": self.version}
        self.hear(self.warnings.take_commit(learners, training, where, sync, float(self.version)))

    def expire(self, learner: str, number: int) -> None:
        self.hear(self.warnings.take_expiry(ContributionId(learner, 0, "aa" * 8, number), 70, 1.0))

    def look(self, *, disk: int = DISK, stored: int = 0, live: tuple[str, ...] = EVERYBODY, unix: float = 1.0) -> None:
        self.hear(self.warnings.look(disk_free_bytes=disk, stored_bytes=stored, live=live, unix=unix))

    @property
    def shown(self) -> list[tuple[str, str]]:
        return [(info.name, info.subject) for info in self.warnings.infos()]


@pytest.fixture
def case() -> Case:
    return Case()


# -------------------------------------------------------------------------------------------------------------- rounds


def test_rounds_of_one_among_others_are_said_once_and_end_with_a_cycle_that_holds_none(case: Case) -> None:
    for learners in ("a", "ab", "b", "ac", "a"):
        case.commit(*learners)
    assert case.said == ["round.alone"]
    assert case.shown == [("round.alone", "")]
    case.commit("a", "b")
    case.commit("a", "b", "c")
    assert case.said == ["round.alone", "round.shared"]
    assert case.logs[-1].fields["num_rounds"] == 3
    assert case.shown == []


def test_a_round_of_one_is_nothing_to_say_where_nobody_else_trains(case: Case) -> None:
    case.commit("a", training=("a",))
    assert case.said == []


def test_a_run_that_asks_for_rounds_of_one_gets_no_warning_about_them(case: Case) -> None:
    for number in range(30):
        case.commit(EVERYBODY[number % 3], sync=SyncSettings(preset="async"))
    assert case.said == []


@pytest.mark.parametrize("training", [("a",), EVERYBODY])
def test_a_learner_that_makes_up_all_rounds_of_many_cycles_is_alone_whoever_else_is_live(
    case: Case, training: tuple[str, ...]
) -> None:
    for _ in range(ALONE_CYCLES * SYNC.num_fragments - 1):
        case.commit("a", training=training)
    assert "learner.alone" not in case.said
    for _ in range(5):
        case.commit("a", training=training)
    assert case.said.count("learner.alone") == 1
    assert ("learner.alone", "a") in case.shown
    case.commit("a", "b")
    assert case.said[-1] == "learner.accompanied"
    assert ("learner.alone", "a") not in case.shown


def test_learners_that_take_turns_are_not_alone(case: Case) -> None:
    for number in range(100):
        case.commit(EVERYBODY[number % 3])
    assert "learner.alone" not in case.said


def test_a_deterministic_run_is_for_one_learner_and_says_nothing_of_it(case: Case) -> None:
    for _ in range(100):
        case.commit("a", training=("a",), sync=SyncSettings(is_deterministic=True))
    assert case.said == []


# ------------------------------------------------------------------------------------------------------- contributions


def test_a_learner_whose_contributions_expire_one_after_the_other_is_outdated_until_one_is_in_time(case: Case) -> None:
    for number in range(EXPIRED_IN_A_ROW - 1):
        case.expire("a", number)
        case.expire("a", number)  # asked about again: still the same contribution
    assert case.said == []
    for number in range(10, 20):
        case.expire("a", number)
    assert case.said == ["learner.outdated"]
    assert case.shown == [("learner.outdated", "a")]
    case.hear(case.warnings.take_acceptance("a"))
    case.hear(case.warnings.take_acceptance("a"))
    assert case.said == ["learner.outdated", "learner.caught_up"]
    assert case.shown == []


def test_contributions_that_expire_between_others_that_are_in_time_are_nothing_to_say(case: Case) -> None:
    for number in range(20):
        case.expire("a", number)
        case.hear(case.warnings.take_acceptance("a"))
    assert case.said == []


def test_an_outdated_learner_that_is_gone_is_shown_no_longer(case: Case) -> None:
    for number in range(EXPIRED_IN_A_ROW):
        case.expire("a", number)
    case.look(live=("b",))
    assert case.shown == []


# ----------------------------------------------------------------------------------------------------------- the store


def test_a_disk_near_its_limit_is_said_once_until_there_is_room_again() -> None:
    case = Case(disk_free_bytes_min=1000)
    for free in (DISK, DISK_FACTOR * 1000, DISK_FACTOR * 1000 - 1, 10, DISK_FACTOR * 1000 + 1, 3999, DISK, DISK):
        case.look(disk=free)
    assert case.said == ["store.filling", "store.relieved"]


def test_a_store_near_its_limit_is_said_once_until_there_is_room_again() -> None:
    case = Case(stored_bytes_max=1000)
    for stored in (0, 899, 900, 1000, 899, 901, 860):
        case.look(stored=stored)
    assert case.said == ["store.filling"]
    assert case.shown == [("store.filling", "stored")]
    case.look(stored=849)
    assert case.said == ["store.filling", "store.relieved"]


def test_a_store_without_limits_fills_up_in_silence() -> None:
    case = Case(disk_free_bytes_min=0)
    case.look(disk=0, stored=DISK)
    assert case.said == []


def test_no_more_is_shown_than_an_answer_may_hold(case: Case) -> None:
    for learner in range(WARNINGS_MAX + 5):
        for number in range(EXPIRED_IN_A_ROW):
            case.expire(f"us-{learner}", number)
    assert len(case.shown) == WARNINGS_MAX


# ----------------------------------------------------------------------------------------------------- the whole broker


def status_of(member: Member) -> Status:
    answer = member.ask(AskStatus())
    assert isinstance(answer, Status)
    return answer


def test_the_status_shows_what_lasts_and_the_log_what_began(
    stage: Stage,
    worker: Member,
    outer: Member,
    offered: Callable[..., Contribution],
    merge: Callable[..., object],
) -> None:
    other = stage.member("worker", "eu-1", "e1" * 8)
    other.join()
    for member in (worker, other):
        member.ask(Progress(steps=1, tokens=1))
    merge(outer, [offered(0)])
    [warning] = status_of(worker).warnings
    assert (warning.name, warning.since_unix) == ("round.alone", stage.unix)
    assert "eu-1 also trained" in warning.text
    assert stage.events().count("round.alone") == 1


def test_contributions_from_too_old_a_version_make_a_learner_outdated(
    stage: Stage, worker: Member, advance: Callable[[int, int], None], contribute: Callable[..., Contribution]
) -> None:
    advance(0, 5)
    slow = stage.member("worker", "slow", "51" * 8)
    slow.join()
    for number in range(EXPIRED_IN_A_ROW):
        slow.ask(Offer(contribution=contribute(slow, number, base=0)))
    assert "learner.outdated" in [warning.name for warning in status_of(worker).warnings]


def test_the_status_tells_clock_version_limits_and_store(stage: Stage, worker: Member, outer: Member) -> None:
    stage.advance(3.0)
    outer.ask(Lease(fragments=(0, 1), num_required=4))
    status = status_of(worker)
    assert status.unix == stage.unix
    assert status.limits == stage.settings.limits
    assert status.num_required == 4
    assert status.store is not None
    assert status.store.stored_bytes == stage.index.stored_bytes()
    assert status.store.disk_free_bytes == stage.blobs.free_bytes()


# ------------------------------------------------------------------------------------------------- two runs of one name


def test_a_store_keeps_its_name(stage: Stage, worker: Member) -> None:
    first = worker.join()
    stage.restart()
    second = worker.join()
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    assert first.store == second.store


def test_a_process_whose_state_is_of_another_store_with_a_run_of_the_same_name_is_refused_and_shown(
    stage: Stage, worker: Member
) -> None:
    stranger = stage.member("worker", "us-9", "99" * 8)
    answer = stranger.join(run="trial", store="ee" * 16)
    assert isinstance(answer, Error)
    assert answer.code == "run"
    assert "two runs with the name trial" in answer.text
    stranger.join(run="trial", store="ee" * 16)
    assert stage.events().count("run.duplicated") == 1
    assert [warning.name for warning in status_of(worker).warnings] == ["run.duplicated"]
    stage.advance(SHOWN_SECONDS + 1)
    assert status_of(worker).warnings == ()


def test_however_many_processes_of_other_runs_knock_there_is_room_for_other_warnings(
    stage: Stage, worker: Member
) -> None:
    for number in range(STRANGERS_MAX + 3):
        stage.member("worker", f"us-{number}", f"{number:016x}").join(run="trial", store="ee" * 16)
    assert len(status_of(worker).warnings) == stage.events().count("run.duplicated") == STRANGERS_MAX < WARNINGS_MAX


def test_a_process_that_comes_back_to_its_own_store_is_let_in(stage: Stage, worker: Member) -> None:
    welcome = worker.join()
    assert isinstance(welcome, Welcome)
    assert isinstance(worker.join(run="trial", store=welcome.store), Welcome)


def test_a_process_with_the_state_of_a_run_is_not_let_into_an_empty_store(empty_stage: Stage) -> None:
    answer = empty_stage.member("worker", "us-9", "99" * 8).join(run="trial", store="ee" * 16)
    assert isinstance(answer, Error)
    assert "empty checkpoint folder" in answer.text
    assert "run.duplicated" not in empty_stage.events()
