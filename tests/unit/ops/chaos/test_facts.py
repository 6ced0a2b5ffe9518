"""Facts are what logs and store say, and what they do not say is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isles.ops.chaos.check import read_lines
from isles.ops.chaos.checker import HeldFact
from isles.ops.chaos.conclusion import damaged_before, read_logs
from isles.ops.chaos.facts import _replayed, logged, logged_in
from isles.ops.chaos.logbook import LogReader, parse, unix_of
from isles.ops.run_folder import RunFolder, State
from isles.outer.replay import Difference, Replayed
from isles.proto.errors import UsageError
from isles.proto.ids import ContributionId

ACCEPTED = {
    "event": "contribution.accepted", "learner": "us-0", "fragment": 1, "number": 7, "incarnation": "ab" * 8,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def say(folder: RunFolder, process: str, *lines: Mapping[str, Any]) -> None:
    with folder.log(process).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_log_is_read_as_it_grows_and_only_in_whole_lines(folder: RunFolder) -> None:
    reader = LogReader(folder.log("broker"))
    assert reader.read() == []
    say(folder, "broker", {"event": "a"})
    with folder.log("broker").open("a", encoding="utf-8") as file:
        file.write('{"event": "b"')
        file.flush()
        assert [line["event"] for line in reader.read()] == ["a"]
        file.write("}\n")
    assert [line["event"] for line in reader.read()] == ["b"]
    assert reader.read() == []


def test_last_words_that_were_cut_short_are_left_out() -> None:
    assert parse(b'{"event": "round.comm') is None
    assert parse(b"Killed") is None
    assert parse(b"[1]") is None
    assert parse(b'{"event": "a"}') == {"event": "a"}


def test_a_line_behind_one_that_a_full_disk_cut_short_is_read() -> None:
    found = parse(b'{"timestamp": "1", "event": "lost", "te{"timestamp": "2", "event": "kept"}')
    assert found == {"timestamp": "2", "event": "kept"}
    assert parse(b'{"timestamp": "1", "ev{"timestamp": "2", "even') is None


def test_the_time_of_a_line_is_read_or_zero() -> None:
    assert unix_of({"timestamp": "2026-12-01T04:00:00.500000Z"}) == 1796097600.5
    assert unix_of({"timestamp": "noon"}) == unix_of({}) == 0.0


def test_logs_give_contributions_commits_starts_and_applied_versions(folder: RunFolder) -> None:
    say(folder, "broker", ACCEPTED, {"event": "round.committed", "fragment": 1, "version": 3, "epoch": 2})
    child = {"event": "child.started", "child": "us-0", "pid": 1}
    say(folder, "up", {"event": "process.started"}, child, child, {"event": "run.finished"})
    applied = {"event": "version.applied", "learner": "us-0", "fragment": 1, "version": 3}
    joined = {"event": "learner.joined", "learner": "us-0", "versions": {"0": 5, "1": 4}}
    progressed = {"event": "learner.progressed", "learner": "us-0", "versions": [5, 6]}
    began = {"event": "process.started"}
    say(folder, "us-0", began, applied, joined, progressed, applied, began, progressed)
    found = logged(folder)
    assert found["accepted"] == [ContributionId("us-0", 1, "ab" * 8, 7)]
    assert found["commits"] == [(1, 3, 2)]
    assert (found["starts"], found["num_up_starts"], found["has_ended_in_order"]) == ({"us-0": 2}, 1, True)
    assert found["held"] == [
        HeldFact("us-0", 1, 1, 3, is_joining=True),
        *(HeldFact("us-0", 1, 0, 5), HeldFact("us-0", 1, 1, 4)),
        *(HeldFact("us-0", 1, 0, 5), HeldFact("us-0", 1, 1, 6)),
        HeldFact("us-0", 1, 1, 3),
        *(HeldFact("us-0", 2, 0, 5), HeldFact("us-0", 2, 1, 6)),
    ]
    assert found["missing"] == {}


def test_lines_that_somebody_has_damaged_are_left_out(folder: RunFolder) -> None:
    say(folder, "broker", ACCEPTED, {**ACCEPTED, "number": "seven"}, {"event": "contribution.accepted"})
    say(folder, "broker", {"event": "round.committed"}, {"event": "round.committed", "fragment": [], "version": 1})
    say(folder, "us-0", {"event": "learner.joined", "versions": {"a": 1}}, {"event": "version.applied"})
    say(folder, "us-0", {"event": "learner.progressed", "versions": ["x"]}, {"event": "learner.joined", "versions": 3})
    found = logged(folder)
    assert found["accepted"] == [ContributionId("us-0", 1, "ab" * 8, 7)]
    assert found["commits"] == found["held"] == []


def test_lines_of_all_processes_in_one_file_are_told_apart() -> None:
    def joined(learner: str, *versions: int) -> dict[str, Any]:
        held = {str(fragment): version for fragment, version in enumerate(versions)}
        return {"event": "learner.joined", "process": "worker", "learner": learner, "versions": held}

    progressed = {"event": "learner.progressed", "process": "worker", "learner": "us-0", "versions": [5]}
    applied = {"event": "version.applied", "process": "worker", "learner": "us-0", "fragment": 0, "version": 1}
    committed = {"event": "round.committed", "process": "broker", "fragment": 1, "version": 3, "epoch": 2}
    lines = [joined("us-0", 4), {**ACCEPTED, "process": "broker"}, joined("eu-0", 3), progressed, applied, committed]
    found = logged_in([*lines, joined("us-0", 6)])
    assert found["accepted"] == [ContributionId("us-0", 1, "ab" * 8, 7)]
    assert found["commits"] == [(1, 3, 2)]
    assert found["held"] == [
        *(HeldFact("us-0", 0, 0, 4), HeldFact("us-0", 0, 0, 5), HeldFact("us-0", 1, 0, 6)),
        HeldFact("eu-0", 0, 0, 3),
    ]
    assert "no lines of a broker" in logged_in([progressed])["missing"]["the broker's log"]


def test_a_log_that_cannot_be_read_is_one_sentence_and_strange_lines_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the log .*nothing cannot be read"):
        read_lines(tmp_path / "nothing")
    (tmp_path / "log").write_text('Traceback\n{"event": "a"}\n[1]\n', encoding="utf-8")
    assert read_lines(tmp_path / "log") == [{"event": "a"}]


def test_what_logs_do_not_say_is_named(folder: RunFolder) -> None:
    say(folder, "us-0", {"event": "process.started"})
    found = logged(folder)
    assert found["accepted"] is found["commits"] is found["starts"] is None
    assert found["held"] == []
    assert "broker.jsonl is missing" in found["missing"]["the broker's log"]


def test_lines_of_all_processes_get_their_times(folder: RunFolder) -> None:
    say(folder, "us-0", {"event": "a", "timestamp": "1970-01-01T00:00:05Z"})
    assert read_logs(folder) == {"us-0": [{"event": "a", "timestamp": "1970-01-01T00:00:05Z", "unix": 5.0}]}


def test_damage_that_an_earlier_report_tells_of_is_remembered(folder: RunFolder) -> None:
    assert damaged_before(folder) == []
    (folder.path / "chaos.json").write_text('{"damaged_on_purpose": ["' + "a" * 64 + '"]}', encoding="utf-8")
    assert damaged_before(folder) == ["a" * 64]
    (folder.path / "chaos.json").write_text("[]", encoding="utf-8")
    assert damaged_before(folder) == []


def test_restarts_are_read_before_the_log_that_tells_of_them_first(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that happens in between is then logged and not yet counted, never the other way round."""
    child = {"event": "child.started", "child": "us-0", "pid": 1}
    say(folder, "up", {"event": "process.started"}, child)
    read = LogReader.read

    def read_late(reader: LogReader) -> list[Any]:
        found = read(reader)
        folder.write_state(State(restarts={"us-0": 1}))
        return found

    monkeypatch.setattr(LogReader, "read", read_late)
    found = logged(folder)
    assert (found["starts"], found["restarts_counted"]) == ({"us-0": 1}, {})


@pytest.mark.parametrize(("kind", "is_outrun"), [("differs", False), ("unreadable", False), ("outrun", True)])
def test_a_tape_that_was_too_fast_is_told_from_one_that_is_wrong(kind: Any, is_outrun: bool) -> None:
    fact = _replayed(Replayed(1, 4, 6, Difference(7, kind, "why")))
    assert (fact.fragment, fact.first, fact.last, fact.difference) == (1, 5, 6, "why")
    assert fact.is_outrun is is_outrun
