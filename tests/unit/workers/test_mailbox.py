"""What the courier leaves for the training thread: nothing of it grows while that one is slow."""

from __future__ import annotations

import torch

from isles.proto.errors import RefusedError
from isles.proto.ids import ContributionId
from isles.proto.messages import Accepted
from isles.workers.mailbox import Arrival, Mailbox
from isles.workers.orders import Cued, PayloadEncoded, VersionArrived

ID = ContributionId("us-0", 0, "aaaaaaaa", 1)


def test_a_mailbox_keeps_one_version_and_one_cue_of_a_fragment_however_many_come() -> None:
    mailbox = Mailbox()
    for version in range(100):
        mailbox.arrive(Arrival(VersionArrived(0, version, None), torch.zeros(1), None))
        mailbox.cue(Cued(0, version))
    facts, arrivals = mailbox.take()
    assert facts == [Cued(0, 99)]
    assert [arrival.event.version for arrival in arrivals] == [99]
    assert mailbox.take() == ([], [])


def test_a_mailbox_keeps_facts_in_order_and_the_first_failure() -> None:
    mailbox = Mailbox()
    mailbox.post(PayloadEncoded(ID))
    mailbox.post(Accepted(id=ID))
    assert mailbox.wait(0.0)
    assert mailbox.take()[0] == [PayloadEncoded(ID), Accepted(id=ID)]
    assert not mailbox.wait(0.0)
    mailbox.fail(RefusedError("first"))
    mailbox.fail(RefusedError("second"))
    assert mailbox.wait(0.0)
    assert str(mailbox.failure) == "first"
