"""Where figures come from: the machine, the commit and the command, printed above every table."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2]
LIBRARIES: Final = ("numpy", "torch", "zstandard", "pyzmq")


def announce() -> None:
    """Prints three lines: the machine, what the program is made of, and how it was called."""
    print(f"{platform.platform()}, {_processor()}, {os.cpu_count()} cores")
    versions = ", ".join(f"{name} {version}" for name in LIBRARIES if (version := _version(name)))
    print(f"commit {commit()}, Python {platform.python_version()}, {versions}")
    program = Path(sys.argv[0]).resolve()
    name = program.relative_to(FOLDER) if program.is_relative_to(FOLDER) else program.name
    print(f"python -P {shlex.join([str(name), *sys.argv[1:]])}\n", flush=True)


def commit() -> str:
    """The commit that is measured, with "-dirty" if files differ from it."""
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """The processor's name where Linux tells it, else the machine's kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
