"""Workers that share a key, each a process: they get an id each, whatever kills them while they are being given one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from isles.ops.settings import section_models
from isles.proto.config import Stated, resolve
from isles.proto.errors import RefusedError
from isles.proto.logs import SilentLogger
from isles.workers.claim import IDENTITY_NAME
from isles.workers.trainer import serve

if TYPE_CHECKING:
    from tests.integration.doors.conftest import House, Lines

NUM_WORKERS = 20
POINTS = (
    "before it has asked",
    "when it has asked",
    "when it is answered",
    "while it keeps the answer",
    "when it has kept the answer",
    "when it has confirmed the answer",
)
KILLED = -signal.SIGKILL


class Claimants:
    """Processes that claim an id each and hold it, see claimants.py."""

    def __init__(self, lines: Callable[[Any], Lines]) -> None:
        program = Path(__file__).with_name("claimants.py")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ISLES_")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self._said = lines(self._process.stdout)
        self._num_started = 0

    def start(self, house: House, folder: Path, point: str = "") -> int:
        """One more process; its id."""
        order = {"address": house.address, "key": str(house.key("service")), "folder": str(folder), "point": point}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._num_started += 1
        self._said.wait_for(lambda _: len(self._all("started")) >= self._num_started)
        return int(self._all("started")[self._num_started - 1]["pid"])

    def _all(self, what: str) -> list[dict[str, Any]]:
        return [said for said in self._said.all() if what in said]

    def claimed(self, pid: int) -> dict[str, Any]:
        """What a process has claimed."""
        found = self._said.wait_for(lambda said: said["pid"] == pid and bool({"id", "error"} & said.keys()))
        assert "error" not in found, found
        return found

    def claim(self, house: House, folder: Path) -> dict[str, Any]:
        return self.claimed(self.start(house, folder))

    def code(self, pid: int) -> int:
        """With which a process ended."""
        return int(self._said.wait_for(lambda said: said["pid"] == pid and "ended" in said)["ended"])

    def kill(self, *claimed: dict[str, Any]) -> None:
        for one in claimed:
            os.kill(one["pid"], signal.SIGKILL)
        for one in claimed:
            assert self.code(one["pid"]) == KILLED

    def close(self) -> None:
        ended = {said["pid"] for said in self._all("ended")}
        for said in self._all("started"):
            if said["pid"] not in ended:
                os.kill(said["pid"], signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._said.close()


@pytest.fixture(scope="module")
def claimants(lines_of: Callable[[Any], Lines]) -> Iterator[Claimants]:
    made = Claimants(lines_of)
    yield made
    made.close()


def identity(claimed: dict[str, Any]) -> tuple[str, str]:
    return claimed["id"], claimed["rejoin"]


def test_twenty_workers_started_at_once_get_an_id_each_and_find_theirs_again(
    build: Callable[..., House], claimants: Claimants, tmp_path: Path
) -> None:
    house, volume = build("house"), tmp_path / "volume"
    started = [claimants.start(house, volume) for _ in range(NUM_WORKERS)]
    first = [claimants.claimed(pid) for pid in started]
    assert {one["id"] for one in first} == {f"service-{number}" for number in range(1, NUM_WORKERS + 1)}
    assert len({one["rejoin"] for one in first}) == len({one["folder"] for one in first}) == NUM_WORKERS
    assert house.learners() == {one["id"] for one in first}, "none was given that nobody has"
    claimants.kill(*first)
    dead = [tmp_path / point for point in ("when it has asked", "while it keeps the answer")]
    for folder in dead:
        assert claimants.code(claimants.start(house, folder, folder.name)) == KILLED
    known = house.learners()
    house.end(signal.SIGKILL)
    house.start()
    late = [claimants.claim(house, folder) for folder in dead]
    assert house.learners() == {one["id"] for one in (*first, *late)} >= known, "no id is lost with the broker either"
    started = [claimants.start(house, volume) for _ in range(NUM_WORKERS)]
    again = [claimants.claimed(pid) for pid in started]
    assert {identity(one) for one in again} == {identity(one) for one in first}
    for one in again:
        house.enter("service", "worker", one["id"], rejoin=one["rejoin"])
    assert len(house.learners()) == NUM_WORKERS + len(dead)
    claimants.kill(*again, *late)


@pytest.mark.parametrize("point", POINTS)
def test_whenever_a_worker_is_killed_its_next_start_has_the_one_id_that_it_was_given(
    house: House, claimants: Claimants, tmp_path: Path, point: str
) -> None:
    before = house.learners()
    assert claimants.code(claimants.start(house, tmp_path / "one", point)) == KILLED
    again = claimants.claim(house, tmp_path / "one")
    assert house.learners() - before == {again["id"]}, "no id is lost"
    other = claimants.claim(house, tmp_path / "other")
    assert other["id"] not in {again["id"], *before}, "no two have one"
    for one in (again, other):
        house.enter("service", "worker", one["id"], rejoin=one["rejoin"])
    claimants.kill(again, other)


def test_whoever_lost_its_folder_is_a_new_learner(house: House, claimants: Claimants, tmp_path: Path) -> None:
    first = claimants.claim(house, tmp_path / "volume")
    claimants.kill(first)
    shutil.rmtree(tmp_path / "volume")
    before = house.learners()
    second = claimants.claim(house, tmp_path / "volume")
    assert second["id"] not in before
    assert second["rejoin"] != first["rejoin"]
    claimants.kill(second)


def spoil_token(claimed: dict[str, Any], token: str) -> None:
    path = Path(claimed["folder"]) / IDENTITY_NAME
    path.write_text(json.dumps({"id": claimed["id"], "rejoin": token}), encoding="utf-8")


def train(house: House, volume: Path, corpus: Path) -> None:
    """The life of `isles worker`, as far as the broker lets it in."""
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60, encoding="utf-8")
    values = {
        "worker.broker": house.address, "worker.key": str(house.key("service")), "worker.num_shards": "2",
        "worker.checkpoint_dir": str(volume), "sync.num_fragments": "1", "run.tokens": "1000", "task.layers": "1",
        "task.corpus": str(corpus), "task.width": "16", "task.heads": "1", "task.context": "16", "task.batch_size": "2",
    }  # fmt: skip
    config = resolve(section_models(), flags=[Stated(key, value, "the test") for key, value in values.items()])
    serve(config, logger=SilentLogger(), should_stop=threading.Event())


def test_with_a_token_that_is_damaged_a_worker_ends_with_one_sentence_and_is_nobody(
    house: House, claimants: Claimants, tmp_path: Path
) -> None:
    mine, others = claimants.claim(house, tmp_path / "mine"), claimants.claim(house, tmp_path / "others")
    claimants.kill(mine)
    for token in ("f0" * 16, others["rejoin"]):
        spoil_token(mine, token)
        with pytest.raises(RefusedError) as caught:
            train(house, tmp_path / "mine", tmp_path / token)
        text = str(caught.value)
        assert f"the id {mine['id']} was given to another worker with the key service" in text
        assert "rejoin token" in text
        assert "an empty checkpoint folder" in text
        assert "\n" not in text
    before = house.learners()
    shutil.rmtree(tmp_path / "mine")
    fresh = claimants.claim(house, tmp_path / "mine")
    assert fresh["id"] not in before
    claimants.kill(fresh, others)


def test_what_another_run_gave_opens_nothing_that_this_one_has_given_and_is_else_taken_along(
    house: House, build: Callable[..., House], claimants: Claimants, tmp_path: Path, denied: Callable[[Any], str]
) -> None:
    other = build("other", keys=house.keys)
    mine = claimants.claim(other, tmp_path / "mine")
    theirs = [claimants.claim(house, tmp_path / "theirs") for _ in range(2)][1]
    assert mine["id"] in house.learners()
    text = denied(house.knock("service", "worker", mine["id"], rejoin=mine["rejoin"]))
    assert f"the id {mine['id']} was given to another worker" in text
    other.enter("service", "worker", theirs["id"], rejoin=theirs["rejoin"])
    assert theirs["id"] not in {mine["id"], claimants.claim(other, tmp_path / "another")["id"]}
    denied(other.knock("service", "worker", theirs["id"], rejoin="f0" * 16))
