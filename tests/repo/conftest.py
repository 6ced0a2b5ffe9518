"""The files that the tests about the repository read."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("brokers", "ops", "outer", "proto", "workers")
PYTHON_FOLDERS = (*PACKAGES, "tests", "benchmarks", "examples")
TEXT_SUFFIXES = {".cfg", ".ini", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
TEXT_NAMES = {"Dockerfile", "Makefile", "run", ".dockerignore", ".gitignore"}
PRIVATE_FOLDERS = {"build", "checkpoints", "dist", "runs", "store", "wheels"}
"""Folders at the root that tools and runs write; hidden ones but `.ci` are left out as well."""


def is_public(entry: Path) -> bool:
    """Whether an entry of the root is part of what is published."""
    if entry.is_dir():
        hidden = entry.name.startswith(".") and entry.name != ".ci"
        return not hidden and entry.name not in PRIVATE_FOLDERS and entry.suffix != ".egg-info"
    return True


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def package_files() -> list[Path]:
    """Every Python file that is installed."""
    return sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="session")
def python_files() -> list[Path]:
    """Every Python file, tests and programs included."""
    return sorted(path for folder in PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="session")
def text_files() -> list[Path]:
    """Every file that a person reads or edits."""
    entries = [entry for entry in ROOT.iterdir() if is_public(entry)]
    paths = [path for entry in entries for path in (entry.rglob("*") if entry.is_dir() else [entry])]
    is_text = [path for path in paths if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES]
    return sorted(path for path in is_text if path.is_file())


@pytest.fixture(scope="session")
def trees(python_files: list[Path]) -> dict[Path, ast.Module]:
    """The syntax tree of every Python file."""
    return {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in python_files}
