"""Keys that name relays: made, followed when a relay's key changes, and delivered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isles.ops import main
from isles.ops.key_folder import KeyFolder
from isles.proto.errors import ConfigError, UsageError
from isles.proto.key_files import KeyWatch, client_file, read_client_key, write_client_key
from isles.proto.keys import RELAY_KEYS_MAX

Isles = Callable[..., str]


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """A relay, a worker and an evaluator that may dial it, and a worker that may not."""
    folder = KeyFolder(tmp_path / "keys")
    folder.add("relay-us", "relay", 1)
    folder.add("us-0", "worker", 1, relays=["relay-us"])
    folder.add("watch", "operator", 1, relays=["relay-us"])
    folder.add("eu-0", "worker", 1)
    return folder


@pytest.fixture
def isles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Isles:
    """Runs `isles keys ...` in the folder above the keys; what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 0) -> str:
        assert main.run(["keys", *arguments]) == code
        out, err = capsys.readouterr()
        return str(out + err)

    return run


def relays(keys: KeyFolder, name: str) -> tuple[str, ...]:
    return read_client_key(client_file(keys.path, name)).relays


def public(keys: KeyFolder, name: str) -> str:
    return read_client_key(client_file(keys.path, name)).public


def test_a_key_names_the_public_keys_of_its_relays(keys: KeyFolder) -> None:
    assert relays(keys, "us-0") == relays(keys, "watch") == (public(keys, "relay-us"),)
    assert relays(keys, "eu-0") == ()
    assert "relays" not in client_file(keys.path, "eu-0").read_text(), "older isles read it"


def test_a_relay_must_have_a_key_first_and_be_one(keys: KeyFolder) -> None:
    for name in ("relay-eu", "us-0"):
        with pytest.raises(UsageError, match=f"{name} is no relay that has a key"):
            keys.add("eu-1", "worker", 1, relays=[name])
    assert not keys.has_file("eu-1")


def test_one_file_names_so_many_relays_and_no_more(keys: KeyFolder) -> None:
    names = [f"relay-{number}" for number in range(RELAY_KEYS_MAX + 1)]
    for name in names:
        keys.add(name, "relay", 1)
    assert keys.name_relays("eu-0", names[:-1])
    with pytest.raises(UsageError, match=f"at most {RELAY_KEYS_MAX}"):
        keys.name_relays("eu-0", names)


def test_while_a_relays_key_is_changed_both_are_named_and_then_only_the_newest(keys: KeyFolder) -> None:
    old = public(keys, "relay-us")
    keys.rotate("relay-us", 2)
    new = public(keys, "relay-us")
    assert relays(keys, "us-0") == relays(keys, "watch") == (old, new)
    assert {path.stem for path in keys.files_with_relay("relay-us")} == {"us-0", "watch"}
    keys.retire("relay-us")
    assert relays(keys, "us-0") == (new,)
    keys.revoke("relay-us")
    assert relays(keys, "us-0") == ()
    assert relays(keys, "eu-0") == ()


