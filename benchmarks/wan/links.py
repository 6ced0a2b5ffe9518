"""Sites on one machine with slow links between them: a network namespace each, joined by one process.

    site a -> TUN -> uplink of a (rate, queue) -> half a round trip -> downlink of b (rate, queue) -> TUN -> site b

Everything between two sites goes this way, whoever sends it, so all that use sockets see the same links. What stays
within a site does not. Needs Linux, root, and the command `ip`.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

MTU_BYTES: Final = 9000
"""Of the emulated links: large, so that 1 Gbit/s are 14,000 packets a second, which this program can carry."""
QUEUE_BYTES: Final = 4 << 20
"""Before each link; a packet that finds it full is lost. Large, so that who sends much at once loses little."""
PACKETS_MAX: Final = 64
"""Read from one site before what is due is delivered."""
IDLE_SECONDS: Final = 0.5
STOP_SECONDS: Final = 10.0
NETWORK: Final = "10.78.0"
DEVICE: Final = "link0"
"""Of every site, in its own namespace."""
TUN_DEVICE: Final = "/dev/net/tun"
_SET_INTERFACE: Final = 0x400454CA
_IS_TUN, _NO_PREFIX = 0x1, 0x1000
_MEGABIT: Final = 1e6


@dataclass(frozen=True)
class Shape:
    """What every link of a run is like; zeros stand for no limit and no delay."""

    bits_per_second: float = 0.0
    round_trip_seconds: float = 0.0

    def __str__(self) -> str:
        if not self.bits_per_second:
            return "unlimited"
        return f"{self.bits_per_second / _MEGABIT:.0f} Mbit/s, {1000 * self.round_trip_seconds:.0f} ms"


def fault() -> str:
    """Why this machine cannot have such links, as half a sentence; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not os.access(TUN_DEVICE, os.R_OK | os.W_OK):
        return f"{TUN_DEVICE} cannot be opened"
    return "" if shutil.which("ip") else "there is no command `ip` (package iproute2)"


def address(site: int) -> str:
    """The IPv4 address of a site."""
    return f"{NETWORK}.{site + 1}"


# -------------------------------------------------------------------------------------------------- the other process


@dataclass
class Router:
    """Carries packets between the sites. Belongs to one thread."""

    descriptors: list[int]
    """Of each site's TUN device."""
    shape: Shape = field(default_factory=Shape)
    num_bytes: int = 0
    """Delivered since `report`."""
    num_lost: int = 0
    _up_free: list[float] = field(default_factory=list)
    _down_free: list[float] = field(default_factory=list)
    """When each link has sent what it has taken in."""
    _events: list[tuple[float, int, int, bytes, bool]] = field(default_factory=list)
    """(when, number, site, packet, whether it has passed the downlink of that site), the next one first."""
    _num_events: int = 0

    def __post_init__(self) -> None:
        self._up_free, self._down_free = ([0.0] * len(self.descriptors) for _ in range(2))

    def run(self, orders: int) -> None:
        """Works until the descriptor of `orders` is closed by its writer; each line of it is a shape."""
        text = b""
        while True:
            wait = max(0.0, self._events[0][0] - time.monotonic()) if self._events else IDLE_SECONDS
            ready, _, _ = select.select([orders, *self.descriptors], [], [], min(wait, IDLE_SECONDS))
            for site, descriptor in enumerate(self.descriptors):
                if descriptor in ready:
                    self._take(site, descriptor)
            self._deliver(time.monotonic())
            if orders in ready:
                piece = os.read(orders, 4096)
                if not piece:
                    return
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    self._obey(line.decode())

    def _obey(self, line: str) -> None:
        """Answers with what has passed since the last order."""
        bits, seconds = map(float, line.split())
        print(self.num_bytes, self.num_lost, flush=True)
        self.shape, self.num_bytes, self.num_lost = Shape(bits, seconds), 0, 0

    def _take(self, site: int, descriptor: int) -> None:
        for _ in range(PACKETS_MAX):
            try:
                packet = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            target = packet[19] - 1  # the last byte of an IPv4 destination
            if packet[0] >> 4 == 4 and 0 <= target < len(self.descriptors):
                sent_at = self._pass(self._up_free, site, time.monotonic(), packet)
                if sent_at is not None:
                    self._at(sent_at + self.shape.round_trip_seconds / 2, target, packet, is_down=False)

    def _deliver(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            when, _, site, packet, is_down = heapq.heappop(self._events)
            if not is_down:
                arrived_at = self._pass(self._down_free, site, when, packet)
                if arrived_at is not None:
                    self._at(arrived_at, site, packet, is_down=True)
                continue
            try:
                os.write(self.descriptors[site], packet)
                self.num_bytes += len(packet)
            except BlockingIOError:
                self.num_lost += 1

    def _at(self, when: float, site: int, packet: bytes, *, is_down: bool) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, site, packet, is_down))

    def _pass(self, free: list[float], site: int, now: float, packet: bytes) -> float | None:
        """When a link has sent a packet that came to it now; None if there was no room for it."""
        rate = self.shape.bits_per_second
        if not rate:
            return now
        begin = max(now, free[site])
        if (begin - now) * rate > 8 * QUEUE_BYTES:
            self.num_lost += 1
            return None
        free[site] = begin + 8 * len(packet) / rate
        return free[site]


