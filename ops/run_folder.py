"""The folder of a run on one machine: who may use it, what lies where, and what is kept between two starts.

What lies where:

config.toml         the resolved configuration     logs/<process>.jsonl   what each process said
state.json          address, time, restarts        logs/<process>.err     what it printed besides, if anything
store/              the broker's                   model.safetensors      the global parameters at the end
workers/<id>/       each learner's checkpoint      summary.json           what came of it
keys/               one for each process           relays/                each relay's store and settings
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

from isles.ops.wording import bytes_text
from isles.proto.errors import UsageError
from isles.proto.transport.address import Address

PORT_TRIES: Final = 64
"""How often three free ports in a row are looked for."""
ERROR_TAIL_BYTES: Final = 8192
FIRST_NAMES: Final = frozenset({"lock", "logs", "workers", "store", "keys", "state.json.tmp"})
"""What is in a run folder that was left before its state was written."""


@dataclass
class State:
    """What is kept between two starts of one run."""

    address: str = ""
    wall_seconds: float = 0.0
    """Time that the run was under way, over all starts."""
    restarts: dict[str, int] = field(default_factory=dict)
    num_starts: int = 0
    worker_settings: dict[str, str] = field(default_factory=dict)
    """Settings of single workers: `us-1.step_seconds` -> text."""
    relays: dict[str, str] = field(default_factory=dict)
    """Relay -> address."""


class RunFolder:
    """One run folder; `with` locks it for this process. Raises UsageError for whatever a person can mend."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._made: list[Path] = []
        """What was not there before, a folder ahead of what lies in it."""

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    def relay_store(self, relay: str) -> Path:
        """Where a relay keeps what the broker has not taken yet, and its cache."""
        return self.path / "relays" / relay

    def relay_config(self, relay: str) -> Path:
        """The settings of a relay, which are not those of the broker."""
        return self.path / "relays" / f"{relay}.toml"

    def make_relays(self) -> None:
        """Makes the folder of the relays. Raises UsageError if the disk refuses it."""
        folder = self.path / "relays"
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot be made: {error.strerror or error}") from error

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def log(self, process: str) -> Path:
        """Where a process logs."""
        return self.logs / f"{process}.jsonl"

    def errors(self, process: str) -> Path:
        """What a process printed: of use when it cannot even log."""
        return self.logs / f"{process}.err"

    def __enter__(self) -> Self:
        try:
            self._refuse_foreign()
            needed = (*reversed(self.path.parents), self.path, self.logs, self.workers, self._lock_file)
            self._made = [path for path in needed if not path.exists()]
            for folder in (self.path, self.logs, self.workers):
                folder.mkdir(parents=True, exist_ok=True)
            lock = self._lock_file.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"the run folder {self.path} cannot be written: {error.strerror or error}; name another with --run-dir"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise UsageError(
                f"another `isles up` is running in {self.path}: stop it, or name another folder with --run-dir"
            ) from error
        except OSError as error:
            lock.close()
            raise UsageError(
                f"the run folder {self.path} cannot be locked ({error.strerror}): name one on a file system that has "
                "locks with --run-dir"
            ) from error
        self._lock = lock
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._lock is not None:
            self._remove_unused()
            self._lock.close()
            self._lock = None

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    def _remove_unused(self) -> None:
        """Leaves nothing of a run that was not even begun, such as one whose settings were refused."""
        if self.config.exists() or (self.path / "state.json").exists():
            return
        for path in reversed(self._made):
            with contextlib.suppress(OSError):  # what is not empty is somebody's
                path.unlink() if path == self._lock_file else path.rmdir()

    def _refuse_foreign(self) -> None:
        """Nothing of anybody's is to be overwritten because a folder was named by mistake."""
        if not self.path.is_dir() or self.config.exists() or (self.path / "state.json").exists():
            return
        foreign = sorted(found.name for found in self.path.iterdir() if found.name not in FIRST_NAMES)
        if foreign:
            raise UsageError(
                f"{self.path} is no run folder, and not empty ({foreign[0]!r} is in it): name another with --run-dir"
            )

    def check_room(self, needed_bytes: int) -> None:
        """Raises UsageError if the broker would take nothing here, since it leaves `needed_bytes` free."""
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < needed_bytes:
            raise UsageError(
                f"the disk under {self.path} has {bytes_text(free_bytes)} free, and the broker takes no uploads below "
                f"{bytes_text(needed_bytes)}: make room, name another --run-dir, or lower the limit with --set "
                "broker.disk_free_bytes_min=..."
            )

    def is_locked(self) -> bool:
        """Whether another process is running this run."""
        try:
            with self._lock_file.open("r", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def read_state(self) -> State:
        """What was kept; a fresh State in a new folder."""
        path = self.path / "state.json"
        if not path.exists():
            return State()
        try:
            return State(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} is damaged ({error}): delete it, the run itself is in the store") from error

    def write_state(self, state: State) -> None:
        write_whole(self.path / "state.json", json.dumps(asdict(state), indent=2) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of the last start that ended; None if there is none that can be read."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def last_words(self, process: str) -> str:
        """The last line that a process printed, without its prefix; empty if it printed nothing."""
        try:
            with self.errors(process).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - ERROR_TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].removeprefix("isles: ").strip() if lines else ""

    def tidy(self) -> None:
        """Removes what is empty."""
        for path in self.logs.glob("*.err"):
            if path.stat().st_size == 0:
                path.unlink()


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees all of it or the one before. Raises UsageError if the disk refuses it."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def choose_address(kept: str, host: str = "127.0.0.1", taken: AbstractSet[int] = frozenset()) -> Address:
    """The kept address if its ports are still free, else three free ports in a row; `taken` are about to be bound.

    Raises UsageError if there are none.
    """
    if kept:
        address = Address.parse(kept)
        ports = ports_of(address)
        if taken.isdisjoint(ports) and all(_is_free(host, port) for port in ports):
            return address
    for _ in range(PORT_TRIES):
        with socket.socket() as probe:
            probe.bind((host, 0))
            first = int(probe.getsockname()[1])
        ports = (first, first + 1, first + 2)
        if first <= 65_533 and taken.isdisjoint(ports) and all(_is_free(host, port) for port in ports):
            return Address(host, *ports)
    raise UsageError(f"there are no three free ports in a row on {host}: name the first one with --set broker.port=...")


def ports_of(address: Address) -> tuple[int, int, int]:
    """Those of control, bulk and events."""
    return (address.control_port, address.bulk_port, address.events_port)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        # As the broker's own sockets: a port whose connections are merely in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
