"""Whether a task of one's own can be found, told before anything is started: nothing is imported, nothing is run."""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from isles.proto.errors import ConfigError, UsageError
from isles.workers.task import BUILT_IN, is_task_name


def check_task(name: str) -> None:
    """Looks for the module and the function that a task's name names.

    What only running the module would show, such as names that it makes as it is imported, is taken to be right.
    Raises ConfigError for a name that names no task, UsageError for a module or a function that is not there.
    """
    if not is_task_name(name):
        raise ConfigError(f"task = {name!r} names no task: write `{BUILT_IN}` or `module:function`")
    if name == BUILT_IN:
        return
    module, _, function = name.partition(":")
    spec = _find(module)
    if spec is None:
        raise UsageError(
            f"task {name}: there is no module {module}; looked in {Path.cwd()} and on Python's path: correct the name, "
            "or start where the file is"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"task {name}: {spec.origin} cannot be read as Python: {error}") from error
    if not _may_bind(tree, function):
        raise UsageError(f"task {name}: there is no {function} in {spec.origin}; correct the name or the file")


def _find(module: str) -> ModuleSpec | None:
    """The place of a module as an import would find it, with the current folder last."""
    parts = module.split(".")
    spec = _find_in(parts[0], None) or PathFinder.find_spec(parts[0], [str(Path.cwd())])
    for number in range(1, len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _find_in(".".join(parts[: number + 1]), list(spec.submodule_search_locations))
    return spec


def _find_in(name: str, locations: list[str] | None) -> ModuleSpec | None:
    """The answer of the first finder that has one; it takes no import of what stands above the module."""
    for finder in sys.meta_path:
        if (spec := finder.find_spec(name, locations)) is not None:
            return spec
    return None


def _may_bind(tree: ast.Module, wanted: str) -> bool:
    """Whether a module may have this name after it was run; False only if nothing in it looks like it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if name in (wanted, "__getattr__"):
                    return True
            case ast.Name(id=name, ctx=ast.Store()):
                if name == wanted:
                    return True
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                if any(
                    alias.name == "*" or (alias.asname or alias.name.partition(".")[0]) == wanted for alias in names
                ):
                    return True
            case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
                return True
    return False
