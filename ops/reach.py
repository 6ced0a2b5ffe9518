"""Reaching a broker: its address and the key that opens it, for every command that asks one.

Such a command is told of a run folder, whose operator's key lies in it, or of an address (`--broker`) and a key file
(`--key`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from isles.proto.config import variable_name
from isles.proto.errors import UsageError
from isles.proto.transport.address import DEFAULT_BROKER

if TYPE_CHECKING:
    from isles.proto.connection import Connection
    from isles.proto.transport.zmq_transport import ZmqClient

OPERATOR_NAME: Final = "operator"
"""Of the key in a run folder that commands use."""
KEY_VARIABLE: Final = variable_name("operator.key")


@dataclass(frozen=True)
class Reach:
    """Where a broker is, and the file with the key that opens it; None = a broker without keys."""

    address: str
    key: Path | None = None

    def dial(self) -> ZmqClient:
        """The way there over ZeroMQ. Raises ConfigError for an address or a key file that cannot be used."""
        from isles.proto.transport.dial import dial

        return dial(self.address, self.key)

    def connect(self, name: str = OPERATOR_NAME) -> Connection:
        """A connection of an operator; nothing is said yet. Raises as `dial`."""
        from isles.ops.watch import operator_hello
        from isles.proto.clock import SystemClock
        from isles.proto.connection import Connection

        return Connection(operator_hello(name), self.dial(), SystemClock())

    @property
    def flags(self) -> list[str]:
        """What tells a command of it."""
        return ["--broker", self.address, *([] if self.key is None else ["--key", str(self.key)])]


def key_option(text: str = "Key file of an operator, as `isles keys new` wrote it.") -> click.Option:
    """`--key`, beside a `--broker`."""
    return click.Option(
        ["--key"],
        default=None,
        type=click.Path(dir_okay=False, path_type=Path),
        envvar=KEY_VARIABLE,
        show_envvar=True,
        metavar="FILE",
        help=text,
    )


def key_in(run_dir: Path) -> Path | None:
    """The operator's key of a run folder; None if its run has no keys."""
    from isles.ops.run_folder import RunFolder
    from isles.proto.key_files import client_file

    path = client_file(RunFolder(run_dir).keys, OPERATOR_NAME)
    return path if path.exists() else None


def find_reach(broker: str | None, key: Path | None, run_dir: Path | None) -> Reach:
    """The broker of the run that is under way in a folder, or the one at an address. Raises UsageError if none is."""
    if broker is not None and run_dir is not None:
        raise click.UsageError("give either --broker or --run-dir")
    if run_dir is None:
        return Reach(broker or DEFAULT_BROKER, key)
    return Reach(running_broker(run_dir), key or key_in(run_dir))


def running_broker(run_dir: Path) -> str:
    """The address of the broker of a run that is under way. Raises UsageError if none is."""
    from isles.ops.run_folder import RunFolder

    folder = RunFolder(run_dir)
    if not folder.is_locked():
        raise UsageError(
            f"no `isles up` is running in {run_dir}: start it first, or name a broker with --broker; the figures of "
            "its last start are in its summary.json"
        )
    return folder.read_state().address
