"""What `isles keys` does to a key folder, and what it says about it."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.ops import key_folder, main
from isles.ops.key_folder import KEYS_PER_NAME_MAX, KeyFolder
from isles.proto.errors import ConfigError, UsageError
from isles.proto.key_files import client_file, read_allow_list, read_broker_key, read_client_key
from isles.proto.keys import BROKER_KEYS_MAX, KeyRole

Isles = Callable[..., str]


@pytest.fixture
def isles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Isles:
    """Runs `isles keys ...` in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        assert main.run(["keys", *arguments]) == code
        out, err = capsys.readouterr()
        assert (err == "") == (code == 0)
        return str(out + err)

    return run


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_the_first_key_makes_the_folder_and_says_what_to_do_with_what(isles: Isles) -> None:
    said = isles("new", "west-0", "--role", "worker")
    for part in (
        "made      keys/broker.key",
        "wrote     keys/west-0.key",
        "let in    keys/allowed.toml  west-0 as worker",
    ):
        assert part in said
    assert "isles worker --broker ADDRESS --key keys/west-0.key" in said
    assert "isles broker --keys keys" in said
    assert "isles broker --keys keys" in said
    assert stat.S_IMODE(Path("keys").stat().st_mode) == 0o700
    assert modes(Path("keys")) == {"broker.key": 0o600, "allowed.toml": 0o644, "west-0.key": 0o600}
    key = read_client_key(Path("keys/west-0.key"))
    assert (key.name, key.role, key.broker) == ("west-0", "worker", (read_broker_key(Path("keys")).public,))
    entry = read_allow_list(Path("keys")).find(key.public)
    assert entry is not None
    assert (entry.name, entry.role) == ("west-0", "worker")


@pytest.mark.parametrize("role", ["worker", "outer", "relay", "operator"])
def test_every_role_has_keys_and_no_secret_is_printed(isles: Isles, role: str) -> None:
    said = isles("new", "one", "--role", role) + isles("rotate", "one") + isles("list") + isles("list", "--json")
    secrets = [read_client_key(Path("keys/one.key")).secret, read_broker_key(Path("keys")).secret]
    assert not any(secret in said for secret in secrets)
    assert f"one as {role}" in said


