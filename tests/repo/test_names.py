"""One word per concept, one concern per file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

LINES_MAX = 450
"""Where a file stops being one room."""

LONG_FILES = {"proto/messages.py"}
"""The whole wire is one file, however long."""

VAGUE_MODULES = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}

OTHER_WORDS = {
    "aggregator": "outer",
    "bucket": "fragment",
    "coordinator": "outer",
    "experiment": "run",
    "hub": "broker",
    "iteration": "inner step",
    "job": "run",
    "master": "outer",
    "replica": "learner",
    "server": "broker or outer",
}
"""Words that could only mean something that already has a name here."""

ABBREVIATIONS = {
    "cfg": "config",
    "ckpt": "checkpoint",
    "cnt": "num",
    "hparams": "settings",
    "mgr": "?",
}


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that a file itself gives to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def words(name: str) -> set[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_a_name_is_split_into_its_words() -> None:
    assert words("RoundServer_maxHTTP") == {"round", "server", "max", "http"}


def test_names_use_the_words_of_the_glossary(trees: dict[Path, ast.Module], package_files: list[Path]) -> None:
    unwanted = OTHER_WORDS | ABBREVIATIONS
    found = [
        f"{path}:{line}: {name}: say {unwanted[word]}"
        for path in package_files
        for line, name in defined_names(trees[path])
        for word in sorted(words(name) & unwanted.keys())
    ]
    assert found == []


def test_no_module_has_a_name_that_says_nothing(python_files: list[Path]) -> None:
    assert [path for path in python_files if VAGUE_MODULES & {path.stem, path.parent.name}] == []


def test_no_file_is_longer_than_a_room(python_files: list[Path], root: Path) -> None:
    lengths = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX and name not in LONG_FILES} == {}


def exported_names(tree: ast.Module) -> list[str] | None:
    """What `__all__` holds, or None where it is not defined."""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            return list(ast.literal_eval(node.value))
    return None


def by_kind(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then functions: the order that ruff keeps."""
    return not name.isupper(), not name[:1].isupper(), name


def test_every_list_of_exports_is_sorted_and_without_repetition(trees: dict[Path, ast.Module]) -> None:
    exports = {path: names for path, tree in trees.items() if (names := exported_names(tree)) is not None}
    assert {path: names for path, names in exports.items() if names != sorted(set(names), key=by_kind)} == {}


def test_every_exported_name_exists(trees: dict[Path, ast.Module]) -> None:
    missing = []
    for path, tree in trees.items():
        present = {name for _, name in defined_names(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                present |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        is_lazy = "__getattr__" in present
        missing += [f"{path}: {name}" for name in exported_names(tree) or [] if name not in present and not is_lazy]
    assert missing == []
