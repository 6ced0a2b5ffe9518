"""A client's side of the protocol: joining, asking until answered, sending and fetching blobs. Pure.

    facts in                                orders and news out
    start, handle(message), tick            Send
    ask(message, payload)                   Answered: the final reply to an ask, whatever it took
    fetch(blob)                             Fetched, FetchFailed
                                            Welcomed (first, and after each forgotten session), Hinted, Refused

Every ask is repeated until it is answered, so every ask must be one that may be repeated; those of `messages.py` are.
An ask with a payload is answered by GRANT first, which is followed here by the chunks, and then by the real answer.
A relay may say RECEIPT in between: the chunks need not be sent again, and the real answer may take long.
When a broker has forgotten the session (it was restarted) the client says HELLO again and repeats what is unanswered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from isles.proto.errors import PayloadError
from isles.proto.messages import (
    REFUSALS,
    Accepted,
    AskStatus,
    BlobRef,
    Channel,
    Chunk,
    Credit,
    Error,
    ErrorCode,
    Expired,
    Fenced,
    Grant,
    Hello,
    Hint,
    Leave,
    Limits,
    Merged,
    Message,
    Offer,
    Receipt,
    Rejected,
    RetryAfter,
    Welcome,
)
from isles.proto.transfers import Download, Upload

RETRY_SECONDS: Final = 1.0
"""First wait for an answer before asking again; doubles up to the maximum."""
RETRY_SECONDS_MAX: Final = 8.0
JOIN_RETRY_SECONDS_MAX: Final = 2.0
"""A broker that is back should be found soon."""
STALL_SECONDS: Final = 15.0
"""A transfer without progress for this long is asked for again: 8 chunks of 1 MiB at 5 Mbit/s take 13 s."""
RECEIPT_SECONDS: Final = 30.0
"""Between two asks for the real answer to what a relay has: it tells by itself, unless it was restarted."""
DAMAGED_MAX: Final = 3
"""How often an upload that arrived damaged is repeated before its asker is told."""


@dataclass(frozen=True, slots=True)
class Send:
    """Order: hand this to the transport; if it cannot take it, forget it."""

    channel: Channel
    message: Message
    payload: bytes | memoryview | None = None


@dataclass(frozen=True, slots=True)
class Welcomed:
    """News: there is a session, and this is the state of the run."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Answered:
    """News: the final reply to an ask."""

    ask: Message
    reply: Message


@dataclass(frozen=True, slots=True)
class Fetched:
    """News: a blob is here and has its digest."""

    blob: BlobRef
    data: bytearray


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """News: a blob cannot be had."""

    blob: BlobRef
    text: str
    code: ErrorCode = "damaged"
    """That of the broker's answer; `damaged` also if it kept arriving damaged, `too-large` if it is over the asker's
    bound."""


@dataclass(frozen=True, slots=True)
class Hinted:
    """News: something happened at the broker."""

    hint: Hint


@dataclass(frozen=True, slots=True)
class Refused:
    """News: the broker will not have this process; nothing more will come."""

    code: str
    text: str


Instruction = Send | Welcomed | Answered | Fetched | FetchFailed | Hinted | Refused


@dataclass
class _Asked:
    message: Message
    request: int
    payload: memoryview | None
    deadline: float
    retry_seconds: float = RETRY_SECONDS
    upload: Upload | None = None
    num_damaged: int = 0


def as_error(reply: Message) -> Error:
    """An answer that is not the one asked for, as an error: the broker's own, or that it is of another kind."""
    if isinstance(reply, Error):
        return reply
    return Error(code="bad-message", text=f"the answer is {type(reply).__name__}")


def _is_of_another(ask: Message, reply: Message) -> bool:
    """Whether an answer names another contribution than the one that was offered: numbers alone may mislead."""
    if not isinstance(ask, Offer):
        return False
    return isinstance(reply, Accepted | Expired | Merged | Rejected | Receipt) and reply.id != ask.contribution.id


