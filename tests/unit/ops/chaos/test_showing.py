"""A campaign in words."""

from __future__ import annotations

import random

from isles.ops.chaos.campaign import Begun, Campaign, Failed, Process, Seen
from isles.ops.chaos.plan import KINDS, MOMENTARY_KINDS, WIDE_KINDS, Fault, Plan
from isles.ops.chaos.showing import begun, happened, names, shown
from isles.ops.fault_view import FaultShown

PROCESSES = (
    Process("broker", "broker", "", 1),
    Process("us-0", "worker", "us", 2),
    Process("us-1", "worker", "us", 3),
)


def campaign(*faults: Fault) -> Campaign:
    made = Campaign(Plan(fault=faults), random.Random(0))
    made.handle(Seen(PROCESSES), 100.0)
    made.handle(Begun(), 100.0)
    return made


def fault(kind: str, at: float = 0.0) -> Fault:
    given = {"region": "us"} if kind == "cut" else {} if kind in WIDE_KINDS else {"process": "us-0"}
    return Fault.model_validate({"at": at, "kind": kind, **given})


def test_every_kind_that_lasts_says_what_its_victims_are_meanwhile() -> None:
    for kind in KINDS:
        lasting = shown(campaign(fault(kind), fault("kill", 50.0))).lasting
        if kind in MOMENTARY_KINDS:
            assert lasting == ()
            continue
        (one,) = lasting
        assert one.text.startswith(f"fault 1 of 2: {kind}")
        assert one.state
        assert one.processes <= {process.name for process in PROCESSES}
        assert one.processes


def test_a_region_is_named_instead_of_its_workers() -> None:
    found = campaign(fault("cut"))
    assert happened(found.injections[1], 1) == "fault 1 of 1: cut us for 15 s"
    assert shown(found).lasting == (FaultShown("fault 1 of 1: cut us", 115.0, frozenset({"us-0", "us-1"}), "cut off"),)


def test_what_hits_the_whole_run_names_nobody_and_tells_what_else_is_known() -> None:
    assert happened(campaign(fault("kill-all")).injections[1], 1) == "fault 1 of 1: kill-all"
    told = happened(campaign(fault("corrupt")).injections[1], 1, "bit 0 of byte 7 of blob 0123456789ab")
    assert told == "fault 1 of 1: corrupt (bit 0 of byte 7 of blob 0123456789ab)"


def test_a_fault_that_did_not_happen_is_told_with_its_reason() -> None:
    found = campaign(fault("kill"))
    found.handle(Failed(1, "it had ended already"), 100.0)
    assert happened(found.injections[1], 1) == "fault 1 of 1 is left out: kill us-0: it had ended already"


def test_whoever_is_not_there_is_still_named() -> None:
    found = campaign(Fault(at=0.0, kind="kill", process="eu-7"))
    assert "kill eu-7: no such process was running" in happened(found.injections[1], 1)


def test_of_many_names_some_are_told_and_the_others_counted() -> None:
    assert names([]) == ""
    assert names(["a", "b"]) == "a, b"
    assert names(list("abcdef")) == "a, b, c, d and 2 more"


def test_what_is_to_come_is_told_before_it_comes() -> None:
    waiting = Campaign(Plan(fault=(fault("kill", 3.0),)), random.Random(0))
    assert (shown(waiting).num_begun, shown(waiting).next_at, shown(waiting).is_over) == (0, None, False)
    assert begun(waiting.plan) == "the time of the plan begins: 1 fault within 3.0 s"
    assert begun(Plan()) == "the plan has no faults"
    waiting.handle(Begun(), 100.0)
    assert shown(waiting).next_at == 103.0
