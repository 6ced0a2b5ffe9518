"""The list of what people suffer names tests that exist."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("cases.toml").read_text(encoding="utf-8")
)


def names_in(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("section", CASES)
def test_every_case_has_tests_and_they_exist(section: str) -> None:
    assert all(CASES[section].values())
    named = sorted({test for tests in CASES[section].values() for test in tests})
    missing = [test for test in named if test.split("::")[1] not in names_in(ROOT / test.split("::")[0])]
    assert missing == []