def test_a_second_key_of_one_name_is_refused_unless_that_was_expected(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    before = Path("keys/west-0.key").read_bytes()
    assert "`isles keys rotate west-0`" in isles("new", "west-0", "--role", "worker", code=2)
    assert "has a key already" in isles("new", "west-0", "--role", "worker", "--if-missing")
    assert "has a key already" in isles("new", "west-0", "--role", "outer", "--if-missing", code=2)
    assert Path("keys/west-0.key").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("new", "broker", "--role", "worker"), "'broker' is the broker itself"),
        (("new", "../west", "--role", "worker"), "cannot name a key"),
        (("new", "West", "--role", "worker"), "cannot name a key"),
        (("new", "west", "--role", "king"), "'king' is not one of"),
        (("new", "west"), "--role"),
        (("list", "--keys", "elsewhere"), "there is no key folder at elsewhere"),
        (("rotate", "west"), "there is no key folder at keys"),
        (("revoke", "west", "--old"), "there is no key folder at keys"),
        (("revoke", "broker"), "cannot be revoked, only changed"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_makes_nothing(
    isles: Isles, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    said = isles(*arguments, code=2)
    assert text in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_list_names_everybody_as_a_table_and_as_json(isles: Isles) -> None:
    for name, role in (("west-0", "worker"), ("west-1", "worker"), ("boss", "operator")):
        isles("new", name, "--role", role)
    isles("rotate", "west-0")
    Path("keys/west-1.key").rename("elsewhere.key")
    table = isles("list")
    assert "4 keys let in" in table
    assert [table.count(word) for word in ("west-0", "west-1", "boss", "earlier key", "elsewhere")] == [2, 1, 1, 1, 1]
    found: dict[str, Any] = json.loads(isles("list", "--json"))
    assert found["broker"] == read_broker_key(Path("keys")).public
    shown = [(key["name"], key["role"], key["is_newest"], key["has_file"]) for key in found["keys"]]
    assert sorted(shown) == [
        ("boss", "operator", True, True),
        ("west-0", "worker", False, False),
        ("west-0", "worker", True, True),
        ("west-1", "worker", True, False),
    ]


def test_a_rotated_key_is_let_in_beside_the_earlier_one_until_that_is_retired(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    old = read_client_key(Path("keys/west-0.key"))
    assert "isles keys revoke west-0 --old" in isles("rotate", "west-0")
    new = read_client_key(Path("keys/west-0.key"))
    assert {key.public for key in read_allow_list(Path("keys")).of("west-0")} == {old.public, new.public}
    assert "1 earlier key" in isles("revoke", "west-0", "--old")
    assert [key.public for key in read_allow_list(Path("keys")).of("west-0")] == [new.public]
    assert "has one key only" in isles("revoke", "west-0", "--old")


def test_a_rotation_that_is_never_finished_is_stopped(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    for _ in range(KEYS_PER_NAME_MAX - 1):
        isles("rotate", "west-0")
    assert "revoke west-0 --old" in isles("rotate", "west-0", code=2)


def test_a_revoked_name_is_gone_with_all_its_keys_and_its_file(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    isles("new", "west-1", "--role", "worker")
    isles("rotate", "west-0")
    assert "2 keys of west-0" in isles("revoke", "west-0")
    assert {key.name for key in read_allow_list(Path("keys"))} == {"west-1"}
    assert not Path("keys/west-0.key").exists()
    assert "west-0 has no key in keys: it lets in west-1" in isles("revoke", "west-0", code=2)
    isles("new", "west-0", "--role", "outer")


@pytest.mark.parametrize("change", [lambda path: path.write_text("x"), lambda path: path.chmod(0o644), Path.unlink])
def test_a_file_that_cannot_be_used_is_mended_by_a_rotation(isles: Isles, change: Callable[[Path], object]) -> None:
    isles("new", "west-0", "--role", "worker")
    change(Path("keys/west-0.key"))
    isles("rotate", "west-0")
    key = read_client_key(Path("keys/west-0.key"))
    assert key.broker == (read_broker_key(Path("keys")).public,)


# --------------------------------------------------------------------------------------------------- the broker's key


def test_the_brokers_next_key_is_known_beside_the_present_one_until_that_is_retired(isles: Isles) -> None:
    for name in ("west-0", "west-1", "away"):
        isles("new", name, "--role", "worker")
    Path("keys/away.key").unlink()
    old = read_broker_key(Path("keys"))
    said = isles("rotate", "broker")
    new = read_broker_key(Path("keys"))
    assert new.public != old.public
    assert "the files of away are not here" in said
    assert new.public in said
    for name in ("west-0", "west-1"):
        assert read_client_key(Path(f"keys/{name}.key")).broker == (old.public, new.public)
    isles("rotate", "west-0")
    assert read_client_key(Path("keys/west-0.key")).broker == (old.public, new.public)
    isles("revoke", "broker", "--old")
    for name in ("west-0", "west-1"):
        assert read_client_key(Path(f"keys/{name}.key")).broker == (new.public,)
    assert "knows only the broker's present key" in isles("revoke", "broker", "--old")


def test_the_key_that_the_broker_has_is_never_pushed_out_of_the_client_files(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    for _ in range(2 * BROKER_KEYS_MAX):
        present = read_broker_key(Path("keys")).public
        isles("rotate", "broker")
        known = read_client_key(Path("keys/west-0.key")).broker
        assert known[-2:] == (present, read_broker_key(Path("keys")).public)
        assert len(known) <= BROKER_KEYS_MAX


def test_a_client_file_that_is_damaged_keeps_the_brokers_key_from_changing(isles: Isles) -> None:
    isles("new", "west-0", "--role", "worker")
    isles("new", "west-1", "--role", "worker")
    before = {path.name: path.read_bytes() for path in Path("keys").iterdir()}
    Path("keys/west-1.key").write_text("x")
    assert "west-1.key" in isles("rotate", "broker", code=2)
    after = {path.name: path.read_bytes() for path in Path("keys").iterdir()}
    assert after == before | {"west-1.key": b"x"}


# ------------------------------------------------------------------------------------------------------ being cut off


def add(folder: Path, name: str = "west-0", role: KeyRole = "worker") -> Path:
    return KeyFolder(folder).add(name, role, 5)


@pytest.mark.parametrize("write", ["write_allow_list", "write_broker_key", "write_client_key"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_new_key_that_was_cut_off_can_be_had_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str, is_first: bool
) -> None:
    if not is_first:
        add(tmp_path, "other")

    def fail(*_: object) -> None:
        raise ConfigError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(key_folder, write, fail)
        try:
            add(tmp_path)
        except ConfigError:
            pass
        else:
            assert (write, is_first) == ("write_broker_key", False)
    folder = KeyFolder(tmp_path)
    if folder.exists and folder.allowed().of("west-0"):
        folder.rotate("west-0", 6)
    else:
        add(tmp_path)
    key = read_client_key(client_file(tmp_path, "west-0"))
    assert folder.allowed().find(key.public) is not None
    assert key.broker == (folder.broker_public(),)


def test_a_folder_that_lost_the_brokers_key_is_not_given_another_one_unasked(tmp_path: Path) -> None:
    add(tmp_path)
    (tmp_path / "broker.key").unlink()
    with pytest.raises(ConfigError, match="put the broker's key back"):
        add(tmp_path, "west-1")
    with pytest.raises(UsageError, match="no key folder"):
        KeyFolder(tmp_path).rotate("west-0", 6)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a key folder"):
        add(tmp_path / "file")


def test_commands_at_the_same_time_lose_no_entry(tmp_path: Path) -> None:
    names = [f"west-{number}" for number in range(12)]
    threads = [threading.Thread(target=add, args=(tmp_path, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_allow_list(tmp_path)} == set(names)
    assert len({read_client_key(client_file(tmp_path, name)).broker for name in names}) == 1
