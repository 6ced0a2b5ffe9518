"""What does it cost that a broker keeps what it is sent, and that nobody else can read it?

    .venv/bin/python -P benchmarks/broker.py [--only files|pipes|memory] [--seed 1] [--short]

files    a contribution without keys, from OFFER to ACCEPTED, against a file of the same bytes that is written and
         synced on the same disk
pipes    a contribution with keys, against two pyzmq sockets in two processes with CURVE that move the same chunks and
         do nothing else
memory   the largest resident memory of the broker above that before the first upload, by how many are open at once

The broker is a process as an operator starts it, with an empty store; the figures of the first two are wall-clock times
of neighbours in time, and more than 1 is faster. Ends with 0 if all bars are reached, else 1; --short only shows that
everything works.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.curve_pipe import CurvePipe
from benchmarks.measure.host import announce
from benchmarks.measure.ratios import Ratio, speed_ratio
from benchmarks.scale.processes import read_cost, tail, wait_for_address
from benchmarks.scale.synthetic import make_manifest
from isles.ops.children import ChildProcess, child_environment
from isles.ops.key_folder import KeyFolder
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    CHUNK_BYTES,
    Accepted,
    BlobRef,
    Contribution,
    Hello,
    Init,
    Initialised,
    Message,
    Offer,
    Stored,
    Upload,
    VersionInfo,
)
from isles.proto.transport.dial import dial

MIB: Final = 1 << 20
SHARE_MIN: Final = 0.5
MEMORY_BYTES_BASE: Final = 64 * MIB
MEMORY_BYTES_PER_UPLOAD: Final = 8 * MIB
ASK_SECONDS: Final = 300.0
STOP_SECONDS: Final = 20.0
TAIL_BYTES: Final = 8
"""By which the payloads of one learner differ."""
OPEN_EACH: Final[dict[int, tuple[int, ...]]] = {16: (1, 8, 32), 256: (1, 4)}
"""MiB of a fragment -> uploads that are open at once."""


@dataclass(frozen=True)
class Served:
    """A broker that listens."""

    address: str
    keys: KeyFolder | None
    pid: int

    def key(self, name: str) -> Path | None:
        """The key file of a new client, if there are keys."""
        return None if self.keys is None else self.keys.add(name, "worker", int(time.time()))


@contextmanager
def broker(folder: Path, *, has_keys: bool) -> Iterator[Served]:
    """A broker with an empty store, and with keys or without."""
    folder.mkdir(parents=True)
    keys = KeyFolder(folder / "keys") if has_keys else None
    own = ["--store", str(folder / "store"), "--port", "0", "--log-level", "warning", "--exit-with-parent"]
    if keys is not None:
        keys.make(int(time.time()))
        own += ["--keys", str(keys.path)]
    child = ChildProcess(["broker", *own], output=folder / "broker.err", environment=child_environment(2))
    try:
        yield Served(wait_for_address(folder, child), keys, child.pid)
        if child.poll() is not None:
            raise SystemExit(f"the broker ended with {child.poll()}: {tail(folder, 'broker')}")
    finally:
        child.terminate()
        child.wait(STOP_SECONDS)
        child.close()


class Learner:
    """Hands in one contribution after the other, each to the next fragment; what is in it is no matter."""

    def __init__(self, served: Served, name: str, manifest: Manifest, payload: bytearray) -> None:
        """The last TAIL_BYTES of `payload` are this learner's to write on."""
        self._address = served.address
        self._name, self._incarnation = name, secrets.token_hex(8)
        self._manifest, self._payload = manifest, payload
        self._digest = hashlib.sha256(memoryview(payload)[:-TAIL_BYTES])
        self._num_sent = 0
        hello = Hello(role="worker", id=name, incarnation=self._incarnation)
        self._connection = Connection(hello, dial(served.address, served.key(name)), SystemClock())
        self._connection.wait_for_welcome(ASK_SECONDS, address=served.address)

    def start_run(self) -> None:
        """The record of a run with this manifest, whose first versions are some bytes."""
        text = b"version 0 of everything"
        blob = BlobRef(digest=hashlib.sha256(text).hexdigest(), size_bytes=len(text))
        self._expect(self._ask(Upload(blob=blob), text), Stored)
        versions = tuple(
            VersionInfo(fragment=one.fragment_id, version=0, parameters_sha256=blob.digest, parameters=blob)
            for one in self._manifest.fragments
        )
        record = RunRecord(
            run="broker",
            seed=0,
            sync=SyncSettings(num_fragments=len(versions), codec_up="fp32"),
            budget=Budget(rounds=1),
            manifest_digest=self._manifest.digest,
            manifest=self._manifest.to_text(),
        )
        self._expect(self._ask(Init(run_record=record, versions=versions)), Initialised)

    def contribute(self) -> None:
        """From OFFER to ACCEPTED."""
        self._payload[-TAIL_BYTES:] = secrets.token_bytes(TAIL_BYTES)
        digest = self._digest.copy()
        digest.update(self._payload[-TAIL_BYTES:])
        books = Contribution(
            id=ContributionId(self._name, self._num_sent, self._incarnation, self._num_sent),
            base_version=0,
            blob=BlobRef(digest=digest.hexdigest(), size_bytes=len(self._payload)),
            codec="fp32",
            tokens=1,
            steps=1,
            seconds=1.0,
            norms=(),
        )
        self._num_sent += 1
        self._expect(self._ask(Offer(contribution=books), self._payload), Accepted)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, message: Message, payload: bytes | bytearray | None = None) -> Message:
        view = None if payload is None else memoryview(payload)
        return self._connection.ask_and_wait(message, ASK_SECONDS, address=self._address, payload=view)

    @staticmethod
    def _expect(reply: Message, kind: type[Message]) -> None:
        if not isinstance(reply, kind):
            raise SystemExit(f"the broker answered {reply!r:.300}, not {kind.__name__}")


