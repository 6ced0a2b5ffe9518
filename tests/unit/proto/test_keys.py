"""Files of keys: what was written is read again, and whatever else stands in them is one clear sentence."""

from __future__ import annotations

import os
import stat
import string
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.proto import keys
from isles.proto.errors import ConfigError
from isles.proto.key_files import (
    KeyWatch,
    client_file,
    generate_pair,
    read_allow_list,
    read_broker_key,
    read_client_key,
    write_allow_list,
    write_broker_key,
    write_client_key,
)
from isles.proto.keys import (
    ALLOWED_MAX,
    AllowedKey,
    AllowList,
    BrokerKey,
    ClientKey,
    is_key,
)


def make_client_key(name: str = "us-0") -> ClientKey:
    pair = generate_pair()
    broker = (generate_pair().public, generate_pair().public)
    return ClientKey(name=name, role="worker", public=pair.public, secret=pair.secret, broker=broker, made_unix=7)


def allowed(name: str, role: str = "worker") -> AllowedKey:
    return AllowedKey(name=name, role=role, public=generate_pair().public, made_unix=3)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = client_file(tmp_path, "us-0")
    write_client_key(path, make_client_key())
    return path


def rewritten(path: Path, change: Callable[[str], str]) -> Path:
    path.write_text(change(path.read_text()))
    return path


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    key = make_client_key()
    write_client_key(tmp_path / "us-0.key", key)
    assert read_client_key(tmp_path / "us-0.key").model_dump() == key.model_dump()
    assert read_client_key(tmp_path / "us-0.key").path == str(tmp_path / "us-0.key")
    pair = generate_pair()
    broker = BrokerKey(public=pair.public, secret=pair.secret, made_unix=9)
    write_broker_key(tmp_path, broker)
    assert read_broker_key(tmp_path) == broker
    known = AllowList(keys=(allowed("us-0"), allowed("us-0"), allowed("boss", "operator")))
    write_allow_list(tmp_path, known)
    assert read_allow_list(tmp_path) == known


def test_files_with_secrets_are_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        write_client_key(tmp_path / "us-0.key", make_client_key())
        write_broker_key(tmp_path, BrokerKey(**generate_pair().model_dump()))
        write_allow_list(tmp_path, AllowList())
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"us-0.key": 0o600, "broker.key": 0o600, "allowed.toml": 0o644}


def test_the_longest_allow_list_there_may_be_can_be_read(tmp_path: Path) -> None:
    pair = generate_pair().public
    head, tail = pair[:1], pair[5:]
    digits = string.ascii_lowercase
    publics = [f"{head}{a}{b}{c}{d}{tail}" for a in "01" for b in "01234" for c in digits for d in digits]
    entries = [
        AllowedKey(name=f"{number:064d}", role="operator", public=public, made_unix=2**40)
        for number, public in enumerate(publics[:ALLOWED_MAX])
    ]
    known = AllowList(keys=tuple(entries))
    write_allow_list(tmp_path, known)
    assert read_allow_list(tmp_path) == known
    with pytest.raises(ConfigError, match="4096"):
        known.with_key(allowed("one-more"))


def test_a_secret_is_never_shown(key_file: Path) -> None:
    key = read_client_key(key_file)
    assert key.secret not in repr(key) + str(key)
    rewritten(key_file, lambda text: text.replace(key.secret, key.secret + "!"))
    with pytest.raises(ConfigError) as caught:
        read_client_key(key_file)
    assert key.secret not in str(caught.value)
    assert key.secret not in repr(caught.value.__cause__) + repr(caught.value.__context__)


