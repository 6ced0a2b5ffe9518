"""A courier whose thread does not run, and a connection that a test scripts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.agreement import SyncSettings
from isles.proto.client import Answered, Client, Hinted
from isles.proto.clock import ManualClock
from isles.proto.ids import ContributionId
from isles.proto.logs import ListLogger
from isles.proto.manifest import Manifest
from isles.proto.messages import (
    AskVersion,
    Hello,
    Hint,
    Message,
    Progress,
    VersionInfo,
    VersionReply,
)
from isles.workers.account import Account
from isles.workers.courier import Courier
from isles.workers.description import describe
from isles.workers.encoding import Encode
from isles.workers.flat import FlatModel
from isles.workers.orders import TakeAccount
from isles.workers.parameters import parameters_digest
from isles.workers.versions import Held

ID = ContributionId("us-0", 0, "aaaaaaaa", 1)
SYNC = SyncSettings(num_fragments=2, codec_up="int8", codec_down="int8")


class FakeConnection:
    """Remembers asks; news are put in by the test."""

    def __init__(self) -> None:
        self.client = Client(Hello(role="worker", id="us-0", incarnation="aaaaaaaa", run="toy"))
        self.asked: list[Message] = []
        self.payloads: list[bytes | None] = []
        self.num_wakes = 0
        self.dropped: dict[str, int] = {}
        self.is_closed = False

    def ask(self, message: Message, payload: bytes | None = None) -> None:
        self.asked.append(message)
        self.payloads.append(payload)

    def take(self, kind: type[Message]) -> list[Any]:
        """The asks of a kind since the last look."""
        found = [message for message in self.asked if isinstance(message, kind)]
        self.asked = [message for message in self.asked if not isinstance(message, kind)]
        return found

    def take_dropped(self) -> dict[str, int]:
        dropped, self.dropped = self.dropped, {}
        return dropped

    def wake(self) -> None:
        self.num_wakes += 1

    def close(self) -> None:
        self.is_closed = True


class Here(Executor):
    """Does everything at once, on the caller's thread."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except ArithmeticError as error:
            future.set_exception(error)
        return future


class Desk:
    """A courier whose thread does not run: the test takes its turns."""

    def __init__(
        self, payloads: dict[ContributionId, bytes] | None = None, connection: Any = None, sync: SyncSettings = SYNC
    ) -> None:
        self.connection = connection or FakeConnection()
        self.clock = ManualClock()
        self.log = ListLogger()
        model = nn.Linear(40, 5)
        tensors = describe(model)
        self.flat = FlatModel(tensors, Manifest.build(tensors.specs, tensors.aliases, 2))
        zeros = {fragment: Held(3, torch.zeros(count)) for fragment, count in enumerate(self.flat.num_values)}
        self.accounts: dict[int, Account[torch.Tensor]] = {}
        self.courier = Courier(
            self.connection,
            sync,
            self.flat,
            learner="us-0",
            address="memory",
            held=zeros,
            payloads=payloads or {},
            shards={},
            progress=lambda: Progress(steps=7),
            clock=self.clock,
            log=self.log,
            accounts=self.accounts,
            worker=Here(),
        )

    def submit(self, order: Any) -> None:
        self.courier.submit(order)
        self.courier._do_orders()

    def answer(self, ask: Message, reply: Message) -> None:
        self.courier._handle(Answered(ask, reply))

    def hint(self, kind: str, seq: int = 1, **fields: Any) -> None:
        hint = Hint.model_validate({"broker_incarnation": "bbbbbbbb", "seq": seq, "kind": kind, **fields})
        self.courier._handle(Hinted(hint))

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.courier._keep_time()

    def wanted(self) -> list[int]:
        """Fragments whose version was asked for since the last look; each is answered: nothing new."""
        asks = self.connection.take(AskVersion)
        for ask in asks:
            values = torch.zeros(self.flat.num_values[ask.fragment])
            head = VersionInfo(fragment=ask.fragment, version=3, parameters_sha256=parameters_digest(values))
            self.answer(ask, VersionReply(head=head))
        return [ask.fragment for ask in asks]

    def encode(self, theta: torch.Tensor, fragment: int = 0) -> None:
        take = TakeAccount(fragment, ID._replace(fragment=fragment), 3, 30, 3, 1.5, {4: 9})
        account = Account(torch.zeros(self.flat.num_values[fragment]))
        self.submit(Encode(take, account, theta))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def make_desk() -> type[Desk]:
    """Makes one with payloads, settings or a connection of its own."""
    return Desk
