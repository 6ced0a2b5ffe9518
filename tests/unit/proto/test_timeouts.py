"""How waiting times must fit each other, over the whole table."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from isles.ops.settings import section_models
from isles.proto.errors import ConfigError
from isles.proto.logs import ListLogger
from isles.proto.messages import Limits
from isles.proto.timeouts import (
    CONSTANTS,
    RELATIONS,
    Relation,
    check_times,
    faults,
    is_constant,
    times_of,
    times_told,
)
from isles.workers.courier import LOST_SECONDS

MUSTS = [relation for relation in RELATIONS if relation.is_must]
DOUBTS = [relation for relation in RELATIONS if not relation.is_must]
FREE = [relation for relation in MUSTS if not is_constant(relation.longer)]
"""Those whose longer side somebody can set too low."""


def all_times() -> dict[str, float]:
    """What `isles up` knows, and what is no setting."""
    times = {**CONSTANTS, "learner.lost_seconds": LOST_SECONDS}
    for name, model in section_models().items():
        times |= times_of(name, model())
    return times


def broken(relation: Relation) -> dict[str, float]:
    """Two times that contradict this relation by a hair."""
    return {relation.longer: relation.factor * 7.0 - 0.001, relation.shorter: 7.0}


def called(relation: Relation) -> str:
    return f"{relation.longer}-{relation.shorter}"


def test_the_defaults_fit_each_other() -> None:
    assert [relation for relation in RELATIONS if not relation.is_kept(all_times())] == []


def test_every_relation_is_about_times_that_exist() -> None:
    assert {name for one in RELATIONS for name in (one.longer, one.shorter)} <= all_times().keys()


def test_somebody_can_mend_every_relation_but_those_between_constants() -> None:
    assert all(
        not is_constant(one.longer) or not is_constant(one.shorter) or one.is_kept(CONSTANTS) for one in RELATIONS
    )


@pytest.mark.parametrize("relation", RELATIONS, ids=called)
def test_a_relation_holds_up_to_its_bound(relation: Relation) -> None:
    assert relation.is_kept({relation.longer: relation.factor * 7.0, relation.shorter: 7.0})
    assert not relation.is_kept(broken(relation))


@pytest.mark.parametrize("relation", RELATIONS, ids=called)
def test_a_relation_of_which_one_time_is_unknown_or_switched_off_holds(relation: Relation) -> None:
    assert relation.is_kept({relation.longer: 0.001})
    assert relation.is_kept({relation.shorter: 1e9})
    assert relation.is_kept({relation.longer: 0.0, relation.shorter: 1e9})


@pytest.mark.parametrize("relation", MUSTS, ids=called)
def test_times_that_cannot_work_are_refused_with_both_names_and_the_remedy(relation: Relation) -> None:
    [sentence] = faults(broken(relation), [relation])
    assert relation.longer in sentence
    assert relation.shorter in sentence
    assert ("raise the first" in sentence) is not is_constant(relation.longer)
    assert ("lower the second" in sentence) is not is_constant(relation.shorter)


@pytest.mark.parametrize("relation", FREE, ids=called)
def test_a_process_does_not_begin_with_times_that_cannot_work(relation: Relation) -> None:
    low = (relation.factor * all_times()[relation.shorter]) * 0.99
    log = ListLogger()
    with pytest.raises(ConfigError, match=relation.longer):
        check_times(all_times() | {relation.longer: low}, log)
    assert log.events() == []


@pytest.mark.parametrize("relation", DOUBTS, ids=called)
def test_times_that_somebody_may_want_are_said_and_taken(relation: Relation) -> None:
    log = ListLogger()
    check_times(all_times() | {relation.longer: (relation.factor * all_times()[relation.shorter]) * 0.99}, log)
    assert log.events()[-2:] == ["timeouts.doubtful", "timeouts.checked"]


def test_all_times_in_force_are_said_once() -> None:
    log = ListLogger()
    check_times({"worker.drain_timeout_seconds": 30.0} | times_told(Limits(outer_lease_seconds=4.0)), log)
    [(level, event, fields)] = log.records
    assert (level, event) == ("info", "timeouts.checked")
    told = {"worker.drain_timeout_seconds": 30.0, "broker.outer_lease_seconds": 4.0, "client.stall_seconds": 15.0}
    assert told.items() <= fields["seconds"].items()


def test_the_times_of_a_section_are_found_by_their_names() -> None:
    class Some(BaseModel):
        lease_seconds: float = 3.0
        wait_seconds_max: int = 4
        seconds: float = 5.0
        versions_kept: int = 8

    assert times_of("some", Some()) == {"some.lease_seconds": 3.0, "some.wait_seconds_max": 4.0}
