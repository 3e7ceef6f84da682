from __future__ import annotations

import dataclasses
import math

import pytest

from shardwise.metrics.cell import WEAK_SCALING, Axis, CellPlan
from shardwise.report.caveats import caveats, in_short
from shardwise.report.folder import Bench
from shardwise.report.tables import (
    counts,
    departure,
    make_rows,
    memory_parts,
    numeric_axes,
    pareto,
    scaling_kind,
    spacing,
    tolerance,
)
from shardwise.report.words import group_title
from tests.report.conftest import LOSSES, MIB, NOISE, processes, record, shifted, strategies, sweep_of


def rows_of(sweep, records):
    return {row.plan.id: row for row in make_rows(Bench(sweep, records))}


def test_every_cell_has_a_row_and_a_state():
    sweep, records = strategies()
    rows = rows_of(sweep, records)
    assert [*rows] == [plan.id for plan in sweep.cells]
    assert {name: row.state for name, row in rows.items()} == {
        "single": "ok",
        "ddp": "ok",
        "fsdp2": "ok",
        "zero1": "wrong",
        "fsdp1": "oom",
        "pp": "not run",
        "control-single": "ok",
    }
    assert counts([*rows.values()]) == {"ok": 3, "wrong": 1, "oom": 1, "not run": 1}  # the control is no cell


def test_spacing_is_float32s():
    # float32 has 24 bits: between 4 and 8 its numbers are 2^(2 - 23) apart, between 1 and 2 2^-23.
    assert spacing(6.18) == 2.0**-21
    assert spacing(4.0) == 2.0**-21
    assert spacing(-1.5) == 2.0**-23


def test_tolerance_is_ten_times_the_controls_departure_but_never_below_float32s_spacing():
    assert tolerance([6.0, 5.0], [6.0, 5.0 + 2.0**-20]) == 10 * 2.0**-20
    assert tolerance([6.0, 5.0], [6.0, 5.0]) == 10 * 2.0**-21


