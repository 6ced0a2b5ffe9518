"""The evaluator, and the global parameters as it fetches them, against a broker that answers at once, in memory."""

from __future__ import annotations

import hashlib
import math
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
from isles.proto.errors import ManifestMismatchError, PayloadError, UnreachableError
from isles.proto.logs import ListLogger, Logger, SilentLogger
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
from isles.workers.evaluator import Evaluator
from isles.workers.parameters import GlobalParameters, ParameterFetcher, parameters_digest
from isles.workers.settings import EvaluatorSettings

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


# ------------------------------------------------------------------------------------------------ fetching parameters


def fetcher(broker: ReadingBroker, timeout_seconds: float = 60.0) -> ParameterFetcher:
    assert broker.record is not None
    return ParameterFetcher(
        broker.connection(), broker.record, address="memory", timeout_seconds=timeout_seconds, clock=broker.clock
    )


def is_same(held: GlobalParameters, broker: ReadingBroker) -> bool:
    return all(torch.equal(held.fragments[fragment].values, values) for fragment, values in broker.values.items())


def test_the_newest_parameters_are_a_snapshot_for_who_has_nothing(broker: ReadingBroker) -> None:
    broker.publish(1, torch.ones(12), tokens=40)
    held = fetcher(broker).newest()
    assert held.versions == {0: 0, 1: 1}
    assert held.tokens == 20.0
    assert is_same(held, broker)


def test_who_holds_a_version_is_brought_forward_by_updates_to_the_same_bits(broker: ReadingBroker) -> None:
    source = fetcher(broker)
    held = source.newest()
    for step in range(3):
        broker.publish(0, torch.randn(15, generator=torch.Generator().manual_seed(step)), tokens=step)
    broker.asked.clear()
    newer = source.newest(held)
    assert newer.versions == {0: 3, 1: 0}
    assert is_same(newer, broker)
    whole = broker.versions[0][-1].parameters
    assert whole is not None
    fetched = [message.digest for message in broker.asked if isinstance(message, Fetch)]
    assert len(fetched) == 3
    assert whole.digest not in fetched
    assert held.versions == {0: 0, 1: 0}


def test_a_checkpoint_is_brought_forward_by_the_updates_after_it(broker: ReadingBroker) -> None:
    for step in range(3):
        broker.publish(0, torch.randn(15, generator=torch.Generator().manual_seed(step)))
    broker.checkpoint = 1
    held = fetcher(broker).newest()
    assert held.versions == {0: 3, 1: 0}
    assert is_same(held, broker)
    assert sum(isinstance(message, Fetch) for message in broker.asked) == 4


def test_when_a_checkpoint_cannot_be_had_the_way_from_what_is_held_is_tried_again(broker: ReadingBroker) -> None:
    source = fetcher(broker)
    held = source.newest()
    broker.publish(0, torch.ones(15))
    head = broker.versions[0][-1]
    assert head.update is not None
    assert head.parameters is not None
    update = broker.blobs.pop(head.update.digest)
    del broker.blobs[head.parameters.digest]
    original = broker._version_reply

    def mend(message: AskVersion) -> VersionReply:
        if message.base_version is None:
            assert head.update is not None
            broker.blobs[head.update.digest] = update
        return original(message)

    broker._version_reply = mend  # type: ignore[method-assign]
    assert is_same(source.newest(held), broker)


def test_updates_that_lead_elsewhere_are_replaced_by_a_snapshot(broker: ReadingBroker) -> None:
    source = fetcher(broker)
    held = source.newest()
    broker.publish(0, torch.ones(15))
    update = broker.versions[0][-1].update
    assert update is not None
    wrong = broker.keep(encode("int4", torch.ones(15)))
    broker.versions[0][-1] = broker.versions[0][-1].model_copy(update={"update": wrong})
    assert is_same(source.newest(held), broker)
    assert [ask.base_version for ask in broker.asked if isinstance(ask, AskVersion)][-2:] == [None, 0]


def test_parameters_that_are_not_what_their_digest_says_are_refused(broker: ReadingBroker) -> None:
    broker.versions[1][0] = broker.versions[1][0].model_copy(update={"parameters_sha256": "0" * 64})
    with pytest.raises(PayloadError, match="not those that the outer made"):
        fetcher(broker).newest()
    assert broker.count(AskVersion) < 20


def test_a_blob_larger_than_its_fragment_can_be_is_not_fetched(broker: ReadingBroker) -> None:
    huge = BlobRef(digest="f" * 64, size_bytes=1 << 40)
    broker.versions[0][0] = broker.versions[0][0].model_copy(update={"parameters": huge})
    with pytest.raises(PayloadError, match="at most"):
        fetcher(broker).newest()
    assert broker.count(Fetch) == 0


def test_a_broker_that_says_nothing_is_given_up_after_the_timeout(broker: ReadingBroker) -> None:
    source = fetcher(broker, timeout_seconds=20.0)
    broker.is_silent = True
    before = broker.clock.now()
    with pytest.raises(UnreachableError):
        source.newest()
    assert broker.clock.now() - before < 40.0


def test_version_0_can_always_be_had(broker: ReadingBroker) -> None:
    first = fetcher(broker).newest()
    broker.publish(0, torch.ones(15))
    again = fetcher(broker).first()
    assert again.versions == {0: 0, 1: 0}
    assert all(torch.equal(again.fragments[n].values, first.fragments[n].values) for n in (0, 1))


