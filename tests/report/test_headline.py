from __future__ import annotations

import dataclasses

import pytest

from shardwise.records.cell import CellPlan
from shardwise.report.caveats import caveats
from shardwise.report.folder import Bench
from shardwise.report.headline import in_short
from shardwise.report.tables import make_rows, pareto
from tests.report.conftest import MIB, record, shifted, strategies, sweep_of


def answer(sweep, records):
    bench = Bench(sweep, records)
    ((title, text),) = in_short(bench, make_rows(bench))
    assert title == ""
    return text


def fewer_rounds(made, number=1):
    return dataclasses.replace(made, rounds=made.rounds[:number])


def test_the_answer_in_short():
    assert answer(*strategies()) == (
        "ddp is fastest (1,500 tokens/s, 1.50× single). fsdp2 needs the least memory (60 MiB, 25 % less than ddp)."
    )
    assert answer(strategies()[0], {}) == "No cell has figures yet."


def test_overlapping_rounds_name_no_fastest():
    sweep, records = strategies()
    # Rounds go from 0.95 to 1.04 of the median: 1400 x 1.04 is more than 1500 x 0.95, so ddp may be no faster.
    records["fsdp2"] = dataclasses.replace(
        records["fsdp2"], tokens_per_second=1400.0, spread={"tokens_per_second": [1330.0, 1456.0]}
    )
    text = answer(sweep, records)
    assert "ddp has the highest median (1,500 tokens/s, 1.50× single), but its rounds overlap with fsdp2." in text


def test_too_few_rounds_name_no_fastest():
    sweep, records = strategies()
    records = {name: fewer_rounds(made, 2) for name, made in records.items()}
    assert answer(sweep, records) == "fsdp2 needs the least memory (60 MiB, 25 % less than ddp)."
    lines = caveats(make_rows(Bench(sweep, records)))
    assert "Taken in 2 rounds: enough for losses and memory, too few to say which cell is faster." in lines


def test_a_rival_with_one_round_is_left_out_of_the_claim():
    sweep, records = strategies()
    records["ddp"] = fewer_rounds(records["ddp"])
    assert answer(sweep, records).startswith("Of the 2 cells with at least 3 rounds, fsdp2 is fastest")
    records["single"] = fewer_rounds(records["single"])
    assert "fastest" not in answer(sweep, records)


def with_peaks(*peaks: int):
    plans = [CellPlan(name, {}, 1, "all", None) for name in "abcdefgh"[: len(peaks)]]
    records = {plan.id: fewer_rounds(record(plan, peak=peak)) for plan, peak in zip(plans, peaks, strict=True)}
    return sweep_of((), plans), records


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ((100, 100, 100), "All need the same memory (100 MiB)."),
        ((1000, 1004, 1006), "a (unchecked) and b (unchecked) need the least memory (1,000 MiB)."),  # 0.4 %, 0.6 %
        ((1000, 1006), "a (unchecked) needs the least memory (1,000 MiB)."),
        ((5, 5, 5, 5, 5, 9), "a (unchecked), b (unchecked), c (unchecked) and 2 more need the least memory (5 MiB)."),
        ((100,), "a (unchecked) alone has figures to go by: nothing to compare."),
    ],
)
def test_equal_peaks_are_called_so(peaks, said):
    assert answer(*with_peaks(*(peak * MIB for peak in peaks))) == said


def test_an_unchecked_cell_is_no_answer_while_others_are_ok():
    sweep, records = strategies()
    plan = dataclasses.replace(sweep.cells[3], reference=None, baseline=None)  # zero1 with nothing to check it
    sweep = dataclasses.replace(sweep, cells=(*sweep.cells[:3], plan, *sweep.cells[4:]))
    records["zero1"] = record(plan, speed=9000.0, peak=10 * MIB, data="zero1", losses=shifted(1.0))
    rows = {row.plan.id: row for row in make_rows(Bench(sweep, records))}
    assert rows["zero1"].state == "unchecked"
    assert rows["zero1"].tokens_per_second == 9000.0
    assert "zero1" not in answer(sweep, records)
    assert [row.plan.id for row in pareto([*rows.values()])] == ["fsdp2", "ddp"]


def test_what_a_figure_is_set_against_carries_its_doubt():
    sweep, records = strategies()
    records["control-single"] = dataclasses.replace(records["control-single"], status="timeout")
    rows = {row.plan.id: row for row in make_rows(Bench(sweep, records))}
    assert rows["fsdp2"].saving_over == "ddp (unchecked)"
    assert rows["fsdp2"].speedup_over == "single"