def manifest_of(payload_bytes: int, num_fragments: int) -> Manifest:
    """Fragments whose parameters take so many bytes each."""
    return make_manifest(payload_bytes // 4 * num_fragments, num_fragments)


def payload_of(size: int, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(size))


# ---------------------------------------------------------------------------------------------------- files and pipes


def write_file(path: Path, payload: bytearray) -> None:
    """A file that survives a power failure."""
    with path.open("wb", buffering=0) as file:
        view = memoryview(payload)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    path.unlink()


def compare(scratch: Path, arguments: argparse.Namespace, *, has_keys: bool) -> bool:
    """Contributions against files, or with keys against pipes; whether the bar is reached for every size."""
    other = "CURVE pipe" if has_keys else "synced file"
    print(f"\n{'with' if has_keys else 'without'} keys, against a {other}: {arguments.pairs} pairs")
    print(f"{'fragment':<12}{'broker MB/s':>13}{other + ' MB/s':>18}{'broker CPU s/GB':>17}  ratio (least-greatest)")
    reached = []
    for mebibytes in arguments.sizes:
        payload = payload_of(mebibytes * MIB, arguments.seed)
        with broker(scratch / f"{other.split()[1]}-{mebibytes}", has_keys=has_keys) as served:
            learner = Learner(served, "one", manifest_of(len(payload), arguments.pairs + 1), payload)
            learner.start_run()
            begun = read_cost(served.pid)
            if has_keys:
                with CurvePipe(CHUNK_BYTES) as pipe:
                    ratio = _ratio(learner, lambda: pipe.move(payload), arguments.pairs)  # noqa: B023
            else:
                path = scratch / "file"
                ratio = _ratio(learner, lambda: write_file(path, payload), arguments.pairs)  # noqa: B023
            ended = read_cost(served.pid)
            learner.close()
        assert begun is not None
        assert ended is not None
        size = len(payload) / 1e6
        cpu = (ended.cpu_seconds - begun.cpu_seconds) / (size / 1e3 * (arguments.pairs + 1))
        print(
            f"{f'{mebibytes} MiB':<12}{size / ratio.seconds:>13.0f}{size / ratio.reference_seconds:>18.0f}{cpu:>17.2f}"
            f"  {ratio}",
            flush=True,
        )
        reached.append(ratio.median >= SHARE_MIN)
    print(f"bar: {SHARE_MIN}; {'reached' if all(reached) else 'missed'}")
    return all(reached)


def _ratio(learner: Learner, reference: object, num_pairs: int) -> Ratio:
    assert callable(reference)
    return speed_ratio(learner.contribute, reference, num_pairs=num_pairs, clock=time.perf_counter)


# -------------------------------------------------------------------------------------------------------------- memory


def compare_memory(scratch: Path, arguments: argparse.Namespace) -> bool:
    """Uploads at once, each by a learner of its own; whether all stay under the bar."""
    print("\nmemory of the broker, in MiB")
    print(f"{'fragment':<12}{'keys':<6}{'open':>5}{'idle':>8}{'peak':>8}{'more':>8}{'bar':>8}")
    reached = []
    for mebibytes in arguments.sizes:
        for has_keys in (False, True):
            for num_open in arguments.open or OPEN_EACH[mebibytes]:
                folder = scratch / f"memory-{mebibytes}-{has_keys}-{num_open}"
                idle, peak = _measure_memory(folder, mebibytes * MIB, num_open, arguments.seed, has_keys=has_keys)
                bar = MEMORY_BYTES_BASE + MEMORY_BYTES_PER_UPLOAD * num_open
                numbers = "".join(f"{number / MIB:>8.0f}" for number in (idle, peak, peak - idle, bar))
                print(f"{f'{mebibytes} MiB':<12}{'yes' if has_keys else 'no':<6}{num_open:>5}{numbers}", flush=True)
                reached.append(peak - idle <= bar)
    print(f"bar: 64 MiB and 8 MiB for each open upload; {'reached' if all(reached) else 'missed'}")
    return all(reached)


def _measure_memory(folder: Path, size: int, num_open: int, seed: int, *, has_keys: bool) -> tuple[int, int]:
    """The broker's memory before the first upload, and its peak after all of them, in bytes."""
    manifest = manifest_of(size, 2)
    with broker(folder, has_keys=has_keys) as served:
        learners = [
            Learner(served, f"l{number}", manifest, payload_of(size, seed + number)) for number in range(num_open)
        ]
        learners[0].start_run()
        idle = read_cost(served.pid)
        threads = [threading.Thread(target=learner.contribute) for learner in learners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = read_cost(served.pid)
        for learner in learners:
            learner.close()
    assert idle is not None
    assert after is not None
    return idle.resident_bytes, after.peak_bytes


# ----------------------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the payloads")
    parser.add_argument("--only", choices=("files", "pipes", "memory"), help="one of the three tables")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 256], help="of a fragment's payload, in MiB")
    parser.add_argument("--pairs", type=int, default=7, help="times that each is done, in turns with the other")
    parser.add_argument("--open", type=int, nargs="+", default=[], help="memory: uploads at once")
    parser.add_argument("--scratch", type=Path, help="folder on the disk that is measured; needs 6 GB")
    parser.add_argument("--short", action="store_true", help="small payloads: only shows that this works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.sizes, arguments.pairs, arguments.open = [4], 2, [2]
    return arguments


def main() -> int:
    arguments = parse()
    announce()
    is_reached = True
    with tempfile.TemporaryDirectory(prefix="isles-broker-", dir=arguments.scratch) as scratch:
        if arguments.only in (None, "files"):
            is_reached &= compare(Path(scratch), arguments, has_keys=False)
        if arguments.only in (None, "pipes"):
            is_reached &= compare(Path(scratch), arguments, has_keys=True)
        if arguments.only in (None, "memory"):
            is_reached &= compare_memory(Path(scratch), arguments)
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
