"""Damage is done to payloads only, and to no disk that somebody else needs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from isles.ops.chaos.damage import BALLAST_NAME, Ballast, corrupt_blob
from isles.proto.errors import UsageError

NAMES = ("a" * 64, "b" * 64)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in NAMES:
        (blobs / name).write_bytes(bytes(100))
    (blobs / "7.tmp").write_bytes(bytes(100))
    (tmp_path / "index.sqlite").write_bytes(bytes(100))
    return tmp_path


def test_one_bit_of_one_payload_is_flipped_and_told(store: Path) -> None:
    name, position = corrupt_blob(store, random.Random(1))
    expected = bytearray(100)
    expected[position] = 1
    for path in store.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (expected if path.name == name else bytes(100))


def test_payloads_that_are_spared_stay_whole(store: Path) -> None:
    assert {corrupt_blob(store, random.Random(seed), [NAMES[0]])[0] for seed in range(9)} == {NAMES[1]}
    with pytest.raises(UsageError, match="there is no payload"):
        corrupt_blob(store, random.Random(1), NAMES)


def test_an_empty_payload_cannot_be_damaged(store: Path) -> None:
    for name in NAMES:
        (store / "blobs" / name).write_bytes(b"")
    with pytest.raises(UsageError, match="was gone before it could be damaged"):
        corrupt_blob(store, random.Random(1))


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be listed"):
        corrupt_blob(tmp_path / "nothing", random.Random(1))


def test_the_machines_own_file_system_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    ballast = Ballast(tmp_path)
    with pytest.raises(UsageError, match="is not filled: it is the machine's own"):
        ballast.fill()
    assert not (tmp_path / BALLAST_NAME).exists()
    ballast.free()
