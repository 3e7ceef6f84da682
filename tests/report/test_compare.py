from __future__ import annotations

import dataclasses

import pytest

from shardwise.commands.cli import main
from shardwise.lab.report.compare import changes
from shardwise.lab.report.folder import BenchFolder
from tests.report.conftest import MIB, STEPS, processes, record, strategies, write


def slower():
    """Bench B: ddp has 0.8 of the speed and fsdp2 1.5 times the memory."""
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    records["ddp"] = record(plans["ddp"], speed=1200.0, peak=80 * MIB, data="ddp")
    records["fsdp2"] = record(plans["fsdp2"], speed=1250.0, peak=90 * MIB, data="fsdp2")
    return sweep, records


def test_ratios_regressions_first():
    fsdp2, ddp, single, *others = changes(BenchFolder(*strategies()), BenchFolder(*slower()))
    assert [change.a.plan.id for change in (fsdp2, ddp, single)] == ["fsdp2", "ddp", "single"]
    assert fsdp2.memory == 1.5
    assert fsdp2.effects == ["more memory"]
    assert ddp.speed == 0.8
    # Rounds go from 0.95 to 1.04 of the median: 0.8 x 0.95 / 1.04 at worst, 0.8 x 1.04 / 0.95 at
    # best, below 1.
    assert ddp.speed_range == pytest.approx((0.8 * 0.95 / 1.04, 0.8 * 1.04 / 0.95))
    assert ddp.effects == ["slower"]
    assert single.effects == []
    assert [change.regression for change in (fsdp2, ddp, single)] == [True, True, False]
    assert [change.a.plan.id for change in others] == ["zero1", "fsdp1", "pp"]
    for change, state in zip(others, ("wrong", "oom", "not run"), strict=True):
        assert state in change.note


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("lora", "alpha", 64.0),
        ("training", "steps", 99),
        ("training", "compile", "inductor"),
        ("parallel", "tp", 2),
    ],
)
def test_cells_whose_run_files_differ_have_a_note_and_no_ratio(section, key, value):
    sweep, records = strategies()
    made = dict(records)
    for name, one in records.items():
        config = {**one.config, section: {**one.config.get(section, {}), key: value}}
        config["training"] = {**config["training"], "output_dir": f"elsewhere/{name}"}
        made[name] = dataclasses.replace(one, config=config)
    before = records["ddp"].config.get(section, {}).get(key, "–")
    for change in changes(BenchFolder(sweep, records), BenchFolder(sweep, made)):
        assert (change.speed, change.memory, change.regression) == (None, None, False)
        if change.a.record:
            assert f"{section}.{key} {before} -> {value}" in change.note


def test_another_output_folder_is_the_same_work():
    sweep, records = strategies()
    moved = {
        name: dataclasses.replace(
            one, config={**one.config, "training": {"steps": STEPS, "output_dir": "b"}}
        )
        for name, one in records.items()
    }
    assert changes(BenchFolder(sweep, records), BenchFolder(sweep, moved))[0].speed == 1.0


def test_unchecked_cells_are_marked():
    sweep, records = strategies()
    unchecked = {name: made for name, made in records.items() if name != "control-single"}
    both = changes(BenchFolder(sweep, records), BenchFolder(sweep, unchecked))
    assert {change.a.plan.id: change.summary for change in both}["ddp"] == "B is unchecked"


def test_a_cell_that_no_longer_runs_or_is_wrong_comes_first():
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    broken = {**records, "fsdp2": record(plans["fsdp2"], status="oom", data="fsdp2")}
    broken["ddp"] = record(plans["ddp"], speed=100.0, data="ddp")
    first, second, third, *_ = changes(BenchFolder(sweep, records), BenchFolder(sweep, broken))
    assert (first.a.plan.id, first.regression, first.lost) == ("fsdp2", True, True)
    assert (second.a.plan.id, second.regression, second.lost) == ("ddp", True, False)
    assert (third.a.plan.id, third.regression) == ("single", False)
    assert "oom" in first.note
    reverse = changes(BenchFolder(sweep, broken), BenchFolder(sweep, records))
    assert not {change.a.plan.id: change for change in reverse}["fsdp2"].regression


def test_nothing_in_common(tmp_path, capfd):
    a, b = write(tmp_path / "a", *strategies()), write(tmp_path / "b", *processes())
    assert main(["report", "--compare", str(a), str(b)]) == 0
    assert "no cell is in both" in capfd.readouterr().out


def test_the_command(tmp_path, capfd):
    sweep, records = strategies()
    a = write(tmp_path / "a", sweep, records)
    fewer = dataclasses.replace(sweep, cells=sweep.cells[:2] + sweep.cells[-1:])
    b = write(
        tmp_path / "b", fewer, {name: records[name] for name in ("single", "ddp", "control-single")}
    )
    assert main(["report", "--compare", str(a), str(b)]) == 0
    out = capfd.readouterr().out
    assert "only in A: fsdp2, zero1, fsdp1, pp" in out
    lines = [line.split() for line in out.splitlines()]
    speeds = ["tokens/s", "1.000", "1,000", "->", "1,000,", "rounds", "0.913", "–", "1.09"]
    assert speeds in lines
    assert ["samples/s", "20", "->", "20"] in lines
    assert ["memory", "1.000", "80", "MiB", "->", "80", "MiB"] in lines


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--compare", "b", "c"], ["--compare", "b", "c", "-o", "x"]]
)
def test_what_does_not_go_together(arguments, capfd):
    assert main(["report", *arguments]) == 2
    assert capfd.readouterr().err.count("\n") == 1
