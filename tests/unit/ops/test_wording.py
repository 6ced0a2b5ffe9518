"""Numbers are written as a person reads them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.ops.wording import (
    BARS,
    amount,
    bytes_text,
    counted,
    fragments_text,
    percent,
    rate,
    seconds_text,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (12_345, "12,345"),
        (123_456, "123 k"),
        (1_234_567, "1.23 M"),
        (5e9, "5.00 G"),
        (2e12, "2.00 T"),
    ],
)
def test_an_amount_has_few_digits_and_a_unit(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_110_000, "2.11 MB"), (3e9, "3 GB"), (5e15, "5000 TB")],
)
def test_bytes_have_decimal_units(value: float, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0 %"), (0.5, "50.0 %"), (0.9996, "99.9 %"), (0.99999, "99.9 %"), (1.0, "100 %")]
)
def test_only_all_is_a_hundred_percent(value: float, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"),
        (4.2, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (185, "3 min 05 s"),
        (7_800, "2 h 10 min"),
        (270_000, "3 d 3 h"),
    ],
)
def test_a_duration_has_two_units_at_most(value: float, text: str) -> None:
    assert seconds_text(value) == text


def test_one_thing_is_not_many() -> None:
    texts = [counted(number, "round") for number in (0, 1, 2, 12_345)]
    assert texts == ["0 rounds", "1 round", "2 rounds", "12,345 rounds"]


def test_a_rate_has_three_digits_or_is_whole() -> None:
    assert (rate(0), rate(1.2345), rate(99.94), rate(12_345.6)) == ("0", "1.23", "99.9", "12,346")


def test_a_line_of_bars_goes_from_the_highest_to_the_lowest() -> None:
    assert sparkline([5.0, 1.0], 10) == BARS[-1] + BARS[0]
    assert sparkline([], 10) == ""
    assert sparkline([2.0, 2.0], 10) == BARS[0] * 2


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(1, 40))
def test_a_line_of_bars_is_as_wide_as_asked_or_as_there_are_values(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS)


def test_a_reader_who_left_does_not_end_what_is_printed_for_him() -> None:
    program = (
        "import sys; from isles.ops.wording import make_console; console = make_console(); "
        "[console.print('line') for _ in range(3)]; sys.stderr.write('went on')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-P", "-c", program], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.stderr, done.returncode) == (b"went on", 0)


def test_fragments_are_counted_without_the_one_of_buffers() -> None:
    assert fragments_text(1, has_buffers=False) == "1 fragment"
    assert fragments_text(4, has_buffers=True) == "4 fragments and buffers"
