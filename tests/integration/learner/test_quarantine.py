"""A learner whose work is rejected again and again: it ends, says why, and comes back when it may."""

from __future__ import annotations

from typing import Any

import pytest

from isles.proto.errors import QuarantinedError
from isles.proto.messages import Pardon

REASON = "too odd for this test"


def test_a_learner_that_is_quarantined_ends_with_one_sentence_until_it_is_pardoned(world: Any) -> None:
    def judge() -> bool:
        """Rejects whatever there is; there is never enough: the broker ends it."""
        if world.status().num_pending.get(0):
            world.reject_pending(0, REASON)
        return False

    with pytest.raises(QuarantinedError) as caught, world.make() as toy:
        toy.train_until(judge)
    text = str(caught.value)
    assert caught.value.exit_code == 9
    assert "3 contributions of learner us-0 in a row were rejected" in text
    assert REASON in text
    assert "isles pardon us-0" in text
    assert "\n" not in text
    with pytest.raises(QuarantinedError, match="isles pardon us-0"), world.make():
        pytest.fail("it is not let in")
    world.ask(Pardon(learner="us-0"))
    world.start_outer()
    with world.make() as toy:
        toy.train_to(2)
    assert world.status().totals.rejected == 3
