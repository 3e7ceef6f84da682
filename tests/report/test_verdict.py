from __future__ import annotations

import dataclasses
import math

import pytest

from shardwise.base.records.cell import CellPlan
from shardwise.lab.report.folder import BenchFolder
from shardwise.lab.report.tables import make_rows
from shardwise.lab.report.verdict import coarse_tolerance, difference, spacing, tolerance
from tests.report.conftest import LOSSES, NOISE, record, shifted, strategies, sweep_of


def rows_of(sweep, records):
    return {row.plan.id: row for row in make_rows(BenchFolder(sweep, records))}


def test_spacing_is_float32s():
    # float32 has 24 bits: between 4 and 8 its numbers are 2^(2 - 23) apart, between 1 and 2 2^-23.
    assert spacing(6.18) == 2.0**-21
    assert spacing(4.0) == 2.0**-21
    assert spacing(-1.5) == 2.0**-23


def test_tolerance_is_ten_times_the_noise_and_at_least_ten_spacings_of_float32():
    assert tolerance([6.0, 5.0], [6.0, 5.0 + 2.0**-20]) == 10 * 2.0**-20
    assert tolerance([6.0, 5.0], [6.0, 5.0]) == 10 * 2.0**-21


def test_difference_is_the_largest_at_any_step_and_nan_where_a_loss_is():
    assert difference([1.0, 2.5, 3.0], [1.0, 2.0, 3.25]) == 0.5
    assert math.isnan(difference([1.0, math.nan, 3.0], [1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("losses", "state", "reason"),
    [
        (shifted(10 * NOISE), "ok", ""),  # the tolerance itself: ten times the control's
        (shifted(10 * NOISE + 2.0**-40), "wrong", "single by 9.5e-06"),
        (shifted(-1e-3), "wrong", "single by 1.0e-03"),
        (shifted(math.nan), "wrong", "nan at step 8"),
        (shifted(math.inf), "wrong", "inf at step 8"),
        (LOSSES[:-1], "wrong", "11 losses"),
        ([], "wrong", "0 losses"),
    ],
)
def test_verdict_on_losses(losses, state, reason):
    sweep, records = strategies()
    plan = next(plan for plan in sweep.cells if plan.id == "ddp")
    records["ddp"] = record(plan, losses=losses, data="ddp", speed=1500.0)
    row = rows_of(sweep, records)["ddp"]
    assert row.state == state
    assert reason in row.reason


@pytest.mark.parametrize(("precision", "state"), [("float32", "wrong"), ("bfloat16", "ok")])
def test_a_cell_whose_ranks_round_partial_sums_to_16_bits_has_a_coarse_tolerance(precision, state):
    sweep, records = strategies()
    plan = next(plan for plan in sweep.cells if plan.id == "ddp")
    far = record(plan, losses=shifted(1e-3), data="ddp", speed=1500.0)
    for cell in ("single", "control-single", "ddp"):
        made = far if cell == "ddp" else records[cell]
        size = 2 if cell == "ddp" else 1
        config = {**made.config, "parallel": {**made.config.get("parallel", {}), "tp": size}}
        config["training"] = {**config.get("training", {}), "precision": precision}
        config["model"] = {**config.get("model", {}), "dtype": "float32"}
        records[cell] = dataclasses.replace(made, config=config)
    assert rows_of(sweep, records)["ddp"].state == state


@pytest.mark.parametrize(
    ("cell", "given", "reason"),
    [
        ("single", {"status": "failed", "reason": "broke"}, "no usable losses"),
        ("single", {"losses": []}, "no usable losses"),
        ("control-single", {"status": "timeout"}, "no usable noise control"),
        ("control-single", {"losses": shifted(math.nan)}, "no usable noise control"),
        ("control-single", {"losses": LOSSES[:-1]}, "no usable noise control"),
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


def test_a_later_round_that_computed_something_else_is_wrong():
    # 10 x NOISE is the tolerance, for what two rounds of one cell may be apart too.
    sweep, records = strategies()
    made = {
        "ddp": dataclasses.replace(records["ddp"], largest_round_difference=10 * NOISE),
        "fsdp2": dataclasses.replace(records["fsdp2"], largest_round_difference=11 * NOISE),
    }
    rows = rows_of(sweep, records | made)
    assert rows["ddp"].state == "ok"
    assert rows["fsdp2"].state == "wrong"
    assert "rounds" in rows["fsdp2"].reason
    assert "1.0e-05, more than 9.5e-06" in rows["fsdp2"].reason
    assert rows["fsdp2"].tokens_per_second is None


def test_a_reference_whose_rounds_differ_is_wrong_and_checks_nothing():
    sweep, records = strategies()
    records["single"] = dataclasses.replace(records["single"], largest_round_difference=math.inf)
    rows = rows_of(sweep, records)
    assert rows["single"].state == "wrong"
    assert rows["ddp"].state == "unchecked"
    assert rows["ddp"].speedup is None


@pytest.mark.parametrize(
    "control",
    [
        None,
        {"status": "oom"},
        {"losses": shifted(0.5, step=3)},
        {"losses": shifted(1.1e-4, step=3)},
    ],
)
def test_without_a_usable_control_what_no_rounding_explains_is_wrong(control):
    # 1e-3 in float32; a control that departs by more than a tenth of it gives no tolerance.
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    del records["control-single"]
    if control:
        records["control-single"] = record(plans["control-single"], **control)
    records["ddp"] = record(plans["ddp"], losses=shifted(0.9e-3), data="ddp")
    records["zero1"] = record(plans["zero1"], losses=shifted(1.1e-3), data="zero1")
    records["fsdp2"] = dataclasses.replace(records["fsdp2"], largest_round_difference=2.0)
    rows = rows_of(sweep, records)
    assert {name: rows[name].state for name in ("single", "ddp", "zero1", "fsdp2")} == {
        "single": "ok",
        "ddp": "unchecked",
        "zero1": "wrong",
        "fsdp2": "wrong",
    }
    assert rows["ddp"].verdict.tolerance == 1e-3


def test_a_control_within_a_tenth_of_what_rounding_explains_is_used():
    sweep, records = strategies()
    records["control-single"] = dataclasses.replace(
        records["control-single"], losses=shifted(0.9e-4, step=3)
    )
    assert rows_of(sweep, records)["ddp"].state == "ok"


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"model": {"dtype": "bfloat16"}, "training": {"precision": "float32"}}, 2**-7 * 6.0),
        ({"model": {"dtype": "float32"}, "training": {"precision": "bfloat16"}}, 2**-7 * 6.0),
        ({"training": {"precision": "float16"}}, 2**-10 * 6.0),
        ({"model": {"dtype": "float32"}, "training": {"precision": "float32"}}, 1e-3),
        ({"model": None, "training": 5}, 1e-3),
    ],
)
def test_what_no_rounding_explains_is_a_share_of_the_loss_in_formats_of_few_bits(config, allowed):
    plan = CellPlan("a", {}, 1, "all", None)
    made = dataclasses.replace(record(plan), config=config)  # its largest loss is 6
    assert coarse_tolerance(made, record(plan)) == coarse_tolerance(record(plan), made) == allowed