@dataclass
class Client:
    """The protocol state of one process towards its broker."""

    hello: Hello
    prove: Callable[[Message, str], Message] | None = None
    """Adds the proof that a relay has to hand over to a HELLO or an OFFER; the text is the store that this process's
    state is of. None = nothing is proved."""
    is_refused: bool = False
    session: str = ""
    limits: Limits = field(default_factory=Limits)
    heard_at: float | None = None
    """When the broker was last heard."""
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _downloads: dict[int, Download] = field(default_factory=dict)
    _num_requests: int = 0
    _was_let_in: bool = False
    _hello_request: int = 0
    _hello_deadline: float | None = None
    _hello_retry_seconds: float = RETRY_SECONDS / 4

    # ------------------------------------------------------------------------------------------ what the shell calls

    def start(self, now: float) -> list[Instruction]:
        """Says HELLO; also the way to read the state of the run anew."""
        self.session = ""
        self._hello_request = self._draw_request()
        self._hello_retry_seconds = RETRY_SECONDS / 4
        return self._say_hello(now)

    def ask(self, message: Message, now: float, payload: bytes | memoryview | None = None) -> list[Instruction]:
        """Asks until answered; a message with a payload gets it sent when the broker grants it."""
        view = None if payload is None else memoryview(payload)
        asked = _Asked(message, self._draw_request(), view, now + RETRY_SECONDS)
        self._asked[asked.request] = asked
        return self._repeat(asked)

    def fetch(self, blob: BlobRef, now: float, *, bytes_max: int) -> list[Instruction]:
        """Brings a blob; one that is under way already is not asked for twice.

        `bytes_max` is the asker's own bound: nothing that a peer sends decides how much memory is taken.
        """
        if blob.size_bytes > bytes_max:
            text = (
                f"blob {blob.digest[:12]} is announced with {blob.size_bytes} bytes; at most {bytes_max} can be right"
            )
            return [FetchFailed(blob, text, "too-large")]
        if any(download.blob.digest == blob.digest for download in self._downloads.values()):
            return []
        download = Download(blob, self._draw_request(), self.limits.credit_chunks, now + STALL_SECONDS)
        self._downloads[download.transfer] = download
        return self._send(Channel.BULK, download.fetch())

    def leave(self, session: str, now: float) -> list[Instruction]:
        """Asks to leave a session that is still open although a later HELLO of this client was refused."""
        self.is_refused, self.session = False, session
        return self.ask(Leave(), now)

    def deny(self, text: str) -> list[Instruction]:
        """Takes word from the transport that this process will never be let in, and why."""
        return [] if self.is_refused else self._refuse("denied", text)

    def forget(self, is_unwanted: Callable[[Message], bool]) -> None:
        """Stops asking what nobody wants to know any more."""
        self._asked = {number: asked for number, asked in self._asked.items() if not is_unwanted(asked.message)}

    def is_asking(self, kind: type[Message]) -> bool:
        """Whether an ask of this kind is unanswered."""
        return any(isinstance(asked.message, kind) for asked in self._asked.values())

    @property
    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        deadlines = [asked.deadline for asked in self._asked.values()] if self.session else []
        deadlines += [download.deadline for download in self._downloads.values()] if self.session else []
        if self._hello_deadline is not None:
            deadlines.append(self._hello_deadline)
        return min(deadlines, default=None)

    def tick(self, now: float) -> list[Instruction]:
        """Repeats what is overdue."""
        if self.is_refused:
            return []
        if self._hello_deadline is not None:
            return self._say_hello(now) if now >= self._hello_deadline else []
        instructions: list[Instruction] = []
        for asked in self._asked.values():
            if now >= asked.deadline:
                asked.retry_seconds = min(2 * asked.retry_seconds, RETRY_SECONDS_MAX)
                asked.deadline = now + asked.retry_seconds
                instructions += self._repeat(asked)
        for download in self._downloads.values():
            if now >= download.deadline:
                download.deadline = now + STALL_SECONDS
                instructions += self._send(Channel.BULK, download.fetch())
        return instructions

    def handle(self, message: Message, now: float, payload: bytes | memoryview | None = None) -> list[Instruction]:
        """Takes one message of the broker."""
        if self.is_refused:
            return []
        self.heard_at = now
        match message:
            case Hint():
                return [Hinted(message)]
            case Welcome():
                return self._take_welcome(message, now)
            case Chunk():
                return self._take_chunk(message, payload or b"", now)
            case Credit():
                return self._take_credit(message, now)
            case Error(code="denied" | "quarantined") if not self._is_about_offer(message):
                return self._refuse(message.code, message.text)
            case Error(code="unknown-session"):
                return self.start(now) if self.session else []
            case Error() if message.request == self._hello_request and self._hello_deadline is not None:
                return self._take_hello_error(message)
            case Fenced() if message.request == self._hello_request and self._hello_deadline is not None:
                return self._refuse_fenced()
            case RetryAfter() if message.request in self._downloads:
                self._downloads[message.request].deadline = now + message.seconds
                return []
            case Error() if message.request in self._downloads:
                return self._take_fetch_error(message)
        asked = self._asked.get(message.request)
        return [] if asked is None or _is_of_another(asked.message, message) else self._take_answer(asked, message, now)

    def _is_about_offer(self, error: Error) -> bool:
        """Whether a relay is told about a contribution that it hands over, not about itself."""
        asked = self._asked.get(error.request)
        is_offer = asked is not None and isinstance(asked.message, Offer)
        return is_offer and self.hello.role == "relay" and error.code == "quarantined"

    # --------------------------------------------------------------------------------------------------------- joining

    def _say_hello(self, now: float) -> list[Instruction]:
        self._hello_deadline = now + self._hello_retry_seconds
        self._hello_retry_seconds = min(2 * self._hello_retry_seconds, JOIN_RETRY_SECONDS_MAX)
        return [Send(Channel.CONTROL, self._proved(self.hello).addressed(request=self._hello_request))]

    def _proved(self, message: Message) -> Message:
        """The message as it is said now: what it proves may have changed since it was said last."""
        return message if self.prove is None else self.prove(message, self.hello.store)

    def _take_welcome(self, welcome: Welcome, now: float) -> list[Instruction]:
        if welcome.request != self._hello_request or self._hello_deadline is None:
            return []
        self._hello_deadline = None
        if not self.hello.id:
            self.hello = self.hello.model_copy(update={"id": welcome.learner, "rejoin": welcome.rejoin})
        if welcome.run_record is not None:
            # From now on this process has state of that store, and another one must not be taken for it.
            self.hello = self.hello.model_copy(update={"store": welcome.store})
        self.session = welcome.new_session
        self.limits = welcome.limits
        self._was_let_in = True
        instructions: list[Instruction] = [Welcomed(welcome)]
        for asked in self._asked.values():
            asked.retry_seconds, asked.deadline, asked.upload = RETRY_SECONDS, now + RETRY_SECONDS, None
            instructions += self._repeat(asked)
        for download in self._downloads.values():
            download.deadline = now + STALL_SECONDS
            instructions += self._send(Channel.BULK, download.fetch())
        return instructions

    def _take_hello_error(self, error: Error) -> list[Instruction]:
        """A store that is damaged may be replaced by a copy, so only who was never let in is turned away by it."""
        is_turned_away = error.code in REFUSALS or (error.code == "damaged" and not self._was_let_in)
        return self._refuse(error.code, error.text) if is_turned_away else []

    def _refuse_fenced(self) -> list[Instruction]:
        return self._refuse("fenced", f"a newer incarnation of {self.hello.role} {self.hello.id} exists")

    def _refuse(self, code: str, text: str) -> list[Instruction]:
        self.is_refused = True
        self._hello_deadline = None
        self._asked.clear()
        self._downloads.clear()
        return [Refused(code, text)]

    # ---------------------------------------------------------------------------------------------------------- asking

    def _draw_request(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def _send(
        self, channel: Channel, message: Message, payload: memoryview | None = None, *, request: int | None = None
    ) -> list[Instruction]:
        """`request` if it is not the message's own."""
        if not self.session and not isinstance(message, AskStatus):
            return []
        number = message.request if request is None else request
        return [Send(channel, message.addressed(request=number, session=self.session), payload)]

    def _repeat(self, asked: _Asked) -> list[Instruction]:
        message = self._proved(asked.message) if isinstance(asked.message, Offer) else asked.message
        return self._send(Channel.CONTROL, message, request=asked.request)

    def _take_answer(self, asked: _Asked, message: Message, now: float) -> list[Instruction]:
        match message:
            case Grant():
                return self._take_grant(asked, message, now)
            case Receipt():
                asked.upload, asked.deadline = None, now + RECEIPT_SECONDS
                return []
            case RetryAfter():
                asked.upload = None
                asked.deadline = now + message.seconds
                return []
            case Error(code="damaged") if asked.payload is not None and asked.num_damaged < DAMAGED_MAX:
                asked.num_damaged += 1
                asked.upload = None
                return self._repeat(asked)
            case Fenced(epoch=0):
                return self._refuse_fenced()
        del self._asked[asked.request]
        return [Answered(asked.message, message)]

    # ------------------------------------------------------------------------------------------------------- transfers

    def _take_grant(self, asked: _Asked, grant: Grant, now: float) -> list[Instruction]:
        if asked.payload is None:
            return []
        offset = min(grant.offset, len(asked.payload))
        asked.deadline = now + STALL_SECONDS
        asked.upload = Upload(
            asked.payload, grant.transfer, self.limits.chunk_bytes, max(1, grant.credit_chunks), offset, offset
        )
        return self._send_chunks(asked.upload)

    def _send_chunks(self, upload: Upload) -> list[Instruction]:
        instructions: list[Instruction] = []
        for chunk, piece in upload.next_chunks():
            instructions += self._send(Channel.BULK, chunk, piece)
        return instructions

    def _take_credit(self, credit: Credit, now: float) -> list[Instruction]:
        for asked in self._asked.values():
            if asked.upload is not None and asked.upload.transfer == credit.transfer:
                asked.deadline = now + STALL_SECONDS
                asked.upload.credit(credit.offset)
                return self._send_chunks(asked.upload)
        return []

    def _take_chunk(self, chunk: Chunk, payload: bytes | memoryview, now: float) -> list[Instruction]:
        download = self._downloads.get(chunk.transfer)
        if download is None:
            return []
        try:
            credit = download.take(chunk, payload)
        except PayloadError as error:
            return self._restart(download, str(error))
        if credit is None:
            return []
        download.deadline = now + STALL_SECONDS
        if not download.is_complete:
            return self._send(Channel.BULK, credit)
        if not download.has_digest():
            return self._restart(download, f"blob {download.blob.digest[:12]} arrived damaged")
        del self._downloads[download.transfer]
        return [*self._send(Channel.BULK, credit), Fetched(download.blob, download.received)]

    def _restart(self, download: Download, text: str) -> list[Instruction]:
        if download.restart():
            return self._send(Channel.BULK, download.fetch())
        del self._downloads[download.transfer]
        return [FetchFailed(download.blob, text)]

    def _take_fetch_error(self, error: Error) -> list[Instruction]:
        download = self._downloads.pop(error.request)
        return [FetchFailed(download.blob, error.text, error.code)]
