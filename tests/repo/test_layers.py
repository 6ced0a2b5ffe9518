"""Who may import whom. The contracts themselves stand in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

PURE_MODULES = (
    "brokers.membership",
    "brokers.retained",
    "brokers.router",
    "ops.chaos.campaign",
    "ops.chaos.checker",
    "ops.chaos.measures",
    "ops.chaos.plan",
    "ops.summary",
    "ops.supervision",
    "outer.grace",
    "outer.ledger",
    "outer.quorum",
    "outer.rounds",
    "outer.weights",
    "proto.agreement",
    "proto.client",
    "proto.ids",
    "proto.manifest",
    "proto.messages",
    "workers.books",
    "workers.orders",
    "workers.session",
)


def pure_contract(project: dict[str, Any]) -> dict[str, Any]:
    contracts: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return next(contract for contract in contracts if contract["name"].startswith("pure cores"))


def test_the_import_contracts_hold(root: Path) -> None:
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_pure_module_is_under_the_contract(project: dict[str, Any], root: Path) -> None:
    present = [name for name in PURE_MODULES if (root / name.replace(".", "/")).with_suffix(".py").is_file()]
    contracted = pure_contract(project)["source_modules"]
    missing = sorted({f"isles.{name}" for name in present} - set(contracted))
    assert missing == [], "add them to source_modules of the contract on pure cores in pyproject.toml"


def test_each_package_is_imported_under_its_full_name(trees: dict[Path, ast.Module]) -> None:
    bare = {"brokers", "ops", "outer", "proto", "workers"}
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else ["."]
            found += [f"{path.name}:{name}" for name in names if name.split(".")[0] in bare or name == "."]
    assert found == []


def test_no_module_imports_everything_from_another(trees: dict[Path, ast.Module]) -> None:
    stars = [
        path.name
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert stars == []