def precisions(**shift: float) -> tuple:
    """float32 and bfloat16, each on one process and with ddp: two references.

    The baseline is that of float32.
    """
    plans, made = [], {}
    for precision in ("float32", "bfloat16"):
        single = f"single-{precision}"
        for name in (single, f"ddp-{precision}", f"control-{single}"):
            values = {"strategy": name.split("-")[0], "training.precision": precision}
            control = name.startswith("control")
            if control:
                values["strategy"] = "single"
            plan = CellPlan(
                name,
                values,
                2 if name.startswith("ddp") else 1,
                "all",
                None if name == single else single,
                control,
                None if name == "single-float32" else "single-float32",
            )
            plans.append(plan)
            by = shift.get(precision, 0.0) + (NOISE if control else 0.0)
            made[name] = record(
                plan, losses=[loss + by for loss in LOSSES], data=values["strategy"], speed=1000.0
            )
    return sweep_of((), plans), made


def test_a_reference_of_other_numerics_is_checked_against_the_baseline():
    # 2^-7 of the largest loss, 6, is 0.047.
    rows = rows_of(*precisions(bfloat16=0.04))
    assert {row.state for row in rows.values()} == {"ok"}
    verdict = rows["single-bfloat16"].verdict
    assert verdict.against == "single-float32"
    assert verdict.difference == pytest.approx(0.04)
    assert verdict.tolerance == 2**-7 * 6.0
    assert (
        rows["ddp-bfloat16"].verdict.against == "single-bfloat16"
    )  # of the same numerics: as closely as ever
    assert rows["ddp-bfloat16"].verdict.tolerance < 2e-5
    assert rows["ddp-bfloat16"].relative_to["speedup"] == "single-float32"


def test_a_reference_of_other_numerics_that_is_far_off_is_wrong_and_checks_nothing():
    rows = rows_of(*precisions(bfloat16=0.05))
    assert rows["single-bfloat16"].state == "wrong"
    assert "more than 4.7e-02" in rows["single-bfloat16"].reason
    assert rows["ddp-bfloat16"].state == "wrong"  # no closer to the baseline
    assert rows["ddp-float32"].state == "ok"


def test_a_reference_of_other_numerics_without_a_baseline_is_unchecked():
    sweep, records = precisions()
    del records["single-float32"]
    rows = rows_of(sweep, records)
    assert rows["single-bfloat16"].state == "unchecked"
    assert rows["ddp-float32"].state == "unchecked"


def test_references_that_point_at_one_another_check_nothing():
    plans = [CellPlan("a", {}, 1, "all", "b"), CellPlan("b", {}, 1, "all", "a")]
    rows = rows_of(sweep_of((), plans), {plan.id: record(plan) for plan in plans})
    assert {row.state for row in rows.values()} == {"unchecked"}
