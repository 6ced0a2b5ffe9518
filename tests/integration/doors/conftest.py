"""A broker process with keys, and those who come to its doors."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest

from isles.ops.key_folder import KeyFolder
from isles.proto.client import Answered, Refused, Welcomed
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection, News
from isles.proto.messages import AskStatus, Hello, Message, Role, Status, Welcome
from isles.proto.transport.dial import dial

WAIT_SECONDS: Final = 90.0
"""Bound of every wait here; nothing takes a tenth of it unless it is broken."""
NAMES: Final = (
    ("service", "worker"),
    ("us-1", "worker"),
    ("eu-1", "worker"),
    ("outer", "outer"),
    ("admin", "operator"),
)
"""Of the keys, with their roles."""


class Lines:
    """What a process says in JSON, one object a line; read as it comes."""

    def __init__(self, stream: IO[str]) -> None:
        self._said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._stream = stream
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            said = json.loads(line) if line.startswith("{") else {"event": "printed", "text": line}
            with self._changed:
                self._said.append(said)
                self._changed.notify_all()

    def wait_for(self, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first that is wanted, whenever it is or was said."""

        def find() -> dict[str, Any] | None:
            return next((said for said in self._said if is_wanted(said)), None)

        with self._changed:
            found = self._changed.wait_for(find, WAIT_SECONDS)
        assert found, self._said[-20:]
        return found

    def all(self) -> list[dict[str, Any]]:
        with self._changed:
            return list(self._said)

    def close(self) -> None:
        """Once the process has ended."""
        self._thread.join(WAIT_SECONDS)
        self._stream.close()


def start_process(*command: object, **streams: Any) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([str(part) for part in command], env=environment, text=True, **streams)


ISLES: Final = Path(sys.executable).with_name("isles")


class House:
    """`isles broker` with keys; it may be killed and started again."""

    def __init__(self, folder: Path, *flags: str, keys: KeyFolder | None = None) -> None:
        self.store, self.keys, self.flags = folder / "store", keys or KeyFolder(folder / "keys"), flags
        for name, role in NAMES:
            if not (self.keys.exists and self.keys.has_file(name)):
                self.keys.add(name, role, 0)  # type: ignore[arg-type]
        self._opened: list[Connection] = []
        self._others: list[tuple[subprocess.Popen[str], Lines]] = []
        self.start()

    def start(self) -> None:
        command = (ISLES, "broker", "--store", self.store, "--keys", self.keys.path, "--port", "0")
        self.process = start_process(*command, "--tick-seconds", "0.05", *self.flags, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        self.logs = Lines(self.process.stderr)
        self.address = str(self.logs.wait_for(lambda said: said["event"] == "broker.started")["address"])

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(WAIT_SECONDS)
        self.logs.close()

    def begin(self, *arguments: object) -> Lines:
        """Another process, such as an outer, until the end; what it logs."""
        process = start_process(ISLES, *arguments, stderr=subprocess.PIPE)
        assert process.stderr is not None
        self._others.append((process, Lines(process.stderr)))
        return self._others[-1][1]

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        for process, lines in self._others:
            process.kill()
            process.wait(WAIT_SECONDS)
            lines.close()
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    def key(self, name: str) -> Path:
        return self.keys.path / f"{name}.key"

    def knock(self, key: str, role: Role, name: str, **fields: Any) -> Connection:
        """Somebody who says HELLO as a new incarnation."""
        hello = Hello(role=role, id=name, incarnation=secrets.token_hex(8), **fields)
        connection = Connection(hello, dial(self.address, self.key(key)), SystemClock())
        self._opened.append(connection)
        connection.start()
        return connection

    def enter(self, key: str, role: Role, name: str, **fields: Any) -> Connection:
        """Somebody who is let in."""
        connection = self.knock(key, role, name, **fields)
        wait_for(connection, Welcomed)
        return connection

    def status(self) -> Status:
        operator = self.enter("admin", "operator", "admin")
        answer = ask(operator, AskStatus())
        operator.close()
        self._opened.remove(operator)
        assert isinstance(answer, Status)
        return answer

    def learners(self) -> set[str]:
        """The ids of all that there ever were."""
        return {one.learner for one in self.status().learners}

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the broker has logged under this name."""
        return [said for said in self.logs.all() if said["event"] == name]


def wait_for(connection: Connection, kind: type[Any], is_wanted: Callable[[Any], bool] = lambda _: True) -> Any:
    """The next news of this kind."""
    clock = SystemClock()
    deadline = clock.now() + WAIT_SECONDS
    seen: list[News] = []
    while clock.now() < deadline:
        for news in connection.poll(0.1):
            if isinstance(news, kind) and is_wanted(news):
                return news
            seen.append(news)
    raise AssertionError(f"no {kind.__name__} came, only {seen[-5:]}")


def ask(connection: Connection, message: Message, payload: bytes | None = None) -> Message:
    """The answer to a question."""
    connection.ask(message, payload)
    answered = wait_for(connection, Answered | Refused, lambda news: getattr(news, "ask", message) is message)
    assert isinstance(answered, Answered), answered
    return answered.reply


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests of a file."""
    made = House(tmp_path_factory.mktemp("house"))
    yield made
    made.close()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., House]]:
    """Makes houses of one's own, of a name and flags, perhaps with the keys of another one."""
    made: list[House] = []

    def run(name: str, *flags: str, **fields: Any) -> House:
        made.append(House(tmp_path / name, *flags, **fields))
        return made[-1]

    yield run
    for house in made:
        house.close()


@pytest.fixture
def asking() -> Callable[..., Message]:
    return ask


@pytest.fixture
def waiting() -> Callable[..., Any]:
    return wait_for


@pytest.fixture
def welcomed() -> Callable[[Connection], Welcome]:
    """The WELCOME of somebody who said HELLO."""
    return lambda connection: wait_for(connection, Welcomed).welcome


@pytest.fixture
def denied() -> Callable[[Connection], str]:
    """Why somebody is refused."""

    def run(connection: Connection) -> str:
        refused = wait_for(connection, Refused)
        assert refused.code == "denied"
        assert "\n" not in refused.text
        return str(refused.text)

    return run


@pytest.fixture(scope="session")
def lines_of() -> Callable[[IO[str]], Lines]:
    """Reads what a process says."""
    return Lines
