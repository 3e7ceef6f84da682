from __future__ import annotations

import dataclasses

import pytest

from shardwise.base.records.cell import Axis, CellPlan
from shardwise.lab.report.columns import FIRST_STEP, ROUTING, SENT, TRAINING
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.seeds import over_seeds
from shardwise.lab.report.summary import caveats
from shardwise.lab.report.tables import (
    counts,
    environments,
    interleaved,
    make_rows,
    numeric_axes,
    pareto,
    rounds_of,
    run_settings,
    scaling_kind,
)
from tests.report.conftest import (
    MIB,
    STEPS,
    large,
    mixtures,
    processes,
    record,
    seeds,
    strategies,
    sweep_of,
)


def rows_of(sweep, records):
    return {row.plan.id: row for row in make_rows(BenchFolder(sweep, records))}


def test_loads_of_experts_are_columns_of_cells_that_have_some():
    rows = rows_of(*mixtures())
    read = {name: [column.text(row) for column in ROUTING] for name, row in rows.items()}
    assert read["fsdp2-ep"] == ["2.00×", "90.2%", "0.0%", "0.0%"]
    assert read["fsdp2-ep-capacity"] == ["2.00×", "90.2%", "10.0%", "15.0%"]
    assert read["control"] == ["–"] * 4  # it runs for its losses


def test_validation_norms_bytes_sent_and_the_time_to_the_first_step_are_columns():
    sweep, records = strategies()
    norms = [*records["ddp"].grad_norms]
    norms[3] *= 1.5
    last = [{"step": STEPS, "loss": 5.25}]
    records["ddp"] = dataclasses.replace(records["ddp"], grad_norms=norms, eval=last)
    records["fsdp2"] = dataclasses.replace(records["fsdp2"], sent_bytes_per_step=[MIB, 6 * MIB])
    rows = rows_of(sweep, records)

    def texts(columns):
        return {name: [column.text(row) for column in columns] for name, row in rows.items()}

    read = texts(TRAINING)
    assert read["single"] == ["6.2500 → 5.5000", "245", "–"]  # e^5.5 is 244.7
    assert read["ddp"] == ["5.2500", "191", "5.0e-01"]
    assert read["fsdp2"][2] == "0"
    assert read["pp"] == ["–"] * 3
    read = texts(SENT)
    assert read["single"] == ["1", "0 bytes", "0 bytes", "equal"]
    assert read["ddp"] == ["2", "3 MiB", "3 MiB", "equal"]
    assert read["fsdp2"] == ["2", "6 MiB", "3 MiB", "+3 MiB"]
    assert read["zero1"][1:] == ["–"] * 3  # it is wrong
    assert texts([FIRST_STEP])["ddp"] == ["3.50 s"]


def test_cells_that_differ_in_their_seed_alone_are_one_row():
    sweep, records = seeds()
    rows = make_rows(BenchFolder(sweep, records))
    single, ddp = over_seeds(BenchFolder(sweep, records), rows)
    assert (single.name, single.counted, ddp.name, ddp.counted) == ("single", "3", "ddp", "2 of 3")
    assert single.texts == [
        "5.7000 (5.4500 – 6.4500)",
        "5.7500 (5.5000 – 6.5000)",
        "1,001 (1,000 – 1,002)",
        "100 MiB",
    ]
    assert ddp.texts[1] == "5.6250 (5.5000 – 5.7500)"
    assert over_seeds(BenchFolder(*strategies()), make_rows(BenchFolder(*strategies()))) == []


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
    assert counts([*rows.values()]) == {
        "ok": 3,
        "wrong": 1,
        "oom": 1,
        "not run": 1,
    }  # the control is no cell


def test_derived_figures():
    rows = rows_of(*strategies())
    # tokens/s: single 1000 on one process, ddp 1500 and fsdp2 1250 on two; MiB: 100, 80, 60.
    assert rows["single"].speedup == 1.0
    assert rows["ddp"].speedup == 1.5
    assert (
        rows["fsdp2"].over_slowest == 1.25
    )  # the slowest is single; the wrong zero1 does not count
    assert rows["ddp"].efficiency == 0.75  # 1500 / (2 x 1000)
    assert rows["fsdp2"].efficiency == 0.625
    assert rows["fsdp2"].relative_to["efficiency"] == "single"
    assert rows["single"].efficiency is None
    assert rows["fsdp2"].saving == pytest.approx(0.25)  # 1 - 60 / 80
    assert rows["ddp"].saving is None
    assert rows["single"].saving is None  # ddp ran on two processes, this on one


