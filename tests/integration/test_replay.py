"""A run made under kills is recomputed from its tape bit by bit, and damage to the tape is found and named."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


def test_a_run_made_under_kills_is_recomputed_bit_by_bit_and_damage_is_named(small_run: Any) -> None:
    process = small_run.begin("--workers=us=2,eu=1", "--rounds=50", "--keep-tape")
    for n, victim in enumerate(("us-0", "outer", "broker"), 1):
        small_run.wait_for(process, lambda n=n: small_run.count("broker", "round.committed") >= 8 * n, f"round {8 * n}")
        os.kill(small_run.pid(victim), signal.SIGKILL)
    small_run.wait_for(process, lambda: small_run.count("broker", "broker.started") > 1, "the second broker")
    small_run.wait_for(process, lambda: small_run.count("broker", "round.committed") > 28, "another round")
    under_way = small_run.ask("replay", small_run.run_dir)
    assert under_way["is_bit_equal"]
    assert sum(one["num_versions"] for one in under_way["fragments"]) >= 20
    rounds = small_run.finish(process)["rounds_committed"]

    replayed = small_run.ask("replay", small_run.run_dir)
    assert replayed["is_bit_equal"]
    assert sum(one["num_versions"] for one in replayed["fragments"]) == rounds
    history = small_run.ask("history", small_run.run_dir)
    assert sum(len(one["versions"]) - 1 for one in history["fragments"]) == rounds
    assert all(one["is_on_tape"] for fragment in history["fragments"] for one in fragment["versions"])
    check_damage(small_run)


def check_damage(run: Any) -> None:
    index = run.store / "index.sqlite"
    info, ingredients = entry(index, fragment=0, version=3)
    payload = run.store / "blobs" / msgpack.unpackb(ingredients, strict_map_key=False)[0]["digest"]
    update = run.store / "blobs" / msgpack.unpackb(info, strict_map_key=False)["update"]["digest"]
    with flipped_byte(payload):
        found = unreadable(run)
        assert re.search(r"the payload of (us|eu)-\d's contribution \d+ cannot be read: .* damaged", found)
    with flipped_byte(update):
        assert "its update cannot be read" in unreadable(run)
    with changed_entry(index, "ingredients", ingredients, flipped_weight(ingredients)):
        assert "its recipe is not the one that was committed" in differing(run)
    with changed_entry(index, "info", info, b"\xc1" + info[1:]):
        result = run.isles("replay", run.run_dir)
        assert result.returncode == 6
        assert "version 3 of fragment 0 in the index" in result.stdout
    assert run.isles("replay", run.run_dir).returncode == 0


def unreadable(run: Any) -> str:
    """What `isles replay` says of fragment 0 where something on its tape is damaged."""
    return told(run, 6, "cannot be recomputed")


def differing(run: Any) -> str:
    """The same where something was changed."""
    return told(run, 1, "differs")


def told(run: Any, code: int, words: str) -> str:
    """What `isles replay` says of fragment 0; that it is version 3 and no other is checked here."""
    result = run.isles("replay", run.run_dir)
    assert result.returncode == code, result.stderr
    first, second = result.stdout.splitlines()
    assert f"fragment 0: versions 1..2 are bit-equal, version 3 {words}: " in first
    assert second.endswith("recomputed, bit-equal")
    return str(first)


def entry(index: Path, *, fragment: int, version: int) -> tuple[bytes, bytes]:
    with closing(sqlite3.connect(index)) as database:
        sql = "SELECT info, ingredients FROM versions WHERE fragment = ? AND version = ?"
        info, ingredients = database.execute(sql, (fragment, version)).fetchone()
    return info, ingredients


def flipped_weight(ingredients: bytes) -> bytes:
    """The packed list with one bit of a weight changed."""
    place = ingredients.index(b"weight") + len("weight") + 3
    return ingredients[:place] + bytes([ingredients[place] ^ 1]) + ingredients[place + 1 :]


@contextmanager
def flipped_byte(path: Path) -> Iterator[None]:
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    yield
    path.write_bytes(data)


@contextmanager
def changed_entry(index: Path, column: str, before: bytes, after: bytes) -> Iterator[None]:
    def put(value: bytes) -> None:
        with closing(sqlite3.connect(index)) as database, database:
            database.execute(f"UPDATE versions SET {column} = ? WHERE fragment = 0 AND version = 3", (value,))

    put(after)
    yield
    put(before)
