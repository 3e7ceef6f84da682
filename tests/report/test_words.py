from __future__ import annotations

import math

import pytest

from shardwise.records.cell import Axis, CellPlan, SweepRecord
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


def test_values_that_do_not_explain_themselves_name_their_axis():
    axes = (
        Axis("training.compile", ("none", "inductor"), ("training.compile",), True),
        Axis("precision", ("bfloat16", "float32"), ("training.precision",), True),
        Axis("strategy", ("ddp", "fsdp2"), ("parallel.data",), True),
        Axis("other", ("ddp", "x"), ("parallel.mesh",), True),
    )
    values = dict(zip((axis.name for axis in axes), ("inductor", "float32", "ddp", "x"), strict=True))
    plan = CellPlan("a", values, 1, "all", None)
    sweep = SweepRecord("t", axes, (plan,), {}, 3, 1.0, [])
    assert words.label_of(plan, sweep) == "compile inductor · float32 · strategy ddp · other x"


def test_what_is_too_long_keeps_both_its_ends():
    assert words.printable("x" * 70 + "1") == "x" * 29 + "…" + "x" * 29 + "1"
    assert words.printable("y" * 60) == "y" * 60
