"""How often elementwise operators move the numbers of a layer's products."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import yaml
from tools.elementwise_traffic import Traffic, passes_of

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, RunConfig, Training
from shardwise.models.families import FAMILIES
from shardwise.planner.cluster import cluster_of
from shardwise.planner.step_time import time_of_step
from shardwise.planner.traffic import PATH, passes

TABLE = yaml.safe_load(PATH.read_text(encoding="utf-8"))
MEASURED = Path(__file__).parents[2] / "results" / "gpu" / "lora_step.json"


def test_bytes_that_operators_read_and_write_are_counted():
    x, w = torch.ones(8, 4), torch.ones(4, 4)  # 128 and 64 bytes
    with Traffic() as traffic:
        y = (x @ w).t()  # a product and a view: nothing
        z = y * x.t()  # two are read, one is written
        z.mul_(z)  # one is read, once, and one is written
        torch.empty_like(z)
    assert traffic.bytes == {None: 3 * 128 + 2 * 128}


def test_what_a_kernel_computes_is_left_out():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0] * 2

    x = torch.ones(4, requires_grad=True)
    traffic = Traffic()
    with traffic.without(Double), traffic:
        y = Double.apply(x) + 1
        assert traffic.bytes[None] == 32
        y.sum().backward()
    # The sum reads 16 bytes and writes 4, and its gradient of 4 is made and expanded.
    assert traffic.bytes[None] < 32 + 32


@pytest.mark.parametrize("mode", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_the_table_is_what_is_counted(mode):
    with get_context("fork").Pool(1) as pool:  # its process group is no other test's
        family, rows = pool.apply(passes_of, (("tiny-qwen3_moe", mode, "bfloat16"),))
    assert {key: TABLE[family][key]["bfloat16"] for key in rows} == rows


def test_the_table_has_every_listed_family_and_way_to_train():
    assert TABLE.keys() == FAMILIES.keys()
    for of_family in TABLE.values():
        modes = [{key for key in of_family if key.endswith(mode)} for mode in ("lora", "full")]
        assert len(modes[0]) == len(modes[1]) == len(of_family) / 2
        assert all(row.keys() == {"bfloat16", "float32"} for row in of_family.values())


def test_what_is_not_in_the_table_takes_means():
    key = "full_attention, dense, lora"
    rows = [of[key]["bfloat16"][0] for of in TABLE.values() if key in of]
    assert passes("new", key, "forward", torch.bfloat16) == pytest.approx(sum(rows) / len(rows))
    every = [r["float32"][1] for of in TABLE.values() for k, r in of.items() if k.endswith("full")]
    mean = sum(every) / len(every)
    assert passes("new", "new, dense, full", "backward", torch.float32) == pytest.approx(mean)
    assert passes("qwen3", "head, full", "forward", torch.bfloat16) == 1.0


def lora_step(folder: Path) -> RunConfig:
    """The run of results/gpu/lora_step.json."""
    work = json.loads(MEASURED.read_text(encoding="utf-8"))["workload"]
    (folder / "config.json").write_text(json.dumps(work["model"]), encoding="utf-8")
    training = Training(
        output_dir="unused",
        global_batch_size=work["batch"],
        micro_batch_size=work["batch"],
        precision="bfloat16",
    )
    return RunConfig(
        Model(str(folder), init="random", dtype="bfloat16"),
        Data("unused", sequence_length=work["sequence_length"]),
        training,
        Lora(r=work["r"], alpha=work["alpha"]),
    )


def test_a_gpu_takes_about_what_is_planned_for_the_device_by_itself(tmp_path):
    profile = json.loads(MEASURED.read_text(encoding="utf-8"))["profile"]["auto"]
    cfg = lora_step(tmp_path)
    planned = time_of_step(cfg, describe(cfg, 1), cluster_of("1xH200")).total
    # Nothing is fitted: shares of a datasheet's figures are assumed. The page says 0.66.
    assert round(planned / profile["device_seconds"], 2) == 0.66


def test_compiled_layers_move_less(tmp_path):
    cfg = lora_step(tmp_path)
    compiled = replace(cfg, training=replace(cfg.training, compile="inductor"))
    seconds = [
        time_of_step(run, describe(cfg, 1), cluster_of("1xH200")).layers for run in (cfg, compiled)
    ]
    assert seconds[1] < 0.6 * seconds[0]