def test_a_wrong_cell_has_no_figures():
    row = rows_of(*strategies())["zero1"]
    assert row.verdict.difference == pytest.approx(1e-3)
    figures = (
        row.tokens_per_second,
        row.tokens_range,
        row.peak_memory_bytes,
        row.speedup,
        row.efficiency,
        row.saving,
    )
    assert figures == (None,) * 6
    assert row.memory_parts is None


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_scaling_is_against_the_same_strategy_on_one_process(kind):
    sweep, records = processes(kind)
    rows = rows_of(sweep, records)
    assert scaling_kind(sweep) == kind
    assert rows["ddp-2"].efficiency == 0.9  # 1800 / (2 x 1000)
    assert rows["ddp-4"].efficiency == 0.8
    assert rows["fsdp2-4"].efficiency == pytest.approx(
        2400 / (4 * 900)
    )  # of fsdp2 on one process, not of ddp
    assert rows["fsdp2-4"].relative_to["efficiency"] == "fsdp2 · processes 1"
    assert rows["fsdp2-4"].saving == pytest.approx(
        0.3
    )  # 60 + 40 / 4 = 70 MiB of ddp's 100 on as many processes


def test_memory_is_saved_against_ranks_with_the_whole_model():
    """Replicas that are cut by tp or pp are compared with plain ddp, and nothing with them."""
    axes = ("parallel.tp", "parallel.pp")
    plans = [
        CellPlan(f"{tp}-{pp}", dict(zip(axes, (tp, pp))), 4, "all", None)
        for tp, pp in ((1, 1), (2, 1), (1, 2))
    ]
    peaks = dict(zip((plan.id for plan in plans), (100, 60, 70)))
    records = {plan.id: record(plan, data="ddp", peak=peaks[plan.id] * MIB) for plan in plans}
    rows = rows_of(sweep_of((), plans), records)
    assert [row.saving for row in rows.values()] == [None, pytest.approx(0.4), pytest.approx(0.3)]
    rows = rows_of(sweep_of((), plans[1:]), {plan.id: records[plan.id] for plan in plans[1:]})
    assert [row.saving for row in rows.values()] == [None, None]


def test_pareto_front_leanest_first():
    sweep, records = strategies()
    rows = [*rows_of(sweep, records).values()]
    # single needs the most and is the slowest; ddp is faster than fsdp2, which is leaner; the wrong
    # zero1 is out.
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
    assert row.memory_parts == {
        "weights": 10,
        "gradients": 0,
        "optimizer": 0,
        "activations": 20,
        "temporary": 0,
    }
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


def test_one_round_has_no_range():
    sweep, records = strategies()
    records["ddp"] = dataclasses.replace(records["ddp"], rounds=[{"status": "ok"}])
    rows = rows_of(sweep, records)
    assert rows["ddp"].tokens_range is None
    assert rows["fsdp2"].tokens_range == (0.95 * 1250, 1.04 * 1250)


def test_settings_leave_the_output_folder_out():
    config = {"training": {"steps": 3, "output_dir": "a"}, "lora": None}
    made = record(CellPlan("a", {}, 1, "all", None), config=config)
    assert run_settings(made) == {"training.steps": 3, "lora": None}


def test_scaling_is_against_the_cell_on_one_process_whose_run_file_differs_least():
    axis = Axis("strategy", ("single", "ddp1", "ddp2"), ("nproc", "parallel.data"), True)
    plans = [
        CellPlan(
            name,
            {"strategy": name},
            2 if name == "ddp2" else 1,
            "all",
            None if name == "single" else "single",
        )
        for name in axis.values
    ]
    speeds = {"single": 2000.0, "ddp1": 1000.0, "ddp2": 1900.0}
    records = {
        plan.id: record(plan, speed=speeds[plan.id], data=plan.id.rstrip("12")) for plan in plans
    }
    row = rows_of(sweep_of((axis,), plans), records)["ddp2"]
    assert row.efficiency == 0.95  # 1900 / (2 x 1000)
    assert row.relative_to["efficiency"] == "ddp1 (unchecked)"


