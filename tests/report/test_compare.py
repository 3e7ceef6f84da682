from __future__ import annotations

import dataclasses

import pytest

from shardwise.cli import main
from shardwise.report.compare import changes
from shardwise.report.folder import Bench
from tests.report.conftest import MIB, STEPS, processes, record, strategies, write


def faster_ddp():
    """B: ddp is 10 % slower, fsdp2 needs half as much again, single is gone and zero2 new."""
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    records["ddp"] = record(plans["ddp"], speed=1200.0, peak=80 * MIB, data="ddp")
    records["fsdp2"] = record(plans["fsdp2"], speed=1250.0, peak=90 * MIB, data="fsdp2")
    return sweep, records


def test_ratios_regressions_first():
    found = changes(Bench(*strategies()), Bench(*faster_ddp()))
    assert [change.a.plan.id for change in found[:3]] == ["fsdp2", "ddp", "single"]
    fsdp2, ddp, single = found[:3]
    assert fsdp2.memory == 1.5
    assert "larger" in fsdp2.verdict
    assert ddp.speed == 0.8
    # Rounds go from 0.95 to 1.04 of the median: 0.8 x 0.95 / 1.04 at worst, 0.8 x 1.04 / 0.95 at best, below 1.
    assert ddp.speed_range == pytest.approx((0.8 * 0.95 / 1.04, 0.8 * 1.04 / 0.95))
    assert ddp.verdict == "slower"
    assert single.verdict == "as fast, within the spread"
    assert {change.a.plan.id: change.note for change in found[3:]} == {
        "zero1": "A wrong, B wrong",
        "fsdp1": "A oom, B oom",
        "pp": "A not run, B not run",
    }


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("lora", "alpha", 64.0), ("training", "steps", 99), ("training", "compile", "inductor"), ("parallel", "tp", 2)],
)
def test_any_other_key_of_the_run_file_is_said_and_not_compared(section, key, value):
    sweep, records = strategies()
    made = dict(records)
    for name, one in records.items():
        config = {**one.config, section: {**one.config.get(section, {}), key: value}}
        config["training"] = {**config["training"], "output_dir": f"elsewhere/{name}"}
        made[name] = dataclasses.replace(one, config=config)
    found = changes(Bench(sweep, records), Bench(sweep, made))
    told = {change.note for change in found if change.a.record}
    assert told == {f"other work: {section}.{key} {records['ddp'].config.get(section, {}).get(key, '–')} -> {value}"}
    assert all(change.speed is None and change.memory is None for change in found)


def test_where_the_output_lies_is_no_other_work():
    sweep, records = strategies()
    moved = {
        name: dataclasses.replace(one, config={**one.config, "training": {"steps": STEPS, "output_dir": "b"}})
        for name, one in records.items()
    }
    assert changes(Bench(sweep, records), Bench(sweep, moved))[0].speed == 1.0


def test_unchecked_is_said():
    sweep, records = strategies()
    unchecked = {name: made for name, made in records.items() if name != "control-single"}
    found = {change.a.plan.id: change for change in changes(Bench(sweep, records), Bench(sweep, unchecked))}
    assert found["ddp"].verdict == "as fast, within the spread, B unchecked"


def test_a_cell_that_no_longer_runs_or_is_wrong_comes_first():
    sweep, records = strategies()
    plans = {plan.id: plan for plan in sweep.cells}
    broken = {**records, "fsdp2": record(plans["fsdp2"], status="oom", data="fsdp2")}
    broken["ddp"] = record(plans["ddp"], speed=100.0, data="ddp")
    found = changes(Bench(sweep, records), Bench(sweep, broken))
    assert [(change.a.plan.id, change.worse) for change in found[:3]] == [
        ("fsdp2", True),
        ("ddp", True),
        ("single", False),
    ]
    assert found[0].note == "A ok, B oom"
    back = {change.a.plan.id: change for change in changes(Bench(sweep, broken), Bench(sweep, records))}
    assert not back["fsdp2"].worse


def test_nothing_in_common(tmp_path, capfd):
    a, b = write(tmp_path / "a", *strategies()), write(tmp_path / "b", *processes())
    assert main(["report", "--compare", str(a), str(b)]) == 0
    assert "no cell is in both" in capfd.readouterr().out


def test_the_command(tmp_path, capfd):
    sweep, records = strategies()
    a = write(tmp_path / "a", sweep, records)
    fewer = dataclasses.replace(sweep, cells=sweep.cells[:2] + sweep.cells[-1:])
    b = write(tmp_path / "b", fewer, {name: records[name] for name in ("single", "ddp", "control-single")})
    assert main(["report", "--compare", str(a), str(b)]) == 0
    out = capfd.readouterr().out
    assert "only in A: fsdp2, zero1, fsdp1, pp" in out
    assert "single: as fast, within the spread" in out
    assert "    tokens/s  1.000  1,000 -> 1,000, from rounds 0.91 – 1.09" in out.splitlines()
    assert "    memory    1.000  80 MiB -> 80 MiB" in out.splitlines()


@pytest.mark.parametrize("arguments", [[], ["a", "--compare", "b", "c"], ["--compare", "b", "c", "-o", "x"]])
def test_what_does_not_go_together(arguments, capfd):
    assert main(["report", *arguments]) == 2
    assert capfd.readouterr().err.count("\n") == 1