# ------------------------------------------------------------------------------------------------------- unusable files


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "it is empty"),
    "blank": (lambda text: " \n\n", "it is empty"),
    "no TOML": (lambda text: text + "[[[", "not TOML"),
    "cut off": (lambda text: text[: len(text) // 2], "not TOML|is missing"),
    "a key too short": (lambda text: text.replace('public = "', 'public = "').replace('"\nsecret', 'x"\nsecret'), "40"),
    "an unknown role": (lambda text: text.replace('"worker"', '"king"'), "role"),
    "a name that is a path": (lambda text: text.replace('"us-0"', '"../us"'), "name"),
    "an unknown entry": (lambda text: text + "other = 1\n", "other"),
    "no key of the broker": (lambda text: "\n".join(ln for ln in text.splitlines() if "broker" not in ln), "broker"),
    "too long": (lambda text: text + "#" * 20_000, "longer than 16384 bytes"),
    "deeply nested": (lambda text: text + "x = " + "[" * 5000 + "]" * 5000, "not TOML|other|x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_key_file_is_one_sentence_that_names_it(key_file: Path, damage: str) -> None:
    change, text = DAMAGES[damage]
    with pytest.raises(ConfigError, match=text) as caught:
        read_client_key(rewritten(key_file, change))
    assert str(key_file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("taken_for", ["us-0.key", "broker.key", "allowed.toml"])
@pytest.mark.parametrize("kind", ["us-0.key", "broker.key", "allowed.toml"])
def test_a_file_of_another_kind_is_called_what_it_is(tmp_path: Path, kind: str, taken_for: str) -> None:
    write_client_key(tmp_path / "us-0.key", make_client_key())
    write_broker_key(tmp_path, BrokerKey(**generate_pair().model_dump()))
    write_allow_list(tmp_path, AllowList(keys=(allowed("us-0"),)))
    readers: dict[str, Callable[[Path], object]] = {
        "us-0.key": lambda folder: read_client_key(folder / "us-0.key"),
        "broker.key": read_broker_key,
        "allowed.toml": read_allow_list,
    }
    words = {"us-0.key": "the key of a process", "broker.key": "the broker's own key", "allowed.toml": "an allow-list"}
    (tmp_path / taken_for).write_bytes((tmp_path / kind).read_bytes())
    (tmp_path / taken_for).chmod(0o600)
    if kind == taken_for:
        readers[taken_for](tmp_path)
        return
    with pytest.raises(ConfigError, match=f"it is {words[kind]}; put"):
        readers[taken_for](tmp_path)


@pytest.mark.parametrize("damage", ["", "[[[", "\x00"])
def test_no_cure_is_named_that_the_damage_itself_stops(tmp_path: Path, damage: str) -> None:
    """`isles keys` reads the list and the broker's key before it does anything."""
    for name, read in (("allowed.toml", read_allow_list), ("broker.key", read_broker_key)):
        (tmp_path / name).write_text(damage, encoding="utf-8")
        (tmp_path / name).chmod(0o600)
        with pytest.raises(ConfigError, match="put a copy of it back, or make all keys anew in an empty folder"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_allow_list_without_a_word_is_no_list_of_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "allowed.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="it is empty"):
        read_allow_list(tmp_path)


def test_what_a_killed_writer_left_stops_no_other_of_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container a process has the same id at every start."""

    class Killed(BaseException):
        """The end of a process, as its files see it."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", die)
        with pytest.raises(Killed):
            write_allow_list(tmp_path, AllowList())
    assert not (tmp_path / "allowed.toml").exists()
    write_allow_list(tmp_path, AllowList())
    assert read_allow_list(tmp_path) == AllowList()


def test_bytes_that_are_no_text_are_no_key_file(key_file: Path) -> None:
    key_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not TOML"):
        read_client_key(key_file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o610])
def test_a_secret_that_others_can_reach_is_refused_with_the_cure(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600"):
        read_client_key(key_file)


def test_a_missing_file_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key file at .*isles keys new"):
        read_client_key(tmp_path / "us-0.key")
    with pytest.raises(ConfigError, match="no allow-list at "):
        read_allow_list(tmp_path)
    with pytest.raises(ConfigError, match="no key file of the broker at "):
        read_broker_key(tmp_path)


def test_what_is_no_file_is_no_key_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    for path in (tmp_path, tmp_path / "pipe.key"):
        with pytest.raises(ConfigError, match="no plain file"):
            read_client_key(path)


def test_a_folder_that_cannot_be_written_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_client_key(tmp_path / "missing" / "us-0.key", make_client_key())
    (tmp_path / "us-0.key").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_client_key(tmp_path / "us-0.key", make_client_key())
    assert [path.name for path in tmp_path.iterdir()] == ["us-0.key"]


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_no_bytes_at_all_make_a_reader_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("keys")
    for name, read in (("allowed.toml", read_allow_list), ("broker.key", read_broker_key)):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
        try:
            read(folder)
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_a_libzmq_without_curve_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import zmq

    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConfigError, match="libzmq was built without CURVE"):
        generate_pair()


# ------------------------------------------------------------------------------------------------------------- keys


def test_every_key_that_libzmq_makes_is_one_and_its_value_fits() -> None:
    for _ in range(50):
        pair = generate_pair()
        assert is_key(pair.public)
        assert is_key(pair.secret)


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "#" * 40, " " * 40, "é" * 40, '"' * 40, "0" * 39 + "\n"])
def test_what_is_no_key_is_none(text: str) -> None:
    assert not is_key(text)


def test_z85_needs_no_escape_in_toml() -> None:
    assert tomllib.loads(f'x = "{keys.Z85_ALPHABET}"') == {"x": keys.Z85_ALPHABET}
    assert len(set(keys.Z85_ALPHABET)) == 85


@pytest.mark.parametrize("name", ["broker", "", "A", "a/b", "..", "-a", "a" * 65, "a\n"])
def test_a_name_that_could_mean_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        client_file(tmp_path, name)


# ---------------------------------------------------------------------------------------------------------- allow-list


def test_a_key_is_found_by_its_public_half_and_nothing_else() -> None:
    first, second = allowed("us-0"), allowed("us-1")
    known = AllowList(keys=(first,))
    assert known.find(first.public) == first
    assert [known.find(text) for text in (second.public, "", "us-0")] == [None, None, None]
    assert known.with_key(second).find(second.public) == second
    assert known.with_key(second).without(first).find(first.public) is None


def test_a_name_has_several_keys_the_oldest_first_but_one_role() -> None:
    first, second = allowed("us-0"), allowed("us-0").model_copy(update={"made_unix": 4})
    known = AllowList(keys=(second, first))
    assert known.of("us-0") == (first, second)
    with pytest.raises(ConfigError, match="us-0 has two roles, worker and outer"):
        known.with_key(allowed("us-0", "outer"))


def test_a_public_key_stands_in_it_once() -> None:
    key = allowed("us-0")
    with pytest.raises(ConfigError, match="twice"):
        AllowList(keys=(key,)).with_key(key.model_copy(update={"name": "us-1"}))


# ----------------------------------------------------------------------------------------------------------- key watch


def test_a_rewritten_file_gives_its_new_key_once(key_file: Path) -> None:
    watch = KeyWatch(read_client_key(key_file))
    assert watch.newer() is None
    other = make_client_key()
    write_client_key(key_file, other)
    newer = watch.newer()
    assert newer is not None
    assert newer.model_dump() == other.model_dump()
    assert watch.newer() is None


def test_a_file_that_becomes_unusable_changes_nothing_until_it_is_usable_again(key_file: Path) -> None:
    watch = KeyWatch(read_client_key(key_file))
    key_file.chmod(0o644)
    rewritten(key_file, lambda text: text + "# longer\n")
    assert watch.newer() is None
    key_file.unlink()
    assert watch.newer() is None
    other = make_client_key()
    write_client_key(key_file, other)
    newer = watch.newer()
    assert newer is not None
    assert newer.model_dump() == other.model_dump()


def test_a_key_that_came_from_no_file_stays(tmp_path: Path) -> None:
    assert KeyWatch(make_client_key()).newer() is None
