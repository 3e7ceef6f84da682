from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.base import words

SOURCE = Path(words.__file__).parents[1]


@pytest.mark.parametrize(
    ("value", "text"),
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
def test_numbers_have_three_significant_digits(value, text):
    assert words.number(value) == text


def test_units():
    assert words.size(60 * 2**20) == "60 MiB"
    assert words.size(1.5 * 2**30) == "1.50 GiB"
    assert words.size(12) == "12 bytes"
    assert words.seconds(0.8125) == "812 ms"
    assert words.seconds(1.234) == "1.23 s"
    assert words.seconds(0.000012) == "12 µs"
    assert words.scientific(4.76837158203125e-07) == "4.8e-07"
    assert words.scientific(0.0) == "0"
    assert words.scientific(math.nan) == "nan"
    assert words.ratio(1.506) == "1.51×"
    assert words.percent(-0.08) == "-8%"
    assert words.percent(0.1234, 1) == "12.3%"
    assert words.span((950.0, 1040.0)) == "950 – 1,040"


@pytest.mark.parametrize(
    "write", [words.size, words.seconds, words.ratio, words.percent, words.span]
)
def test_what_was_not_measured_has_no_figure(write):
    assert write(None) == words.NOTHING


def test_durations():
    assert [words.duration(seconds) for seconds in (0.4, 59.4, 60, 200, 3900)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 20 s",
        "1 h 05 min",
    ]


def test_counts_and_lists():
    assert [words.counted(count, "round") for count in (0, 1, 2)] == [
        "0 rounds",
        "1 round",
        "2 rounds",
    ]
    assert [words.listed("abcdef"[:length]) for length in (0, 1, 2, 4, 6)] == [
        "",
        "a",
        "a and b",
        "a, b, c and d",
        "a, b, c and 3 more",
    ]
    assert words.listed("abcdef", most=6) == "a, b, c, d, e and f"


def test_one_line():
    assert words.one_line("a\nb\x07c") == "a b c"
    assert words.one_line("x" * 70 + "1") == "x" * 29 + "…" + "x" * 29 + "1"
    assert words.one_line("y" * 60) == "y" * 60


def names_in(path: Path) -> Iterator[str]:
    """Names that a file gives to functions, classes, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_a_name_says_content():
    """A gradient of x is `grad_x`; nothing is `of_x`."""
    named = {path: [*names_in(path)] for path in SOURCE.rglob("*.py")}
    assert sum("grad_out" in names for names in named.values()) > 10
    assert {name for names in named.values() for name in names if name.startswith("of_")} == set()


def test_no_two_classes_share_a_name():
    trees = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    counts = Counter(node.name for node in classes)
    assert counts["ParallelModel"] == 1
    assert [name for name, count in counts.items() if count > 1] == []
