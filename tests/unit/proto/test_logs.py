"""Log lines as people and programs read them."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
from pathlib import Path

import pytest

from isles.proto.errors import ConfigError
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


def test_a_disk_that_is_full_costs_a_line_and_not_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = make_logger("worker", "us-0", file=tmp_path / "w.jsonl")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        logger.info("learner.progressed", steps=1)
    logger.info("learner.progressed", steps=2)
    [line] = (tmp_path / "w.jsonl").read_text().splitlines()
    assert json.loads(line)["steps"] == 2


def test_a_reader_who_left_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedPipe(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    for stream in (ClosedPipe(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        make_logger("broker", "broker").info("broker.started")


def test_a_log_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the log file .*file/w.jsonl cannot be written"):
        make_logger("worker", "us-0", file=tmp_path / "file" / "w.jsonl")


def test_a_list_logger_remembers() -> None:
    logger = ListLogger()
    logger.warning("round.alone", learner="us-0")
    assert logger.records == [("warning", "round.alone", {"learner": "us-0"})]
    assert logger.events() == ["round.alone"]


def test_event_names_are_a_noun_and_what_happened() -> None:
    assert all(EVENT_NAME.match(name) for name in EVENTS)