def _open_tun(name: str) -> int:
    descriptor = os.open(TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _IS_TUN | _NO_PREFIX))
    return descriptor


def route(namespaces: list[str]) -> None:
    """The whole program of the joining process: makes the devices, moves each to its site, and carries packets."""
    descriptors = []
    for site, namespace in enumerate(namespaces):
        name = f"wan{os.getpid()}-{site}"
        descriptors.append(_open_tun(name))
        _ip("link", "set", "dev", name, "netns", namespace)
        _ip("-n", namespace, "link", "set", "dev", name, "name", DEVICE)
        _ip("-n", namespace, "addr", "add", f"{address(site)}/24", "dev", DEVICE)
        _ip("-n", namespace, "link", "set", "dev", DEVICE, "mtu", str(MTU_BYTES), "txqueuelen", "10000", "up")
    print("ready", flush=True)
    Router(descriptors).run(sys.stdin.fileno())


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"`ip {' '.join(arguments)}` failed: {result.stderr.strip()}")


# ---------------------------------------------------------------------------------------------------- this process


class Sites:
    """Some sites; `with` makes and removes them."""

    def __init__(self, num_sites: int) -> None:
        self.namespaces = [f"isles-wan-{os.getpid()}-{site}" for site in range(num_sites)]
        self._router: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            for namespace in self.namespaces:
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            program = str(Path(__file__).with_name("run.py"))
            self._router = subprocess.Popen(
                [sys.executable, "-P", program, "--role", "link", "--namespaces", *self.namespaces],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._answer("ready")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, site: int, arguments: list[str]) -> list[str]:
        """The same command at a site."""
        return ["ip", "netns", "exec", self.namespaces[site], *arguments]

    def shape(self, shape: Shape) -> tuple[int, int]:
        """Makes all links so; what passed since the last order, in bytes, and how many packets were lost."""
        assert self._router is not None
        assert self._router.stdin is not None
        self._router.stdin.write(f"{shape.bits_per_second} {shape.round_trip_seconds}\n")
        self._router.stdin.flush()
        num_bytes, num_lost = self._answer("").split()
        return int(num_bytes), int(num_lost)

    def _answer(self, wanted: str) -> str:
        assert self._router is not None
        assert self._router.stdout is not None
        line = self._router.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            raise SystemExit("the process that joins the sites ended: its own message stands above")
        return line

    def close(self) -> None:
        """Removes them; idempotent."""
        router, self._router = self._router, None
        if router is not None:
            if router.stdin is not None:
                router.stdin.close()
            try:
                router.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                router.kill()
                router.wait()
            if router.stdout is not None:
                router.stdout.close()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
