"""The cells of a sweep file, the comparisons that it may make, and errors for mistakes in it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.commands import cli
from shardwise.config import UserError
from shardwise.config.keys import flat
from shardwise.config.run_file import parse_config
from shardwise.lab.benchmark.fairness import check_group
from shardwise.lab.benchmark.sweep import MAX_ID_LENGTH, Sweep, read_sweep
from tests.benchmark.sweeps import BASE, STRATEGIES, sweep_file


def read(folder: Path, **content: Any) -> Sweep:
    return read_sweep(sweep_file(folder, **content), folder / "out")


def cells(sweep: Sweep) -> dict[str, Any]:
    return {cell.plan.id: cell for cell in sweep.cells}


def test_cells_are_the_product_of_the_axes_in_order(tmp_path):
    axes = {
        "strategy": STRATEGIES,
        "data.sequence_length": [16, 32],
        "adapter": {"lora": {}, "full": {"lora": None}},
    }
    sweep = read(tmp_path, axes=axes, set={"training.steps": 7}, title="Two strategies")
    plans = [cell.plan for cell in sweep.cells if not cell.plan.control]
    assert [plan.id for plan in plans[:5]] == [
        "single-16-lora",
        "single-16-full",
        "single-32-lora",
        "single-32-full",
        "ddp-16-lora",
    ]
    assert len(plans) == 2 * 2 * 2
    ddp = cells(sweep)["ddp-16-full"]
    assert (ddp.plan.nproc, ddp.plan.reference) == (2, "single-16-full")
    assert ddp.plan.values == {"strategy": "ddp", "data.sequence_length": "16", "adapter": "full"}
    assert (ddp.run["parallel"]["data"], ddp.run["data"]["sequence_length"], ddp.run["lora"]) == (
        "ddp",
        16,
        None,
    )
    assert {cell.run["training"]["steps"] for cell in sweep.cells} == {7}
    assert all(parse_config(cell.run).to_dict() == cell.run for cell in sweep.cells)
    compared = {axis.name: axis.compared for axis in sweep.record.axes}
    assert compared == {"strategy": True, "data.sequence_length": False, "adapter": False}
    # Work axes make groups: 2 lengths x 2 adapters, in each of which the two strategies are
    # compared.
    assert len({plan.group for plan in plans}) == 4
    assert sweep.record.equal[ddp.plan.group]["tokens per step"] == 8 * 16
    assert cells(read(tmp_path, axes={"strategy": STRATEGIES}, nproc=2))["ddp"].run["training"][
        "output_dir"
    ] == str(tmp_path / "out" / "ddp" / "round-1")


def test_a_base_may_be_a_file_beside_the_sweep(tmp_path):
    content = {**BASE, "training": {**BASE["training"], "output_dir": "elsewhere"}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(content))
    inline, from_file = read(tmp_path), read(tmp_path, base="base.yaml")
    assert from_file.cells == inline.cells


def test_one_control_for_each_reference(tmp_path):
    axes = {
        "strategy": STRATEGIES,
        "training.micro_batch_size": [2, 4],
        "training.precision": ["float32", "bfloat16"],
    }
    sweep = read(tmp_path, axes=axes)
    references = {cell.plan.id: cell.plan.reference for cell in sweep.cells}
    # Losses are compared between cells that round alike: each precision has its own reference.
    assert references["ddp-4-bfloat16"] == "single-2-bfloat16"
    assert references["ddp-2-float32"] == references["single-4-float32"] == "single-2-float32"
    assert references["single-2-float32"] is None
    # Speeds are compared with one cell, however that rounds.
    baselines = {cell.plan.id: cell.plan.baseline for cell in sweep.cells if not cell.plan.control}
    assert baselines.pop("single-2-float32") is None
    assert set(baselines.values()) == {"single-2-float32"}
    controls = [cell for cell in sweep.cells if cell.plan.control]
    assert [cell.plan.id for cell in controls] == [
        "control-single-2-float32",
        "control-single-2-bfloat16",
    ]
    assert [cell.plan.reference for cell in controls] == ["single-2-float32", "single-2-bfloat16"]
    given = read(tmp_path, axes=axes, reference={"strategy": "ddp", "training.micro_batch_size": 4})
    assert cells(given)["single-2-float32"].plan.reference == "ddp-4-float32"
    precise = read(tmp_path, axes=axes, reference={"training.precision": "bfloat16"})
    assert cells(precise)["ddp-2-float32"].plan.reference == "single-2-float32"
    assert cells(precise)["ddp-2-float32"].plan.baseline == "single-2-bfloat16"


@pytest.mark.parametrize(("rows", "micro"), [(8, 2), (8, 8), (2, 1)])
def test_a_control_does_the_same_work_and_rounds_otherwise(rows, micro, tmp_path):
    sweep = read(
        tmp_path, set={"training.global_batch_size": rows, "training.micro_batch_size": micro}
    )
    (control,) = (cell for cell in sweep.cells if cell.plan.control)
    reference = cells(sweep)[control.plan.reference]
    changed = {
        key: value for key, value in flat(control.run).items() if flat(reference.run)[key] != value
    }
    assert changed.keys() == {
        "measure.reverse_microbatches",
        "measure.nudge_weights",
        "training.output_dir",
    }


def test_ranks_that_share_rows_are_compared_with_one_process(tmp_path):
    values = {f"cp{n}": {"nproc": n, "parallel.cp": n} for n in (1, 2, 3, 4)}
    sweep = read(tmp_path, axes={"ranks": values})
    found = cells(sweep)
    assert {found[name].plan.reference for name in ("cp2", "cp3", "cp4")} == {"cp1"}
    assert len({cell.plan.group for cell in sweep.cells}) == 1
    refused = {name: cell.refusal for name, cell in found.items() if cell.refusal}
    assert refused.keys() == {"cp3"}
    assert "data.sequence_length is 32, which parallel.cp cannot cut into 3" in refused["cp3"]
    ways = {way: {"parallel.cp": 2, "parallel.cp_attention": way} for way in ("ring", "gather")}
    by_way = cells(read(tmp_path, axes={"way": ways}, nproc=2))
    assert by_way["gather"].plan.reference == "ring"
    assert not by_way["gather"].refusal


def test_weak_scaling_is_compared_in_groups_of_its_own(tmp_path):
    scale = {str(n): {"nproc": n, "training.global_batch_size": 4 * n} for n in (1, 2)}
    parallel = {"ddp": {"parallel.data": "ddp"}, "fsdp2": {"parallel.data": "fsdp2"}}
    sweep = read(tmp_path, axes={"scale": scale, "strategy": parallel})
    assert {cell.plan.group for cell in sweep.cells} == {"weak scaling"}
    assert all(axis.compared for axis in sweep.record.axes)
    assert sweep.record.equal["weak scaling"]["tokens per step and process"] == 4 * 32
    # Unequal work has unequal losses: each scale is checked against its own.
    assert cells(sweep)["2-fsdp2"].plan.reference == "2-ddp"
    assert cells(sweep)["2-fsdp2"].plan.baseline == "2-ddp"
    assert cells(sweep)["2-ddp"].plan.reference is None


ddp_and_more = {
    "single": STRATEGIES["single"],
    "ddp": {**STRATEGIES["ddp"], "training.micro_batch_size": 8},
}
UNFAIR: list[tuple[Any, str]] = [
    ({"strategy": ddp_and_more}, "ddp sets training.micro_batch_size (another choice)"),
    (
        {"strategy": {"single": {}, "ddp": {"parallel.data": "ddp", "data.sequence_length": 16}}},
        "ddp sets data.sequence_length (what is computed)",
    ),
    (
        {
            "length": {
                "long": {"data.sequence_length": 64},
                "short": {"training.checkpointing": "full"},
            }
        },
        "short sets training.checkpointing (another choice)",
    ),
    ({"scale": {"1": {"nproc": 1, "training.global_batch_size": 4}, "2": {"nproc": 2}}}, None),
    (
        {"scale": {"1": {"nproc": 1}, "2": {"nproc": 2, "training.global_batch_size": 8}}},
        "8 rows per process in 1 and 4 in 2",
    ),
    (
        {
            "scale": {
                "a": {"nproc": 2, "training.global_batch_size": 8, "training.steps": 2},
                "b": {},
            }
        },
        "a sets training.global_batch_size (what is computed)",
    ),
    ({"measure.memory": [True, False]}, "sets measure.memory"),
    ({"measure.warmup_steps": [0, 3]}, "sets measure.warmup_steps"),
    ({"measure.reverse_microbatches": [False, True]}, "sets measure.reverse_microbatches"),
    ({"training.output_dir": ["a", "b"]}, "sets training.output_dir"),
    ({"training.patience": [0, 2]}, "sets training.patience"),
    ({"strategy": STRATEGIES, "nproc": [1, 2]}, "axes.strategy and axes.nproc both set nproc"),
    (
        {"adapter": {"lora": {}, "full": {"lora": None}}, "lora.r": [4, 8]},
        "axes.adapter and axes.lora.r both set lora.r",
    ),
    ({"data": [{"train": "a"}, {"train": "b"}]}, "replaces the section data"),
]


@pytest.mark.parametrize(("axes", "fragment"), UNFAIR, ids=[str(i) for i in range(len(UNFAIR))])
def test_unfair_comparisons_are_refused(axes, fragment, tmp_path):
    if fragment is None:
        read(tmp_path, axes=axes)  # 4 rows in each of 1 and (of the base's 8) 2 processes
        return
    with pytest.raises(UserError, match=re.escape(fragment)) as caught:
        read(tmp_path, axes=axes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "values"),
    [("lora.kernel", ["torch", "peft"]), ("training.matmul", ["default", "fp8_rowwise"])],
)
def test_products_are_compared_and_round_each_in_its_own_way(key, values, tmp_path):
    sweep = read(tmp_path, axes={"strategy": STRATEGIES, key: values})
    assert all(axis.compared for axis in sweep.record.axes)
    assert len({cell.plan.reference for cell in sweep.cells} - {None}) == 2


def test_what_all_values_of_an_axis_set_alike_does_not_count(tmp_path):
    alike = {"training.save_every": 2, "training.precision": "bfloat16", "lora": None}
    axes = {"strategy": {name: settings | alike for name, settings in STRATEGIES.items()}}
    sweep = read(tmp_path, axes=axes)
    assert [(axis.keys, axis.compared) for axis in sweep.record.axes] == [
        (("nproc", "parallel.data"), True)
    ]
    assert cells(sweep)["ddp"].plan.reference == "single"  # though it sets the precision
    assert {cell.run["training"]["save_every"] for cell in sweep.cells} == {2}
    assert {cell.run["lora"] for cell in sweep.cells} == {None}
    axes["strategy"]["ddp"]["training.save_every"] = 4
    with pytest.raises(UserError, match=r"single sets training\.save_every"):
        read(tmp_path, axes=axes)
    precise = {
        "strategy": {
            name: {**s, "training.precision": "bfloat16"} for name, s in STRATEGIES.items()
        }
    }
    with pytest.raises(UserError, match=r"both set training\.precision"):
        read(tmp_path, axes=precise | {"training.precision": ["float32", "bfloat16"]})


def test_cells_that_differ_in_a_key_of_no_axis_are_refused(tmp_path):
    runs = {
        cell.plan.id: (cell.plan.nproc, cell.run)
        for cell in read(tmp_path).cells
        if not cell.plan.control
    }
    varied = ("nproc", "parallel.data")
    assert check_group(runs, varied, weak=False)["training.steps"] == 4
    for section, key, value in (
        ("training", "seed", 1),
        ("model", "dtype", "bfloat16"),
        ("training", "checkpointing", "full"),
        ("data", "packing", "none"),
        ("measure", "memory", False),
    ):
        nproc, run = runs["ddp"]
        changed = runs | {"ddp": (nproc, run | {section: run[section] | {key: value}})}
        with pytest.raises(UserError, match=f"single and ddp .* {section}.{key} is"):
            check_group(changed, varied, weak=False)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"axis": {}}, "unknown key axis; did you mean axes?"),
    ({"base": None}, "base is missing"),
    ({"base": "none.yaml"}, "none.yaml: "),
    ({"base": {**BASE, "training": {"output_dir": "x"}}}, "base sets training.output_dir"),
    ({"base": {**BASE, "training": {"resume": "latest"}}}, "base sets training.resume"),
    ({"base": {**BASE, "training": {"patience": 2}}}, "base sets training.patience"),
    (
        {"base": {**BASE, "training": {"step": 1}}},
        "cell single: unknown key training.step; did you ",
    ),
    (
        {"base": {**BASE, "measure": {"nudge_weights": True}, "parallel": {"virtual_stages": 3}}},
        "none of the 2 cells is a valid run",
    ),
    ({"base": {**BASE, "training": 5}}, "training is 5"),
    ({"axes": {}}, "axes is empty"),
    ({"axes": ["strategy"]}, "axes is ['strategy']"),
    ({"axes": {"strategy": {}}}, "axes.strategy has no values"),
    ({"axes": {"strategy": ["single", "ddp"]}}, "strategy is no key of a run file"),
    ({"axes": {"nproc": [0, 1]}}, "axes.nproc.0.nproc is 0"),
    ({"axes": {"nproc": [True]}}, "axes.nproc.true.nproc is True"),
    ({"axes": {"nproc": [1, 1]}}, "axes.nproc.1 is given twice"),
    ({"axes": {"nproc": {1: {"nproc": 1}, "1": {"nproc": 2}}}}, "the key 1 is given twice"),
    ({"axes": {"data.packing": ["1", 1]}}, "axes.data.packing.1 is given twice"),
    ({"axes": {"strategy": {"single": None}}}, "axes.strategy.single is None"),
    (
        {"axes": {"strategy": {"ddp": {"paralel.data": "ddp"}}}},
        "unknown key paralel.data; did you mean parallel?",
    ),
    (
        {"axes": {"strategy": {"ddp": {"parallel.dta": "ddp"}}}},
        "unknown key parallel.dta; did you mean data?",
    ),
    ({"axes": {"training.step": [1, 2]}}, "unknown key training.step; did you mean steps?"),
    (
        {"axes": {f"training.{key}": [*range(1, 101)] for key in ("seed", "steps", "eval_every")}},
        "make 1,000,000 cells",
    ),
    ({"set": {"training.step": 1}}, "set: unknown key training.step; did you mean steps?"),
    ({"set": {"training.output_dir": "x"}}, "set sets training.output_dir"),
    ({"set": {"nproc": 2}}, "set names nproc"),
    ({"set": 3}, "set is 3"),
    ({"nproc": 0}, "nproc is 0; give a whole number"),
    ({"rounds": 0}, "rounds is 0; give a whole number"),
    ({"rounds": 10**12}, "rounds is 1000000000000; give less than 1e9"),
    ({"timeout_seconds": math.inf}, "timeout_seconds is inf; give less than 1e9"),
    ({"axes": {"strategy": {"ddp": {"timed": 2}}}}, "axes.strategy.ddp.timed is 2"),
    ({"memory_rounds": 0}, "memory_rounds is 0; give a whole number"),
    ({"rounds": 1.5}, "rounds is 1.5; give a whole number"),
    ({"timeout_seconds": -1}, "timeout_seconds is -1; give a positive number"),
    ({"timeout_seconds": float("nan")}, "timeout_seconds is nan; give a positive number"),
    ({"reference": {"strateg": "single"}}, "reference names strateg; did you mean strategy?"),
    ({"reference": {"strategy": "sinlge"}}, "reference.strategy is sinlge; did you mean single?"),
]


@pytest.mark.parametrize(
    ("content", "fragment"), MISTAKES, ids=[fragment for _, fragment in MISTAKES]
)
def test_a_mistake_is_one_line(content, fragment, tmp_path):
    with pytest.raises(UserError, match=re.escape(fragment)) as caught:
        read(tmp_path, **content)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["axes: [", "axes: {a: 1, a: 2}", "- a", "\x00", "&a [*a]"])
def test_broken_yaml_is_one_line(text, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_sweep(path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_a_value_may_say_that_its_cells_are_not_timed(tmp_path):
    wide = {"nproc": 4, "parallel.data": "ddp", "timed": False}
    sweep = read(
        tmp_path, axes={"strategy": {**STRATEGIES, "wide": wide}, "data.sequence_length": [16, 32]}
    )
    assert {name for name, cell in cells(sweep).items() if not cell.plan.timed} == {
        "wide-16",
        "wide-32",
    }
    assert cells(sweep)["wide-16"].plan.nproc == 4
    assert sweep.record.axes[0].keys == ("nproc", "parallel.data")


def test_an_invalid_combination_is_a_refused_cell(tmp_path):
    keep = {"nproc": 2, "parallel.data": "ddp", "parallel.reshard_after_forward": False}
    odd = {"nproc": 3, "parallel.tp": 2}
    sweep = read(tmp_path, axes={"strategy": {**STRATEGIES, "keep": keep, "odd": odd}})
    assert "parallel.reshard_after_forward" in cells(sweep)["keep"].refusal
    assert "parallel.tp is 2, which does not divide the 3" in cells(sweep)["odd"].refusal
    assert not cells(sweep)["ddp"].refusal


def test_hostile_names_give_safe_folders(tmp_path):
    names = [
        "../../x",
        "<script>alert(1)</script>",
        "a" * 300,
        "a" * 300 + "b",
        "two words",
        "two?words",
        "Two words",
    ]
    names += [
        "",
        ".",
        "..",
        "-rf",
        "sweep.json",
        "Figures",
        "a/b",
        "a\\b",
        "\n",
        "é",
        "con\x00trol",
        "--out=x",
        "$(id)",
        "~",
    ]
    sweep = read(tmp_path, axes={"name": {name: {} for name in names}})
    ids = [cell.plan.id for cell in sweep.cells]
    assert [axis.values for axis in sweep.record.axes] == [
        tuple(names)
    ]  # a reader sees the names as they were given
    assert len({cell_id.lower() for cell_id in ids}) == len(ids)
    for cell_id in ids:
        assert re.fullmatch(r"[A-Za-z0-9+][A-Za-z0-9._+-]*", cell_id)
        assert len(cell_id) <= MAX_ID_LENGTH + 4
        assert cell_id.lower() not in (
            "sweep.json",
            "figures",
        )  # what the bench and the report have there


def test_values_that_are_no_text_have_names(tmp_path):
    axes = {"training.checkpointing": ["none", ["linear_attention"]], "optimizer.lr": [1e-3, 0.5]}
    assert [cell.plan.id for cell in read(tmp_path, axes=axes).cells][:4] == [
        "none-0.001",
        "none-0.5",
        "linear_attention-0.001",
        "linear_attention-0.5",
    ]
    switched = read(
        tmp_path, axes={"data.packing": ["none", "concat"], "optimizer.max_grad_norm": [None, 1.0]}
    )
    assert [cell.plan.id for cell in switched.cells] == [
        "none-null",
        "none-1.0",
        "concat-null",
        "concat-1.0",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel.data": "dpp"}, "cell x: parallel.data is 'dpp'; give "),
        ({"parallel.date": "ddp"}, "axes.strategy.x: unknown key parallel.date; did you mean data"),
        ({"parallel.tp": 0}, "cell x: parallel.tp is 0; give at least 1"),
    ],
)
def test_what_no_run_file_may_have_is_a_mistake_in_the_sweep(settings, message, tmp_path):
    axes = {"strategy": {**STRATEGIES, "x": {"nproc": 2, **settings}}}
    with pytest.raises(UserError, match=message):
        read_sweep(sweep_file(tmp_path, axes=axes), tmp_path / "out")


def test_a_dry_run_lists_the_cells_and_their_runs(tmp_path, capsys):
    odd = {"nproc": 3, "parallel.data": "ddp"}
    path = sweep_file(tmp_path, axes={"strategy": {**STRATEGIES, "odd": odd}}, rounds=3)
    out = tmp_path / "out"
    assert cli.main(["bench", str(path), "--out", str(out), "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [["cell", "processes", "runs"], ["single", "1", "3"], ["ddp", "2", "3"]]
    assert rows[3][:4] == ["odd", "3", "0", "unsupported:"]
    assert rows[4] == ["control-single", "1", "1", "noise", "control"]
    assert rows[5] == ["7", "runs", "of", "4", "cells,", "of", "up", "to", "3", "processes", "each"]
    assert not out.exists()
