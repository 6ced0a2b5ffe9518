"""A broker that only has versions to read: it answers at once, in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.clock import ManualClock
from isles.proto.codec.torch_codec import decode, encode
from isles.proto.connection import Connection
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    AskHeads,
    AskHistory,
    AskStatus,
    AskVersion,
    BlobRef,
    Channel,
    Chunk,
    Credit,
    Done,
    Error,
    Fetch,
    Head,
    Heads,
    Hello,
    History,
    Leave,
    Limits,
    Message,
    Report,
    ReportInfo,
    Status,
    VersionInfo,
    VersionReply,
    Welcome,
    pack,
    unpack,
)
from isles.proto.transport.interface import Arrival, Bytes
from isles.workers.description import describe
from isles.workers.parameters import parameters_digest

TOKEN = "ab" * 8


def tied_model() -> nn.Module:
    """Five matrices, two of which are the same storage."""
    model = nn.Module()
    model.first = nn.Linear(3, 4, bias=False)
    model.second = nn.Linear(4, 3)
    model.third = nn.Linear(3, 4, bias=False)
    model.third.weight = model.first.weight
    return model


@dataclass
class ReadingBroker:
    """Holds versions as a broker does; `clock` moves a little with every wait, so that timeouts pass."""

    record: RunRecord | None
    clock: ManualClock = field(default_factory=ManualClock)
    versions: dict[int, list[VersionInfo]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    reports: list[ReportInfo] = field(default_factory=list)
    asked: list[Message] = field(default_factory=list)
    is_silent: bool = False
    checkpoint: int = 1_000_000
    """The version to begin with, if there is one as new."""
    arrivals: list[Arrival] = field(default_factory=list)

    # what tests do

    def new_model(self) -> nn.Module:
        """The run's model, with values of its own."""
        return tied_model()

    def publish(self, fragment: int, values: Tensor, tokens: int = 0) -> None:
        """The next version of a fragment: exactly these values at version 0, afterwards nearly."""
        before = self.values.get(fragment)
        update = None
        if before is not None:
            assert self.record is not None
            payload = encode(self.record.sync.codec_down, values - before)
            update = self.keep(payload)
            values = before + decode(payload, num_values=values.numel())
        line = self.versions.setdefault(fragment, [])
        line.append(
            VersionInfo(
                fragment=fragment,
                version=len(line),
                parameters_sha256=parameters_digest(values),
                tokens_total=tokens,
                update=update,
                parameters=self.keep(encode("fp32", values)),
            )
        )
        self.values[fragment] = values

    def keep(self, payload: bytes) -> BlobRef:
        digest = hashlib.sha256(payload).hexdigest()
        self.blobs[digest] = payload
        return BlobRef(digest=digest, size_bytes=len(payload))

    def connection(self, role: str = "evaluator") -> Connection:
        hello = Hello.model_validate({"role": role, "id": "reader", "incarnation": TOKEN})
        connection = Connection(hello, self, self.clock)
        connection.wait_for_welcome(10.0, address="memory")
        return connection

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.asked)

    # the transport's interface

    denial: str | None = None

    def send(self, channel: Channel, header: bytes, payload: Bytes | None = None) -> bool:
        message = unpack(header)
        self.asked.append(message)
        if not self.is_silent:
            for reply, piece in self._answer(message):
                update = {"request": message.request}
                self.arrivals.append(Arrival(channel, b"", pack(reply.model_copy(update=update)), piece))
        return True

    def poll(self, timeout_seconds: float) -> list[Arrival]:
        if not self.arrivals:
            self.clock.advance(max(timeout_seconds, 1e-3))
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def _answer(self, message: Message) -> list[tuple[Message, bytes | None]]:
        fields: dict[str, Any]
        match message:
            case Hello():
                fields = {"new_session": TOKEN, "protocol": (1, 0), "broker_incarnation": TOKEN, "seq": 0}
                welcome = Welcome.model_validate({**fields, "limits": Limits(), "run_record": self.record})
                return [(welcome, None)]
            case AskVersion():
                return [(self._version_reply(message), None)]
            case AskHistory():
                line = self.versions[message.fragment]
                return [(History(versions=tuple(line[message.first : message.first + message.num_max])), None)]
            case AskHeads():
                return [(Heads(broker_incarnation=TOKEN, seq=0, heads=self._heads()), None)]
            case AskStatus():
                fields = {"run": "run", "broker_incarnation": TOKEN, "uptime_seconds": 1, "progress": 0}
                return [(Status.model_validate({**fields, "reports": tuple(self.reports)}), None)]
            case Report():
                fields = message.model_dump(include={"name", "value", "versions", "tokens"})
                fields |= {"seq": len(self.reports) + 1, "reporter": "reader", "unix": 0}
                self.reports.append(ReportInfo.model_validate(fields))
                return [(Done(), None)]
            case Leave():
                return [(Done(), None)]
            case Fetch():
                payload = self.blobs.get(message.digest)
                if payload is None:
                    return [(Error(code="not-found", text="no such blob"), None)]
                return [(Chunk(transfer=message.transfer, offset=0), payload)]
            case Credit():
                return []
        return [(Error(code="bad-message", text=type(message).__name__), None)]

    def _heads(self) -> tuple[Head, ...]:
        return tuple(
            Head(fragment=fragment, version=line[-1].version, tokens_total=line[-1].tokens_total)
            for fragment, line in sorted(self.versions.items())
        )

    def _version_reply(self, message: AskVersion) -> VersionReply:
        line = self.versions[message.fragment]
        begin = None if message.base_version is not None else line[min(self.checkpoint, len(line) - 1)]
        first = message.base_version if begin is None else begin.version
        assert first is not None
        updates = [info.update for info in line[first + 1 :] if info.update is not None]
        return VersionReply(head=line[-1], updates=tuple(updates), snapshot=begin)


def make_record(
    model: nn.Module, *, budget: Budget | None = None, num_fragments: int = 2, **fields: object
) -> RunRecord:
    """The record of a run that trains `model`."""
    tensors = describe(model)
    manifest = Manifest.build(tensors.specs, tensors.aliases, num_fragments)
    settings: Mapping[str, object] = {
        "run": "run",
        "seed": 1,
        "sync": SyncSettings(num_fragments=num_fragments),
        "budget": budget or Budget(tokens=1000),
        "manifest_digest": manifest.digest,
        "manifest": manifest.to_text(),
    }
    return RunRecord.model_validate({**settings, **fields})


@pytest.fixture
def broker() -> ReadingBroker:
    """A run of `tied_model` at version 0 with the values 0, 1, 2, ... in each fragment."""
    broker = ReadingBroker(make_record(tied_model()))
    assert broker.record is not None
    for fragment in Manifest.from_text(broker.record.manifest).fragments:
        broker.publish(fragment.fragment_id, torch.arange(fragment.num_values, dtype=torch.float32))
    return broker
