"""Log lines as people and programs read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from isles.proto.events import EVENTS
from isles.proto.logs import ListLogger, make_logger

EVENT_NAME = re.compile(r"^[a-z]+\.[a-z]+(?:_[a-z]+)*$")


def test_a_line_is_one_json_object_that_says_what_happened_and_who_says_it(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "worker.jsonl"
    make_logger("worker", "us-0", file=file).info("version.applied", fragment=1, version=3)
    [line] = file.read_text().splitlines()
    record = json.loads(line)
    assert record["event"] == "version.applied"
    assert (record["process"], record["id"], record["fragment"], record["level"]) == ("worker", "us-0", 1, "info")
    assert record["timestamp"].endswith("Z")


def test_lines_below_the_level_are_not_written(tmp_path: Path) -> None:
    logger = make_logger("outer", "outer", file=tmp_path / "o.jsonl", level="warning")
    logger.info("round.opened")
    logger.warning("round.alone")
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 1


def test_without_a_terminal_standard_error_gets_json(capfd: pytest.CaptureFixture[str]) -> None:
    make_logger("broker", "broker").info("broker.started", address="tcp://x:1")
    assert json.loads(capfd.readouterr().err)["address"] == "tcp://x:1"


def test_a_list_logger_remembers() -> None:
    logger = ListLogger()
    logger.warning("round.alone", learner="us-0")
    assert logger.records == [("warning", "round.alone", {"learner": "us-0"})]
    assert logger.events() == ["round.alone"]


def test_event_names_are_a_noun_and_what_happened() -> None:
    assert all(EVENT_NAME.match(name) for name in EVENTS)
