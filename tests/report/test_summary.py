from __future__ import annotations

import dataclasses

import pytest

from shardwise.base.records.cell import CellPlan
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.summary import NO_COMPARISON, caveats, fastest, leanest
from shardwise.lab.report.tables import make_rows, pareto
from tests.report.conftest import MIB, processes, record, shifted, strategies, sweep_of


def rows_of(sweep, records):
    return make_rows(BenchFolder(sweep, records))


def with_rounds(made, number):
    return dataclasses.replace(made, rounds=made.rounds[:number])


def test_the_best_cells():
    rows = rows_of(*strategies())
    name, figure = fastest(rows)
    assert name == "ddp"
    assert figure.startswith("1,500 tokens/s")
    assert "1.50× single" in figure
    name, figure = leanest(rows)
    assert name == "fsdp2"
    assert figure.startswith("60 MiB")
    assert "25% less than ddp" in figure


def test_without_two_cells_there_is_no_best_one():
    sweep, records = strategies()
    assert fastest(rows_of(sweep, {})) == leanest(rows_of(sweep, {})) == ("", NO_COMPARISON)
    alone = rows_of(sweep, {"single": records["single"]})
    assert fastest(alone) == leanest(alone) == ("", NO_COMPARISON)


def test_cells_whose_rounds_overlap_are_named_together():
    sweep, records = strategies()
    # 1400 x 1.04 is more than 1500 x 0.95, so ddp may be no faster.
    records["fsdp2"] = dataclasses.replace(
        records["fsdp2"], tokens_per_second=1400.0, spread={"tokens_per_second": [1330.0, 1456.0]}
    )
    name, figure = fastest(rows_of(sweep, records))
    assert name == "ddp and fsdp2"
    assert "overlap" in figure
    assert "1,500 tokens/s" in figure


def test_no_cell_is_the_fastest_where_none_is_timed():
    sweep, records = strategies()
    plans = tuple(dataclasses.replace(plan, timed=False) for plan in sweep.cells)
    rows = rows_of(dataclasses.replace(sweep, cells=plans), records)
    assert fastest(rows) == ("", "not timed")
    assert leanest(rows)[0] == "fsdp2"


def test_it_takes_three_rounds_to_be_the_fastest():
    sweep, records = strategies()
    few = {name: with_rounds(made, 2) for name, made in records.items()}
    name, figure = fastest(rows_of(sweep, few))
    assert (name, "3 good rounds" in figure) == ("", True)
    assert leanest(rows_of(sweep, few))[0] == "fsdp2"
    records["ddp"] = with_rounds(records["ddp"], 1)
    name, figure = fastest(rows_of(sweep, records))
    assert (name, "1 cell with fewer" in figure) == ("fsdp2", True)
    records["single"] = with_rounds(records["single"], 1)
    assert fastest(rows_of(sweep, records))[0] == ""


@pytest.mark.parametrize(
    ("peaks", "names", "peak"),
    [
        ((100, 100, 100), "all cells", "100 MiB"),
        ((1000, 1004, 1006), "a (unchecked) and b (unchecked)", "1,000 MiB"),  # 0.4 %, 0.6 %
        ((1000, 1006), "a (unchecked)", "1,000 MiB"),
        ((5, 5, 5, 5, 5, 9), "a (unchecked), b (unchecked), c (unchecked) and 2 more", "5 MiB"),
    ],
)
def test_equal_peaks_are_named_together(peaks, names, peak):
    plans = [CellPlan(name, {}, 1, "all", None) for name in "abcdefgh"[: len(peaks)]]
    records = {
        plan.id: record(plan, peak=peak * MIB) for plan, peak in zip(plans, peaks, strict=True)
    }
    assert leanest(rows_of(sweep_of((), plans), records)) == (names, peak)


def test_an_unchecked_cell_is_not_the_best_while_others_are_ok():
    sweep, records = strategies()
    plan = dataclasses.replace(sweep.cells[3], reference=None, baseline=None)  # zero1, unchecked
    sweep = dataclasses.replace(sweep, cells=(*sweep.cells[:3], plan, *sweep.cells[4:]))
    records["zero1"] = record(plan, speed=9000.0, peak=10 * MIB, data="zero1", losses=shifted(1.0))
    rows = {row.plan.id: row for row in rows_of(sweep, records)}
    assert rows["zero1"].state == "unchecked"
    assert rows["zero1"].tokens_per_second == 9000.0
    assert fastest([*rows.values()])[0] == "ddp"
    assert leanest([*rows.values()])[0] == "fsdp2"
    assert [row.plan.id for row in pareto([*rows.values()])] == ["fsdp2", "ddp"]


def test_a_ratio_to_an_unchecked_cell_is_marked():
    sweep, records = strategies()
    records["control-single"] = dataclasses.replace(records["control-single"], status="timeout")
    rows = {row.plan.id: row for row in rows_of(sweep, records)}
    assert rows["fsdp2"].relative_to["saving"] == "ddp (unchecked)"
    assert rows["fsdp2"].relative_to["speedup"] == "single"


def has(fragment, lines):
    return any(fragment in line for line in lines)


def test_caveats_come_from_the_environment():
    sweep, records = strategies()
    lines = caveats(rows_of(sweep, records))
    assert has("GPU", lines)
    assert has("NCCL", lines)
    assert not has("overloaded", lines)
    gpu = {
        name: record(CellPlan(**made.cell), environment={"cuda": "13.0", "commit": name})
        for name, made in records.items()
    }
    lines = caveats(rows_of(sweep, gpu))
    assert not has("gloo", lines)
    assert has("commit", lines)


def test_more_timed_processes_than_cores_are_a_caveat():
    sweep, records = processes()  # up to 4 processes on 2 cores
    assert has("4 processes shared 2 cores", caveats(rows_of(sweep, records)))
    cells = [dataclasses.replace(plan, timed=plan.nproc < 4) for plan in sweep.cells]
    untimed = dataclasses.replace(sweep, cells=tuple(cells))
    assert not has("shared 2 cores", caveats(rows_of(untimed, records)))


def test_facts_that_differ_between_cells_are_a_caveat():
    sweep, records = strategies()
    kernels = {name: {"loss": "triton" if name == "ddp" else "chunked"} for name in records}
    made = {name: dataclasses.replace(one, kernels=kernels[name]) for name, one in records.items()}
    assert has("loss kernel", caveats(rows_of(sweep, made)))
    odd = {"cpu_count": "two", "device": ["a", {}]}
    records["ddp"] = dataclasses.replace(records["ddp"], environment=odd)
    assert has("cpu_count", caveats(rows_of(sweep, records)))


def test_notes_name_their_cells():
    sweep, records = strategies()
    records = {name: dataclasses.replace(made, notes=["common"]) for name, made in records.items()}
    records["ddp"] = dataclasses.replace(records["ddp"], notes=["common", "only here"])
    assert caveats(rows_of(sweep, records))[-2:] == ["common", "ddp: only here"]
