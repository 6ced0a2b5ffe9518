"""A region with keys: who is let in, who is cut off, and what a relay cannot do."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from isles.proto.client import Refused
from isles.proto.messages import Accepted, Offer, pack, unpack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]
PAYLOAD = b"a delta " * 50_000


def keep(region: Any, worker: Any, offer: Any) -> None:
    """Has the relay take an offer while its link is cut."""
    region.cut()
    worker.connection.ask(offer, PAYLOAD)
    worker.poll_until(lambda: bool(region.relay.logs.of("contribution.kept")), "the relay keeping the contribution")


def test_with_keys_everything_passes_as_without_and_belongs_to_its_makers_key(
    make_region: Any, initialise: Any, offer_of: Any
) -> None:
    region = make_region(has_keys=True)
    worker = region.worker()
    initialise(worker)
    assert isinstance(worker.ask(offer_of(worker, PAYLOAD), PAYLOAD), Accepted)
    status = region.at_home().status()
    assert [(one.learner, one.is_live) for one in status.learners] == [("us-1", True)]
    assert [one.relay for one in status.relays] == ["relay"]


def strand(region: Any, initialise: Any, offer_of: Any) -> None:
    """Leaves an offer on the disk of a relay that was killed, and whose learner is gone."""
    worker = region.worker()
    initialise(worker)
    keep(region, worker, offer_of(worker, PAYLOAD))
    worker.close()
    region.relay.end(signal.SIGKILL)


def test_a_relay_that_changes_what_an_offer_says_is_refused_by_the_home_broker(
    make_region: Any, initialise: Any, offer_of: Any
) -> None:
    region = make_region(has_keys=True)
    strand(region, initialise, offer_of)
    [path] = (region.relay.store / "offers").iterdir()
    offer = unpack(path.read_bytes())
    assert isinstance(offer, Offer)
    path.write_bytes(pack(offer.changed(contribution=offer.contribution.changed(tokens=1_000_000))))
    region.heal()
    region.relay.start()
    region.relay.logs.wait_for("contribution.forwarded", answer="broken-rule")
    assert region.home.logs.of("contribution.accepted") == []


def test_an_offer_that_nobody_changed_is_taken_from_a_relay_that_was_killed(
    make_region: Any, initialise: Any, offer_of: Any
) -> None:
    region = make_region(has_keys=True)
    strand(region, initialise, offer_of)
    region.heal()
    region.relay.start()
    region.home.logs.wait_for("contribution.accepted", learner="us-1")


def test_a_worker_whose_key_is_revoked_is_cut_at_the_relay_and_at_home(
    make_region: Any, initialise: Any, offer_of: Any
) -> None:
    region = make_region(has_keys=True)
    worker = region.worker()
    initialise(worker)
    other = region.worker("us-2", incarnation="b2" * 8)
    region.keys.revoke("us-1")
    worker.wait_for(lambda news: isinstance(news, Refused) and news.code == "denied")
    region.home.logs.wait_for("client.revoked", id="us-1")
    region.relay.logs.wait_for("client.revoked", id="us-1")
    assert isinstance(other.ask(offer_of(other, PAYLOAD), PAYLOAD), Accepted)


def test_what_a_worker_left_at_the_relay_before_its_key_was_revoked_is_refused(
    make_region: Any, initialise: Any, offer_of: Any
) -> None:
    region = make_region(has_keys=True)
    worker = region.worker()
    initialise(worker)
    keep(region, worker, offer_of(worker, PAYLOAD))
    region.keys.revoke("us-1")
    region.home.logs.wait_for("keys.changed", num=2)
    region.heal()
    region.relay.logs.wait_for("contribution.forwarded", answer="broken-rule")
    assert region.home.logs.of("contribution.accepted") == []


def test_a_relay_whose_key_is_revoked_ends(make_region: Any, initialise: Any) -> None:
    region = make_region(has_keys=True)
    initialise(region.worker())
    region.keys.revoke("relay")
    assert region.relay.process.wait(90.0) == 3
    region.relay.logs.close()
