"""One learner whose work the outer rejects again and again, in processes: it is shut out, the others go on, and it
comes back when it is pardoned."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from isles.brokers.stage import blob_of
from isles.ops.main import run as isles
from isles.proto.agreement import Budget, RunRecord, SyncSettings
from isles.proto.client import Answered, Refused
from isles.proto.codec import encode
from isles.proto.codec.frame import pack
from isles.proto.codec.table import codec_named
from isles.proto.ids import ContributionId
from isles.proto.manifest import Manifest, TensorSpec
from isles.proto.messages import (
    Accepted,
    AskHeads,
    Contribution,
    Heads,
    Init,
    Initialised,
    Message,
    Offer,
    Row,
    Stored,
    Upload,
    VersionInfo,
)

if TYPE_CHECKING:
    from tests.integration.doors.conftest import House

Vector = npt.NDArray[np.float32]
NUM_VALUES = 40
HONEST = ("us-1", "eu-1")
"""Learners, each with a key of its own name."""
BAD = "service-9"
MANIFEST = Manifest.build([TensorSpec("w", (NUM_VALUES,), "float32", "parameter")], {}, 1)
RECORD = RunRecord(
    run="trial",
    seed=1,
    sync=SyncSettings(num_fragments=1, codec_up="fp32", codec_down="fp32", merge_rule="mean", grace_max_seconds=0.1),
    budget=Budget(tokens=10**9),
    manifest_digest=MANIFEST.digest,
    manifest=MANIFEST.to_text(),
)


def delta(seed: int) -> Vector:
    return (np.random.default_rng(seed).standard_normal(NUM_VALUES) * 0.01).astype(np.float32)


def nonsense() -> bytes:
    """What no encoder of ours writes: a value that is not finite."""
    vector = delta(0)
    vector[3] = np.nan
    planes = np.ascontiguousarray(vector.view(np.uint8).reshape(-1, 4).T)
    return pack(codec_named("fp32"), num_values=vector.size, scale_exponent=0, raw=planes.tobytes())


class Scripted:
    """A learner that contributes what it is given."""

    def __init__(self, house: House, key: str, name: str, asking: Callable[..., Message], waiting: Any) -> None:
        self.name = name
        self.asking, self.waiting = asking, waiting
        self.connection = house.enter(key, "worker", name)
        self.num_offered = 0

    def initialise(self) -> None:
        first = np.zeros(NUM_VALUES, np.float32)
        payload = encode("fp32", first)
        assert isinstance(self.asking(self.connection, Upload(blob=blob_of(payload)), payload), Stored)
        digest = hashlib.sha256(first.tobytes()).hexdigest()
        info = VersionInfo(fragment=0, version=0, parameters_sha256=digest, parameters=blob_of(payload))
        assert isinstance(self.asking(self.connection, Init(run_record=RECORD, versions=(info,))), Initialised)

    def offer(self, payload: bytes) -> tuple[Contribution, Offer]:
        heads = self.asking(self.connection, AskHeads())
        assert isinstance(heads, Heads)
        self.num_offered += 1
        contribution = Contribution(
            id=ContributionId(self.name, 0, self.connection.client.hello.incarnation, self.num_offered),
            base_version=heads.heads[0].version,
            blob=blob_of(payload),
            codec="fp32",
            tokens=100,
            steps=10,
            seconds=1.0,
            norms=(1.0,),
        )
        return contribution, Offer(contribution=contribution)

    def contribute(self, payload: bytes) -> str:
        """What becomes of one contribution."""
        contribution, offer = self.offer(payload)
        assert isinstance(self.asking(self.connection, offer, payload), Accepted)
        while (row := self.row()).id != contribution.id or row.state == "pending":
            self.connection.poll(0.02)
        return row.state

    def row(self) -> Row:
        heads = self.asking(self.connection, AskHeads())
        assert isinstance(heads, Heads)
        return heads.rows[0]


@pytest.fixture
def come(house: House, asking: Callable[..., Message], waiting: Any) -> Callable[..., Scripted]:
    return lambda key, name: Scripted(house, key, name, asking, waiting)


def test_a_learner_that_the_outer_rejects_is_shut_out_until_it_is_pardoned_and_the_others_go_on(
    house: House, come: Callable[..., Scripted], waiting: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    honest = [come(name, name) for name in HONEST]
    honest[0].initialise()
    bad = come("service", BAD)
    house.begin("outer", "--broker", house.address, "--key", house.key("outer"), "--id", "outer")
    assert [bad.contribute(nonsense()) for _ in range(3)] == ["rejected"] * 3
    payload = encode("fp32", delta(9))
    bad.connection.ask(bad.offer(payload)[1], payload)
    refused = waiting(
        bad.connection, Refused | Answered, lambda news: not isinstance(getattr(news, "reply", None), Heads)
    )
    assert isinstance(refused, Refused)
    assert refused.code == "quarantined"
    assert f"3 contributions of learner {BAD} in a row were rejected" in refused.text
    assert "is not finite" in refused.text
    again = house.knock("service", "worker", BAD)
    assert waiting(again, Refused).code == "quarantined", "starting anew does not help"
    for number, one in enumerate(honest):
        assert one.contribute(encode("fp32", delta(number))) == "merged"
    warned = {(one.name, one.subject) for one in house.status().warnings}
    assert ("learner.quarantined", BAD) in warned
    reach = ("--broker", house.address, "--key", str(house.key("admin")))
    assert isles(["pardon", BAD, *reach]) == 0
    assert f"{BAD} is welcome again" in capsys.readouterr().out
    better = come("service", BAD)
    assert better.contribute(payload) == "merged"
    assert [said["learner"] for said in house.events("learner.quarantined")] == [BAD]
    assert house.status().totals.rejected == 3
