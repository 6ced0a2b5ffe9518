"""A broker with keys over real sockets: given ids, revocation, and the operator's word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.brokers.broker import serve
from isles.brokers.settings import BrokerSettings
from isles.ops.key_folder import KeyFolder
from isles.ops.main import run as isles
from isles.proto.client import Answered, Refused, Welcomed
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import ConfigError, RefusedError, UsageError
from isles.proto.logs import ListLogger
from isles.proto.messages import AskHeads, Hello, Role
from isles.proto.route import Route
from isles.proto.transport.dial import dial
from isles.workers.claim import IDENTITY_NAME, Claim, claim_given
from isles.workers.record import asking_for_id

WAIT_SECONDS = 30.0
"""Bound of every wait here; nothing takes a tenth of it unless it is broken."""


class StartLogger(ListLogger):
    """Says when a broker can be dialled."""

    def __init__(self) -> None:
        super().__init__()
        self.is_started = threading.Event()

    def info(self, event: str, **fields: Any) -> None:
        super().info(event, **fields)
        if event == "broker.started":
            self.is_started.set()


class House:
    """A broker in a thread of this process, and its key folder."""

    def __init__(self, folder: Path) -> None:
        self.store, self.keys = folder / "store", KeyFolder(folder / "keys")
        self.logger = StartLogger()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        for name, role in (("service", "worker"), ("us-1", "worker"), ("admin", "operator")):
            self.keys.add(name, role, 0)  # type: ignore[arg-type]

    def start(self) -> None:
        self._stop.clear()
        self.logger.is_started.clear()
        settings = BrokerSettings(store=self.store, keys=self.keys.path, port=0, tick_seconds=0.05)
        self._thread = threading.Thread(
            target=serve, args=(settings,), kwargs={"logger": self.logger, "should_stop": self._stop}
        )
        self._thread.start()
        assert self.logger.is_started.wait(WAIT_SECONDS)
        self.address = (self.store / "address").read_text(encoding="utf-8").strip()

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)

    def key(self, name: str) -> Path:
        return self.keys.path / f"{name}.key"

    def connect(self, name: str, role: Role = "worker", learner: str = "us-1") -> Connection:
        hello = Hello(role=role, id=learner, incarnation="ab" * 8)
        connection = Connection(hello, dial(self.address, self.key(name)), SystemClock())
        connection.start()
        return connection

    def ask_for_id(self, incarnation: str) -> Any:
        return asking_for_id(
            Route(self.address, self.key("service")),
            "local",
            WAIT_SECONDS,
            incarnation=incarnation,
            should_stop=lambda: False,
        )


def wait_for(connection: Connection, kind: type[Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for news in connection.poll(0.05):
            if isinstance(news, kind):
                return news
    raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    made.start()
    yield made
    made.end()


Closing = Callable[[Connection], Connection]


@pytest.fixture
def closing() -> Iterator[Closing]:
    """Closes connections at the end."""
    opened: list[Connection] = []

    def keep(connection: Connection) -> Connection:
        opened.append(connection)
        return connection

    yield keep
    for connection in opened:
        connection.close()


def test_workers_that_share_a_key_and_a_volume_get_an_id_each_and_keep_it(house: House, tmp_path: Path) -> None:
    volume = tmp_path / "checkpoints"
    first, second = claim_given(volume, house.ask_for_id), claim_given(volume, house.ask_for_id)
    assert {first.name, second.name} == {"service-1", "service-2"}
    assert first.folder != second.folder
    for claim in (first, second):
        claim.close()
    house.end()
    house.start()

    def never(incarnation: str) -> Any:
        raise AssertionError("an id is kept")

    again = [claim_given(volume, never) for _ in range(2)]
    assert [(claim.name, claim.rejoin, claim.folder) for claim in again] == [
        (claim.name, claim.rejoin, claim.folder) for claim in (first, second)
    ]
    third = claim_given(volume, house.ask_for_id)
    assert third.name == "service-3"
    for claim in (*again, third):
        claim.close()


def test_a_key_that_is_revoked_ends_a_connection_that_stands(house: House, closing: Closing) -> None:
    worker = closing(house.connect("us-1"))
    wait_for(worker, Welcomed)
    carried = house.keys.path / "us-1.carried"
    carried.write_bytes(house.key("us-1").read_bytes())
    carried.chmod(0o600)
    house.keys.revoke("us-1")
    refused = wait_for(worker, Refused)
    assert refused.code == "denied"
    assert "allow-list" in refused.text
    carried.rename(house.key("us-1"))
    stranger = closing(house.connect("us-1"))
    assert wait_for(stranger, Refused).code == "denied"


def test_a_key_is_exchanged_for_the_next_without_a_pause(house: House, closing: Closing) -> None:
    worker = closing(house.connect("us-1"))
    wait_for(worker, Welcomed)
    house.keys.rotate("us-1", 1)
    newer = closing(house.connect("us-1"))
    welcome = wait_for(newer, Welcomed).welcome
    for connection in (worker, newer):
        connection.ask(AskHeads())
        wait_for(connection, Answered)
    assert worker.client.session == welcome.new_session, "both keys of the name open the same session"


def test_an_operator_pardons_by_the_command_line(
    house: House, closing: Closing, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for(closing(house.connect("us-1")), Welcomed)
    reach = ("--broker", house.address, "--key")
    assert isles(["pardon", "us-1", *reach, str(house.key("admin"))]) == 0
    assert "us-1 is welcome again" in capsys.readouterr().out
    for arguments, code, words in (
        (["nobody", *reach, str(house.key("admin"))], 2, "no learner nobody"),
        (["../x", *reach, str(house.key("admin"))], 2, "no name of a learner"),
        (["us-1", *reach, str(house.key("us-1"))], RefusedError.exit_code, "has the role worker"),
    ):
        assert isles(["pardon", *arguments]) == code
        complaint = capsys.readouterr().err
        assert words in complaint
        assert complaint.count("\n") == 1


def test_a_broker_without_usable_keys_does_not_start(tmp_path: Path) -> None:
    settings = BrokerSettings(store=tmp_path / "store", keys=tmp_path / "nowhere", port=0)
    with pytest.raises(ConfigError, match="isles keys new"):
        serve(settings, logger=ListLogger(), should_stop=threading.Event())
    assert not (tmp_path / "store").exists()


# --------------------------------------------------------------------------------------------------- what is kept of it


def test_an_identity_that_is_damaged_is_named_with_the_remedy(tmp_path: Path) -> None:
    slot = tmp_path / "_given-1"
    slot.mkdir()
    for damage in (b"", b"{", b'{"id": "../../etc", "rejoin": "ab"}', b"\xff" * 5000):
        (slot / IDENTITY_NAME).write_bytes(damage)
        with pytest.raises(UsageError, match="delete the folder"):
            claim_given(tmp_path, lambda _: pytest.fail("it has one"))


def test_a_worker_that_gets_no_id_lets_go_of_its_slot(tmp_path: Path) -> None:
    def refuse(incarnation: str) -> Any:
        raise RefusedError("denied")

    for _ in range(2):
        with pytest.raises(RefusedError):
            claim_given(tmp_path, refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["_given-1"]


def test_what_is_kept_is_readable_by_its_owner_alone(house: House, tmp_path: Path) -> None:
    with claim_given(tmp_path / "volume", house.ask_for_id) as claim:
        assert claim.folder is not None
        path = claim.folder / IDENTITY_NAME
        assert path.stat().st_mode & 0o077 == 0
        assert claim.rejoin in path.read_text(encoding="utf-8")


def test_without_a_folder_nothing_is_kept(house: House) -> None:
    claims: list[Claim] = [claim_given(None, house.ask_for_id) for _ in range(2)]
    assert [claim.folder for claim in claims] == [None, None]
    assert claims[0].name != claims[1].name
