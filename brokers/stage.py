"""A whole broker in one place: the real core on a store in memory, no transport, no threads, a clock set by hand.

For tests and simulations. `Stage` performs at once what the core orders; a `Member` is a client that says one thing and
gets back what it was answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isles.brokers.limits import RoutingSettings
from isles.brokers.router import Router
from isles.brokers.store.blobs import MemoryBlobs
from isles.brokers.store.disk import perform
from isles.brokers.store.sqlite_index import IN_MEMORY, SqliteIndex
from isles.brokers.vocabulary import AllowListChanged, Event, Instruction, Log, MessageArrived, Publish, Send, Tick
from isles.proto.keys import AllowList
from isles.proto.messages import (
    BlobRef,
    Channel,
    Chunk,
    Credit,
    Fetch,
    Grant,
    Hello,
    Hint,
    Message,
    Proof,
    Role,
    Welcome,
)


def blob_of(data: bytes) -> BlobRef:
    """The name of some bytes."""
    return BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


@dataclass
class Stage:
    """One broker; `restart` is a crash of its process."""

    settings: RoutingSettings = field(default_factory=RoutingSettings)
    now: float = 0.0
    unix_at_zero: float = 1_700_000_000.0
    index: SqliteIndex = field(default_factory=lambda: SqliteIndex(IN_MEMORY))
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    sent: list[Send] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)
    is_disk_slow: bool = False
    """Keep disk orders in `waiting` instead of performing them."""
    waiting: list[Any] = field(default_factory=list)
    allowed: AllowList | None = None
    """Whom the broker lets in; None = it has no keys."""
    verify: Callable[[Proof, bytes], bool] | None = None
    """Whether a proof is of some words; None = the broker cannot tell."""
    _num_tokens: int = 0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The process dies and starts again on the same store."""
        self.blobs.sweep(self.index.digests())
        self.waiting.clear()
        incarnation = self._draw_token()
        self.router = Router(
            self.index,
            self.settings,
            incarnation,
            self._draw_token,
            self.now,
            self.unix,
            allowed=self.allowed,
            verify=self.verify,
        )

    def _draw_token(self) -> str:
        self._num_tokens += 1
        return f"{self._num_tokens:032x}"

    @property
    def unix(self) -> float:
        return self.unix_at_zero + self.now

    def hear(self, event: Event) -> list[Instruction]:
        """Handles an event, and what the disk says to it; all instructions in order."""
        with self.index.transaction():
            instructions = self.router.handle(event, self.now, self.unix)
        for instruction in list(instructions):
            match instruction:
                case Send():
                    self.sent.append(instruction)
                case Publish(hint):
                    self.hints.append(hint)
                case Log():
                    self.logs.append(instruction)
                case _ if self.is_disk_slow:
                    self.waiting.append(instruction)
                case _:
                    done = perform(self.blobs, instruction)
                    instructions += [] if done is None else self.hear(done)
        return instructions

    def work(self) -> None:
        """Performs the disk orders that are waiting."""
        waiting, self.waiting = self.waiting, []
        for order in waiting:
            done = perform(self.blobs, order)
            if done is not None:
                self.hear(done)

    def advance(self, seconds: float) -> list[Instruction]:
        """Time passes, and the core notices."""
        self.now += seconds
        return self.hear(Tick(self.blobs.free_bytes()))

    def admit(self, allowed: AllowList | None) -> list[Instruction]:
        """The allow-list becomes another one."""
        self.allowed = allowed
        return self.hear(AllowListChanged(allowed))

    def events(self) -> list[str]:
        """The names of what was logged, in order."""
        return [log.event for log in self.logs]

    def member(self, role: Role, name: str, incarnation: str = "aa" * 8, *, key: str = "") -> Member:
        """A client that has not said anything yet."""
        return Member(self, role, name, incarnation, key=key)


@dataclass
class Member:
    """One incarnation of one client."""

    stage: Stage
    role: Role
    id: str
    incarnation: str
    session: str = ""
    num_requests: int = 0
    key: str = ""
    """The public key that it has proved; empty = a broker without keys."""

    @property
    def connection(self) -> bytes:
        return f"{self.role}/{self.id}/{self.incarnation}/{self.key}".encode()

    def say(self, message: Message, payload: bytes | None = None, channel: Channel = Channel.CONTROL) -> list[Send]:
        """Says one thing; everything that was sent to this client because of it."""
        self.num_requests += 1
        request = message.request or self.num_requests
        said = message.model_copy(update={"session": message.session or self.session, "request": request})
        before = len(self.stage.sent)
        self.stage.hear(MessageArrived(channel, self.connection, said, payload, self.key))
        return [send for send in self.stage.sent[before:] if send.connection == self.connection]

    def ask(self, message: Message) -> Message:
        """Says one thing and gets exactly one answer."""
        [answer] = self.say(message)
        return answer.message

    def join(self, **fields: Any) -> Message:
        """Says HELLO; takes the session of a WELCOME."""
        hello = Hello(role=self.role, id=self.id, incarnation=self.incarnation, **fields)
        answer = self.ask(hello)
        if isinstance(answer, Welcome):
            self.session = answer.new_session
        return answer

    def send(self, message: Message, data: bytes) -> Message:
        """Asks for an upload, sends the bytes as granted, and returns the last answer; not GRANT, unless it stalls."""
        answer = self.ask(message)
        if not isinstance(answer, Grant):
            return answer
        offset, size = answer.offset, self.stage.settings.chunk_bytes
        while offset < len(data):
            piece = data[offset : offset + size]
            chunk = Chunk(transfer=answer.transfer, offset=offset)
            said = [send.message for send in self.say(chunk, piece, Channel.BULK)]
            final = [message for message in said if not isinstance(message, Credit | Grant)]
            if final:
                return final[-1]
            offset += len(piece)
        return answer

    def fetch(self, blob: BlobRef) -> bytes | Message:
        """The bytes of a blob, or the answer instead of them."""
        self.num_requests += 1
        transfer, data = self.num_requests, b""
        sends = self.say(Fetch(transfer=transfer, digest=blob.digest), channel=Channel.BULK)
        while sends:
            for send in sends:
                if not isinstance(send.message, Chunk):
                    return send.message
                assert send.payload is not None
                data += bytes(send.payload)
            sends = self.say(Credit(transfer=transfer, offset=len(data)), channel=Channel.BULK)
        return data
