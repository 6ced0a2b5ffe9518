"""What `isles keys deliver` leaves behind: each key where its process looks for it, however often it is called."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from isles.ops.key_delivery import Delivery, deliver
from isles.ops.key_folder import KeyFolder
from isles.ops.main import run
from isles.ops.run_keys import ROLES, make_run_keys
from isles.proto.errors import ConfigError
from isles.proto.key_files import client_file, read_broker_key, read_client_key


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "broker")


def wanted(tmp_path: Path) -> list[Delivery]:
    return [
        Delivery("operator", "operator"),
        Delivery("outer", "outer", tmp_path / "outer"),
        Delivery("worker-us", "worker", tmp_path / "us"),
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_each_process_gets_its_own_key_and_no_other(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    assert [path.name for path in (tmp_path / "us").iterdir()] == ["worker-us.key"]
    assert [path.name for path in (tmp_path / "outer").iterdir()] == ["outer.key"]
    key = read_client_key(client_file(tmp_path / "us", "worker-us"))
    assert key.role == "worker"
    assert key.broker == (read_broker_key(keys.path).public,)
    found = keys.allowed().find(key.public)
    assert found is not None
    assert found.name == "worker-us"


def test_nobody_else_may_read_a_key(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    files = [*tmp_path.rglob("*.key")]
    assert len(files) == 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "us").stat().st_mode) == 0o700


def test_the_same_call_again_changes_nothing(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    before = contents(tmp_path)
    assert deliver(keys, wanted(tmp_path), 2) == []
    assert contents(tmp_path) == before


def test_what_was_changed_in_the_key_folder_is_brought(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    keys.rotate("worker-us", 2)
    keys.rotate_broker(2)
    deliver(keys, wanted(tmp_path), 3)
    for name, folder in (("worker-us", "us"), ("outer", "outer")):
        delivered = read_client_key(client_file(tmp_path / folder, name))
        assert delivered.model_dump() == read_client_key(client_file(keys.path, name)).model_dump()
        assert len(delivered.broker) == 2


def test_a_key_whose_file_got_lost_is_replaced_and_let_in_no_more(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    lost = read_client_key(client_file(keys.path, "worker-us"))
    client_file(keys.path, "worker-us").unlink()
    deliver(keys, wanted(tmp_path), 2)
    assert keys.allowed().find(lost.public) is None
    assert read_client_key(client_file(tmp_path / "us", "worker-us")).public != lost.public


def test_a_key_never_changes_its_role(tmp_path: Path, keys: KeyFolder) -> None:
    deliver(keys, wanted(tmp_path), 1)
    with pytest.raises(ConfigError, match="with the role outer, not worker"):
        deliver(keys, [Delivery("outer", "worker", tmp_path / "outer")], 2)


@pytest.mark.parametrize("words", [["outer"], ["outer="], ["outer=boss"], ["../x=worker"], ["broker=worker"], []])
def test_what_cannot_be_delivered_is_one_sentence(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["keys", "deliver", "--keys", str(tmp_path / "keys"), *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("isles: ")
    assert len(said.splitlines()) == 1


def test_a_run_folder_has_a_key_for_each_process_and_keeps_it(tmp_path: Path) -> None:
    operator = make_run_keys(tmp_path / "keys", ["us-0"])
    assert read_client_key(operator).role == "operator"
    first = contents(tmp_path)
    make_run_keys(tmp_path / "keys", ["us-0", "eu-0"])
    later = contents(tmp_path)
    assert {name: later[name] for name in first if name.endswith(".key")} == {
        name: text for name, text in first.items() if name.endswith(".key")
    }
    names = {key.name for key in KeyFolder(tmp_path / "keys").allowed()}
    assert names == {*ROLES, "us-0", "eu-0"}
