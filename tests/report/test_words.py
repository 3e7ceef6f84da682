from __future__ import annotations

import math

import pytest

from shardwise.report import words


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0.0, "0"),
        (1309.4, "1,309"),
        (99.96, "100"),
        (86.71, "86.7"),
        (80.0, "80"),
        (1.5, "1.50"),
        (0.01234, "0.0123"),
        (-2.5, "-2.50"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_three_digits_that_mean_something(value, said):
    assert words.number(value) == said


def test_units():
    assert words.size(60 * 2**20) == "60 MiB"
    assert words.size(1.5 * 2**30) == "1.50 GiB"
    assert words.size(12) == "12 bytes"
    assert words.seconds(0.8125) == "812 ms"
    assert words.seconds(1.234) == "1.23 s"
    assert words.scientific(4.76837158203125e-07) == "4.8×10⁻⁷"
    assert words.scientific(0.0) == "0"
    assert words.percent(-0.08) == "−8 %"
    assert words.span((950.0, 1040.0)) == "950 – 1,040"


def test_facts_have_short_commits():
    assert words.fact("a6c3927431294aa8a1ccd9683d4de76d40c11f65+changes") == "a6c3927431+changes"
    assert words.fact(None) == "–"
    assert words.fact(2) == "2"


def test_a_name_is_one_printable_line():
    assert words.printable("a\nb\x07c") == "a b c"
    assert words.printable("x" * 99) == "x" * 59 + "…"
