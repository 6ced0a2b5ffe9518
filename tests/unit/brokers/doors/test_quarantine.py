"""Learners whose contributions are rejected again and again: not heard for a while, nor waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.messages import (
    Accepted,
    AskHeads,
    AskStatus,
    Committed,
    Contribution,
    Done,
    Error,
    Grant,
    Heads,
    LearnerInfo,
    Message,
    Offer,
    Pardon,
    Progress,
    Rejected,
    Rejection,
    Settle,
    Shards,
    ShardsLeased,
    Status,
    Upload,
    Welcome,
)

Contribute = Callable[..., Contribution]
Payload = Callable[[Member, int], bytes]
Offered = Callable[..., Contribution]

REASON = "learner us-1, fragment 0: tensor a is not finite"


@pytest.fixture
def reject(outer: Member) -> Callable[..., None]:
    """Has the outer reject contributions."""

    def run(*contributions: Contribution, kind: str = "finite") -> None:
        for contribution in contributions:
            rejection = Rejection(id=contribution.id, reason=REASON, kind=kind)
            outer.ask(Settle(fragment=contribution.id.fragment, epoch=1, rejections=(rejection,)))

    return run


@pytest.fixture
def quarantined(worker: Member, offered: Offered, reject: Callable[..., None]) -> Member:
    """A worker after three rejections in a row."""
    for number in range(1, 4):
        reject(offered(number, base=0))
    return worker


def info_of(stage: Stage, learner: str) -> LearnerInfo:
    [info] = [one for one in stage.router.state.membership.infos() if one.learner == learner]
    return info


def code_of(answer: Message) -> str:
    return answer.code if isinstance(answer, Error) else ""


def test_three_rejections_in_a_row_begin_a_quarantine_that_names_the_last_reason(
    stage: Stage, worker: Member, offered: Offered, reject: Callable[..., None], contribute: Contribute
) -> None:
    for number in (1, 2):
        reject(offered(number, base=0))
        assert "learner.quarantined" not in stage.events()
    reject(offered(3, base=0))
    [said] = [log for log in stage.logs if log.event == "learner.quarantined"]
    assert said.fields == {"learner": "us-1", "num_rejected": 3, "seconds": 600.0, "reason": REASON}
    answer = worker.ask(Offer(contribution=contribute(worker, 4)))
    assert isinstance(answer, Error)
    assert answer.code == "quarantined"
    assert all(word in answer.text for word in ("3 contributions", REASON, "10 min", "isles pardon us-1"))


@pytest.mark.parametrize("number", range(1, 7))
def test_a_merge_begins_the_row_anew(
    stage: Stage,
    outer: Member,
    offered: Offered,
    reject: Callable[..., None],
    merge: Callable[..., Message],
    number: int,
) -> None:
    version = 0
    for step in range(1, 7):
        contribution = offered(step, base=version)
        if step % 3 == 0:
            assert isinstance(merge(outer, [contribution], base=version), Committed)
            version += 1
        else:
            reject(contribution)
    assert "learner.quarantined" not in stage.events()


def test_one_mishap_that_spoils_several_fragments_counts_once(
    stage: Stage, offered: Offered, reject: Callable[..., None], settings: RoutingSettings
) -> None:
    for first in (1, 3, 5):
        assert "learner.quarantined" not in stage.events()
        reject(offered(first, base=0, fragment=0), offered(first + 1, base=0, fragment=1))
    assert "learner.quarantined" in stage.events()


def test_what_the_store_lost_is_nobodys_fault(stage: Stage, offered: Offered, reject: Callable[..., None]) -> None:
    for number in range(1, 9):
        reject(offered(number, base=0), kind="lost")
    assert "learner.quarantined" not in stage.events()


def test_no_round_waits_for_a_quarantined_learner_and_its_shards_are_free(
    stage: Stage, worker: Member, offered: Offered, reject: Callable[..., None]
) -> None:
    worker.ask(Shards(num_wanted=4))
    for number in range(1, 4):
        reject(offered(number, base=0))
    for _ in range(3):
        worker.ask(Progress(steps=9))
        assert (info_of(stage, "us-1").is_live, info_of(stage, "us-1").num_shards) == (False, 0)
        stage.advance(1.0)
    assert code_of(worker.ask(Shards(num_wanted=4))) == "quarantined"
    assert code_of(worker.ask(Upload(blob=blob_of(b"x")))) == "quarantined"
    assert isinstance(worker.ask(AskHeads()), Heads), "it may look"


def test_an_upload_under_way_is_dropped(
    stage: Stage, worker: Member, offered: Offered, reject: Callable[..., None], contribute: Contribute
) -> None:
    last = [offered(number, base=0) for number in (1,)]
    reject(*last)
    reject(offered(2, base=0))
    third = offered(3, base=0)
    assert isinstance(worker.ask(Offer(contribution=contribute(worker, 4, fragment=1))), Grant)
    reject(third)
    assert not stage.router.state.uploads.is_open(contribute(worker, 4, fragment=1).blob.digest)


def test_a_quarantined_learner_is_not_let_in_again_by_starting_anew(stage: Stage, quarantined: Member) -> None:
    for restart in (lambda: None, stage.restart):
        restart()
        again = stage.member("worker", "us-1", "c1" * 8, key=quarantined.key)
        answer = again.join()
        assert isinstance(answer, Error)
        assert (answer.code, REASON in answer.text) == ("quarantined", True)


def test_its_time_ends_and_the_next_rejection_begins_another(
    stage: Stage, quarantined: Member, contribute: Contribute, payload: Payload, reject: Callable[..., None]
) -> None:
    stage.advance(600.0)
    assert isinstance(quarantined.join(), Welcome)
    contribution = contribute(quarantined, 4)
    assert isinstance(quarantined.send(Offer(contribution=contribution), payload(quarantined, 4)), Accepted)
    assert info_of(stage, "us-1").is_live
    outer = stage.member("outer", "outer-1", f"{3:016x}", key="o" * 40)
    outer.join()
    rejection = Rejection(id=contribution.id, reason=REASON, kind="norm")
    epoch = stage.router.state.leases.epoch(0)
    outer.ask(Settle(fragment=0, epoch=epoch, rejections=(rejection,)))
    assert code_of(quarantined.ask(Offer(contribution=contribute(quarantined, 5)))) == "quarantined"


def test_an_operator_pardons_and_the_learner_goes_on_at_once(
    stage: Stage, quarantined: Member, come: Callable[..., Member], contribute: Contribute, payload: Payload
) -> None:
    operator = come("a", "operator", "operator")
    assert isinstance(operator.ask(Pardon(learner="us-1")), Done)
    assert isinstance(operator.ask(Pardon(learner="us-1")), Done), "a repeated one is answered alike"
    assert stage.events().count("learner.pardoned") == 1
    answer = quarantined.send(Offer(contribution=contribute(quarantined, 4)), payload(quarantined, 4))
    assert isinstance(answer, Accepted)
    stage.restart()
    assert isinstance(quarantined.join(), Welcome)
    assert isinstance(quarantined.ask(Shards(num_wanted=1)), ShardsLeased)


def test_a_pardon_of_nobody_says_so(stage: Stage, come: Callable[..., Member]) -> None:
    answer = come("a", "operator", "operator").ask(Pardon(learner="nobody"))
    assert isinstance(answer, Error)
    assert (answer.code, "no learner nobody" in answer.text) == ("not-found", True)


def test_the_fate_of_what_was_rejected_is_told_during_the_quarantine(
    stage: Stage, quarantined: Member, come: Callable[..., Member]
) -> None:
    heads = quarantined.ask(AskHeads())
    assert isinstance(heads, Heads)
    assert [row.state for row in heads.rows] == ["rejected"]
    status = quarantined.ask(AskStatus())
    assert isinstance(status, Status)
    assert status.totals.rejected == 3
    [warning] = [one for one in status.warnings if one.name == "learner.quarantined"]
    assert (warning.subject, REASON in warning.text, warning.since_unix) == ("us-1", True, stage.unix)
    stage.advance(600.0)
    later = come("a", "operator", "operator").ask(AskStatus())
    assert isinstance(later, Status)
    assert [one.name for one in later.warnings] == [], "it is over"


@pytest.mark.parametrize("num_max", [0, 1])
def test_the_limit_is_a_setting_and_nought_means_never(
    empty_stage: Stage, outer: Member, worker: Member, offered: Offered, reject: Callable[..., None], num_max: int
) -> None:
    state = empty_stage.router.state
    state.settings = state.settings.model_copy(update={"quarantine_rejections": num_max})
    for number in range(1, 2 if num_max else 20):
        reject(offered(number, base=0))
    assert ("learner.quarantined" in empty_stage.events()) is bool(num_max)


def test_without_keys_it_is_the_same(
    stage: Stage, worker: Member, offered: Offered, reject: Callable[..., None], contribute: Contribute
) -> None:
    for number in range(1, 4):
        reject(offered(number, base=0))
    stage.allowed = None
    stage.restart()
    keyless = stage.member("worker", "us-1", "d1" * 8)
    assert code_of(keyless.join()) == "quarantined"
    assert not isinstance(keyless, Rejected)