def test_departure_is_the_largest_at_any_step_and_nan_spreads():
    assert departure([1.0, 2.5, 3.0], [1.0, 2.0, 3.25]) == 0.5
    assert math.isnan(departure([1.0, math.nan, 3.0], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("losses", "state", "reason"),
    [
        (shifted(10 * NOISE), "ok", ""),  # the tolerance itself: ten times the control's
        (shifted(10 * NOISE + 2.0**-40), "wrong", "departs by 9.5×10⁻⁶ from single, tolerance 9.5×10⁻⁶"),
        (shifted(-1e-3), "wrong", "departs by 1.0×10⁻³"),
        (shifted(math.nan), "wrong", "its loss is nan at step 8"),
        (shifted(math.inf), "wrong", "its loss is inf at step 8"),
        (LOSSES[:-1], "wrong", "11 losses where its reference has 12"),
        ([], "wrong", "0 losses where its reference has 12"),
    ],
)
def test_verdict_on_losses(losses, state, reason):
    sweep, records = strategies()
    plan = next(plan for plan in sweep.cells if plan.id == "ddp")
    records["ddp"] = record(plan, losses=losses, data="ddp", speed=1500.0)
    row = rows_of(sweep, records)["ddp"]
    assert row.state == state
    assert reason in row.reason


@pytest.mark.parametrize(
    ("cell", "given", "reason"),
    [
        ("single", {"status": "failed", "reason": "broke"}, "its reference single has no usable losses"),
        ("single", {"losses": []}, "its reference single has no usable losses"),
        ("control-single", {"status": "timeout"}, "no usable noise control of single"),
        ("control-single", {"losses": shifted(math.nan)}, "no usable noise control of single"),
        ("control-single", {"losses": LOSSES[:-1]}, "no usable noise control of single"),
    ],
)
def test_without_a_usable_measure_a_cell_is_unchecked_and_keeps_its_figures(cell, given, reason):
    sweep, records = strategies()
    records[cell] = record(next(plan for plan in sweep.cells if plan.id == cell), **given)
    row = rows_of(sweep, records)["ddp"]
    assert row.state == "unchecked"
    assert reason in row.reason
    assert row.tokens_per_second == 1500.0
    assert row.name == "ddp (unchecked)"


def test_a_reference_with_nan_is_wrong_and_checks_nothing():
    sweep, records = strategies()
    records["single"] = record(sweep.cells[0], losses=shifted(math.nan))
    rows = rows_of(sweep, records)
    assert rows["single"].state == "wrong"
    assert rows["ddp"].state == "unchecked"


def test_a_cell_without_any_reference_is_unchecked():
    plan = CellPlan("a", {}, 1, "all", None)
    assert rows_of(sweep_of((), [plan]), {"a": record(plan)})["a"].state == "unchecked"


def test_derived_figures():
    rows = rows_of(*strategies())
    # tokens/s: single 1000 on one process, ddp 1500 and fsdp2 1250 on two; MiB: 100, 80, 60.
    assert rows["single"].speedup == 1.0
    assert rows["ddp"].speedup == 1.5
    assert rows["fsdp2"].over_slowest == 1.25  # the slowest is single; the wrong zero1 does not count
    assert rows["ddp"].efficiency == 0.75  # 1500 / (2 x 1000)
    assert rows["fsdp2"].efficiency == 0.625
    assert rows["fsdp2"].efficiency_over == "single"
    assert rows["single"].efficiency is None
    assert rows["fsdp2"].saving == pytest.approx(0.25)  # 1 - 60 / 80
    assert rows["ddp"].saving is None
    assert rows["single"].saving is None  # ddp ran on two processes, this on one


def test_nothing_is_told_of_a_wrong_cell():
    row = rows_of(*strategies())["zero1"]
    assert row.departure == pytest.approx(1e-3)
    figures = (row.tokens_per_second, row.tokens_range, row.peak_memory_bytes, row.speedup, row.efficiency, row.saving)
    assert figures == (None,) * 6
    assert memory_parts(row) is None


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_scaling_is_against_the_same_strategy_on_one_process(kind):
    sweep, records = processes(kind)
    rows = rows_of(sweep, records)
    assert scaling_kind(sweep) == kind
    assert rows["ddp-2"].efficiency == 0.9  # 1800 / (2 x 1000)
    assert rows["ddp-4"].efficiency == 0.8
    assert rows["fsdp2-4"].efficiency == pytest.approx(2400 / (4 * 900))  # of fsdp2 on one process, not of ddp
    assert rows["fsdp2-4"].efficiency_over == "fsdp2 · processes 1"
    assert rows["fsdp2-4"].saving == pytest.approx(0.3)  # 60 + 40 / 4 = 70 MiB of ddp's 100 on as many processes


def test_pareto_front_leanest_first():
    sweep, records = strategies()
    rows = [*rows_of(sweep, records).values()]
    # single needs the most and is the slowest; ddp is faster than fsdp2, which is leaner; the wrong zero1 is out.
    assert [row.plan.id for row in pareto(rows)] == ["fsdp2", "ddp"]
    twins = [CellPlan(name, {}, 1, "all", None) for name in ("a", "b", "c")]
    records = {"a": record(twins[0]), "b": record(twins[1]), "c": record(twins[2], peak=101 * MIB)}
    rows = [*rows_of(sweep_of((), twins), records).values()]
    assert [row.plan.id for row in pareto(rows)] == ["a", "b"]  # equals do not beat one another


def test_memory_parts_are_of_the_rank_with_the_largest_peak():
    plan = CellPlan("a", {}, 2, "all", None)
    parts = [{"weights": 10, "activations": 5}, {"weights": 10, "activations": 20}]
    made = record(plan, peak_memory_bytes=[15, 30], memory_parts=parts)
    row = rows_of(sweep_of((), [plan]), {"a": made})["a"]
    assert memory_parts(row) == {"weights": 10, "gradients": 0, "optimizer": 0, "activations": 20, "temporary": 0}
    assert row.peak_memory_bytes == 30


def test_only_axes_of_numbers_get_lines():
    plans = [
        CellPlan("a-1", {"s": "a", "n": "128"}, 1, "g", None),
        CellPlan("a-2", {"s": "b", "n": "256"}, 2, "g", None),
    ]
    axes = (
        Axis("s", ("a", "b"), ("nproc", "parallel.data"), True),
        Axis("n", ("128", "256"), ("data.sequence_length",), False),
    )
    sweep = sweep_of(axes, plans)
    assert [axis.name for axis in numeric_axes(sweep, [*rows_of(sweep, {}).values()])] == ["n"]


def test_caveats_come_from_the_environment():
    sweep, records = strategies()
    bench = Bench(sweep, records)
    rows = make_rows(bench)
    assert any("NCCL" in line for line in caveats(bench, rows))
    assert not any("crowded" in line for line in caveats(bench, rows))
    crowded = Bench(*processes())  # 4 processes on 2 cores
    assert any("4 processes shared 2 cores" in line for line in caveats(crowded, make_rows(crowded)))
    gpu = {
        name: record(CellPlan(**made.cell), environment={"cuda": "13.0", "commit": name})
        for name, made in records.items()
    }
    lines = caveats(Bench(sweep, gpu), make_rows(Bench(sweep, gpu)))
    assert not any("gloo" in line for line in lines)
    assert any("same commit" in line for line in lines)


def test_notes_name_their_cells():
    sweep, records = strategies()
    records = {name: dataclasses.replace(made, notes=["all say so"]) for name, made in records.items()}
    records["ddp"] = dataclasses.replace(records["ddp"], notes=["all say so", "only here"], rounds=[{"status": "ok"}])
    lines = caveats(Bench(sweep, records), make_rows(Bench(sweep, records)))
    assert lines[-2:] == ["all say so", "ddp: only here"]
    assert "1 of 3 cells with figures have fewer than 3 good rounds." in lines
    assert rows_of(sweep, records)["ddp"].tokens_range is None  # one round has no spread


def test_the_answer_in_short():
    bench = Bench(*strategies())
    ((title, text),) = in_short(bench, make_rows(bench))
    assert title == ""
    assert text == (
        "ddp is fastest (1,500 tokens/s, 1.50× its reference). "
        "fsdp2 needs the least memory (60 MiB, 25 % less than ddp)."
    )
    assert in_short(Bench(bench.sweep), make_rows(Bench(bench.sweep))) == [("", "No cell has figures yet.")]


def test_the_answer_says_where_rounds_overlap():
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    # Rounds go from 0.95 to 1.04 of the median: 1400 x 1.04 is more than 1500 x 0.95, so ddp may be no faster.
    records["fsdp2"] = record(plans["fsdp2"], speed=1400.0, data="fsdp2")
    ((_, text),) = in_short(Bench(sweep, records), make_rows(Bench(sweep, records)))
    assert "its rounds overlap with fsdp2" in text


def test_too_few_rounds_name_no_fastest():
    sweep, records = strategies()
    bench = Bench(dataclasses.replace(sweep, rounds=2), records)
    rows = make_rows(bench)
    assert in_short(bench, rows) == [("", "fsdp2 needs the least memory (60 MiB, 25 % less than ddp).")]
    assert "Taken in 2 rounds: enough for losses and memory, too few to say which cell is faster." in caveats(
        bench, rows
    )


def test_weak_scaling_is_said_also_of_a_group_alone():
    sweep, _ = strategies()
    plans = tuple(dataclasses.replace(plan, group=WEAK_SCALING) for plan in sweep.cells)
    assert group_title(WEAK_SCALING, dataclasses.replace(sweep, cells=plans)) == "weak scaling"
