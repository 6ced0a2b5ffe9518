"""A plan says what it means, in one sentence if it cannot be meant."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from isles.ops.chaos.options import RANDOM, read_plan
from isles.ops.chaos.plan import (
    KINDS,
    NETWORK_KINDS,
    RANDOM_KINDS,
    RANDOM_KINDS_WITH_LINKS,
    Fault,
    RandomPlan,
    draw,
    parse_kinds,
    validate,
)
from isles.ops.chaos.roster import Member, Roster, roster_of
from isles.ops.settings import UpSettings
from isles.proto.errors import ConfigError, UsageError

ROSTER = roster_of(UpSettings(workers="us=2"))


def complaint(fault: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"fault": [{"at": 1.0, "kind": "kill"}, fault]}, "plan.toml")
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "kill"}, "plan.toml: fault 2: at is missing"),
        ({"at": 1.0, "kind": "explode"}, "kind = 'explode' is none of kill, kill-all"),
        ({"at": 1.0, "kind": "kill", "proces": "us-0"}, "there is no setting proces: at, kind, process"),
        ({"at": -1.0, "kind": "kill"}, "fault 2: at: input should be greater than or equal to 0"),
        ({"at": 1.0, "kind": "kill", "process": "us-0", "role": "worker"}, "both a process and a role"),
        ({"at": 1.0, "kind": "kill-all", "process": "us-0"}, "kill-all concerns the whole run: leave process out"),
        ({"at": 1.0, "kind": "cut"}, 'cut takes a region: region = "us"'),
        ({"at": 1.0, "kind": "freeze", "region": "us"}, "give process or role instead of region"),
        ({"at": 1.0, "kind": "delay", "role": "outer"}, "role can only be worker"),
        ({"at": 1.0, "kind": "kill", "seconds": 3.0}, "kill is over at once: leave seconds out"),
        ({"at": 1.0, "kind": "freeze", "delay_seconds": 1.0}, "delay_seconds belongs to the kind delay"),
        ({"at": 1.0, "kind": "kill", "process": "../etc"}, "is no name of a process"),
    ],
)
def test_a_fault_that_cannot_be_meant_is_refused_in_one_sentence(fault: dict[str, Any], words: str) -> None:
    assert words in complaint(fault)


@pytest.mark.parametrize("fault", [3, "kill", {"at": 1.0, "kind": "kill"}])
def test_faults_that_are_no_list_of_tables_are_told_how_to_be_written(fault: Any) -> None:
    with pytest.raises(ConfigError, match=r"plan.toml: fault: each fault is a table .* \[\[fault\]\]"):
        validate({"fault": fault}, "plan.toml")


def test_an_unknown_key_of_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no setting faults: seed, fault exist"):
        validate({"faults": []}, "plan.toml")


def test_every_kind_has_a_sentence_and_every_fault_too() -> None:
    for kind in KINDS:
        given: dict[str, Any] = {"at": 2.0, "kind": kind} | ({"region": "us"} if kind == "cut" else {})
        assert Fault(**given).sentence.startswith(f"2 s: {kind}")
        assert KINDS[kind]


def test_a_plan_is_read_from_a_file_and_its_seed_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('seed = 4\n[[fault]]\nat = 1\nkind = "freeze"\nrole = "worker"\nseconds = 2\n', encoding="utf-8")
    plan = read_plan(str(path), {"chaos_seed": None}, ROSTER)
    assert (plan.seed, plan.ends_at) == (4, 3.0)
    assert read_plan(str(path), {"chaos_seed": 9}, ROSTER).seed == 9
    assert not plan.has_network_faults


def test_what_belongs_to_a_random_plan_is_refused_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="every belongs to a random plan"):
        read_plan(str(path), {"chaos_every": 3.0}, ROSTER)


def test_a_plan_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_plan(str(tmp_path / "nothing"), {}, ROSTER)
    path = tmp_path / "plan.toml"
    path.write_text("[[fault", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no TOML file"):
        read_plan(str(path), {}, ROSTER)


def test_the_same_seed_draws_the_same_plan_and_another_one_another() -> None:
    wanted = RandomPlan(for_seconds=300, every_seconds=10, kinds=tuple(KINDS), regions=("eu", "us"))
    first, again, other = (draw(wanted, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first.fault) == 30
    times = [fault.at for fault in first.fault]
    assert times == sorted(times)
    assert all(fault.region in ("eu", "us") for fault in first.fault if fault.kind == "cut")
    assert all(fault.role == "worker" for fault in first.fault if fault.kind in NETWORK_KINDS - {"cut"})


def test_faults_are_drawn_for_those_that_are_named() -> None:
    plan = read_plan(RANDOM, {"chaos_processes": "us-0, outer", "chaos_kinds": "kill", "chaos_for": 200.0}, ROSTER)
    assert {fault.process for fault in plan.fault} == {"us-0", "outer"}


def test_what_is_drawn_unasked_needs_no_links_of_a_run_under_way_and_never_costs_more_than_time() -> None:
    from_outside = read_plan(RANDOM, {"chaos_for": 1000.0}, ROSTER)
    assert {fault.kind for fault in from_outside.fault} == set(RANDOM_KINDS)
    under_up = read_plan(RANDOM, {"chaos_for": 3000.0}, ROSTER, RANDOM_KINDS_WITH_LINKS)
    drawn = [fault.kind for fault in under_up.fault]
    assert set(drawn) == set(KINDS) - {"kill-all", "disk-full", "corrupt"}
    assert max(set(drawn), key=drawn.count) == "kill"


def test_a_random_plan_that_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="cut needs a run with regions"):
        read_plan(RANDOM, {"chaos_kinds": "cut"}, Roster({"broker": Member("broker")}, "a project"))
    with pytest.raises(ConfigError, match="every_seconds: input should be greater than 0"):
        read_plan(RANDOM, {"chaos_every": 0.0}, ROSTER)
    with pytest.raises(ConfigError, match="make `every` longer"):
        read_plan(RANDOM, {"chaos_every": 1e-6}, ROSTER)
    with pytest.raises(ConfigError, match="'explode' is no kind of fault"):
        parse_kinds("kill,explode")
