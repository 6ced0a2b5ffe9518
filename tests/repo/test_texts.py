"""Nothing in the tree depends on the machine it was written on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

MACHINE_TRACES = re.compile(
    r"""
    (?<![\w.])/(?:work|root|home|Users|opt)/[\w.]   # folders of one machine
    | \.pyenv
    | https?://\S*(?:/simple\b|registry|/debian\b)   # package registries
    | \b(?:index-url|find-links|extra-index-url)\s*=\s*\S
    """,
    re.VERBOSE,
)
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def other_files(paths: list[Path]) -> list[Path]:
    """All but this file, whose patterns would find themselves."""
    return [path for path in paths if path.name != Path(__file__).name]


def test_no_file_names_a_folder_or_a_registry_of_one_machine(text_files: list[Path]) -> None:
    assert lines_matching(MACHINE_TRACES, other_files(text_files)) == []


def test_no_file_leaves_something_for_later(text_files: list[Path]) -> None:
    assert lines_matching(UNFINISHED, other_files(text_files)) == []


def test_every_toml_file_can_be_read(text_files: list[Path]) -> None:
    for path in text_files:
        if path.suffix == ".toml":
            assert tomllib.loads(path.read_text(encoding="utf-8")), path


def test_every_text_file_ends_with_one_newline(text_files: list[Path]) -> None:
    texts = {path: path.read_bytes() for path in text_files}
    assert [path for path, text in texts.items() if text and (text[-1:] != b"\n" or text[-2:] == b"\n\n")] == []
