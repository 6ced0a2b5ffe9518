"""A run of two fragments on a stage, and who takes part in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isles.brokers.limits import RoutingSettings
from isles.brokers.stage import Member, Stage, blob_of
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    Checkpoint,
    Commit,
    Committed,
    Contribution,
    Ingredient,
    Init,
    Initialised,
    Lease,
    Leased,
    Message,
    Offer,
    Recipe,
    Stored,
    Upload,
    VersionInfo,
)

PARAMETERS = (b"parameters of fragment 0" * 40, b"parameters of fragment 1" * 40)


@pytest.fixture
def record() -> RunRecord:
    specs = [TensorSpec("a", (4,), "float32", "parameter"), TensorSpec("b", (3,), "float32", "parameter")]
    manifest = Manifest.build(specs, {}, 2)
    return RunRecord(
        run="trial",
        seed=1,
        sync=SyncSettings(num_fragments=2, horizon_versions=4),
        budget=Budget(tokens=1000),
        manifest_digest=manifest.digest,
        manifest=manifest.to_text(),
    )


@pytest.fixture
def settings() -> RoutingSettings:
    return RoutingSettings(chunk_bytes=4096, credit_chunks=2, num_shards=8, versions_kept=3)


@pytest.fixture
def empty_stage(settings: RoutingSettings) -> Stage:
    """A broker whose run has no parameters yet."""
    return Stage(settings)


@pytest.fixture
def first_init(record: RunRecord) -> Init:
    versions = tuple(
        VersionInfo(fragment=number, version=0, parameters_sha256="0" * 64, parameters=blob_of(data))
        for number, data in enumerate(PARAMETERS)
    )
    return Init(run_record=record, versions=versions)


@pytest.fixture
def initialise(first_init: Init) -> Callable[[Member], Initialised]:
    """Uploads version 0 and makes the run."""

    def run(worker: Member) -> Initialised:
        for data in PARAMETERS:
            assert isinstance(worker.send(Upload(blob=blob_of(data)), data), Stored)
        answer = worker.ask(first_init)
        assert isinstance(answer, Initialised)
        return answer

    return run


@pytest.fixture
def stage(empty_stage: Stage, initialise: Callable[[Member], Initialised]) -> Stage:
    """A broker with a run at version 0."""
    founder = empty_stage.member("worker", "founder")
    founder.join()
    initialise(founder)
    return empty_stage


@pytest.fixture
def worker(stage: Stage) -> Member:
    member = stage.member("worker", "us-1", "a1" * 8)
    member.join(region="us")
    return member


@pytest.fixture
def outer(stage: Stage) -> Member:
    """An outer that holds both fragments with epoch 1."""
    member = stage.member("outer", "outer-1", "b1" * 8)
    member.join()
    answer = member.ask(Lease(fragments=(0, 1)))
    assert isinstance(answer, Leased)
    assert answer.epochs == {0: 1, 1: 1}
    return member


@pytest.fixture
def contribute() -> Callable[..., Contribution]:
    """Makes a contribution of a member; its payload is a function of its number."""

    def make(
        member: Member,
        number: int,
        *,
        fragment: int = 0,
        base: int = 0,
        tokens: int = 100,
        cursor: dict[int, int] | None = None,
        data: bytes | None = None,
    ) -> Contribution:
        payload = payload_of(member, number) if data is None else data
        return Contribution(
            id=ContributionId(member.id, fragment, member.incarnation, number),
            base_version=base,
            blob=blob_of(payload),
            codec="int4",
            tokens=tokens,
            steps=10,
            seconds=1.0,
            norms=(1.0,),
            cursor=cursor or {},
        )

    return make


def payload_of(member: Member, number: int) -> bytes:
    return f"delta {number} of {member.id} {member.incarnation} ".encode() * 400


@pytest.fixture
def payload() -> Callable[[Member, int], bytes]:
    """The bytes of a member's contribution with that number: several chunks."""
    return payload_of


@pytest.fixture
def offered(
    worker: Member, contribute: Callable[..., Contribution], payload: Callable[[Member, int], bytes]
) -> Callable[..., Contribution]:
    """Has the worker's contribution of that number accepted."""

    def run(number: int, *, base: int | None = None, fragment: int = 0) -> Contribution:
        contribution = contribute(worker, number, base=number if base is None else base, fragment=fragment)
        worker.send(Offer(contribution=contribution), payload(worker, number))
        return contribution

    return run


@pytest.fixture
def commit_of() -> Callable[..., Commit]:
    """Makes a COMMIT of some contributions; its update must be uploaded first."""

    def make(
        contributions: list[Contribution],
        *,
        base: int = 0,
        fragment: int = 0,
        epoch: int = 1,
        commit_id: str = "c0" * 8,
        update: bytes = b"update",
    ) -> Commit:
        ingredients = tuple(
            Ingredient(
                id=contribution.id,
                digest=contribution.blob.digest,
                base_version=contribution.base_version,
                tokens=contribution.tokens,
                steps=contribution.steps,
                weight=1.0,
            )
            for contribution in sorted(contributions, key=lambda contribution: contribution.id)
        )
        return Commit(
            commit_id=commit_id,
            fragment=fragment,
            epoch=epoch,
            base_version=base,
            parameters_sha256="1" * 64,
            update=blob_of(update),
            optimizer_sha256="3" * 64,
            recipe=Recipe(ingredients=ingredients, fraction=0.5, merge_rule="mean", settings_digest="2" * 64),
        )

    return make


@pytest.fixture
def merge(commit_of: Callable[..., Commit]) -> Callable[..., object]:
    """Uploads a version's update and commits it; the answer."""

    def run(outer: Member, contributions: list[Contribution], *, base: int = 0, **fields: object) -> object:
        update = f"update {base + 1} ".encode()
        outer.send(Upload(blob=blob_of(update)), update)
        commit_id = f"{base + 1:016x}"
        return outer.ask(commit_of(contributions, base=base, commit_id=commit_id, update=update, **fields))

    return run


@pytest.fixture
def checkpoint() -> Callable[..., Message]:
    """Uploads the state of a version and says CHECKPOINT; the answer."""

    def run(outer: Member, version: int, *, epoch: int = 1, state: bytes | None = None) -> Message:
        parameters = f"parameters of version {version} ".encode() if state is None else state
        momentum = b"momentum of " + parameters
        for data in (parameters, momentum):
            outer.send(Upload(blob=blob_of(data)), data)
        fields = {"parameters": blob_of(parameters), "momentum": blob_of(momentum)}
        return outer.ask(Checkpoint(fragment=0, epoch=epoch, version=version, **fields))

    return run


@pytest.fixture
def advance(
    outer: Member, offered: Callable[..., Contribution], merge: Callable[..., Message]
) -> Callable[[int, int], None]:
    """Brings fragment 0 from one version to another."""

    def run(first: int, last: int) -> None:
        for version in range(first, last):
            assert isinstance(merge(outer, [offered(version)], base=version), Committed)

    return run
