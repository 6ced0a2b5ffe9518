"""What a run takes: the published figures, and that what is called enough is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.ops.plan.arithmetic import (
    Process,
    data_parallel_gbit,
    decoupled_gbit,
    egress_dollars,
    fragment_seconds,
    loads,
    needs,
    others,
    processes,
    published_gbit,
)
from isles.ops.plan.settings import PUBLISHED_GBIT, PlanSettings


def settings(**given: object) -> PlanSettings:
    return PlanSettings.model_validate(given)


def process(name: str, **given: object) -> Process:
    return next(one for one in processes(settings(**given)) if one.name == name)


def test_the_published_pair_comes_out_of_the_published_case() -> None:
    found = settings()
    assert (round(data_parallel_gbit(found)), round(published_gbit(found), 2)) == PUBLISHED_GBIT


def test_four_bits_without_scales_are_833_megabits() -> None:
    assert decoupled_gbit(5e9, 4, 24, 1.0) == pytest.approx(0.8333, abs=1e-4)


def test_one_site_sums_up_nothing_and_more_sites_ever_more() -> None:
    rates = [data_parallel_gbit(settings(sites=count)) for count in (1, 2, 8, 100)]
    assert rates[0] == 0
    assert rates == sorted(rates)
    assert rates[3] < 2 * rates[1]


def test_the_broker_carries_what_all_sites_carry_together() -> None:
    up, down, arriving, leaving = loads(settings(sites=5, bits_up=2.0, bits_down=3.0))
    assert arriving.gbit == pytest.approx(5 * up.gbit)
    assert leaving.gbit == pytest.approx(5 * down.gbit)
    assert down.gbit == pytest.approx(1.5 * up.gbit)
    assert leaving.gigabytes(1) == pytest.approx(down.gigabytes(1))


def test_what_leaves_a_site_is_paid_once() -> None:
    found = settings(sites=4, bits_up=2.0, bits_down=2.0, days=10, egress_dollars_per_gb=0.1)
    sent = 4 * 2 * 5e9 * 2 / 8 / 1e9 / 24 * 86_400 * 10
    assert egress_dollars(loads(found), found) == pytest.approx(0.1 * sent)


def test_data_parallel_training_costs_more_than_the_published_method_and_that_more_than_ours() -> None:
    found = settings()
    wanted, mean, published = others(found)
    assert wanted.gbit > mean.gbit > 100 * published.gbit
    assert published.gbit > loads(found)[0].gbit


sizes = st.fixed_dictionaries(
    {
        "parameters": st.integers(10**6, 10**12),
        "sites": st.integers(1, 64),
        "interval_steps": st.integers(1, 500),
        "num_fragments": st.integers(1, 64),
        "up_gbit": st.floats(0.01, 100),
        "down_gbit": st.floats(0.01, 100),
        "broker_gbit": st.floats(0.01, 400),
        "utilisation_max": st.floats(0.05, 1.0),
        "overlap_steps": st.floats(0, 20),
    }
)


@given(sizes)
def test_the_h_that_is_called_enough_keeps_every_link_below_the_target_and_one_less_does_not(
    given_sizes: dict[str, object],
) -> None:
    found = settings(**given_sizes)
    interval = needs(found).interval_steps

    def fullest(steps: int) -> float:
        return max(load.utilisation for load in loads(found.model_copy(update={"interval_steps": steps})))

    assert fullest(interval) <= found.utilisation_max * (1 + 1e-6)
    if interval > 1:
        assert fullest(interval - 1) > found.utilisation_max * (1 - 1e-6)


@given(sizes)
def test_the_p_that_is_called_enough_brings_a_fragment_up_and_down_in_time(given_sizes: dict[str, object]) -> None:
    found = settings(**given_sizes)
    needed = needs(found)
    if needed.num_fragments is None:
        assert needed.budget_seconds <= found.round_trip_seconds
    else:
        assert fragment_seconds(found, needed.num_fragments) <= needed.budget_seconds * (1 + 1e-6)


def test_a_learner_keeps_anchors_and_residuals_only_where_the_rule_has_them() -> None:
    rebase, blend = (process("learner", apply_rule=rule).memory_bytes for rule in ("rebase", "blend"))
    assert blend - rebase == 4 * 5e9


def test_the_outer_keeps_on_disk_what_its_cache_does_not_hold() -> None:
    small = process("outer", parameters=10**8)
    large = process("outer", parameters=10**10)
    assert small.disk_bytes == 0
    assert large.disk_bytes == 12 * 10**10 - (4 << 30)


def test_the_store_holds_more_for_more_sites_and_rarer_checkpoints() -> None:
    few = process("broker", parameters=10**9, checkpoint_versions=2).disk_bytes
    more = process("broker", parameters=10**9, checkpoint_versions=8).disk_bytes
    most = process("broker", parameters=10**9, checkpoint_versions=8, sites=16).disk_bytes
    assert 28e9 < few < more < most


def test_the_outer_s_load_falls_with_h_and_does_not_depend_on_p() -> None:
    base = needs(settings()).outer_cores
    assert needs(settings(interval_steps=48)).outer_cores == pytest.approx(base / 2)
    assert needs(settings(num_fragments=12)).outer_cores == pytest.approx(base)
