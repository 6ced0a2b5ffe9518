"""The account against its own definition, in exact fractions and in float64."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isles.proto.agreement import ApplyRule, Books, SyncSettings
from isles.workers.account import Account, Add, Replace

RULES: tuple[ApplyRule, ...] = ("rebase", "overwrite", "blend", "hybrid")
EXACT = st.integers(-1000, 1000).map(Fraction)
EVENTS = st.lists(st.tuples(st.sampled_from(["step", "apply", "apply own", "reset"]), EXACT), max_size=30)


class Exact:
    """One exact value; the smallest vector there is."""

    def __init__(self, value: Fraction) -> None:
        self.value = value

    def __add__(self, other: Exact) -> Exact:
        return Exact(self.value + other.value)

    def __sub__(self, other: Exact) -> Exact:
        return Exact(self.value - other.value)

    def __mul__(self, factor: float) -> Exact:
        return Exact(self.value * Fraction(factor))


def reference_theta(rule: ApplyRule, theta: Fraction, theta_w: Fraction, unmerged: Fraction, is_own: bool) -> Fraction:
    """The live parameters after a version, as the rules are stated; `unmerged` is U after the subtraction."""
    if rule == "overwrite":
        return theta_w
    if rule == "blend" or (rule == "hybrid" and is_own):
        return theta / 2 + theta_w / 2
    return theta_w - unmerged


@pytest.mark.parametrize("rule", RULES)
@given(events=EVENTS)
def test_with_exact_books_the_account_is_always_all_work_that_was_not_merged(
    rule: ApplyRule, events: list[tuple[str, Fraction]]
) -> None:
    theta, account = Exact(Fraction(0)), Account(Exact(Fraction(0)), rule=rule)
    unmerged = Fraction(0)
    for event, value in events:
        if event == "step":
            theta = theta - Exact(value)
            unmerged += value
        elif event == "reset":
            theta = account.reset(Exact(value)).of(theta)
            unmerged = Fraction(0)
        else:
            decoded = Exact(account.contribution(theta).value // 2) if event == "apply own" else None
            unmerged -= decoded.value if decoded else 0
            expected = reference_theta(rule, theta.value, value, unmerged, decoded is not None)
            theta = account.apply(Exact(value), decoded, lambda now=theta: now).of(theta)
            assert theta.value == expected
            assert account.anchor.value == value
        assert account.contribution(theta).value == unmerged


@given(events=EVENTS)
def test_rebase_never_has_a_residual(events: list[tuple[str, Fraction]]) -> None:
    theta, account = Exact(Fraction(0)), Account(Exact(Fraction(0)))
    for event, value in events:
        if event == "step":
            theta = theta + Exact(value)
        elif event.startswith("apply"):
            decoded = Exact(Fraction(1)) if event == "apply own" else None
            theta = account.apply(Exact(value), decoded, lambda now=theta: now).of(theta)
        assert account.residual is None


def test_what_rebase_adds_does_not_depend_on_the_live_parameters() -> None:
    def refuse() -> Exact:
        raise AssertionError("the live parameters were read")

    for decoded in (None, Exact(Fraction(3))):
        change = Account(Exact(Fraction(1))).apply(Exact(Fraction(5)), decoded, refuse)
        assert isinstance(change, Add)


def test_hybrid_blends_what_contains_the_own_work_and_rebases_on_everything_else() -> None:
    account = Account(Exact(Fraction(0)), rule="hybrid")
    assert isinstance(account.apply(Exact(Fraction(1)), None, lambda: Exact(Fraction(9))), Add)
    assert isinstance(account.apply(Exact(Fraction(2)), Exact(Fraction(1)), lambda: Exact(Fraction(9))), Replace)


@pytest.mark.parametrize("rule", RULES)
def test_published_books_never_have_a_residual(rule: ApplyRule) -> None:
    account = Account(Exact(Fraction(0)), rule=rule, books="published")
    theta = Exact(Fraction(-8))
    theta = account.apply(Exact(Fraction(4)), Exact(Fraction(6)), lambda: theta).of(theta)
    assert account.residual is None
    kept = {"rebase": Fraction(2), "overwrite": Fraction(0), "blend": Fraction(6), "hybrid": Fraction(6)}
    assert account.contribution(theta).value == kept[rule]


def test_a_reset_without_a_newer_version_goes_back_to_the_anchor() -> None:
    account = Account(Exact(Fraction(7)), Exact(Fraction(2)), rule="blend")
    assert account.reset().of(Exact(Fraction(99))).value == 7
    assert account.residual is None


@pytest.mark.parametrize("before", RULES)
@pytest.mark.parametrize("after", RULES)
@given(numbers=st.lists(EXACT, min_size=5, max_size=5))
def test_an_account_that_goes_on_under_another_rule_keeps_its_work(
    before: ApplyRule, after: ApplyRule, numbers: list[Fraction]
) -> None:
    start, first, stepped, second, own = map(Exact, numbers)
    account = Account.under(SyncSettings(apply_rule=before), start)
    theta = account.apply(first, None, lambda: stepped).of(stepped)
    unmerged = account.contribution(theta)
    resumed = Account.under(SyncSettings(apply_rule=after), account.anchor, account.residual)
    assert resumed.contribution(theta).value == unmerged.value
    theta = resumed.apply(second, own, lambda: theta).of(theta)
    assert resumed.contribution(theta).value == (unmerged - own).value


def test_a_copy_of_an_account_is_a_snapshot() -> None:
    account = Account(Exact(Fraction(7)))
    snapshot = replace(account)
    account.apply(Exact(Fraction(9)), None, lambda: Exact(Fraction(0)))
    assert snapshot.contribution(Exact(Fraction(0))).value == 7


@pytest.mark.parametrize("books", ["exact", "published"])
@pytest.mark.parametrize("rule", RULES)
def test_tensors_in_single_precision_follow_a_float64_reference(rule: ApplyRule, books: Books) -> None:
    sync = SyncSettings(apply_rule=rule, books=books, blend_alpha=0.25)
    generator = torch.Generator().manual_seed(5)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(257, generator=generator) * scale

    start = draw(1.0)
    single, double = Account.under(sync, start), Account.under(sync, start.double())
    theta, theta_double = start.clone(), start.double()
    for index in range(40):
        work = draw(0.01)
        theta, theta_double = theta - work, theta_double - work.double()
        if index % 3 == 2:
            theta_w = double.anchor - draw(0.01).double()
            decoded = (double.contribution(theta_double) * 0.9).float() if index % 2 else None
            wide = None if decoded is None else decoded.double()
            change = single.apply(theta_w.float(), decoded, lambda now=theta: now)
            theta = change.of(theta)
            theta_double = double.apply(theta_w, wide, lambda now=theta_double: now).of(theta_double)
    assert theta.dtype == torch.float32
    torch.testing.assert_close(theta.double(), theta_double, atol=2e-6, rtol=0)
    torch.testing.assert_close(
        single.contribution(theta).double(), double.contribution(theta_double), atol=4e-6, rtol=0
    )