def test_scaling_is_never_against_a_cell_of_another_micro_batch():
    rows = rows_of(*large())
    assert rows["ddp-4-128-lora"].relative_to["efficiency"] == "single · micro batch size 4"
    sweep, records = large()
    del records["single-4-128-lora"]
    assert rows_of(sweep, records)["ddp-4-128-lora"].efficiency is None


def test_speeds_are_set_against_the_baseline_though_losses_are_not():
    rows = rows_of(*large())
    assert rows["single-4-128-lora"].speedup == pytest.approx(
        4**0.3
    )  # of single with micro-batches of 1
    assert rows["single-4-128-lora"].relative_to["speedup"] == "single · micro batch size 1"
    assert rows["single-1-128-lora"].is_baseline


def test_a_control_has_no_figures():
    row = rows_of(*strategies())["control-single"]
    assert row.state == "ok"
    assert (row.tokens_per_second, row.peak_memory_bytes, row.speedup) == (None, None, None)


def with_starts(**starts: list[str]):
    sweep, _ = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    made = {
        name: record(
            plans[name],
            rounds=[{"status": "ok", "started": f"2026-01-01T00:{time}"} for time in times],
        )
        for name, times in starts.items()
    }
    return make_rows(BenchFolder(sweep, made))


@pytest.mark.parametrize(
    ("single", "ddp", "expected"),
    [
        (["01", "03", "05"], ["02", "04", "06"], True),
        (["01", "04", "05"], ["02", "03", "06"], True),  # the order within a round does not matter
        (["01", "02", "03"], ["04", "05", "06"], False),
        (["01", "03"], ["02", "04", "05"], True),  # one was lost
        (
            ["01", "03", "04"],
            ["02", "05", "06"],
            False,
        ),  # single's third came before the second of ddp
    ],
)
def test_interleaved_is_read_from_the_times(single, ddp, expected):
    rows = with_starts(single=single, ddp=ddp)
    assert interleaved(rows) == expected
    assert any("not interleaved" in line for line in caveats(rows)) != expected


def test_interleaved_is_not_claimed_without_times():
    sweep, records = strategies()
    records["ddp"] = dataclasses.replace(records["ddp"], rounds=[{"status": "ok"}] * 3)
    assert not interleaved(make_rows(BenchFolder(sweep, records)))


def test_cells_in_jobs_of_their_own_are_not_interleaved():
    rows = with_starts(single=["01", "03"], ddp=["02", "04"])
    assert interleaved(rows)
    for of_cell in filter(None, (row.record for row in rows)):
        of_cell.rounds[0]["job"] = "Slurm job 1_0 on n1"
    assert not interleaved(rows)


def test_rounds_beside_busy_programs_are_told():
    rows = with_starts(single=["01", "03"], ddp=["02", "04"])
    for row, share in zip(rows, (0.1, 0.3), strict=False):
        assert row.record is not None
        for entry in row.record.rounds:
            entry["others_share"] = share
    assert rows[1].record is not None
    rows[1].record.rounds[1]["others_share"] = 0.34
    (line,) = [line for line in caveats(rows) if "Other programs" in line]
    assert "10% of the machine's CPU time in 2 of 4 rounds, 34% in round 2 of ddp" in line


def test_rounds_are_counted_where_they_went_well():
    assert rounds_of(with_starts(single=["01", "03"], ddp=["02"])) == "1 to 2 rounds"
    assert rounds_of(with_starts(single=["01"], ddp=["02"])) == "1 round"
    assert rounds_of([]) == ""


def test_a_kernel_that_some_cells_lack_is_told_with_their_number():
    sweep, records = strategies()
    own = records["ddp"].kernels | {"attention": "ring"}
    records["ddp"] = dataclasses.replace(records["ddp"], kernels=own)
    facts = environments([*rows_of(sweep, records).values()])
    assert facts["attention kernel"] == [f"ring in 1 of {len(records)} cells"]
    assert {name: facts[f"{name} kernel"] for name in records["single"].kernels} == {
        name: [kernel] for name, kernel in records["single"].kernels.items()
    }
