"""Many synthetic learners in one thread: each has the real protocol core, all share one ZeroMQ context.

What a learner costs the broker is complete: three connections, a session, a heartbeat, every hint. What it costs this
process is kept small, since the broker is what is measured: the hints of all but the first member are received and
dropped unread.
"""

from __future__ import annotations

import resource
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import zmq

from isles.proto.client import Answered, Hinted, Welcomed
from isles.proto.clock import SystemClock
from isles.proto.connection import Connection, News, raise_if_refused
from isles.proto.messages import Channel, Hello, Message, Progress
from isles.proto.transport.address import Address
from isles.proto.transport.interface import Arrival, Bytes

TICK_SECONDS: Final = 0.25
"""Between two looks at what each member has to repeat."""
BEAT_SECONDS: Final = 1.0
"""Between two PROGRESS messages of a member, as the broker asks of learners by default."""
COPY_BELOW_BYTES: Final = 65_536
FILES_PER_MEMBER: Final = 16
"""Three sockets, each with its connection and what libzmq has besides."""


class MemberTransport:
    """One member's three sockets in a shared context; the crowd receives for it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: Address) -> None:
        self.sockets: dict[Channel, zmq.Socket[bytes]] = {}
        self.denial: str | None = None
        self.inbox: deque[Arrival] = deque()
        kinds = ((Channel.CONTROL, zmq.DEALER, address.control), (Channel.BULK, zmq.DEALER, address.bulk))
        for channel, kind, endpoint in (*kinds, (Channel.EVENTS, zmq.SUB, address.events)):
            socket = self.sockets[channel] = context.socket(kind)
            socket.linger = 0
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            else:
                socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.connect(endpoint)

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        frames: list[Bytes] = [header] if payload is None else [header, payload]
        try:
            self.sockets[channel].send_multipart(frames, zmq.DONTWAIT, copy=len(frames[-1]) < COPY_BELOW_BYTES)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        arrivals = list(self.inbox)
        self.inbox.clear()
        return arrivals

    def wake(self) -> None:
        """Nobody waits in `poll`."""

    def close(self) -> None:
        for socket in self.sockets.values():
            socket.close(linger=0)


@dataclass
class Member:
    """One synthetic learner."""

    name: str
    incarnation: str
    connection: Connection
    transport: MemberTransport
    beat_at: float
    steps: int = 0
    tokens: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    """Fragment -> versions that hold something of this member, as it knows."""


class Crowd:
    """All members; `turn` is their common life. Waits are bounded by whoever calls it."""

    def __init__(self, address: str, num_members: int) -> None:
        _permit_files(num_members)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * num_members + 64)
        self._poller = zmq.Poller()
        self._owners: dict[zmq.Socket[bytes], tuple[Member, Channel]] = {}
        self.clock = SystemClock()
        self.address = address
        self.members = [self._make(number, num_members) for number in range(num_members)]
        self._tick_at = self.clock.now()

    def _make(self, number: int, num_members: int) -> Member:
        transport = MemberTransport(self._context, Address.parse(self.address))
        hello = Hello(role="worker", id=f"synthetic-{number:03}", incarnation=secrets.token_hex(8), region="synthetic")
        connection = Connection(hello, transport, self.clock)
        beat_at = self.clock.now() + BEAT_SECONDS * number / num_members
        member = Member(hello.id, hello.incarnation, connection, transport, beat_at)
        for channel, socket in transport.sockets.items():
            self._owners[socket] = (member, channel)
            self._poller.register(socket, zmq.POLLIN)
        return member

    def join(self, timeout_seconds: float) -> None:
        """Brings all members into the run. Ends the process with a sentence if that takes too long."""
        for member in self.members:
            member.connection.start()
        waiting = {member.name for member in self.members}
        for member, news in self.turns(timeout_seconds, lambda: not waiting, "to be let in by the broker"):
            if isinstance(news, Welcomed):
                waiting.discard(member.name)

    def turns(self, timeout_seconds: float, is_done: Callable[[], bool], what: str) -> Iterator[tuple[Member, News]]:
        """All news until `is_done`. Ends the process with a sentence after `timeout_seconds`."""
        deadline = self.clock.now() + timeout_seconds
        while not is_done():
            if self.clock.now() >= deadline:
                raise SystemExit(f"the synthetic learners waited {timeout_seconds:g} s {what}: see the broker's log")
            yield from self.turn(TICK_SECONDS)

    def turn(self, timeout_seconds: float) -> Iterator[tuple[Member, News]]:
        """What came for anybody, waiting at most so long for the first; heartbeats and repetitions on the way."""
        woken: dict[str, Member] = {}
        for socket, _ in self._poller.poll(max(0, round(1000 * min(timeout_seconds, TICK_SECONDS)))):
            member, channel = self._owners[socket]
            if self._receive(member, channel, socket):
                woken[member.name] = member
        now = self.clock.now()
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            woken = {member.name: member for member in self.members}
        for member in woken.values():
            self._beat(member, now)
            for news in member.connection.poll(0.0):
                raise_if_refused(news, self.address)
                yield member, news

    def _receive(self, member: Member, channel: Channel, socket: zmq.Socket[bytes]) -> bool:
        """Takes what waits on one socket; whether its owner has something to read."""
        is_read = channel is not Channel.EVENTS or member is self.members[0]
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
            if is_read:
                payload = frames[1].buffer if len(frames) == 2 else None
                member.transport.inbox.append(Arrival(channel, b"", frames[0].buffer, payload))
        return is_read

    @staticmethod
    def _beat(member: Member, now: float) -> None:
        client = member.connection.client
        if now >= member.beat_at and client.session:
            member.beat_at = now + BEAT_SECONDS
            client.forget(lambda ask: isinstance(ask, Progress))
            member.connection.ask(Progress(steps=member.steps, tokens=member.tokens, step_seconds=0.1))

    def ask(self, member: Member, message: Message, timeout_seconds: float, payload: bytes | None = None) -> Message:
        """Asks for one member and waits for the answer; other news is dropped."""
        answers: list[Message] = []
        member.connection.ask(message, payload)
        for _, news in self.turns(timeout_seconds, lambda: bool(answers), f"for an answer to {type(message).__name__}"):
            if isinstance(news, Answered) and news.ask is message:
                answers.append(news.reply)
        return answers[0]

    def close(self) -> None:
        for member in self.members:
            member.connection.close()
        self._context.term()


def hinted_version(news: News) -> tuple[int, int] | None:
    """Fragment and version that a hint announces as the head."""
    if isinstance(news, Hinted) and news.hint.kind == "version":
        return news.hint.fragment, news.hint.version
    return None


def expect(reply: object, kind: type) -> None:
    """Ends the process with the broker's own sentence if the reply is of another kind."""
    if not isinstance(reply, kind):
        raise SystemExit(f"the broker answered {getattr(reply, 'text', None) or reply!r:.300}, not {kind.__name__}")


def _permit_files(num_members: int) -> None:
    """Each socket takes file descriptors, more for a large crowd than a process has by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_PER_MEMBER * num_members + 256
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise SystemExit(
            f"{num_members} learners take {wanted} open files, this machine permits {hard}: raise ulimit -n"
        )
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
