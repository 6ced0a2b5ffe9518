"""What the doctor makes of what it measured."""

from __future__ import annotations

from typing import Any

import pytest

from isles.ops.doctor import MEMORY_INFO, _number_in, look_here
from isles.ops.doctor_findings import (
    Finding,
    Place,
    is_well,
    judge_bandwidth,
    judge_broker,
    judge_clock,
    judge_name,
    judge_place,
    judge_ports,
    judge_round_trip,
    judge_store,
    judge_versions,
)
from isles.ops.doctor_link import Measured, Meter
from isles.ops.doctor_ports import PortSeen, Resolved
from isles.proto.messages import Channel, Head, Limits, Status, StoreInfo, WarningInfo, Welcome
from isles.proto.transport.interface import Arrival
from isles.proto.transport.memory import MemoryBroker

LIMITS = Limits()
MIB = 1 << 20


def status(**fields: Any) -> Status:
    return Status(run="demo", broker_incarnation="ab" * 8, uptime_seconds=75, progress=0.5, **fields)


def welcome() -> Welcome:
    heads = (Head(fragment=0, version=3),)
    return Welcome(
        new_session="cd" * 8, protocol=(1, 0), broker_incarnation="ab" * 8, seq=1, limits=LIMITS, heads=heads
    )


def measured(**fields: Any) -> Measured:
    return Measured(**{"status": status(version="1"), "welcome": welcome(), **fields})


def one(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def seen(state: Any = "zeromq", mechanism: str = "NULL", address: str = "10.0.0.1") -> list[PortSeen]:
    return [PortSeen(channel, address, 7700, state, 0.01, mechanism) for channel in Channel]


# --------------------------------------------------------------------------------------------------- names, ports, keys


def test_a_name_is_shown_with_all_its_addresses_and_a_number_once() -> None:
    assert judge_name("host", Resolved(("10.0.0.1", "10.0.0.2"))).text == "host is 10.0.0.1, 10.0.0.2"
    assert judge_name("[::1]", Resolved(("::1",))).text == "[::1]"


@pytest.mark.parametrize("state", ["refused", "unanswered", "unreachable", "silent", "foreign"])
def test_every_way_in_which_a_port_can_fail_has_its_own_advice(state: str) -> None:
    findings = judge_ports(seen(state), has_key=False)
    assert [finding.verdict for finding in findings] == ["wrong"] * 3
    assert findings[0].advice
    assert {finding.advice for finding in findings[1:]} == {""}


def test_a_name_of_which_only_some_addresses_answer_is_a_warning() -> None:
    findings = judge_ports([*seen("refused", address="10.0.0.1"), *seen(address="10.0.0.2")], has_key=False)
    assert [finding.verdict for finding in findings[:3]] == ["warning"] * 3
    assert "10.0.0.1 is refused" in findings[0].text


@pytest.mark.parametrize(
    ("mechanism", "has_key", "verdict"),
    [("CURVE", True, "ok"), ("CURVE", False, "wrong"), ("NULL", False, "ok"), ("NULL", True, "wrong")],
)
def test_a_broker_that_asks_for_keys_and_a_process_that_has_one_belong_together(
    mechanism: str, has_key: bool, verdict: str
) -> None:
    assert judge_ports(seen(mechanism=mechanism), has_key=has_key)[-1].verdict == verdict


def test_ports_that_ask_for_different_things_are_not_one_brokers() -> None:
    mixed = [*seen()[:1], *seen(mechanism="CURVE")[1:]]
    assert "not one broker's" in judge_ports(mixed, has_key=True)[-1].text


# ----------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.001, "ok"), (0.9, "ok"), (1.01, "warning"), (4.9, "warning"), (5.0, "wrong")]
)
def test_a_round_trip_is_judged_by_heartbeat_and_lease(seconds: float, verdict: str) -> None:
    found = judge_round_trip(measured(round_trips=[seconds, 0.0001, 90.0]), LIMITS)
    assert one(found).verdict == verdict
    assert (one(found).advice != "") is (verdict != "ok")


def test_a_round_trip_that_only_an_outer_would_suffer_from_says_so() -> None:
    slow = judge_round_trip(measured(round_trips=[0.5]), Limits(outer_lease_seconds=1.2))
    assert one(slow).verdict == "warning"
    assert "outer" in one(slow).advice


@pytest.mark.parametrize(
    ("ahead", "round_trip", "verdict"),
    [(0.0, 0.1, "ok"), (2.0, 0.1, "ok"), (2.2, 0.1, "warning"), (-60.0, 0.1, "warning"), (3.0, 4.0, "ok")],
)
def test_clocks_are_compared_as_exactly_as_a_round_trip_permits(ahead: float, round_trip: float, verdict: str) -> None:
    assert one(judge_clock(measured(clock_ahead_seconds=ahead, round_trips=[round_trip]))).verdict == verdict


