"""Turns, spreads and ratios of the programs that measure, and their result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.paired import Results, outside, ratios, spread, table, take_turns, turns


def test_every_second_round_is_reversed():
    assert list(turns(["a", "b"], 3)) == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_figures_are_those_of_the_rounds_after_the_warm_up():
    calls = []

    def run(number: int) -> dict[str, float]:
        calls.append(number)
        return {"wall": float(number), "loss": 1.0}

    values = take_turns({"ours": run, "torch": run}, rounds=2, warm_up=1)
    assert calls == [0, 0, 1, 1, 2, 2]
    assert values["wall"] == {"ours": [1.0, 2.0], "torch": [1.0, 2.0]}
    assert values["loss"] == {"ours": [1.0, 1.0], "torch": [1.0, 1.0]}


def test_ratios_are_of_the_same_round():
    result = ratios([3.0, 8.0, 10.0], [2.0, 4.0, 10.0])
    assert result["rounds"] == [1.5, 2.0, 1.0]
    assert (result["median"], result["interval"]) == (1.5, [1.0, 2.0])
    assert result["interval_holds_median"] == 1 - 2 / 8  # all three above it, or all below
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0, 2.0], [1.0])


def test_interval_of_a_median_by_order_statistics():
    # Of 5 values the median lies outside all of them with 2 / 2^5 = 6 %: no interval is sure
    # enough. Of 30, tables have the 10th and the 21st; of 100, the 40th and the 61st.
    assert [outside(number) for number in (1, 5, 30, 100)] == [0, 0, 9, 39]
    result = spread([float(value) for value in range(1, 31)])
    assert result["interval"] == [10.0, 21.0]
    assert 0.95 <= result["interval_holds_median"] < 0.96


def measured(path: Path, equal: dict[str, int], cases: dict[str, int]) -> tuple[list[str], Results]:
    """Return the cases that were measured; a case of 0 interrupts the program."""
    results, calls = Results(path, equal), []

    def measure(case: str) -> float:
        calls.append(case)
        return 1 / cases[case]

    for case in cases:
        results.add(case, lambda case=case: measure(case))
    results.write()
    return calls, results


def test_an_interrupted_program_resumes_and_a_complete_one_starts_from_scratch(tmp_path):
    path = tmp_path / "new" / "results.json"
    with pytest.raises(ZeroDivisionError):
        measured(path, {"rounds": 3}, {"a": 1, "b": 0})
    assert json.loads(path.read_text()) == {"complete": False, "rounds": 3, "rows": {"a": 1.0}}
    calls, results = measured(path, {"rounds": 3}, {"a": 1, "b": 2})
    assert calls == ["b"]
    assert results.rows == {"a": 1.0, "b": 0.5}
    assert json.loads(path.read_text())["complete"]
    assert measured(path, {"rounds": 3}, {"a": 1, "b": 2})[0] == ["a", "b"]


def test_rows_of_other_work_are_not_kept(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(ZeroDivisionError):
        measured(path, {"rounds": 3}, {"a": 1, "b": 0})
    assert measured(path, {"rounds": 4}, {"a": 1})[0] == ["a"]


def test_a_table_keeps_its_columns():
    assert table(["a", "b"], [[1, "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x/y |"
