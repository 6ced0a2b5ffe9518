"""The global parameters as an onlooker fetches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isles.proto.codec.torch_codec import encode
from isles.proto.errors import ManifestMismatchError, PayloadError, UnreachableError
from isles.proto.messages import (
    AskVersion,
    BlobRef,
    Fetch,
    VersionReply,
)
from isles.workers.parameters import GlobalParameters, ParameterFetcher


def fetcher(broker: Any, timeout_seconds: float = 60.0) -> ParameterFetcher:
    assert broker.record is not None
    return ParameterFetcher(
        broker.connection(), broker.record, address="memory", timeout_seconds=timeout_seconds, clock=broker.clock
    )


def is_same(held: GlobalParameters, broker: Any) -> bool:
    return all(torch.equal(held.fragments[fragment].values, values) for fragment, values in broker.values.items())


def test_the_newest_parameters_are_a_snapshot_for_who_has_nothing(broker: Any) -> None:
    broker.publish(1, torch.ones(12), tokens=40)
    held = fetcher(broker).newest()
    assert held.versions == {0: 0, 1: 1}
    assert held.tokens == 20.0
    assert is_same(held, broker)


def test_who_holds_a_version_is_brought_forward_by_updates_to_the_same_bits(broker: Any) -> None:
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


def test_a_checkpoint_is_brought_forward_by_the_updates_after_it(broker: Any) -> None:
    for step in range(3):
        broker.publish(0, torch.randn(15, generator=torch.Generator().manual_seed(step)))
    broker.checkpoint = 1
    held = fetcher(broker).newest()
    assert held.versions == {0: 3, 1: 0}
    assert is_same(held, broker)
    assert sum(isinstance(message, Fetch) for message in broker.asked) == 4


def test_when_a_checkpoint_cannot_be_had_the_way_from_what_is_held_is_tried_again(broker: Any) -> None:
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


def test_updates_that_lead_elsewhere_are_replaced_by_a_snapshot(broker: Any) -> None:
    source = fetcher(broker)
    held = source.newest()
    broker.publish(0, torch.ones(15))
    update = broker.versions[0][-1].update
    assert update is not None
    wrong = broker.keep(encode("int4", torch.ones(15)))
    broker.versions[0][-1] = broker.versions[0][-1].model_copy(update={"update": wrong})
    assert is_same(source.newest(held), broker)
    assert [ask.base_version for ask in broker.asked if isinstance(ask, AskVersion)][-2:] == [None, 0]


def test_parameters_that_are_not_what_their_digest_says_are_refused(broker: Any) -> None:
    broker.versions[1][0] = broker.versions[1][0].model_copy(update={"parameters_sha256": "0" * 64})
    with pytest.raises(PayloadError, match="not those that the outer made"):
        fetcher(broker).newest()
    assert broker.count(AskVersion) < 20


def test_a_blob_larger_than_its_fragment_can_be_is_not_fetched(broker: Any) -> None:
    huge = BlobRef(digest="f" * 64, size_bytes=1 << 40)
    broker.versions[0][0] = broker.versions[0][0].model_copy(update={"parameters": huge})
    with pytest.raises(PayloadError, match="at most"):
        fetcher(broker).newest()
    assert broker.count(Fetch) == 0


def test_a_broker_that_says_nothing_is_given_up_after_the_timeout(broker: Any) -> None:
    source = fetcher(broker, timeout_seconds=20.0)
    broker.is_silent = True
    before = broker.clock.now()
    with pytest.raises(UnreachableError):
        source.newest()
    assert broker.clock.now() - before < 40.0


def test_version_0_can_always_be_had(broker: Any) -> None:
    first = fetcher(broker).newest()
    broker.publish(0, torch.ones(15))
    again = fetcher(broker).first()
    assert again.versions == {0: 0, 1: 0}
    assert all(torch.equal(again.fragments[n].values, first.fragments[n].values) for n in (0, 1))


def test_tensors_have_the_models_names_with_ties_under_each_of_theirs(broker: Any) -> None:
    held = fetcher(broker).newest()
    model = broker.new_model()
    held.load_into(model)
    tensors = held.tensors()
    assert tensors.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, tensors[name])
    assert torch.equal(tensors["first.weight"], tensors["third.weight"])


def test_parameters_are_not_loaded_into_another_model(broker: Any) -> None:
    held = fetcher(broker).newest()
    with pytest.raises(ManifestMismatchError, match="no such tensor"):
        held.load_into(nn.Linear(3, 4))
