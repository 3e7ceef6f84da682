from __future__ import annotations

import dataclasses

from shardwise.base.records.cell import WEAK_SCALING, Axis, CellPlan, SweepRecord
from shardwise.lab.report.names import fact, group_title, label_of
from tests.report.conftest import strategies


def test_facts_have_short_commits():
    assert fact("a6c3927431294aa8a1ccd9683d4de76d40c11f65+changes") == "a6c3927431+changes"
    assert fact(None) == "–"
    assert fact(2) == "2"


def test_values_that_need_the_name_of_their_axis_have_it():
    axes = (
        Axis("training.compile", ("none", "inductor"), ("training.compile",), True),
        Axis("precision", ("bfloat16", "float32"), ("training.precision",), True),
        Axis("strategy", ("ddp", "fsdp2"), ("parallel.data",), True),
        Axis("other", ("ddp", "x"), ("parallel.mesh",), True),
    )
    values = dict(
        zip((axis.name for axis in axes), ("inductor", "float32", "ddp", "x"), strict=True)
    )
    plan = CellPlan("a", values, 1, "all", None)
    sweep = SweepRecord("t", axes, (plan,), {}, 3, 1.0, [])
    assert label_of(plan, sweep) == "compile inductor · float32 · strategy ddp · other x"


def test_a_single_group_of_weak_scaling_has_that_title():
    sweep, _ = strategies()
    plans = tuple(dataclasses.replace(plan, group=WEAK_SCALING) for plan in sweep.cells)
    assert group_title(WEAK_SCALING, dataclasses.replace(sweep, cells=plans)) == WEAK_SCALING
