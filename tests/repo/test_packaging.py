"""What is installed is what is in the folders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

IMPORT_NAMES = {"pyzmq": "zmq"}
"""Of requirements that are not called what is imported."""


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def test_every_folder_with_python_files_is_a_listed_package(
    project: dict[str, Any], package_files: list[Path], root: Path
) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(root) for path in package_files}
    assert listed == sorted(".".join(("isles", *folder.parts)) for folder in folders)


def test_every_package_folder_has_an_init(package_files: list[Path]) -> None:
    assert {folder for path in package_files if not (folder := path.parent).joinpath("__init__.py").is_file()} == set()


def test_only_names_below_isles_are_installed(project: dict[str, Any]) -> None:
    tables = project["tool"]["setuptools"]
    assert all(name.startswith("isles.") for name in tables["packages"])
    assert all(name == f"isles.{folder}" for name, folder in tables["package-dir"].items())


def test_isles_itself_is_a_namespace(root: Path) -> None:
    assert not (root / "__init__.py").exists()
    assert "isles" in {line.split(".")[0] for line in (distribution("isles").read_text("top_level.txt") or "").split()}


def test_every_requirement_is_pinned(project: dict[str, Any], root: Path) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    extras = project["project"]["optional-dependencies"]
    wanted = project["project"]["dependencies"] + extras["plot"] + extras["relay"] + extras["train"] + extras["dev"]
    assert {requirement_name(line) for line in wanted} <= {requirement_name(pin) for pin in pins}


def test_the_base_requirements_hold_no_tensor_library(project: dict[str, Any]) -> None:
    assert {"numpy", "torch", "safetensors"}.isdisjoint(map(requirement_name, project["project"]["dependencies"]))


def test_the_base_requirements_hold_nothing_that_only_training_imports(
    project: dict[str, Any], trees: dict[Path, ast.Module], package_files: list[Path], root: Path
) -> None:
    """Payloads are opaque to a broker, so what reads them belongs to the extra `train`, as numpy does."""
    imported = set()
    for path in package_files:
        parts = path.relative_to(root).parts
        if parts[0] in {"brokers", "ops", "proto"} and "codec" not in parts:
            for node in ast.walk(trees[path]):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                imported |= {name.split(".")[0] for name in names}
    needed = {IMPORT_NAMES.get(name, name) for name in map(requirement_name, project["project"]["dependencies"])}
    assert needed <= imported


def modules_loaded_by(*names: str) -> set[str]:
    """Import `names` in an interpreter of their own; return everything that got loaded."""
    imports = "\n".join(f"import {name}" for name in names)
    program = f"{imports}\nimport sys\nprint(*sys.modules, sep='\\n')"
    result = subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True)
    return set(result.stdout.split())


def dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("isles", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def test_the_broker_and_the_wire_load_neither_numpy_nor_torch(package_files: list[Path], root: Path) -> None:
    slim = [path for path in package_files if path.relative_to(root).parts[0] in {"brokers", "proto"}]
    names = [name for path in slim if not (name := dotted(path, root)).startswith("isles.proto.codec")]
    loaded = modules_loaded_by(*names)
    assert set(names) <= loaded
    assert {"numpy", "torch", "safetensors"}.isdisjoint(loaded)
