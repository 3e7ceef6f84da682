"""How often elementwise operators move the numbers of a layer's products."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tools.elementwise_traffic import DTYPES, Traffic, passes_of

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.step_time import time_of_step
from shardwise.lab.planner.traffic import PATH, passes
from shardwise.models.families import FAMILIES
from tests.left_out import some_now

TABLE = yaml.safe_load(PATH.read_text(encoding="utf-8"))
ROOT = Path(__file__).parents[2]
MEASURED, MODELS = ROOT / "results" / "gpu" / "lora_step.json", ROOT / "configs" / "models"


def test_bytes_that_operators_read_and_write_are_counted():
    x, w = torch.ones(8, 4), torch.ones(4, 4)  # 128 and 64 bytes
    with Traffic() as traffic:
        y = (x @ w).t()  # a product and a view: nothing
        z = y * x.t()  # two are read, one is written
        z.mul_(z)  # one is read, once, and one is written
        z.copy_(y)  # the same
        torch.empty_like(z)
    assert traffic.bytes == {None: 3 * 128 + 2 * 128 + 2 * 128}


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


@pytest.mark.parametrize(
    ("name", "loss", "mode", "dtypes"),
    some_now(
        [
            ("qwen3_moe", "triton", "lora", "bfloat16"),
            ("jamba", "triton", "full", "mixed"),
            ("falcon-h1-1.5b", "triton", "lora", "float32"),  # its multipliers are a large buffer
            ("qwen3_5-2b", "triton", "full", "bfloat16"),
            ("llama-3.1-8b", "plain", "lora", "bfloat16"),
        ],
        now=[("qwen3_moe", "triton", "lora", "bfloat16")],
    ),
)
def test_the_table_is_what_is_counted(name, loss, mode, dtypes):
    with get_context("fork").Pool(1) as pool:  # its process group is no other test's
        family, rows = pool.apply(passes_of, ((name, loss, mode, dtypes),))
    assert {key: TABLE[family][key][dtypes] for key in rows} == rows


def test_the_table_has_every_listed_family_and_way_to_train():
    assert TABLE.keys() == FAMILIES.keys()
    for of_family in TABLE.values():
        modes = [[key for key in of_family if f", {mode}" in key] for mode in ("lora", "full")]
        assert len(modes[0]) == len(modes[1]) == len(of_family) / 2
        assert all(f"{end}, lora" in " ".join(modes[0]) for end in ("embed", "head"))
        assert all(row.keys() == DTYPES.keys() for row in of_family.values())


@pytest.mark.parametrize("config", sorted(MODELS.glob("tiny-*")), ids=lambda path: path.name)
def test_some_family_in_the_table_has_such_layers_as_a_tiny_model(config):
    run = describe(RunConfig(Model(str(config)), Data("unused"), Training("unused")), 1)
    keys = {f"{x.kind}, {x.feed_forward}, lora" for x in run.spec.layers}
    assert keys <= {key for of_family in TABLE.values() for key in of_family}


def test_what_is_not_in_the_table_takes_means():
    key = "full_attention, dense, lora"
    rows = [of[key]["bfloat16"][0] for of in TABLE.values() if key in of]
    in_16 = run_in("bfloat16", "bfloat16")
    assert passes(in_16, "new", key, "forward") == pytest.approx(sum(rows) / len(rows))
    layers = [item for of in TABLE.values() for item in of.items() if item[0].count(", ") == 2]
    every = [r["float32"][1] for k, r in layers if k.endswith("full") and "head" not in k]
    mean = sum(every) / len(every)
    in_32 = run_in("float32", "float32")
    assert passes(in_32, "new", "new, dense, full", "backward") == pytest.approx(mean)
    mixed = passes(run_in("float32", "bfloat16"), "qwen3", key, "forward")
    assert mixed == TABLE["qwen3"][key]["mixed"][0] != TABLE["qwen3"][key]["bfloat16"][0]


def test_a_head_has_the_traffic_of_its_loss():
    auto, triton, chunked, plain = (
        passes(run_in("bfloat16", "bfloat16", loss), "qwen3", "head, lora", "forward")
        for loss in ("auto", "triton", "chunked", "plain")
    )
    assert 1 < auto == triton < plain < chunked
    # The chunked loss knows the gradients when its forward ends; logits take part in no backward.
    backwards = [
        passes(run_in("bfloat16", "bfloat16", loss), "qwen3", "head, lora", "backward")
        for loss in ("triton", "plain")
    ]
    assert backwards[0] < 1 < 4 < backwards[1]


def test_compiled_layers_move_each_number_once_but_for_experts_and_the_head():
    cfg = run_in("bfloat16", "bfloat16")
    compiled = replace(cfg, training=replace(cfg.training, compile="inductor"))
    spread = replace(compiled, parallel=Parallel(data="ddp", ep=2))
    moe = ("qwen3_moe", "full_attention, moe, lora", "forward")
    assert passes(compiled, *moe) == 1
    assert passes(spread, *moe) == passes(cfg, *moe) > 1
    head = ("qwen3_moe", "head, lora", "forward")
    assert passes(compiled, *head) == passes(cfg, *head) > 1


def run_in(weights: str, products: str, loss: Any = "auto") -> RunConfig:
    training = Training(output_dir="unused", precision=products, loss=loss)
    return RunConfig(Model("unused", dtype=weights), Data("unused"), training)


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


def test_the_device_takes_up_to_twice_what_is_planned(tmp_path):
    profile = json.loads(MEASURED.read_text(encoding="utf-8"))["profile"]["auto"]
    cfg = lora_step(tmp_path)
    planned = time_of_step(cfg, describe(cfg, 1), cluster_of("1xH200")).total
    # Nothing is fitted: shares of a datasheet's figures are assumed.
    assert 0.5 < planned / profile["device_seconds"] < 1
    page = (MEASURED.parents[2] / "docs/concepts/planning.md").read_text(encoding="utf-8")
    assert f"while the plan predicts {1e3 * planned:.0f} ms" in " ".join(page.split())


def test_compiled_layers_move_less(tmp_path):
    cfg = lora_step(tmp_path)
    eager, traced, compiled = (
        time_of_step(
            replace(cfg, training=replace(cfg.training, compile=backend)),
            describe(cfg, 1),
            cluster_of("1xH200"),
        ).layers
        for backend in ("none", "aot_eager", "inductor")
    )
    assert compiled < 0.6 * eager
    assert traced == eager


def test_sequence_parallel_ranks_share_their_experts_alone():
    cfg = replace(run_in("bfloat16", "bfloat16"), model=Model(str(MODELS / "tiny-qwen3_moe")))
    training = replace(cfg.training, global_batch_size=8)
    cfg = replace(cfg, data=replace(cfg.data, sequence_length=128), training=training)
    seconds = []
    for ep in (1, 2):
        parallel = Parallel(data="ddp", tp=2, sequence_parallel=True, ep=ep)
        run = describe(replace(cfg, parallel=parallel), 4)
        of = time_of_step(replace(cfg, parallel=parallel), run, cluster_of("4xH200"))
        seconds.append(of.elementwise)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.05)


def test_sequence_parallel_ranks_share_what_lies_between_products(tmp_path):
    cfg = lora_step(tmp_path)
    single, tp, sp = (
        time_of_step(
            replace(cfg, parallel=Parallel(tp=num_ranks, sequence_parallel=is_sequence)),
            describe(replace(cfg, parallel=Parallel(tp=num_ranks)), num_ranks),
            cluster_of("2xH200"),
        ).layers
        for num_ranks, is_sequence in ((1, False), (2, False), (2, True))
    )
    assert 0.5 * single < sp < 0.55 * single < tp
