"""What is left of the training speed when learners are far apart, by isles and by two others on the same links?

    .venv/bin/python -P benchmarks/wan/run.py [--learners-each 2 4] [--seed 1] [--short]

Every learner is at a site of its own, with a link of one rate to all others and one round trip between any two. Broker
and outer are at the first learner's site, so its link carries what all others send and receive; everything of isles has
keys. The figure is items per second of all learners together, as a share of learners that do not synchronise at all.

    data-parallel   gloo all-reduce of the gradients in every step; starting it before the backward pass is over could
                    at most save the length of one pass
    diloco          gloo all-reduce of the deltas in every H-th step, which everybody waits for
    isles           the product, with its default settings

Ends with 0 if isles keeps 0.95 on the slowest links, where data-parallel keeps less than 0.1, else 1; --short only
shows that everything works. Needs Linux and root: `benchmarks/wan/links.py` says what for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `benchmarks`: nothing of it is installed

from benchmarks.measure.host import announce
from benchmarks.wan.links import Shape, Sites, address, fault, route
from isles.ops.children import child_environment, isles_command
from isles.ops.key_folder import KeyFolder
from isles.proto.keys import KeyRole

SHARE_MIN: Final = 0.95
DATA_PARALLEL_SHARE_MAX: Final = 0.1
METHODS: Final = ("data-parallel", "diloco", "isles")
RATES: Final = (1000.0, 100.0, 20.0)
ROUND_TRIPS: Final = (20.0, 80.0)
"""Mbit/s and milliseconds."""
PARAMETERS_PER_LAYER: Final = 512 * 512 + 512
WINDOW_SECONDS: Final = 12.0
"""About how long a window of the method that waits most is; it has at least STEPS_MIN steps."""
STEPS_MIN: Final = 6
ANSWER_SECONDS: Final = 600.0
START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 20.0


@dataclass(frozen=True)
class Window:
    """What one method did on one kind of link."""

    items_per_second: float
    versions: float
    """Applied by a learner, mean."""
    late_share: float
    """Of the steps whose computation took longer than the pace."""
    megabytes: float
    """That crossed the links, warm-up included."""
    num_lost: int
    cores_busy: float
    """Of the whole machine, by whoever."""


class Crew:
    """The processes of all learners; `with` starts and ends them."""

    def __init__(self, arguments: argparse.Namespace, sites: Sites, method: str, scratch: Path, broker: str) -> None:
        self._arguments, self._sites, self._method = arguments, sites, method
        self._scratch, self._broker = scratch, broker
        self._learners: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            for site in range(len(self._sites.namespaces)):
                self._learners.append(self._start(site))
            for learner in self._learners:
                _answer(learner)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def measure(self, num_steps: int, num_warm_up: int) -> list[dict[str, Any]]:
        """All at once; what each says."""
        for learner in self._learners:
            assert learner.stdin is not None
            learner.stdin.write(f"measure {num_steps} {num_warm_up}\n")
            learner.stdin.flush()
        return [_answer(learner) for learner in self._learners]

    def _start(self, site: int) -> subprocess.Popen[str]:
        given = self._arguments
        program = [sys.executable, "-P", __file__, "--role", "learner", "--method", self._method, "--site", str(site)]
        program += ["--learners", str(len(self._sites.namespaces)), "--pace-seconds", str(given.pace_seconds)]
        program += ["--layers", str(given.layers), "--seed", str(given.seed), "--broker", self._broker]
        program += [
            "--interval-steps",
            str(given.interval_steps),
            "--key",
            str(self._scratch / "keys" / f"l{site}.key"),
        ]
        return subprocess.Popen(
            self._sites.command(site, program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(os.cpu_count() or 1) | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )

    def _close(self) -> None:
        for learner in self._learners:
            if learner.stdin is not None:
                learner.stdin.close()
        for learner in self._learners:
            end(learner)


def _answer(learner: subprocess.Popen[str]) -> dict[str, Any]:
    assert learner.stdout is not None
    line = learner.stdout.readline()
    if not line:
        raise SystemExit("a learner's process ended: its own message stands above")
    found: dict[str, Any] = json.loads(line)
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Waits for a process that was told to end, and ends it if that takes too long."""
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def broker_and_outer(sites: Sites, scratch: Path) -> Iterator[str]:
    """Both at the first site, with keys for everybody; gives the broker's address."""
    keys = KeyFolder(scratch / "keys")
    roles: dict[str, KeyRole] = {f"l{site}": "worker" for site in range(len(sites.namespaces))}
    for name, role in {**roles, "outer": "outer"}.items():
        keys.add(name, role, int(time.time()))
    where = f"tcp://{address(0)}"
    children: list[subprocess.Popen[Any]] = []
    with (scratch / "services.err").open("ab") as errors:
        try:
            store = ["--store", str(scratch / "store"), "--keys", str(keys.path), "--bind", where, "--port", "7700"]
            children.append(_service(sites, "broker", store, errors))
            _wait_for(scratch / "store" / "address", children[0], scratch)
            broker = f"{where}:7700"
            own = ["--broker", broker, "--key", str(keys.path / "outer.key"), "--scratch-dir", str(scratch)]
            children.append(_service(sites, "outer", own, errors))
            yield broker
            if any(child.poll() is not None for child in children):
                raise SystemExit(f"broker or outer ended early: {(scratch / 'services.err').read_text()[-2000:]}")
        finally:
            for child in reversed(children):
                child.terminate()
                end(child)


