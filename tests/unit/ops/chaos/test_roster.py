"""A plan that names whom a run does not have is refused before anything happens, and told who is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isles.ops.chaos.campaign import Process
from isles.ops.chaos.options import RANDOM, read_plan
from isles.ops.chaos.plan import NETWORK_KINDS, RANDOM_KINDS_WITH_LINKS, Plan, validate
from isles.ops.chaos.roster import Member, Roster, roster_of, roster_of_project
from isles.ops.options import load_config
from isles.ops.run_folder import RunFolder, State
from isles.ops.settings import UpSettings, section_models
from isles.ops.start import commands
from isles.proto.config import Stated
from isles.proto.errors import ConfigError

SETTINGS = UpSettings(workers="us=1,eu=2", outers=2, has_evaluator=False)
ROSTER = roster_of(SETTINGS)
ALL = "broker, outer, outer-2, us-0, eu-0, eu-1"


def plan(**fault: Any) -> Plan:
    return validate({"fault": [{"at": 1.0, "kind": "kill"}, {"at": 5.0, **fault}]}, "plan.toml")


@pytest.mark.parametrize("has_evaluator", ["true", "false"])
def test_the_roster_of_a_run_is_whom_it_starts(has_evaluator: str, tmp_path: Path) -> None:
    wanted = {"up.workers": "us=1,eu=2", "up.outers": "3", "up.has_evaluator": has_evaluator}
    config = load_config(section_models(), file=None, stated=[Stated(*one, "a test") for one in wanted.items()])
    roster = roster_of(config.section("up", UpSettings))
    children = commands(RunFolder(tmp_path), config, State())
    assert {name: member.role for name, member in roster.members.items()} == {
        name: role for name, (role, _) in children.items()
    }
    assert roster.regions == ("eu", "us")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "kill", "process": "us-7"}, f"there is no process us-7 in the run of runs/demo: it has {ALL}"),
        ({"kind": "freeze", "role": "evaluator"}, f"there is no evaluator in the run of runs/demo: it has {ALL}"),
        ({"kind": "cut", "region": "asia"}, "there is no region asia in the run of runs/demo: it has eu, us"),
        ({"kind": "delay", "region": "asia"}, "there is no region asia in the run of runs/demo: it has eu, us"),
        (
            {"kind": "delay", "process": "outer"},
            "outer is no worker of the run of runs/demo: those are us-0, eu-0, eu-1",
        ),
    ],
)
def test_whom_a_run_does_not_have_is_named_together_with_whom_it_has(fault: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ROSTER.check(plan(**fault), "plan.toml")
    text = str(caught.value)
    assert text.startswith(f"plan.toml: fault 2 (5 s: {fault['kind']} ")
    assert text.endswith(words)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "kill", "process": "outer-2"},
        {"kind": "kill", "role": "outer"},
        {"kind": "cut", "region": "eu"},
        {"kind": "reset", "process": "eu-1"},
        {"kind": "rate", "role": "worker"},
        {"kind": "freeze"},
        {"kind": "kill-all"},
    ],
)
def test_what_can_happen_to_somebody_is_taken(fault: dict[str, Any]) -> None:
    ROSTER.check(plan(**fault), "plan.toml")


def test_a_file_is_checked_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[[fault]]\nat = 1\nkind = "kill"\nprocess = "us-7"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="there is no process us-7 in the run of runs/demo"):
        read_plan(str(path), {}, ROSTER)


def test_a_name_for_a_random_plan_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=f"processes: there is no process us-7 in the run of runs/demo: it has {ALL}"):
        read_plan(RANDOM, {"chaos_processes": "us-0,us-7"}, ROSTER)


def test_nothing_is_drawn_that_could_happen_to_nobody() -> None:
    wanted = {"chaos_for": 2000.0, "chaos_processes": "broker,us-0"}
    found = read_plan(RANDOM, wanted, ROSTER, RANDOM_KINDS_WITH_LINKS)
    assert {one.process for one in found.fault if one.kind in NETWORK_KINDS - {"cut"}} == {"us-0"}
    assert {one.process for one in found.fault if one.kind == "kill"} == {"broker", "us-0"}
    without_workers = read_plan(RANDOM, {**wanted, "chaos_processes": "broker"}, ROSTER, RANDOM_KINDS_WITH_LINKS)
    assert {one.kind for one in without_workers.fault} == {"kill", "freeze", "cut"}
    with pytest.raises(ConfigError, match="must be among the processes that are named"):
        read_plan(RANDOM, {"chaos_processes": "broker", "chaos_kinds": "delay,reset"}, ROSTER)
    unnamed = read_plan(RANDOM, {"chaos_for": 2000.0}, ROSTER)
    assert {one.role for one in unnamed.fault} == {"worker", "outer", "broker"}, "this run has no evaluator"
    with pytest.raises(ConfigError, match="there is nothing to draw"):
        read_plan(RANDOM, {}, Roster({}, "the compose project empty"))


def test_a_project_has_its_containers_and_their_regions() -> None:
    found = [Process("broker", "broker", "", 1), Process("worker-us-2", "worker", "us", 0)]
    roster = roster_of_project("isles", found)
    assert (roster.workers, roster.regions) == (("worker-us-2",), ("us",))
    with pytest.raises(ConfigError, match="no process us-0 in the compose project isles: it has broker, worker-us-2"):
        roster.check_names(["us-0"], "a plan")


def test_of_a_large_fleet_some_are_named_and_the_others_counted() -> None:
    roster = Roster({f"us-{n}": Member("worker", "us") for n in range(100)}, "the run of runs/demo")
    with pytest.raises(ConfigError, match="us-18, us-19 and 80 more"):
        roster.check_names(["broker"], "a plan")
