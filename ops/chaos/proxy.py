"""A network that can be made bad: one link per worker, three ports each, between it and the broker.

    worker  ->  link (delay, rate, blackhole, refuse, reset)  ->  broker

Bytes are passed on unread. All links live in one thread of their own with an asyncio loop; other threads give orders
through `Network`. A link never loses or reorders bytes, as TCP would not either: what a blackhole holds back comes
when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

from isles.ops.chaos.campaign import CLEAR, LinkShape
from isles.proto.errors import UsageError
from isles.proto.transport.address import Address

PIECE_BYTES: Final = 64 << 10
"""Read at once."""
PACED_BYTES: Final = 4 << 10
"""Written at once where a rate is kept: small against what passes in a second, so that the pace is even."""
PIECES_MAX: Final = 64
"""Held of one direction of one connection, 4 MiB: as much as 100 Mbit/s take in a third of a second."""
CONNECT_SECONDS: Final = 5.0
"""For the broker to take a connection; it is on this machine."""
ORDER_SECONDS: Final = 10.0
"""For the loop to carry out an order; it has nothing else to do that takes long."""
ABORT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST."""

Direction = Literal["up", "down"]
"""To the broker, and from it."""

_T = TypeVar("_T")


class _Pipe:
    """One direction of one connection."""

    def __init__(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        self._link = link
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)

    async def run(self) -> None:
        """Until either end closes; what has come is delivered first."""
        receiver = asyncio.create_task(self._receive())
        try:
            await self._deliver()
        finally:
            receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await receiver

    async def _receive(self) -> None:
        clock = asyncio.get_running_loop().time
        piece = b"?"
        while piece:
            try:
                piece = await self._reader.read(PIECE_BYTES)
            except OSError:
                piece = b""
            await self._pieces.put((clock() + self._link.shape.delay_seconds, piece))

    async def _deliver(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, piece = await self._pieces.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not piece:
                return
            for start in range(0, len(piece), PACED_BYTES) if self._link.shape.bytes_per_second else (0,):
                await self._link.may_pass.wait()
                part = piece[start : start + PACED_BYTES] if self._link.shape.bytes_per_second else piece[start:]
                self._writer.write(part)
                self._link.num_bytes[self._direction] += len(part)
                await self._writer.drain()
                if not self._link.shape.bytes_per_second:
                    break
                await asyncio.sleep(len(part) / self._link.shape.bytes_per_second)


class Link:
    """What lies between one worker and the broker. Belongs to the loop's thread."""

    def __init__(self, host: str, upstream: Address) -> None:
        self._host = host
        self._upstream = upstream
        self._listeners: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self.shape = CLEAR
        self.num_bytes: Counter[Direction] = Counter()
        """That have passed since the start, those of the transport's own included."""
        self.may_pass = asyncio.Event()
        self.may_pass.set()

    async def listen(self) -> Address:
        """Binds three free ports; returns them."""
        ports = []
        upstream = self._upstream
        for port in (upstream.control_port, upstream.bulk_port, upstream.events_port):
            listener = await asyncio.start_server(self._handler(port), self._host, 0)
            self._listeners.append(listener)
            ports.append(int(listener.sockets[0].getsockname()[1]))
        return Address(self._host, *ports)

    def obey(self, shape: LinkShape) -> None:
        """Does this to all bytes from now on."""
        self.shape = shape
        if shape.is_blackhole:
            self.may_pass.clear()
        else:
            self.may_pass.set()
        if shape.is_refusing:
            self.reset()

    def reset(self) -> int:
        """Resets all connections; how many there were."""
        num_connections = len(self._connections)
        for task, writers in list(self._connections.items()):
            for writer in writers:
                _abort(writer)
            task.cancel()
        return num_connections

    async def close(self) -> None:
        """Ends it."""
        for listener in self._listeners:
            listener.close()
        tasks = list(self._connections)
        self.reset()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _handler(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections[task] = (writer,)
            try:
                await self._carry(task, port, reader, writer)
            except (OSError, TimeoutError):
                pass  # one of the ends is gone: both dial again when they are back
            except asyncio.CancelledError:
                pass  # reset: nobody waits for this task
            finally:
                for each in self._connections.pop(task, ()):
                    _abort(each)

        return handle

    async def _carry(
        self, task: asyncio.Task[None], port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.shape.is_refusing:
            return
        await self.may_pass.wait()
        opening = asyncio.open_connection(self._upstream.host.strip("[]"), port)
        far_reader, far_writer = await asyncio.wait_for(opening, CONNECT_SECONDS)
        self._connections[task] = (writer, far_writer)
        pipes = [_Pipe(self, reader, far_writer, "up"), _Pipe(self, far_reader, writer, "down")]
        tasks = [asyncio.create_task(pipe.run()) for pipe in pipes]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _abort(writer: asyncio.StreamWriter) -> None:
    peer = writer.get_extra_info("socket")
    if peer is not None:
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    writer.transport.abort()


class Network:
    """All links of a run, in a thread of their own. `with` starts and ends it; the methods are for any one thread."""

    def __init__(self, upstream: Address, workers: Sequence[str], *, host: str = "127.0.0.1") -> None:
        """Starts nothing. `upstream` is the broker; `host` is listened on."""
        self._upstream = upstream
        self._workers = tuple(workers)
        self._host = host
        self._links: dict[str, Link] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.addresses: dict[str, Address] = {}
        """Worker -> where it finds its link instead of the broker."""

    def start(self) -> None:
        """Listens. Raises UsageError if there are not enough free ports."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()
        try:
            self.addresses = self._run(self._listen())
        except OSError as error:
            self.close()
            raise UsageError(
                f"a link to the broker cannot listen on {self._host} ({error.strerror or error}): every worker takes "
                "three free ports; give the run fewer workers, or leave the network faults out of its plan"
            ) from error

    def shape(self, worker: str, shape: LinkShape) -> None:
        """Does this to a worker's link. Raises UsageError for a worker that has none."""
        self._run(self._apply(worker, lambda link: link.obey(shape)))

    def reset(self, worker: str) -> int:
        """Resets the connections of a worker's link; how many there were. Raises UsageError likewise."""
        num_connections: int = self._run(self._apply(worker, Link.reset))
        return num_connections

    def num_bytes(self, worker: str, direction: Direction) -> int:
        """How many bytes a worker's link has passed on. Raises UsageError likewise."""
        num_bytes: int = self._run(self._apply(worker, lambda link: link.num_bytes[direction]))
        return num_bytes

    def close(self) -> None:
        """Ends all links; idempotent."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(UsageError):
            self._run(self._close_links())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ORDER_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None

    def _run(self, doing: Any) -> Any:
        assert self._loop is not None, "the network was not started"
        try:
            return asyncio.run_coroutine_threadsafe(doing, self._loop).result(ORDER_SECONDS)
        except TimeoutError as error:
            raise UsageError(
                f"the links did not obey within {ORDER_SECONDS:g} s: this machine is too busy for faults of the network"
            ) from error

    async def _listen(self) -> dict[str, Address]:
        self._links = {worker: Link(self._host, self._upstream) for worker in self._workers}
        return {worker: await link.listen() for worker, link in self._links.items()}

    async def _apply(self, worker: str, order: Callable[[Link], _T]) -> _T:
        link = self._links.get(worker)
        if link is None:
            raise UsageError(f"{worker} reaches its broker without a link that could be disturbed")
        return order(link)

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links.values()))
