"""The budget of payloads that wait for their merge."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isles.outer.payload_cache import PayloadCache
from isles.proto.ids import ContributionId


def id_of(number: int) -> ContributionId:
    return ContributionId("a", 0, "ab" * 8, number)


def test_what_fits_is_kept_until_it_is_dropped() -> None:
    cache = PayloadCache(10)
    assert cache.put(id_of(1), b"12345678")
    assert not cache.put(id_of(2), b"123")
    assert cache.get(id_of(1)) == b"12345678"
    assert cache.get(id_of(2)) is None
    cache.drop(id_of(1))
    assert cache.put(id_of(2), b"123")


def test_a_budget_of_nothing_keeps_nothing() -> None:
    cache = PayloadCache(0)
    assert not cache.put(id_of(1), b"1")
    assert cache.bytes_held == 0


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8), st.booleans()), max_size=60))
def test_the_account_is_exact_and_never_above_the_budget(steps: list[tuple[int, int, bool]]) -> None:
    cache = PayloadCache(16)
    known: dict[int, int] = {}
    for number, size, is_put in steps:
        known.pop(number, None)
        if not is_put:
            cache.drop(id_of(number))
        elif cache.put(id_of(number), bytes(size)):
            known[number] = size
        assert cache.bytes_held == sum(known.values()) <= 16
        assert all(len(cache.get(id_of(number)) or b"") == size for number, size in known.items())
