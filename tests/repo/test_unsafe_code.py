"""Nothing in the tree runs code that came from elsewhere, and nothing hides an error."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isles.proto.messages import MESSAGES

UNSAFE_MODULES = {
    "_pickle", "cffi", "cloudpickle", "code", "codeop", "ctypes", "dill", "joblib", "jsonpickle", "marshal", "pickle",
    "runpy", "shelve",
}  # fmt: skip
UNSAFE_BUILTINS = {"__import__", "compile", "eval", "exec"}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj"}
UNSAFE_KEYWORDS = {"allow_pickle", "shell", "weights_only"}
UNSAFE_FUNCTIONS = {
    *(("torch", name) for name in ("hub", "jit", "load", "package", "save")),
    *(("yaml", name) for name in ("full_load", "load", "load_all", "unsafe_load")),
    *((library, name) for library in ("np", "numpy") for name in ("fromfile", "load", "save", "savez")),
    ("os", "popen"), ("os", "system"), ("pd", "read_pickle"), ("builtins", "eval"), ("builtins", "exec"),
}  # fmt: skip
UNSAFE_TEXT = re.compile(
    r"\b(?:pickle|marshal|shelve|dill|joblib)\s*\.\s*(?:loads?|dumps?|open)\b|\ballow_pickle\b|\brecv_pyobj\b"
    r"|\byaml\s*\.\s*(?:unsafe_)?load\b|\btorch\s*\.\s*load\b"
)
"""The same where no syntax tree is looked at: in texts, commands and files of other kinds."""

NAMES_BY_VALUE = {
    "benchmarks/scale/learners.py": "columns of its own table",
    "brokers/broker.py": "the level of a log line of ours",
    "docs/generate.py": "names in our own modules",
    "ops/changes.py": "the two kinds of budget",
    "ops/chaos/plan.py": "fields of a fault",
    "ops/main.py": "modules of the table of commands",
    "ops/settings.py": "modules and models of the table of sections",
    "ops/simulation/mutations.py": "functions that a test replaces",
    "outer/desk.py": "the level of a log line of ours",
    "outer/restoration.py": "the parts of a state",
    "outer/state_cache.py": "the parts of a state",
    "proto/agreement.py": "fields of the settings",
    "proto/manifest.py": "fields of a tensor",
    "proto/timeouts.py": "settings of the table of timeouts",
    "workers/checkpoint.py": "fields of a checkpoint",
    "workers/description.py": "a parameter of the caller's own module",
    "workers/flat.py": "dtypes, which a manifest has only from a closed table",
    "workers/models/gpt.py": "fields of the task",
    "workers/parameters.py": "dtypes, which a manifest has only from a closed table",
    "workers/performer.py": "the level of a log line of ours",
    "workers/task.py": "a task that was given to this process by its owner; never the one of a run record",
}
"""Files in which an attribute or a module is named by a value, and whose value: none is a peer's."""


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
    if isinstance(node, ast.keyword) and node.arg in UNSAFE_KEYWORDS:
        return f"{node.arg}="
    return None


def is_named_by_value(node: ast.AST) -> bool:
    """Whether an attribute or a module is chosen by something that is not written there."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function in {"getattr", "setattr", "delattr"}:
        return len(node.args) > 1 and not isinstance(node.args[1], ast.Constant)
    return function == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant))


@pytest.fixture(scope="session")
def all_trees(trees: dict[Path, ast.Module], root: Path) -> dict[Path, ast.Module]:
    """The syntax trees of every Python file, also of those that belong to no package."""
    others = [path for folder in ("docs", "deploy", ".ci") for path in (root / folder).rglob("*.py")]
    return trees | {path: ast.parse(path.read_text(encoding="utf-8")) for path in others}


def test_no_file_unpickles_evaluates_or_starts_a_shell(all_trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {name}"
        for path, tree in all_trees.items()
        for node in ast.walk(tree)
        if (name := unsafe_name(node)) is not None
    ]
    assert found == []


def test_no_text_of_ours_unpickles_either(text_files: list[Path], root: Path) -> None:
    kept = {root / "pyproject.toml", root / "tests" / "repo" / "test_unsafe_code.py"}
    code = [path for path in text_files if path not in kept and path.suffix != ".md"]
    assert [str(path) for path in code if UNSAFE_TEXT.search(path.read_text(encoding="utf-8"))] == []


def test_attributes_and_modules_are_named_by_values_only_where_they_are_our_own(
    all_trees: dict[Path, ast.Module], root: Path
) -> None:
    found = {
        str(path.relative_to(root))
        for path, tree in all_trees.items()
        if not path.is_relative_to(root / "tests") and any(map(is_named_by_value, ast.walk(tree)))
    }
    assert found == set(NAMES_BY_VALUE)


IMPORT_EVERYTHING = """
import builtins, importlib, sys
unsafe, names = set(sys.argv[1].split(",")), sys.argv[2].split(",")
import_as_before = builtins.__import__
def note(name, globals=None, locals=None, fromlist=(), level=0):
    importer = str((globals or {}).get("__name__", ""))
    if importer.startswith("isles.") and not level and name.split(".")[0] in unsafe:
        print(importer, "imports", name)
    return import_as_before(name, globals, locals, fromlist, level)
builtins.__import__ = note
for name in names:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_no_module_imports_what_is_unsafe_however_it_is_written(package_files: list[Path], root: Path) -> None:
    parts = [path.relative_to(root).with_suffix("").parts for path in package_files]
    names = [".".join(("isles", *(one[:-1] if one[-1] == "__init__" else one))) for one in parts]
    arguments = [",".join(sorted(UNSAFE_MODULES)), ",".join(names)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_EVERYTHING, *arguments], check=True, capture_output=True, text=True
    )
    assert done.stdout == ""


def test_no_message_has_room_for_code_or_a_path() -> None:
    fields = {name for message in MESSAGES.values() for name in message.model_fields}
    words = {word for name in fields for word in name.split("_")}
    assert words.isdisjoint({"path", "file", "folder", "directory", "module", "class", "function", "command", "url"})


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
        "numpy.load(file)",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
        "import yaml; yaml.load(text)",
        "from yaml import unsafe_load",
        "torch.jit.load(path)",
        "import ctypes",
        "__import__(name)",
    ],
)
def test_an_unsafe_line_is_found(line: str) -> None:
    assert any(unsafe_name(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize("line", ["getattr(x, name)", "importlib.import_module(name)", "setattr(x, a + b, 1)"])
def test_a_name_by_value_is_found(line: str) -> None:
    assert any(is_named_by_value(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.parametrize("line", ["getattr(x, 'name')", "importlib.import_module('torch')", "x.name"])
def test_a_name_that_is_written_there_is_none(line: str) -> None:
    assert not any(is_named_by_value(node) for node in ast.walk(ast.parse(line)))


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