def _service(sites: Sites, role: str, own: list[str], errors: IO[bytes]) -> subprocess.Popen[Any]:
    command = sites.command(0, isles_command(role, *own, "--log-level", "warning"))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=child_environment(2))


def _wait_for(path: Path, broker: subprocess.Popen[Any], scratch: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        if broker.poll() is not None or time.monotonic() >= deadline:
            raise SystemExit(f"the broker did not start: {(scratch / 'services.err').read_text()[-2000:]}")
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------ the experiment


def steps_of(method: str, shape: Shape, arguments: argparse.Namespace, num_learners: int) -> int:
    """Inner steps of a window: whole intervals for those that have some."""
    whole: int = arguments.intervals * arguments.interval_steps
    if method != "data-parallel":
        return whole
    bits = 32 * PARAMETERS_PER_LAYER * arguments.layers * 2 * (num_learners - 1) / num_learners
    wait = bits / shape.bits_per_second if shape.bits_per_second else 0.0
    expected: float = arguments.pace_seconds + wait + 2 * num_learners * shape.round_trip_seconds
    return max(STEPS_MIN, min(whole, round(WINDOW_SECONDS / expected)))


def measure(crew: Crew, sites: Sites, shape: Shape, num_steps: int, num_warm_up: int) -> Window:
    """One method on one kind of link."""
    sites.shape(shape)
    busy, begun = _busy_seconds(), time.monotonic()
    found = crew.measure(num_steps, num_warm_up)
    busy, seconds = _busy_seconds() - busy, time.monotonic() - begun
    num_bytes, num_lost = sites.shape(shape)
    return Window(
        items_per_second=sum(one["items"] for one in found) / max(one["seconds"] for one in found),
        versions=sum(one["versions"] for one in found) / len(found),
        late_share=max(one["late_share"] for one in found),
        megabytes=num_bytes / 1e6,
        num_lost=num_lost,
        cores_busy=busy / seconds,
    )


def _busy_seconds() -> float:
    """Processor time that this machine has spent on anything since it started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", maxsplit=1)[0].split()[1:]
    user, nice, system, _, _, irq, soft_irq = map(int, fields[:7])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def compare(arguments: argparse.Namespace, num_learners: int, shapes: list[Shape], scratch: Path) -> bool:
    """The table of so many learners; whether isles keeps what it should on the last of the shapes."""
    print(f"\n{num_learners} learners")
    print(
        f"{'link':<20}{'method':<15}{'items/s':>9}{'share':>8}{'versions':>10}{'MB':>9}{'lost':>6}{'late':>7}{'cores':>7}"
    )
    warm_up = arguments.interval_steps // 2
    shares: dict[str, float] = {}
    with Sites(num_learners) as sites:
        with Crew(arguments, sites, "alone", scratch, "") as crew:
            alone = measure(crew, sites, Shape(), steps_of("alone", Shape(), arguments, num_learners), warm_up)
        _print_row("none", "alone", alone, 1.0)
        for method in METHODS:
            with _crew(arguments, sites, method, scratch) as crew:
                for shape in [Shape(), *shapes]:
                    num_steps = steps_of(method, shape, arguments, num_learners)
                    window = measure(crew, sites, shape, num_steps, warm_up if method != "data-parallel" else 1)
                    shares[method] = window.items_per_second / alone.items_per_second
                    _print_row(str(shape), method, window, shares[method])
    is_reached = shares["isles"] >= SHARE_MIN and shares["data-parallel"] < DATA_PARALLEL_SHARE_MAX
    print(
        f"{shapes[-1]}: isles keeps {shares['isles']:.3f} (bar: {SHARE_MIN}), diloco {shares['diloco']:.3f}, "
        f"data-parallel {shares['data-parallel']:.3f} (to be under {DATA_PARALLEL_SHARE_MAX})",
        flush=True,
    )
    return is_reached


@contextmanager
def _crew(arguments: argparse.Namespace, sites: Sites, method: str, scratch: Path) -> Iterator[Crew]:
    if method != "isles":
        with Crew(arguments, sites, method, scratch, "") as crew:
            yield crew
        return
    own = scratch / f"isles-{len(sites.namespaces)}"
    own.mkdir()
    with broker_and_outer(sites, own) as broker, Crew(arguments, sites, method, own, broker) as crew:
        yield crew


def _print_row(link: str, method: str, window: Window, share: float) -> None:
    print(
        f"{link:<20}{method:<15}{window.items_per_second:>9.1f}{share:>8.3f}{window.versions:>10.1f}"
        f"{window.megabytes:>9.1f}{window.num_lost:>6}{window.late_share:>7.1%}{window.cores_busy:>7.2f}",
        flush=True,
    )


# ----------------------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters and the data")
    parser.add_argument("--learners-each", type=int, nargs="+", default=[2, 4], help="learners of each table")
    parser.add_argument("--layers", type=int, default=4, help="square layers of the model, 262,656 parameters each")
    parser.add_argument("--pace-seconds", type=float, default=0.1, help="length of an inner step")
    parser.add_argument("--interval-steps", type=int, default=48, help="H, of diloco and isles")
    parser.add_argument("--intervals", type=int, default=2, help="intervals that are measured on each link")
    parser.add_argument("--short", action="store_true", help="two learners, few steps: only shows that this works")
    parser.add_argument("--role", choices=("link", "learner"), help=argparse.SUPPRESS)
    parser.add_argument("--namespaces", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--method", default="alone", help=argparse.SUPPRESS)
    parser.add_argument("--site", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--learners", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--key", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short and not arguments.role:
        arguments.learners_each, arguments.interval_steps, arguments.intervals = [2], 8, 2
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.role == "link":
        route(arguments.namespaces)
        return 0
    if arguments.role == "learner":
        from benchmarks.wan.learner import serve

        serve(arguments)
        return 0
    announce()
    if reason := fault():
        print(f"nothing was measured: {reason}")
        return 0 if arguments.short else 2
    shapes = [Shape(1e6 * rate, round_trip / 1000) for rate in RATES for round_trip in ROUND_TRIPS]
    shapes = shapes[-1:] if arguments.short else shapes
    size = PARAMETERS_PER_LAYER * arguments.layers
    print(
        f"{size} parameters, inner steps of {arguments.pace_seconds:g} s, H = {arguments.interval_steps}, seed "
        f"{arguments.seed}"
    )
    is_reached = True
    with tempfile.TemporaryDirectory(prefix="isles-wan-") as scratch:
        for num_learners in arguments.learners_each:
            is_reached &= compare(arguments, num_learners, shapes, Path(scratch))
    return 0 if is_reached or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())
