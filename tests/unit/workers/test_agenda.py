"""When the evaluator evaluates: a function of versions and time."""

from __future__ import annotations

from isles.workers.evaluator import Agenda


def agenda(**settings: float) -> Agenda:
    return Agenda(**{"every_cycles": 1, "every_seconds_min": 5.0, "quiet_seconds": 3.0, **settings})  # type: ignore[arg-type]


def test_an_evaluation_is_due_once_every_fragment_has_advanced() -> None:
    one = agenda()
    one.note_evaluated({0: 4, 1: 4}, begun_at=0.0)
    one.see({0: 7, 1: 4}, now=10.0)
    assert one.is_behind
    assert not one.is_due(10.0, is_finished=False)
    one.see({0: 7, 1: 5}, now=11.0)
    assert one.is_due(11.0, is_finished=False)
    assert not agenda(every_cycles=2).is_due(11.0, is_finished=False)


def test_evaluations_begin_no_more_often_than_the_setting_says() -> None:
    one = agenda()
    one.note_evaluated({0: 4}, begun_at=10.0)
    one.see({0: 5}, now=11.0)
    assert not one.is_due(14.9, is_finished=False)
    assert one.is_due(15.0, is_finished=False)


def test_a_finished_run_is_evaluated_once_more_when_nothing_follows() -> None:
    one = agenda()
    one.note_evaluated({0: 4, 1: 4}, begun_at=0.0)
    one.see({0: 5, 1: 4}, now=10.0)
    one.see({0: 5, 1: 4}, now=12.0)
    assert not one.is_due(12.9, is_finished=True)
    assert one.is_due(13.0, is_finished=True)
    one.note_evaluated({0: 5, 1: 4}, begun_at=13.0)
    assert not one.is_due(100.0, is_finished=True)


def test_buffers_that_never_change_do_not_hold_an_evaluation_up_and_newer_ones_are_not_forgotten() -> None:
    one = agenda(num_fragments=2)
    one.note_evaluated({0: 4, 1: 4, 2: 0}, begun_at=0.0)
    one.see({0: 5, 1: 5, 2: 0}, now=10.0)
    assert one.is_due(10.0, is_finished=False)
    one.note_evaluated({0: 5, 1: 5, 2: 0}, begun_at=10.0)
    one.see({0: 5, 1: 5, 2: 1}, now=11.0)
    assert one.is_behind
    assert one.is_due(20.0, is_finished=True)
