"""A session whose interval follows its learner's speed."""

from __future__ import annotations

import random
from typing import Any

from isles.workers.session import PaceTold, PayloadEncoded, Session, TakeAccount


def steps_between_contributions(kit: Any, session: Session, num_steps: int) -> list[int]:
    """Steps from one contribution to the next, each of which is merged at once."""
    taken, since = [], 0
    for _ in range(num_steps):
        since += 1
        for one in kit.take_step(session):
            if isinstance(one, TakeAccount):
                session.handle(PayloadEncoded(one.id), 0.0)
                taken.append(since)
                since = 0
                kit.arrive(session, (session.versions[0]) + 1, kit.row_of(one.id, "merged", session.versions[0] + 1))
    return taken


def test_a_fast_learner_takes_more_steps_and_a_slow_one_fewer(kit: Any) -> None:
    for own, wanted in ((0.5, 8), (1.0, 4), (2.0, 2), (100.0, 1), (1e-9, 32)):
        session = kit.make_started(has_dynamic_interval=True)
        session.handle(PaceTold(1.0, own), 0.0)
        assert steps_between_contributions(kit, session, 100)[1:3] == [wanted, wanted]


def test_without_the_setting_a_pace_changes_nothing(kit: Any) -> None:
    session = kit.make_started()
    session.handle(PaceTold(1.0, 0.1), 0.0)
    assert steps_between_contributions(kit, session, 20) == [4, 4, 4, 4, 4]


def test_a_learner_that_slows_down_is_due_at_once(kit: Any) -> None:
    session = kit.make_started(interval_steps=100, has_dynamic_interval=True)
    for _ in range(60):
        assert not kit.accounts(kit.take_step(session))
    session.handle(PaceTold(1.0, 2.0), 0.0)
    assert kit.accounts(kit.take_step(session)) == [0]


def test_a_pace_that_is_lost_leaves_the_interval_of_the_run(kit: Any) -> None:
    session = kit.make_started(has_dynamic_interval=True)
    session.handle(PaceTold(1.0, 0.5), 0.0)
    session.handle(PaceTold(0.0, 0.5), 0.0)
    assert session.interval_steps == 4


def test_learners_of_unequal_speed_contribute_at_about_the_same_times(kit: Any) -> None:
    """Seeded speeds: over a long time each contributes as often as the others, to within a tenth."""
    chance = random.Random(7)
    speeds = [chance.uniform(0.5, 2.0) for _ in range(7)]
    typical = sorted(speeds)[3]
    counts = []
    for own in speeds:
        session = kit.make_started(interval_steps=40, has_dynamic_interval=True)
        for _ in range(10):
            session.handle(PaceTold(typical * chance.uniform(0.98, 1.02), own), 0.0)
        counts.append(len(steps_between_contributions(kit, session, round(2000 / own))))
    assert max(counts) <= 1.1 * min(counts)
