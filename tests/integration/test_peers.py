"""The benchmark beside the peers: what is read off sockets and records, and that its own half runs without any peer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "peers" / "run.py"
PLAN = {"name": "", "index": 0, "width": 8, "record": "", "interval": 2, "num_steps": 7}

TALKER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as own:
    own.sendall(b"x" * 100_000)
    own.recv(1)
    own.sendall(b"y")
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def talker() -> Iterator[int]:
    """A child that has sent 100,001 bytes to this process and received one; its process id."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", TALKER, str(server.getsockname()[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                assert len(stream.read(100_000)) == 100_000
                connection.sendall(b"z")
                assert stream.read(1) == b"y"
                yield child.pid
            assert child.stdin is not None
            child.stdin.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for others")
def test_bytes_on_the_sockets_of_a_process_are_counted(talker: int) -> None:
    from benchmarks.peers.sockets import SocketBytes

    counted = SocketBytes(talker)
    assert (counted.sent, counted.received) == (100_001, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection for others")
def test_what_the_processes_of_one_learner_say_to_each_other_does_not_count(talker: int) -> None:
    from benchmarks.peers.sockets import SocketBytes, tree

    assert talker in tree(os.getpid())
    counted = SocketBytes(os.getpid())
    assert (counted.sent, counted.received) == (0, 0)


def rows(*walls: float, **extra: list[Any]) -> list[Any]:
    from benchmarks.peers.processes import Row

    return [
        Row(number, float(number), wall, 0.0, 0.0, 0, 0, {name: values[number - 1] for name, values in extra.items()})
        for number, wall in enumerate(walls, 1)
    ]


def test_an_interval_holds_what_is_done_between_its_last_inner_step_and_the_next() -> None:
    from benchmarks.peers.plan import Plan
    from benchmarks.peers.systems import intervals

    found = intervals(rows(1, 2, 3, 4, 5, 6, 7, 8), Plan(**PLAN), 1)
    assert [[row.step for row in one] for one in found] == [[4, 5], [6, 7]]


def test_of_two_that_wait_for_each_other_the_later_one_says_what_a_synchronisation_costs() -> None:
    from benchmarks.peers.cost import cost_of_peer
    from benchmarks.peers.plan import Plan

    early, late = rows(0, 0, 0, 9, 0, 1, 0), rows(0, 0, 0, 1, 0, 1, 0)
    assert cost_of_peer([early, late], Plan(**PLAN), 1).wall == 1.0


def test_what_isles_takes_is_divided_by_the_synchronisations_that_there_were() -> None:
    from benchmarks.peers.cost import cost_of_isles
    from benchmarks.peers.plan import Plan

    contributions = [0, 0, 0, 1, 1, 2, 4]  # of 4 fragments, in two intervals: half a synchronisation in each
    record = rows(0, 0, 0, 1, 1, 1, 1, contributions=contributions)
    assert cost_of_isles([record, record], Plan(**PLAN), 1).wall == 4.0


def test_lost_is_what_calls_take_beyond_what_they_took_before() -> None:
    from benchmarks.peers.failures import loss_of
    from benchmarks.peers.plan import Plan

    record = rows(0.1, 0.1, 0.1, 0.1, 0.1, 2.1, 0.1, discarded=[0, 0, 0, 0, 0, 1, 1])
    loss = loss_of(record, Plan(**PLAN), 4.5, "goes on")
    assert loss.seconds == pytest.approx(2.05)
    assert (loss.longest, loss.discarded) == (2.1, 1.0)


def test_of_torchft_an_interval_without_a_commit_is_discarded() -> None:
    from benchmarks.peers.failures import loss_of
    from benchmarks.peers.plan import Plan

    record = rows(*[0.0] * 8, commits=[0, 1, 1, 2, 2, 2, 2, 3])
    assert loss_of(record, Plan(**PLAN), 4.5, "goes on").discarded == 2.0


@pytest.mark.soak
def test_the_program_measures_isles_where_no_peer_is_installed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-P", str(PROGRAM), "--short"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("goes on, all is merged") == 2
    assert list(tmp_path.glob("isles-*")) == []
