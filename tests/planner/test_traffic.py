"""What elementwise operators cost a GPU: bytes, of the operators of each unit's walk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.assembly.describe import describe
from shardwise.config import Data, Lora, Model, Parallel, RunConfig, Training
from shardwise.lab.planner.cluster import cluster_of
from shardwise.lab.planner.step_time import time_of_step
from shardwise.lab.planner.unit_time import in_bytes
from shardwise.lab.planner.unit_work import UnitWork, work_of_units
from tests.models.counted_operators import CountedOperators

ROOT = Path(__file__).parents[2]
MEASURED, MODELS = ROOT / "results" / "gpu" / "lora_step.json", ROOT / "configs" / "models"


def test_bytes_that_operators_read_and_write_are_counted():
    x, w = torch.ones(8, 4), torch.ones(4, 4)  # 128 and 64 bytes
    with CountedOperators() as counted:
        y = (x @ w).t()  # a product and a view
        z = y * x.t()  # two are read, one is written
        z.mul_(z)  # one is read, once, and one is written
        z.copy_(y)  # the same
        torch.empty_like(z)
        (y + torch.ones(4, 1).expand(4, 8)).sum()  # four numbers are read eight times
    assert counted.moves[:4] == [0, 3 * 128, 2 * 128, 2 * 128]
    assert counted.moves[-2:] == [16 + 2 * 128, 128 + 4]


def units_of(cfg: RunConfig, num_ranks: int = 1) -> list[UnitWork]:
    """The units of a run as a GPU prices them."""
    # Its description is that of a CPU, where Triton cannot run.
    run = describe(replace(cfg, training=replace(cfg.training, loss="auto")), num_ranks)
    works = work_of_units(cfg, run.hf, run.spec)
    return [in_bytes(cfg, run, place, work) for place, work in enumerate(works)]


def test_a_head_has_the_traffic_of_its_loss():
    auto, triton, chunked, plain = (
        units_of(tiny("qwen3", loss))[-1] for loss in ("auto", "triton", "chunked", "plain")
    )
    assert auto == triton
    assert triton.rest_forward.elements < plain.rest_forward.elements
    assert plain.rest_forward.elements < chunked.rest_forward.elements
    # The chunked loss knows the gradients when its forward ends; logits take part in no backward.
    logits = 4 * 512 * 256
    assert triton.rest_backward.elements + 3 * logits < plain.rest_backward.elements


def test_compiled_layers_move_each_number_once_but_for_experts_and_the_head():
    cfg = tiny("qwen3_moe")
    compiled = replace(cfg, training=replace(cfg.training, compile="inductor"))
    parallel = Parallel(data="ddp", ep=2)
    spread = replace(compiled, parallel=parallel)
    run = describe(cfg, 1)
    once = 2 * 2 * work_of_units(cfg, run.hf, run.spec)[1].rest_forward.elements
    of = [units_of(c) for c in (cfg, compiled)]
    assert of[1][1].rest_forward.elements == once < of[0][1].rest_forward.elements
    assert of[1][-1] == of[0][-1]
    eager, traced = (units_of(c, 2) for c in (replace(cfg, parallel=parallel), spread))
    assert traced[1] == eager[1]


def test_compiled_code_still_copies_weights():
    cfg = tiny("qwen3")
    cfg = replace(cfg, training=replace(cfg.training, compile="inductor"))
    wide = replace(cfg, model=replace(cfg.model, dtype="float32"))
    run = describe(cfg, 1)
    layer = run.hf.get_submodule(run.spec.layers[0].name)
    copied = 6 * sum(p.numel() for p in layer.parameters() if p.ndim == 2)  # 4 read, 2 written
    moved = units_of(wide)[1].rest_forward.elements - units_of(cfg)[1].rest_forward.elements
    between = 2 * 2 * work_of_units(cfg, run.hf, run.spec)[1].rest_forward.elements
    # Eager operators on 16 bits may move even less than each number once.
    assert copied <= moved <= copied + between


def tiny(name: str, loss: Any = "auto") -> RunConfig:
    cfg = run_in("bfloat16", "bfloat16", loss)
    return replace(cfg, model=Model(str(MODELS / f"tiny-{name}"), init="random", dtype="bfloat16"))


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


def test_the_page_says_what_is_planned_for_a_step_that_a_gpu_has_run(tmp_path):
    """It ran before norms, gates and convolutions had kernels; no GPU has run these."""
    profile = json.loads(MEASURED.read_text(encoding="utf-8"))["profile"]["auto"]
    cfg = lora_step(tmp_path)
    planned = time_of_step(cfg, describe(cfg, 1), cluster_of("1xH200")).total
    products = 28e-3
    assert products < planned < profile["device_seconds"]
    page = (MEASURED.parents[2] / "docs/concepts/planning.md").read_text(encoding="utf-8")
    assert f"the plan predicts {1e3 * planned:.0f} ms" in " ".join(page.split())


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
    assert compiled < eager
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
    # Beside them `ep` puts rows into the order of ranks.
    assert seconds[0] < seconds[1] < 1.1 * seconds[0]


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
    assert 0.5 * single < sp < 0.55 * single
    assert sp < tp < 0.6 * single
