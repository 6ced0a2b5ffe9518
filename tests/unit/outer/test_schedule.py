"""The outer learning rate over a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.outer.schedule import WARMUP_START_SHARE, fragment_progress, outer_rate
from isles.proto.agreement import Budget, OuterSchedule, SyncSettings
from isles.proto.messages import VersionInfo


def sync_of(schedule: OuterSchedule, warmup: float = 0.0, final: float = 0.1, rate: float = 0.7) -> SyncSettings:
    return SyncSettings(
        outer_schedule=schedule, outer_warmup_share=warmup, outer_final_share=final, outer_learning_rate=rate
    )


def reference(schedule: str, warmup: float, final: float, rate: float, progress: float) -> float:
    """The same in other words: interpolation between the corners, the cosine as a phase."""
    if progress < warmup:
        return rate * (0.1 * (warmup - progress) + progress) / warmup
    if schedule == "constant":
        return rate
    phase = (progress - warmup) / (1 - warmup)
    weight = phase if schedule == "linear" else math.sin(phase * math.pi / 2) ** 2
    return rate * ((1 - weight) + weight * final)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.just(0.0) | st.floats(1e-6, 0.9),
    final=st.floats(0, 1),
    rate=st.floats(1e-3, 10),
    progress=st.floats(0, 1),
)
def test_a_rate_is_what_the_reference_says(
    schedule: OuterSchedule, warmup: float, final: float, rate: float, progress: float
) -> None:
    found = outer_rate(sync_of(schedule, warmup, final, rate), progress)
    assert (rate if found is None else found) == pytest.approx(
        reference(schedule, warmup, final, rate, progress), rel=1e-9, abs=1e-12
    )


def test_the_default_is_the_constant_rate_of_the_settings() -> None:
    assert [outer_rate(SyncSettings(), progress) for progress in (0.0, 0.5, 1.0)] == [None, None, None]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_begins_at_the_rate_and_ends_at_its_final_share(schedule: OuterSchedule) -> None:
    sync = sync_of(schedule, final=0.25)
    assert outer_rate(sync, 0.0) == pytest.approx(0.7)
    assert outer_rate(sync, 1.0) == pytest.approx(0.175)


def test_the_first_step_of_a_warm_up_is_not_zero() -> None:
    assert outer_rate(sync_of("constant", warmup=0.1), 0.0) == pytest.approx(0.7 * WARMUP_START_SHARE)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_the_warm_up_a_rate_only_falls(schedule: OuterSchedule) -> None:
    sync = sync_of(schedule, warmup=0.2)
    rates = [outer_rate(sync, progress / 100) or 0.0 for progress in range(20, 101)]
    assert rates == sorted(rates, reverse=True)


def test_progress_is_that_of_the_fragments_own_head() -> None:
    head = VersionInfo(fragment=0, version=6, parameters_sha256="0" * 64, tokens_total=400)
    assert fragment_progress(head, Budget(tokens=1000), num_fragments=4) == 0.4
    assert fragment_progress(head, Budget(rounds=48), num_fragments=4) == 0.5
    assert fragment_progress(head, Budget(rounds=10), num_fragments=4) == 1.0