@pytest.mark.parametrize(
    ("bytes_per_second", "verdict"),
    [(100 * MIB, "ok"), (MIB / 7, "ok"), (MIB / 8, "warning"), (MIB / 29, "warning"), (MIB / 31, "wrong")],
)
def test_a_chunk_has_to_get_through_before_a_connection_is_given_up(bytes_per_second: float, verdict: str) -> None:
    found = judge_bandwidth(measured(bytes_moved=round(bytes_per_second * 10), seconds_moving=10.0), LIMITS)[0]
    assert found.verdict == verdict
    assert ("broker.chunk_bytes" in found.advice) is (verdict != "ok")


def test_the_chunk_that_is_advised_gets_through() -> None:
    slow = measured(bytes_moved=20_000, seconds_moving=1.0)
    advised = int(judge_bandwidth(slow, LIMITS)[0].advice.split("chunk_bytes to ")[1].split(",")[0])
    better = judge_bandwidth(slow, Limits(chunk_bytes=advised))[0]
    assert better.verdict == "ok"


def test_a_model_that_takes_longer_than_a_worker_waits_is_a_warning() -> None:
    large = measured(status=status(version="1", num_parameters=10**9), bytes_moved=8 * MIB, seconds_moving=1.0)
    findings = judge_bandwidth(large, LIMITS)
    assert [finding.verdict for finding in findings] == ["ok", "warning"]
    assert "worker.join_timeout_seconds" in findings[1].advice


def test_little_that_was_moved_says_only_at_least_how_much_would_be() -> None:
    assert one(judge_bandwidth(measured(bytes_moved=1000, seconds_moving=0.001), LIMITS)).text.startswith("at least")


def test_nothing_that_came_of_a_run_is_wrong_and_without_a_run_is_not() -> None:
    assert one(judge_bandwidth(measured(fetch_fault="none came"), LIMITS)).verdict == "wrong"
    assert one(judge_bandwidth(measured(welcome=None), LIMITS)).verdict == "ok"


@pytest.mark.parametrize(("theirs", "verdict"), [("1", "ok"), ("2", "warning"), ("", "warning")])
def test_two_builds_that_differ_are_a_warning(theirs: str, verdict: str) -> None:
    assert one(judge_versions(measured(status=status(version=theirs)), "1")).verdict == verdict


@pytest.mark.parametrize(
    ("store", "verdict"),
    [
        (StoreInfo(stored_bytes=1, disk_free_bytes=1000, disk_free_bytes_min=10), "ok"),
        (StoreInfo(stored_bytes=1, disk_free_bytes=9, disk_free_bytes_min=10), "wrong"),
        (StoreInfo(stored_bytes=100, stored_bytes_max=100, disk_free_bytes=1000), "wrong"),
    ],
)
def test_a_store_at_its_limit_is_wrong(store: StoreInfo, verdict: str) -> None:
    assert one(judge_store(status(store=store))).verdict == verdict


def test_this_machine_is_compared_with_what_a_worker_of_the_run_takes() -> None:
    place = Place("1", memory_free_bytes=10**9, disk_free_bytes=10**12)
    assert [finding.verdict for finding in judge_place(place, None)] == ["ok", "ok"]
    findings = judge_place(place, status(num_parameters=10**9))
    assert [finding.verdict for finding in findings] == ["warning", "ok"]
    assert judge_place(Place("1", None, None), None) == []


def test_a_refusal_is_all_that_is_wrong_with_a_broker_that_answers() -> None:
    findings = judge_broker(measured(refusal="this key is revoked", round_trips=[0.1]), Place("1", None, None), 5.0)
    assert [finding.check for finding in findings if finding.verdict == "wrong"] == ["answer"]
    assert "this key is revoked" in findings[0].text


def test_what_the_broker_warns_of_is_a_warning_here() -> None:
    warning = WarningInfo(name="round.alone", text="a round held only us-0", since_unix=1.0)
    troubled = measured(status=status(version="1", warnings=(warning,)), round_trips=[0.1], has_hint=True)
    findings = judge_broker(troubled, Place("1", None, None), 5.0)
    assert "round.alone" in findings[-1].text
    assert findings[-1].verdict == "warning"


def test_only_what_is_wrong_makes_a_broker_unwell() -> None:
    assert is_well([Finding("a", "ok", ""), Finding("b", "warning", "")])
    assert not is_well([Finding("a", "ok", ""), Finding("b", "wrong", "")])


# ---------------------------------------------------------------------------------------------------------- small parts


def test_the_meter_counts_payload_alone() -> None:
    broker = MemoryBroker()
    client = broker.connect()
    meter = Meter(client)
    client.receive(Arrival(Channel.BULK, b"", b"header", b"12345"))
    client.receive(Arrival(Channel.CONTROL, b"", b"header"))
    assert len(meter.poll(0.0)) == 2
    assert meter.num_bytes == 5


def test_this_machine_tells_something_of_itself() -> None:
    place = look_here()
    assert place.version
    assert place.disk_free_bytes
    assert _number_in(MEMORY_INFO, "NoSuchWord:") is None
