"""Warnings of other processes are found in their logs as these grow, are begun, or are moved away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isles.ops.log_watch import CHARACTERS_MAX, LogWatch, Warned


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log that has a warning already."""
    path = tmp_path / "us-0.jsonl"
    say(path, level="warning", event="broker.lost", silent_seconds=9)
    return path


def say(path: Path, **fields: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"timestamp": "now", "process": "worker", "id": "us-0"} | fields) + "\n")


def test_only_what_comes_after_the_start_is_told(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    assert watch.poll() == []
    say(log, level="warning", event="checkpoint.failed", text="the disk is full")
    say(log, level="info", event="version.applied", version=3)
    say(log, level="error", event="process.failed", error="OSError")
    assert watch.poll() == [
        Warned("us-0", "warning", "checkpoint.failed: the disk is full"),
        Warned("us-0", "error", "process.failed: OSError"),
    ]
    assert watch.poll() == []


def test_a_log_that_begins_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    watch = LogWatch({"eu-0": tmp_path / "eu-0.jsonl"})
    assert watch.poll() == []
    say(tmp_path / "eu-0.jsonl", level="warning", event="learner.reset", reason="too old")
    assert [warned.text for warned in watch.poll()] == ["learner.reset: too old"]


def test_a_log_that_was_moved_away_is_followed_in_its_new_file(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    log.rename(log.with_suffix(".old"))
    say(log, level="warning", event="round.alone")
    assert [warned.text for warned in watch.poll()] == ["round.alone"]


def test_a_log_that_was_cut_short_is_read_anew(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    log.write_text("")
    assert watch.poll() == []
    say(log, level="warning", event="round.alone")
    assert len(watch.poll()) == 1


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    line = json.dumps({"level": "warning", "event": "round.alone"})
    with log.open("a", encoding="utf-8") as file:
        file.write(line[:20])
        file.flush()
        assert watch.poll() == []
        file.write(line[20:] + "\n")
    assert len(watch.poll()) == 1


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[]\n", b"{\n", b"3\n", b'{"level": ["warning"]}\n'])
def test_lines_that_are_no_events_are_passed_over(garbage: bytes, log: Path) -> None:
    watch = LogWatch({"us-0": log})
    with log.open("ab") as file:
        file.write(garbage)
    say(log, level="warning", event="round.alone")
    assert [warned.text for warned in watch.poll()] == ["round.alone"]


def test_an_event_without_a_reason_is_told_with_its_fields(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    say(log, level="warning", event="broker.lost", address="tcp://x", silent_seconds=5)
    assert watch.poll()[0].text == "broker.lost: address tcp://x, silent_seconds 5"


def test_a_long_text_is_one_shortened_line(log: Path) -> None:
    watch = LogWatch({"us-0": log})
    say(log, level="error", event="process.failed", text="no\nroom " * 500)
    text = watch.poll()[0].text
    assert len(text) == CHARACTERS_MAX
    assert text.startswith("process.failed: no room no room")
    assert text.endswith("…")