def test_tensors_have_the_models_names_with_ties_under_each_of_theirs(broker: ReadingBroker) -> None:
    held = fetcher(broker).newest()
    model = tied_model()
    held.load_into(model)
    tensors = held.tensors()
    assert tensors.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, tensors[name])
    assert torch.equal(tensors["first.weight"], tensors["third.weight"])


def test_parameters_are_not_loaded_into_another_model(broker: ReadingBroker) -> None:
    held = fetcher(broker).newest()
    with pytest.raises(ManifestMismatchError, match="no such tensor"):
        held.load_into(nn.Linear(3, 4))


# -------------------------------------------------------------------------------------------------------- the evaluator


class SumTask:
    """The validation loss of a model is the sum of its parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def validation_loss(self, model: nn.Module) -> float:
        assert not model.training
        self.losses.append(sum(float(parameter.detach().sum()) for parameter in model.parameters()))
        return self.losses[-1]


def start(
    broker: ReadingBroker, task: SumTask | None = None, logger: Logger | None = None, **settings: float
) -> Evaluator:
    assert broker.record is not None
    return Evaluator(
        broker.connection(),
        broker.record,
        task or SumTask(),  # type: ignore[arg-type]
        tied_model(),
        EvaluatorSettings.model_validate({"every_seconds_min": 0.0, **settings}),
        logger=logger or SilentLogger(),
        clock=broker.clock,
        should_stop=lambda: False,
    )


def publish_cycle(broker: ReadingBroker) -> None:
    broker.publish(0, torch.zeros(15), tokens=10)
    broker.publish(1, torch.zeros(12), tokens=30)


def test_the_first_figure_is_that_of_version_0_even_if_the_run_has_gone_on(broker: ReadingBroker) -> None:
    broker.publish(0, torch.zeros(15), tokens=10)
    task = SumTask()
    start(broker, task).look()
    assert broker.reports[0].versions == {0: 0, 1: 0}
    assert broker.reports[0].value == task.losses[0]
    assert broker.reports[0].tokens == 0.0


def test_each_cycle_is_evaluated_with_its_versions_and_tokens(broker: ReadingBroker) -> None:
    logger = ListLogger()
    evaluator = start(broker, logger=logger)
    for _ in range(3):
        evaluator.look()
        evaluator.look()
        publish_cycle(broker)
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 2}]
    assert [report.tokens for report in broker.reports] == [0.0, 20.0, 20.0]
    assert all(report.name == "validation_loss" for report in broker.reports)
    assert logger.events().count("loss.evaluated") == 3


def test_told_to_stop_it_evaluates_the_newest_versions_once_more_and_leaves(broker: ReadingBroker) -> None:
    evaluator = start(broker)
    evaluator.look()
    broker.publish(0, torch.zeros(15), tokens=10)
    evaluator.look()
    assert len(broker.reports) == 1
    evaluator.finish()
    assert broker.reports[-1].versions == {0: 1, 1: 0}
    assert broker.count(Leave) == 1


def test_told_to_stop_with_nothing_new_it_only_leaves(broker: ReadingBroker) -> None:
    evaluator = start(broker)
    evaluator.look()
    evaluator.finish()
    assert len(broker.reports) == 1
    assert broker.count(Leave) == 1


def test_a_restarted_evaluator_goes_on_from_the_figures_that_are_there(broker: ReadingBroker) -> None:
    start(broker).look()
    again = start(broker)
    again.look()
    again.finish()
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}]


def test_a_broker_that_is_away_is_waited_for_and_said_once(broker: ReadingBroker) -> None:
    logger = ListLogger()
    evaluator = start(broker, logger=logger)
    evaluator.look()
    broker.is_silent = True
    evaluator.look()
    evaluator.look()
    assert logger.events().count("broker.lost") == 1
    broker.is_silent = False
    publish_cycle(broker)
    evaluator.look()
    assert broker.reports[-1].versions == {0: 1, 1: 1}


def test_it_ends_in_time_when_the_broker_is_gone_for_good(broker: ReadingBroker) -> None:
    evaluator = start(broker, final_timeout_seconds=30.0)
    evaluator.look()
    broker.is_silent = True
    before = broker.clock.now()
    evaluator.finish()
    assert broker.clock.now() - before < 40.0


def test_a_figure_that_the_broker_did_not_hear_is_reported_again(broker: ReadingBroker) -> None:
    class SilencingTask(SumTask):
        def validation_loss(self, model: nn.Module) -> float:
            broker.is_silent = True
            return super().validation_loss(model)

    task = SilencingTask()
    evaluator = start(broker, task)
    evaluator.look()
    assert broker.reports == []
    broker.is_silent = False
    evaluator.look()
    assert [report.versions for report in broker.reports] == [{0: 0, 1: 0}]
    assert len(task.losses) == 1


def test_a_loss_that_is_not_finite_is_logged_and_not_reported(broker: ReadingBroker) -> None:
    class NanTask(SumTask):
        def validation_loss(self, model: nn.Module) -> float:
            return math.nan

    logger = ListLogger()
    start(broker, NanTask(), logger).look()
    assert broker.reports == []
    assert ("error", "loss.evaluated") in [(level, event) for level, event, _ in logger.records]