def test_the_files_name_the_next_key_before_the_relay_has_it(keys: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    from isles.ops import key_folder

    def note(path: Path, key: object) -> None:
        written.append(path.stem)
        write_client_key(path, key)

    monkeypatch.setattr(key_folder, "write_client_key", note)
    keys.rotate("relay-us", 2)
    assert written == ["us-0", "watch", "relay-us"]


def test_other_changes_leave_the_relays_as_they_are(keys: KeyFolder) -> None:
    before = relays(keys, "us-0")
    keys.rotate("us-0", 2)
    keys.rotate_broker(2)
    keys.retire_broker()
    keys.rotate("eu-0", 2)
    keys.retire("us-0")
    assert relays(keys, "us-0") == before


def test_a_relay_is_dialled_with_its_own_key_in_place_of_the_brokers(keys: KeyFolder) -> None:
    path = client_file(keys.path, "us-0")
    key = read_client_key(path)
    dialled = key.for_relay()
    assert (dialled.broker, dialled.public, dialled.secret) == (key.relays, key.public, key.secret)
    assert (dialled.is_for_relay, key.is_for_relay, dialled.path) == (True, False, str(path))
    with pytest.raises(ConfigError, match="names no relay"):
        read_client_key(client_file(keys.path, "eu-0")).for_relay()


def test_a_relays_next_key_is_noticed_by_a_running_process(keys: KeyFolder) -> None:
    path = client_file(keys.path, "us-0")
    watch = KeyWatch(read_client_key(path).for_relay())
    assert watch.newer() is None
    keys.rotate("relay-us", 2)
    newer = watch.newer()
    assert newer is not None
    assert len(newer.broker) == 2
    assert newer.is_for_relay
    keys.revoke("relay-us")
    assert watch.newer() is None, "a file that names no relay any more changes nothing"


# ------------------------------------------------------------------------------------------------------- the commands


def test_new_names_relays_and_says_how_to_start(isles: Isles, tmp_path: Path) -> None:
    said = isles("new", "relay-us", "--role", "relay")
    assert "isles broker --upstream ADDRESS --key keys/relay-us.key --region REGION" in said
    said = isles("new", "us-0", "--role", "worker", "--relay", "relay-us")
    assert "isles worker --broker ADDRESS --key keys/us-0.key --relay ADDRESS" in said
    keys = KeyFolder(Path("keys"))
    assert relays(keys, "us-0") == (public(keys, "relay-us"),)


def test_a_key_that_is_there_can_be_given_a_relay(isles: Isles, tmp_path: Path) -> None:
    isles("new", "relay-us", "--role", "relay")
    isles("new", "us-0", "--role", "worker")
    again = ("new", "us-0", "--role", "worker", "--relay", "relay-us", "--if-missing")
    assert "names relay-us" in isles(*again)
    assert "names relay-us" not in isles(*again)
    keys = KeyFolder(Path("keys"))
    assert relays(keys, "us-0") == (public(keys, "relay-us"),)


@pytest.mark.parametrize("role", ["outer", "relay"])
def test_only_who_may_come_through_a_relay_is_given_one(isles: Isles, role: str) -> None:
    isles("new", "relay-us", "--role", "relay")
    assert "dials the broker" in isles("new", "x", "--role", role, "--relay", "relay-us", code=2)
    assert "dials the broker" in isles("deliver", f"x={role}@relay-us", code=2)


def test_a_rotated_relay_says_which_files_come_first(isles: Isles) -> None:
    isles("new", "relay-us", "--role", "relay")
    isles("new", "us-0", "--role", "worker", "--relay", "relay-us")
    said = isles("rotate", "relay-us")
    assert "keys/us-0.key  names it" in said
    assert "restart the relay" in said


def test_a_delivery_names_relays_wherever_they_stand(isles: Isles, tmp_path: Path) -> None:
    call = ("deliver", "worker-us=worker@relay-us:us", "relay-us=relay:relay", "outer=outer:outer")
    isles(*call)
    delivered = read_client_key(tmp_path / "us" / "worker-us.key")
    assert delivered.relays == (read_client_key(tmp_path / "relay" / "relay-us.key").public,)
    assert isles(*call) == ""
    isles("rotate", "relay-us")
    isles(*call)
    assert len(read_client_key(tmp_path / "us" / "worker-us.key").relays) == 2


def test_a_delivery_without_a_relay_leaves_what_is_named(isles: Isles, tmp_path: Path) -> None:
    isles("deliver", "worker-us=worker@relay-us", "relay-us=relay")
    assert isles("deliver", "worker-us=worker", "relay-us=relay") == ""
    assert len(read_client_key(tmp_path / "keys" / "worker-us.key").relays) == 1


def test_a_delivery_from_a_relay_that_there_is_not_is_refused(isles: Isles) -> None:
    assert "is no relay that has a key" in isles("deliver", "worker-us=worker@relay-eu", code=2)
