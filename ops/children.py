"""Child processes whose command lines name their role, and that never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from isles.proto.config import VARIABLE_PREFIX
from isles.proto.errors import ConfigError

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def isles_command(*arguments: str) -> list[str]:
    """A command line on which `ps` shows `isles ROLE ...`, run by this interpreter."""
    script = Path(sys.executable).with_name("isles")
    if script.is_file():
        return [sys.executable, "-P", str(script), *arguments]
    program = "import sys; from isles.ops.main import run; sys.exit(run(sys.argv[2:]))"
    return [sys.executable, "-P", "-c", program, "isles", *arguments]


def child_environment(num_computing: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: settings travel in a file, and cores are shared by those that compute.

    With more computing processes than cores each gets one thread: more would only wait for one another.
    """
    environment = dict(os.environ if base is None else base)
    environment = {key: value for key, value in environment.items() if not key.startswith(VARIABLE_PREFIX)}
    num_cores = os.cpu_count() or 1
    if num_computing > 1:
        for variable in THREAD_VARIABLES:
            environment.setdefault(variable, str(max(1, num_cores // num_computing)))
    return environment


class ChildProcess:
    """One running child. Its standard input is a pipe that closes when this process dies, however it dies."""

    def __init__(self, arguments: Sequence[str], *, output: Path, environment: Mapping[str, str]) -> None:
        """Starts it. Raises ConfigError if `output`, to which it appends what it prints, cannot be written."""
        try:
            file = output.open("ab")
        except OSError as error:
            raise ConfigError(
                f"{output} cannot be written ({error.strerror}), so nothing can be started there: check the disk, and "
                "whether somebody removed the run folder"
            ) from error
        with file:
            self._process = subprocess.Popen(
                isles_command(*arguments),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=dict(environment),
                start_new_session=True,  # a Ctrl-C reaches us alone, so that we choose who stops first
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def terminate(self) -> None:
        """Asks it to end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()

    def wait(self, timeout_seconds: float) -> int:
        """The exit code; kills it first if it is not there in time."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Lets go of the pipe of a child that has ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
