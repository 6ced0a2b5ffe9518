"""Nothing in the tree runs code that came from elsewhere, and nothing hides an error."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

UNSAFE_MODULES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_BUILTINS = {"compile", "eval", "exec"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
UNSAFE_FUNCTIONS = {("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("yaml", "load")}


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.split(".")[0]]
    return []


def unsafe_name(node: ast.AST) -> str | None:
    """The unsafe thing that `node` names, or None."""
    for name in imported(node):
        if name in UNSAFE_MODULES:
            return name
    if isinstance(node, ast.ImportFrom):
        taken = {(node.module or "", alias.name) for alias in node.names} & UNSAFE_FUNCTIONS
        return ".".join(min(taken)) if taken else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_BUILTINS:
        return node.func.id
    if isinstance(node, ast.Attribute):
        if node.attr in UNSAFE_METHODS:
            return node.attr
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in UNSAFE_FUNCTIONS:
            return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.keyword) and node.arg == "shell":
        return "shell="
    return None


def test_no_file_unpickles_evaluates_or_starts_a_shell(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if (name := unsafe_name(node)) is not None
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "from torch import load",
        "eval(text)",
        "socket.recv_pyobj()",
        "run(command, shell=True)",
    ],
)
def test_an_unsafe_line_is_found(line: str) -> None:
    assert any(unsafe_name(node) for node in ast.walk(ast.parse(line)))


def test_no_handler_catches_everything_silently(trees: dict[Path, ast.Module]) -> None:
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            is_bare = node.type is None
            is_broad = isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            is_silent = all(isinstance(line, ast.Pass) for line in node.body)
            if is_bare or (is_broad and is_silent):
                found.append(f"{path}:{node.lineno}")
    assert found == []


def is_sleep(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"):
        return False
    return isinstance(node.func.value, ast.Name) and node.func.value.id in {"time", "asyncio"}


def test_no_test_waits_by_sleeping(trees: dict[Path, ast.Module], root: Path) -> None:
    tests = [path for path in trees if path.is_relative_to(root / "tests")]
    assert [
        f"{path}:{getattr(node, 'lineno', 0)}" for path in tests for node in ast.walk(trees[path]) if is_sleep(node)
    ] == []
